"""How config fields are read from the command line, and checked."""

from collections.abc import Callable
from typing import Any, Literal

from tyro.constructors import PrimitiveConstructorSpec

from jaxrl_atari.errors import ConfigError

GpuOption = bool | int | Literal["auto"]


def parse_gpu(value: bool | int | str, field: str = "devices.gpu", words: tuple[str, ...] = ()) -> Any:
    """Reads a `gpu` option as people write it: `auto`, `true`, `false` or a device index (`0` is a device).

    Args:
        field: what it is called in errors.
        words: what else it may be.

    Returns:
        "auto", True, False, an index, or one of `words`.
    """
    word = value.strip().lower() if isinstance(value, str) else value
    if word in ("auto", *words) or isinstance(word, bool) or (isinstance(word, int) and word >= 0):
        return word
    if word in ("true", "false"):
        return word == "true"
    if isinstance(word, str) and word.isdecimal():
        return int(word)
    raise ConfigError(field, value, ", ".join((*words, "auto", "true", "false")) + " or a device index such as 0")


def parse_count(text: str) -> int | Literal["all"]:
    """Reads a number of devices, or `all`."""
    if text.strip().lower() == "all":
        return "all"
    if text.strip().isdecimal():
        return int(text)
    raise ConfigError("devices.data_parallel", text, "a number of devices, or all")


def one_word(parse: Callable[[str], Any], metavar: str) -> PrimitiveConstructorSpec:
    """Tells tyro that an option is one word, and how it is read."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda value: isinstance(value, bool | int | str),
        str_from_instance=lambda value: [str(value).lower()],
    )


def require(holds: bool, name: str, value: Any, expected: str, hint: str = "") -> None:
    """Raises `ConfigError`, with the rest of the arguments, unless `holds`."""
    if not holds:
        raise ConfigError(name, value, expected, hint)


def require_int(name: str, value: Any, low: int, high: int) -> None:
    """Raises `ConfigError` unless `value` is a whole number from low to high."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    require(is_int and low <= value <= high, name, value, f"a whole number from {low:,} to {high:,}")


def require_number(name: str, value: Any, low: float, high: float) -> None:
    """Raises `ConfigError` unless `value` is a number from low to high; NaN is none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    require(is_number and low <= value <= high, name, value, f"a number from {low:g} to {high:g}")


def require_choice(name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Raises `ConfigError` unless `value` is one of `choices`."""
    require(value in choices, name, value, "one of " + ", ".join(choices))
