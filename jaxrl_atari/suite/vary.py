"""The option `--vary` of suites, and its values as text."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_atari.config import Config, parse_value
from jaxrl_atari.errors import did_you_mean, require
from jaxrl_atari.trials.varied_fields import can_vary, fields_that_can_vary


def parse_vary(texts: Sequence[str], config: Config) -> dict[str, list[Any]]:
    """Reads the options `--vary`.

    Args:
        texts: one for each field: `ppo.learning_rate=1e-4,2.5e-4`.
        config: the config whose fields vary.

    Returns:
        The dotted name of each field that varies -> its values, in the order of the options.

    Raises:
        ConfigError: a text of another form; a field that is named twice; or as `check_vary`.
    """
    vary: dict[str, list[Any]] = {}
    for text in texts:
        field, _, words = text.partition("=")
        name = field.strip().replace("-", "_")
        require(words, "--vary", text, "FIELD=VALUE,VALUE,... such as ppo.learning_rate=1e-4,2.5e-4")
        require(name not in vary, "--vary", text, f"{name} once, with all its values")
        vary[name] = [parse_value(word.strip()) for word in words.split(",")]
    check_vary(vary, config)
    return vary


def check_vary(vary: Mapping[str, list[Any]], config: Config) -> None:
    """Checks the fields that vary and their values, from `--vary` or from sweep.json.

    Raises:
        ConfigError: a field that does not exist or cannot vary; a value that is there twice, or that cannot be a
            part of a directory's name.
    """
    for name, values in vary.items():
        require(
            can_vary(name, config),
            "--vary",
            name,
            expected="a field that may differ between settings, by its dotted name, such as ppo.learning_rate",
            hint=did_you_mean(name, fields_that_can_vary(config)),
        )
        # 1 and 1.0 are one value. 1 and true are two, which Python counts as equal.
        distinct = {(isinstance(value, bool), value) for value in values}
        words = [value_text(value) for value in values]
        require(len(distinct) == len(values), "--vary", f"{name}={','.join(words)}", "each value once")
        for word in words:
            fits = Path(word).name == word
            require(fits, "--vary", word, "a value that can be a part of the name of a directory")


def vary_options(vary: Mapping[str, Sequence[Any]]) -> str:
    """The options from which `parse_vary` reads these fields and values; empty if nothing varies."""
    return " ".join(f"--vary {name}={','.join(map(value_text, values))}" for name, values in vary.items())


def value_text(value: Any) -> str:
    """A value as `parse_value` reads it: `0.0001`, `true`, `none`. Settings are named after their values."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)
