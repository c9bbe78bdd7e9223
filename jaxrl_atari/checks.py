"""Checks of values: options against their annotations (type, choices, limits), environment variables, and JSON."""

import dataclasses
import json
import math
import os
import re
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import numpy as np

from jaxrl_atari.errors import ConfigError, require


class Limits(NamedTuple):
    """The values that a numeric option may have, both ends included: `Annotated[int, Limits(1, 16)]`."""

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        """Completes "a number": ` from 1 to 16`, ` from 1 on`, or nothing without limits."""
        low, high = (f"{limit:,}" if isinstance(limit, int) else f"{limit:g}" for limit in self)
        if self.high == math.inf:
            return "" if self.low == -math.inf else f" from {low} on"
        return f" from {low} to {high}"


def check_fields(config: Any, prefix: str = "", as_options: bool = False) -> None:
    """Checks every field of a dataclass, and of those in it, against its annotation: type, choices and `Limits`.

    NumPy's numbers become Python's.

    Args:
        prefix: stands before the fields' names in errors, such as `ppo.`.
        as_options: errors name the fields as the options of a command: `num-envs`, for the field `num_envs`.

    Raises:
        ConfigError: the first field whose value does not fit.
    """
    for name, annotation in get_type_hints(type(config), include_extras=True).items():
        _, metadata = _kind_and_metadata(annotation)
        option = option_name(name, metadata) if as_options else name
        value = checked_value(f"{prefix}{option}", getattr(config, name), annotation)
        object.__setattr__(config, name, value)
        if dataclasses.is_dataclass(value):
            check_fields(value, f"{prefix}{option}." if option else prefix, as_options)


def checked_value(field: str, value: Any, annotation: Any) -> Any:
    """Checks a value against an annotation: type, choices and `Limits`.

    Args:
        field: name of the value in the error.

    Returns:
        The value, or Python's number for one of NumPy's.

    Raises:
        ConfigError: the value does not fit.
    """
    kind, metadata = _kind_and_metadata(annotation)
    limits = next((each for each in metadata if isinstance(each, Limits)), Limits())
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    if isinstance(value, np.generic):
        value = value.item()
    if not any(_fits(value, kind, limits) for kind in kinds):
        raise ConfigError(field, value, " or ".join(_description(kind, limits) for kind in kinds))
    return value


def _kind_and_metadata(annotation: Any) -> tuple[Any, Sequence[Any]]:
    """The type of an annotation, and what `Annotated` adds to it."""
    kind, *metadata = get_args(annotation) if get_origin(annotation) is Annotated else (annotation,)
    return kind, metadata


def option_name(field: str, metadata: Sequence[Any]) -> str:
    """The name of a field as an option: `num-envs` for `num_envs`, or that of `tyro.conf.arg(name=...)`.

    The latter may be empty: the options of a dataclass then have no common prefix.

    Args:
        metadata: what the field's `Annotated` type has besides the type.
    """
    names = [each.name for each in metadata if getattr(each, "name", None) is not None]
    return names[0] if names else field.replace("_", "-")


def whole_number_variable(name: str, limits: Limits) -> int | None:
    """The whole number in an environment variable; None if the variable is not set, or empty.

    Raises:
        ConfigError: the variable holds something else, or a number outside the limits.
    """
    text = os.environ.get(name, "").strip()
    if not text:
        return None
    fits = re.fullmatch("[0-9]{1,18}", text) and limits.low <= int(text) <= limits.high
    require(fits, name, text, f"a whole number{limits}", "or unset it")
    return int(text)


def texts_in(value: Any) -> Iterator[str]:
    """All strings in a JSON value, at any depth, with the keys of its objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        for each in value.values():
            yield from texts_in(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts_in(each)


def is_json(value: Any) -> bool:
    """Whether JSON can hold a value: one without tuples and NaN, whose keys are strings."""
    try:
        return json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError, RecursionError):
        return False


def _fits(value: Any, kind: Any, limits: Limits) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if kind in (int, float):
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        return is_number and limits.low <= value <= limits.high  # NaN is in no range
    return isinstance(value, get_origin(kind) or kind)


def _description(kind: Any, limits: Limits) -> str:
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
    words = {
        int: f"a whole number{limits}",
        float: f"a number{limits}",
        bool: "true or false",
        str: "text",
        type(None): "None",
    }
    return words.get(kind, f"a value of type {getattr(kind, '__name__', kind)}")
