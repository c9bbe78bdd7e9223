"""What a suite or a sweep trains: its plan, in SUITE_DIR/suite.json or SWEEP_DIR/sweep.json.

A suite is a trial for each game. A sweep is the same games under several settings of the config. Several fields
that vary make a grid: a setting for each combination of their values. A setting is a suite, whose directory is
named after the setting: SWEEP_DIR/ppo.learning_rate=0.0001/.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_atari.config import Config, can_vary, parse_value, set_fields, value_text
from jaxrl_atari.envs.games import GAMES, game_under, parse_game
from jaxrl_atari.errors import require
from jaxrl_atari.runs.description import describe, read_config, read_games
from jaxrl_atari.runs.files import read_result, write_json
from jaxrl_atari.runs.layout import SUITE_FILE, SWEEP_FILE, held_kind

Vary = dict[str, list[Any]]
"""Dotted name of a field that varies -> its values."""


class SweepPlan(NamedTuple):
    """What a sweep trains, as `plan_sweep` makes it. If nothing varies, that is a suite."""

    config: Config  # of all settings, apart from the fields that vary
    games: list[str]
    vary: Vary
    settings: dict[
        str, Config
    ]  # name, such as `ppo.gamma=0.9,ppo.epochs=2` -> config; the last field varies fastest

    @property
    def total_sessions(self) -> int:
        """The number of sessions of all games under all settings."""
        return self.config.sessions * len(self.games) * len(self.settings)

    def trials(self, directory: Path) -> Iterator[tuple[str, Path, Config]]:
        """The trials of a suite or sweep in a directory, setting by setting and game by game.

        Yields:
            What stands before the names of the trial's jobs, its run directory, and its config.
        """
        for setting, setting_config in self.settings.items():
            for game, config in game_configs(setting_config, self.games).items():
                label = f"game {game}  {setting}  " if setting else f"game {game}  "
                yield label, directory / setting / game, config


def game_configs(config: Config, games: Sequence[str] | None) -> dict[str, Config]:
    """Makes the config of each game's trial.

    All games have one protocol: the config's or, if it chooses none, the one that the name of its game implies.

    Args:
        config: the config of the suite.
        games: names of games in any spelling. None: all with a reference score under the protocol.

    Returns:
        ALE's name of a game -> the config of its trial, in the order of `games`.

    Raises:
        ConfigError: an unknown game, a game of another protocol, or no game.
    """
    backend = config.env.backend
    require(backend != "gymnasium", "env.backend", backend, "ale or envpool in a suite, whose games are ALE's")
    configs: dict[str, Config] = {}
    protocol = config.env.protocol if config.env.protocol != "auto" else parse_game(config.env.game)[1] or "auto"
    if games is None:
        games = [name for name in GAMES if game_under(name, config.env.resolved_protocol).references]
    for game in games:
        name, named = parse_game(game)
        require(named is None, "games", game, name, "a suite has one protocol: choose it with --env.protocol")
        env = dataclasses.replace(config.env, game=name, protocol=protocol)
        configs[name] = dataclasses.replace(config, name=name, env=env)
    require(configs, "games", "", "at least one game, or no --games under a protocol with reference scores")
    return configs


def parse_vary(texts: Sequence[str]) -> Vary:
    """Reads the options `--vary`, such as `ppo.learning_rate=1e-4,2.5e-4`.

    Raises:
        ConfigError: a text of another form, or a field that cannot vary.
    """
    vary: Vary = {}
    for text in texts:
        field, _, words = text.partition("=")
        name = field.strip().replace("-", "_")
        require(words, "--vary", text, "FIELD=VALUE,VALUE,... such as ppo.learning_rate=1e-4,2.5e-4")
        require(
            can_vary(name),
            "--vary",
            name,
            expected="a field that may differ between settings, by its dotted name, such as ppo.learning_rate",
        )
        vary.setdefault(name, []).extend(parse_value(word.strip()) for word in words.split(","))
    return vary


def plan_sweep(config: Config, games: list[str], vary: Vary) -> SweepPlan:
    """Makes the plan of a sweep, or of a suite if nothing varies. The arguments are fields of `SweepPlan`.

    A value that is named twice counts once.

    Raises:
        ConfigError: a combination of values that the config does not accept, or that does not name a directory.
    """
    vary = {name: list({value_text(value): value for value in values}.values()) for name, values in vary.items()}
    settings = {}
    for values in itertools.product(*vary.values()):
        fields = dict(zip(vary, values, strict=True))
        name = ",".join(f"{field}={value_text(value)}" for field, value in fields.items())
        require(Path(name).name == name, "--vary", name, "values that make the name of a directory")
        settings[name] = set_fields(config, fields)
    return SweepPlan(config, games, vary, settings)


def write_plan(directory: Path, plan: SweepPlan) -> None:
    """Writes the files from which `read_plan` reads the plan: sweep.json, and suite.json for each setting.

    If nothing varies, the directory holds a suite, and has suite.json alone.
    """
    if plan.vary:
        _write(directory, SWEEP_FILE, plan.config, games=plan.games, vary=plan.vary, settings=[*plan.settings])
    for setting, config in plan.settings.items():
        suite_dir = directory / setting
        suite_dir.mkdir(exist_ok=True)
        _write(suite_dir, SUITE_FILE, config, games=plan.games)


def _write(directory: Path, file: str, config: Config, **values: Any) -> None:
    """Writes a description, which has the history of earlier starts, without what differs between games."""
    described = describe(config, directory, file)
    shared = {name: value for name, value in described.items() if name not in ("game", "gae_lambda")}
    write_json(directory / file, values | shared)


def read_plan(directory: Path) -> SweepPlan:
    """Reads the plan of a sweep from sweep.json, or the plan of a suite from suite.json.

    Raises:
        UserError: the directory holds neither a sweep nor a suite, or its file cannot be used.
    """
    file = SWEEP_FILE if held_kind(directory) == "sweep" else SUITE_FILE
    vary = read_result(directory / file, vary=dict)["vary"] if file == SWEEP_FILE else {}
    return plan_sweep(read_config(directory, file), read_games(directory, file), vary)
