"""Options of one word that can be of several types: their text, parsed."""

from collections.abc import Callable
from typing import Any

from tyro.constructors import PrimitiveConstructorSpec

from jaxrl_atari.cli.errors import ConfigError


def parse_gpu(value: bool | int | str, field: str = "devices.gpu", words: tuple[str, ...] = ()) -> Any:
    """Parses a `gpu` option: `auto`, `true`, `false` or a device index (`0` is a device).

    Args:
        field: name of the option in errors.
        words: further values that it may have.

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


def parse_count(text: str) -> int | str:
    """A number of devices, `all`, or the text itself, which the check of the field then rejects."""
    word = text.strip().lower()
    return int(word) if word.isdecimal() else word


def parse_switch(text: str) -> bool | str | None:
    """`true`, `false`, `none`, or the text itself, which the check of the field then rejects."""
    return {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)


def one_word(parse: Callable[[str], Any], metavar: str) -> PrimitiveConstructorSpec:
    """The command-line form of an option that tyro cannot derive from its type: one word, and how to parse it."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: parse(words[0]),
        is_instance=lambda value: isinstance(value, bool | int | str | None),
        str_from_instance=lambda value: [str(value).lower()],
    )
