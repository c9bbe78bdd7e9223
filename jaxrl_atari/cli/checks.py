"""Checks of options: a dataclass's values against its annotations."""

import types
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from jaxrl_atari.cli.errors import ConfigError


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
