"""The fields that vary between the settings of a sweep, or the trials of a search, and the option `--vary`."""

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from jaxrl_atari.config import Config
from jaxrl_atari.config_dicts import flat
from jaxrl_atari.errors import require
from jaxrl_atari.option_forms import parse_word

SAME_IN_ALL_SETTINGS = (
    "name", "seed", "sessions", "total_env_steps", "output_dir", "env.game", "env.protocol",
    "env.options", "env.image_key",
    "devices.", "trial.", "evaluation.", "log.",
)  # fmt: skip
"""Fields and groups that neither a sweep nor a search can vary, as the beginnings of their dotted names."""

COEFFICIENTS = "ppo.coefficients"
"""The field with the coefficients of the algorithm, of which `ppo.coefficients.NAME` is one.

The algorithm, and not the config, knows their names.
"""


def fields_that_can_vary(config: Config) -> list[str]:
    """The dotted names of the fields that a sweep or a search can vary.

    A coefficient is among them only if the config has a value for it; see `is_coefficient` for the others.
    """
    return [
        name
        for name in flat(config.to_dict())
        if name != COEFFICIENTS and not name.startswith(SAME_IN_ALL_SETTINGS)
    ]


def is_coefficient(name: str) -> bool:
    """Whether a dotted name has the form of a coefficient's. Only the algorithm knows whether it has this one."""
    group, _, coefficient = name.rpartition(".")
    return group == COEFFICIENTS and coefficient.isidentifier()


def can_vary(name: str, config: Config) -> bool:
    """Whether a sweep or a search can vary the field or the coefficient with this dotted name."""
    return is_coefficient(name) or name in fields_that_can_vary(config)


def value_text(value: Any) -> str:
    """A value as it is written on a command line: `0.0001`, `true`, `none`."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)


def parse_value(text: str) -> Any:
    """The value of a word of `--vary`: True, False, None, a number or the word itself; `1e6` is a whole number."""
    value = parse_word(text.strip())
    if not isinstance(value, str):
        return value
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if number.is_integer() and "." not in value else number


def parse_vary(texts: Sequence[str], config: Config) -> dict[str, list[Any]]:
    """Reads the options `--vary`.

    Args:
        texts: one for each field: `ppo.learning_rate=1e-4,2.5e-4`.
        config: the config whose fields vary.

    Returns:
        The dotted name of each field that varies -> its values, in the order of the options.

    Raises:
        ConfigError: a text of another form; a field that does not exist, or cannot vary; a value that cannot be a
            part of a directory's name; a field or a value that is named twice.
    """
    fields = flat(config.to_dict())
    known = fields_that_can_vary(config)
    vary: dict[str, list[Any]] = {}
    for text in texts:
        field, _, words = text.partition("=")
        name = field.strip().replace("-", "_")
        require(words, "--vary", text, "FIELD=VALUE,VALUE,... such as ppo.learning_rate=1e-4,2.5e-4")
        may_vary = name in known or is_coefficient(name)
        expected = "a field of the config by its dotted name, such as ppo.learning_rate"
        require(may_vary or name in fields, "--vary", field, expected, _similar_name(name, known))
        require(may_vary, "--vary", field, "a field that may differ between settings", "this one cannot")
        require(name not in vary, "--vary", text, f"{name} once, with all its values")
        values = [parse_value(word) for word in words.split(",")]
        for value in values:
            require(values.count(value) == 1, "--vary", text, "each value once")
            fits = Path(value_text(value)).name == value_text(value)
            require(fits, "--vary", value, "a value that can be a part of the name of a directory")
        vary[name] = values
    return vary


def _similar_name(name: str, known: Sequence[str]) -> str:
    """`did you mean NAME?` if a name resembles a known field, or may be a coefficient; else an empty text."""
    group, _, last = name.rpartition(".")
    names = [*known, f"{COEFFICIENTS}.{last}"] if "." in group else known
    return "".join(f"did you mean {similar}?" for similar in get_close_matches(name, names, 1))
