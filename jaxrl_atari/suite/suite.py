"""A suite of games: a trial for each game. SUITE_DIR/suite.json has its games and its config."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxrl_atari.config import Config
from jaxrl_atari.envs.games import GAMES, game_under, parse_game
from jaxrl_atari.errors import ConfigError, UserError, reason, require
from jaxrl_atari.runs.description import describe, read_config, read_games
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.runs.layout import SUITE_FILE


def game_configs(config: Config, games: Sequence[str] | None) -> dict[str, Config]:
    """Makes the config of each game's trial.

    All games have one protocol: the config's, unless the name of the config's game implies another.

    Args:
        config: the config of the suite.
        games: names of games in any spelling. None: all with a reference score under the protocol.

    Returns:
        ALE's name of a game -> the config of its trial, in the order of `games`.

    Raises:
        ConfigError: an unknown game, a game named twice, or no game.
    """
    backend = config.env.backend
    require(backend != "gymnasium", "env.backend", backend, "ale or envpool in a suite, whose games are ALE's")
    configs: dict[str, Config] = {}
    protocol = parse_game(config.env.game)[1] or config.env.protocol
    if games is None:
        games = [name for name in GAMES if game_under(name, config.env.resolved_protocol).references]
    for game in games:
        name, named = parse_game(game)
        require(name not in configs, "games", game, "each game once")
        require(named is None, "games", game, name, "a suite has one protocol: choose it with --env.protocol")
        env = dataclasses.replace(config.env, game=name, protocol=protocol)
        configs[name] = dataclasses.replace(config, name=name, env=env)
    require(configs, "games", "", "at least one game, or no --games under a protocol with reference scores")
    return configs


def describe_without_game(config: Config, directory: Path, file: str = SUITE_FILE) -> dict[str, Any]:
    """The description of a suite or a sweep. It lacks `game` and `gae_lambda` of a run: they differ between games.

    Args:
        directory: directory of the suite or sweep.
        file: name of the description's file there, whose earlier content has the history.
    """
    described = describe(config, directory, file)
    return {name: value for name, value in described.items() if name not in ("game", "gae_lambda")}


def write_suite_file(suite_dir: Path, config: Config, games: Sequence[str]) -> None:
    """Writes suite.json, from which the suite can be run again.

    A suite that is resumed keeps the history of its earlier starts, as a run does.
    """
    write_json(suite_dir / SUITE_FILE, {"games": [*games]} | describe_without_game(config, suite_dir))


@contextlib.contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Names the file whose content the block uses, which may have been edited by hand.

    Raises:
        UserError: the block refuses the content, as `ConfigError`, or the content has another structure.
    """
    try:
        yield
    except (ConfigError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: cannot be used ({reason(error)}); restore it from a copy") from error


def read_suite_file(suite_dir: Path) -> tuple[Config, list[str]]:
    """Reads the config and the games of a suite from its suite.json.

    Raises:
        UserError: not the directory of a suite, or its suite.json cannot be used.
    """
    config = read_config(suite_dir, SUITE_FILE)
    games = read_games(suite_dir)
    with naming_file(suite_dir / SUITE_FILE):
        game_configs(config, games)
    return config, games
