"""What a suite or a sweep trains: its plan, in SUITE_DIR/suite.json or SWEEP_DIR/sweep.json.

A suite is a trial for each game. A sweep is the same games under several settings of the config. Several fields
that vary make a grid: a setting for each combination of their values. A setting is a suite, whose directory is
named after the setting: SWEEP_DIR/ppo.learning_rate=0.0001/.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_atari.config import Config, set_fields
from jaxrl_atari.envs.games import GAMES, game_under, parse_game
from jaxrl_atari.errors import ConfigError, UserError, reason, require
from jaxrl_atari.runs.description import describe, read_config, read_games
from jaxrl_atari.runs.files import read_json, write_json
from jaxrl_atari.runs.layout import SUITE_FILE, SWEEP_FILE, is_sweep
from jaxrl_atari.suite.vary import check_vary, value_text

MAX_LABEL_BYTES = 255
"""The longest name of a directory on the usual file systems."""


class Setting(NamedTuple):
    """One setting of a sweep."""

    label: str  # name of its directory, such as `ppo.gamma=0.9,ppo.epochs=2`; empty if nothing varies
    fields: dict[str, Any]  # dotted name -> value
    config: Config  # of the sweep, with these fields

    def directory(self, parent: Path) -> Path:
        """The directory of this setting's suite: `parent` itself if nothing varies."""
        return parent / self.label


class SweepPlan(NamedTuple):
    """What a sweep trains, as `plan_sweep` makes it. If nothing varies, that is a suite."""

    config: Config  # of all settings, apart from the fields that vary
    games: list[str]
    vary: dict[str, list[Any]]  # dotted name of a field -> its values
    settings: list[Setting]  # one for each combination of values; the last field varies fastest

    @property
    def is_sweep(self) -> bool:
        """Whether a field varies. Otherwise this is the plan of a suite: its only setting has an empty label."""
        return bool(self.vary)

    @property
    def total_sessions(self) -> int:
        """The number of sessions of all games under all settings."""
        return self.config.sessions * len(self.games) * len(self.settings)


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


def plan_sweep(config: Config, games: list[str], vary: dict[str, list[Any]]) -> SweepPlan:
    """Makes the plan of a sweep, or of a suite if nothing varies. The arguments are fields of `SweepPlan`.

    Raises:
        ConfigError: a combination of values that the config does not accept, or that gives its directory too long
            a name.
    """
    settings = []
    for values in itertools.product(*vary.values()):
        fields: dict[str, Any] = dict(zip(vary, values, strict=True))
        label = ",".join(f"{name}={value_text(value)}" for name, value in fields.items())
        require(
            len(label.encode()) <= MAX_LABEL_BYTES,
            "--vary",
            label,
            expected=f"a setting of at most {MAX_LABEL_BYTES} bytes, because its directory is named after it",
            hint="vary fewer fields at a time, or use a search",
        )
        settings.append(Setting(label, fields, set_fields(config, fields)))
    return SweepPlan(config, games, vary, settings)


def continue_sweep(plan: SweepPlan, before: SweepPlan) -> SweepPlan:
    """The plan with which a sweep is resumed. Without a field that varies, it gets the fields of `before`.

    Tables and the names of directories follow the order of games and fields. So they keep the order of `before`,
    unless the user has chosen other games or fields.

    Args:
        plan: what the user has chosen.
        before: the plan of the sweep so far.

    Raises:
        ConfigError: as `plan_sweep`.
    """
    games = plan.games
    if {*games} == {*before.games}:
        games = before.games
    vary = plan.vary or before.vary
    if vary.keys() == before.vary.keys():
        vary = {name: vary[name] for name in before.vary}
    return plan_sweep(plan.config, games, vary)


def write_plan(directory: Path, plan: SweepPlan) -> None:
    """Writes the files from which `read_plan` reads the plan: sweep.json, and suite.json for each setting.

    If nothing varies, the directory holds a suite, and has suite.json alone.
    """
    if plan.is_sweep:
        _write(directory, SWEEP_FILE, plan.config, {"games": plan.games, "vary": plan.vary})
    for setting in plan.settings:
        suite_dir = setting.directory(directory)
        suite_dir.mkdir(exist_ok=True)
        _write(suite_dir, SUITE_FILE, setting.config, {"games": plan.games})


def _write(directory: Path, file: str, config: Config, values: dict[str, Any]) -> None:
    """Writes a description, which has the history of earlier starts, without what differs between games."""
    described = describe(config, directory, file)
    del described["game"], described["gae_lambda"]
    write_json(directory / file, values | described)


def read_plan(directory: Path) -> SweepPlan:
    """Reads the plan of a sweep from sweep.json, or the plan of a suite from suite.json.

    Raises:
        UserError: the directory holds neither a sweep nor a suite, or its file cannot be used.
    """
    file = SWEEP_FILE if is_sweep(directory) else SUITE_FILE
    config = read_config(directory, file)
    games = read_games(directory, file)
    vary = read_json(directory / file).get("vary", {})
    try:
        game_configs(config, games)
        check_vary(vary, config)
        return plan_sweep(config, games, vary)
    except (ConfigError, TypeError, AttributeError) as error:  # a file that was edited by hand
        raise UserError(f"{directory / file}: cannot be used ({reason(error)}); restore it from a copy") from error
