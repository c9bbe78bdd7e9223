"""A sweep: the same games under several settings of the config, and one table of all scores.

SWEEP_DIR/sweep.json             config, games, and the values that vary
SWEEP_DIR/<setting>/             directory of a suite, named after its setting, such as ppo.learning_rate=0.0001/
SWEEP_DIR/results.{md,csv,json}  the table, written whenever a session ends, and at the end or a stop
SWEEP_DIR/graphs/                the learning curves of all settings, a panel for each game

Several fields that vary make a grid: a setting for each combination of their values.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_atari.config import Config, flat, set_fields
from jaxrl_atari.errors import UserError, reason, require
from jaxrl_atari.option_forms import parse_word
from jaxrl_atari.runs.files import read_result, write_json
from jaxrl_atari.runs.layout import SWEEP_FILE
from jaxrl_atari.runs.run_dir import describe, read_config, read_games
from jaxrl_atari.suite.suite import SuitePlan, game_configs, unfinished_of_suite, write_suite_file
from jaxrl_atari.trials.launch import Job

SAME_IN_ALL_SETTINGS = (
    "name", "seed", "sessions", "total_env_steps", "output_dir", "env.game", "env.protocol",
    "env.options", "env.image_key",
    "devices.", "trial.", "evaluation.", "log.",
)  # fmt: skip
"""Fields and groups that neither a sweep nor a search can vary, as the beginnings of their dotted names."""

COEFFICIENT = "ppo.coefficients."
"""Stands before the name of a coefficient, which the algorithm defines and not the config."""


class Setting(NamedTuple):
    """One setting of a sweep."""

    label: str  # name of its directory, such as `ppo.gamma=0.9,ppo.epochs=2`; empty in a suite that varies nothing
    fields: dict[str, Any]  # dotted name -> value
    suite: SuitePlan


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Config, games and what varies. Without anything that varies, it is a suite.

    Raises:
        ConfigError: a combination of values that the config does not accept.
    """

    config: Config
    games: list[str]
    vary: dict[str, list[Any]]  # dotted name of a field -> its values
    settings: list[Setting] = dataclasses.field(init=False, compare=False)
    """All combinations of values, in order; the last field varies fastest."""

    def __post_init__(self):
        settings = []
        for values in itertools.product(*self.vary.values()):
            fields: dict[str, Any] = dict(zip(self.vary, values, strict=True))
            label = ",".join(f"{name}={value_text(value)}" for name, value in fields.items())
            settings.append(Setting(label, fields, SuitePlan(set_fields(self.config, fields), self.games)))
        object.__setattr__(self, "settings", settings)


def value_text(value: Any) -> str:
    """A value as a command line has it: `0.0001`, `true`, `none`."""
    return (
        str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else str(value).lower()
    )


def parse_value(text: str) -> Any:
    """The value that a word of `--vary` stands for; `1e6` is a whole number."""
    value = parse_word(text.strip())
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if number.is_integer() and "." not in value else number


def can_vary(name: str, config: Config) -> bool:
    """Whether a sweep or a search can vary the field with this dotted name."""
    is_coefficient = name.startswith(COEFFICIENT) and name.removeprefix(COEFFICIENT).isidentifier()
    exists = is_coefficient or name in flat(config.to_dict())
    return exists and not name.startswith(SAME_IN_ALL_SETTINGS)


def parse_vary(texts: Sequence[str], config: Config) -> dict[str, list[Any]]:
    """Reads the options `--vary`.

    Args:
        texts: one for each field: `ppo.learning_rate=1e-4,2.5e-4`.
        config: the config whose fields vary.

    Returns:
        The dotted name of each field that varies -> its values, in the order of the options.

    Raises:
        ConfigError: a text of another form; a field that does not exist, or cannot vary; a value, or a combination
            of values, that the config does not accept; a field or a value that is named twice.
    """
    fields = list(flat(config.to_dict()))
    known = [name for name in fields if can_vary(name, config)]
    vary: dict[str, list[Any]] = {}
    for text in texts:
        field, _, words = text.partition("=")
        name = field.strip().replace("-", "_")
        require(words, "--vary", text, "FIELD=VALUE,VALUE,... such as ppo.learning_rate=1e-4,2.5e-4")
        expected = "a field of the config by its dotted name, such as ppo.learning_rate"
        hint = "".join(f"did you mean {similar}?" for similar in get_close_matches(name, known, 1))
        require(name in fields or can_vary(name, config), "--vary", field, expected, hint)
        require(
            can_vary(name, config), "--vary", field, "a field that may differ between settings", "this one cannot"
        )
        require(name not in vary, "--vary", text, f"{name} once, with all its values")
        values = [parse_value(word) for word in words.split(",")]
        for value in values:
            require(values.count(value) == 1, "--vary", text, "each value once")
            fits = Path(value_text(value)).name == value_text(value)
            require(fits, "--vary", value, "a value that can be a part of the name of a directory")
        vary[name] = values
    Sweep(config, [], vary)  # checks the combinations
    return vary


# --- sweep.json and sessions -------------------------------------------------------------------------------------


def write_sweep_files(sweep_dir: Path, sweep: Sweep) -> None:
    """Writes sweep.json, from which the sweep can be run again, and the suite.json of each setting.

    A sweep in which nothing varies has its suite.json alone.
    """
    if sweep.vary:
        described = describe(sweep.config, sweep_dir, SWEEP_FILE)
        del described["game"], described["gae_lambda"]  # each game has its own
        write_json(sweep_dir / SWEEP_FILE, {"games": sweep.games, "vary": sweep.vary} | described)
    for setting in sweep.settings:
        (sweep_dir / setting.label).mkdir(exist_ok=True)
        write_suite_file(sweep_dir / setting.label, setting.suite)


def read_sweep_file(sweep_dir: Path) -> Sweep:
    """Reads sweep.json.

    Raises:
        UserError: not the directory of a sweep, or its sweep.json cannot be used.
    """
    config = read_config(sweep_dir, SWEEP_FILE)
    vary = read_result(sweep_dir / SWEEP_FILE, vary=dict)["vary"]
    try:
        sweep = Sweep(config, read_games(sweep_dir, SWEEP_FILE), vary)
        game_configs(config, sweep.games)
    except (KeyError, TypeError, AttributeError) as error:
        problem = f"cannot be used ({reason(error)})"
        raise UserError(f"{sweep_dir / SWEEP_FILE}: {problem}; restore it from a copy") from error
    return sweep


def unfinished_of_sweep(sweep_dir: Path, sweep: Sweep) -> list[Job]:
    """The sessions of all settings that have not trained to their end. Raises as `unfinished_of_suite`."""
    jobs = []
    first = 0
    for setting in sweep.settings:
        jobs += unfinished_of_suite(sweep_dir / setting.label, setting.suite, first, setting.label)
        first += setting.suite.config.sessions * len(sweep.games)
    return jobs
