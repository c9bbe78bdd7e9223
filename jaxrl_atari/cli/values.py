"""Values of options: checked against their annotations, and parsed where tyro cannot derive how from the type."""

import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from tyro.constructors import PrimitiveConstructorSpec

from jaxrl_atari.errors import ConfigError, UserError


class Limits(NamedTuple):
    """The values that a numeric option may have, both ends included: `Annotated[int, Limits(1, 16)]`."""

    low: float
    high: float

    def __str__(self) -> str:
        numbers = [f"{x:,}" if isinstance(x, int) else f"{x:g}" for x in self]
        return f"from {numbers[0]} to {numbers[1]}"


def check_fields(config: Any, prefix: str = "") -> None:
    """Checks every field of a dataclass against its annotation: type, choices and `Limits`.

    Args:
        prefix: of the fields' names in errors, such as `ppo.`.

    Raises:
        ConfigError: the first field whose value does not fit.
    """
    for name, annotation in get_type_hints(type(config), include_extras=True).items():
        kind, *metadata = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
        limits = next((x for x in metadata if isinstance(x, Limits)), None)
        kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
        value = getattr(config, name)
        if not any(_fits(value, kind, limits) for kind in kinds):
            expected = " or ".join(_description(kind, limits) for kind in kinds)
            raise ConfigError(f"{prefix}{name}", value, expected)


def _fits(value: Any, kind: Any, limits: Limits | None) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind in (int, float):
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        return is_number and (limits is None or limits.low <= value <= limits.high)  # NaN is in no range
    return isinstance(value, get_origin(kind) or kind)


def _description(kind: Any, limits: Limits | None) -> str:
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "None"}
    text = words.get(kind, f"a value of type {getattr(kind, '__name__', kind)}")
    return f"{text} {limits}" if limits and kind in (int, float) else text


def parse_path(text: str, option: str) -> Path:
    """The path that an option names, with `~` expanded. Raises `UserError` for an empty one and an unknown `~user`."""
    if not text:
        raise UserError(f"{option}: expected a path, found nothing; perhaps a shell variable is not set")
    if (path := os.path.expanduser(text)).startswith("~"):
        raise UserError(f"{option} {text}: there is no such user; ~/ is your home, and ./~ starts a name with ~")
    return Path(path)


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


def counted(count: float, noun: str) -> str:
    """`1 game`, `2 games`, `0.25 GPUs`."""
    return f"{count:g} {noun}{'' if count == 1 else 's'}"
