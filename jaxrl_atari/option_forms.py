"""Types of options, and the forms of their values on a command line: words, numbers, JSON."""

import json
import os
import re
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from jaxrl_atari.checks import Limits

MAX_DIGITS = 19
"""Digits of a whole number. No option is that large, and Python refuses to read thousands of digits."""


def parse_word(text: str) -> bool | int | str | None:
    """The value that a word of a command line stands for: True, False, None, a whole number, or itself."""
    named = {"true": True, "false": False, "none": None}
    if text.lower() in named:
        return named[text.lower()]
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else text


def parse_choice(text: str) -> bool | int | str | None:
    """The value of a word as in `parse_word`, for an option that takes the words in small or capital letters."""
    return parse_word(text.lower())


def one_word(metavar: str) -> PrimitiveConstructorSpec:
    """The form of an option with several types: one word, read by `parse_choice`.

    Args:
        metavar: shown in `--help` for the value.
    """
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: parse_choice(words[0]),
        is_instance=lambda value: isinstance(value, bool | int | str | None),
        str_from_instance=lambda value: [str(value).lower()],
    )


FORMS = ConstructorRegistry()
"""How tyro reads the options that are numbers or paths."""


@FORMS.primitive_rule
def _number_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Reads an int or a float, or one of these, None and fixed words. `check_fields` refuses other text."""
    kinds = get_args(info.type) if get_origin(info.type) in (Union, types.UnionType) else (info.type,)
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    plain = {kind for kind in kinds if get_origin(kind) is not Literal}
    if not plain & {int, float} or not plain <= {int, float, type(None)}:
        return None
    names = {int: "INT", float: "FLOAT", type(None): "{None}"}
    metavars = [names[kind] if kind in names else f"{{{','.join(get_args(kind))}}}" for kind in kinds]

    def read(text: str) -> float | str | None:
        if text in words:
            return text
        if type(None) in plain and text.lower() == "none":
            return None
        return parse_number(text, whole=float not in plain)

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="|".join(sorted(metavars, key=lambda name: not name.startswith("{"))),
        instance_from_str=lambda texts: read(texts[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [str(value)],
    )


def parse_path(text: str) -> Path:
    """The path in a text. `~` is the home directory, also where a shell leaves it alone: `--output=~/graphs`."""
    return Path(os.path.expanduser(text))  # `Path.expanduser` raises an error for an unknown `~user`


@FORMS.primitive_rule
def _path_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec | None:
    """Reads a path with `parse_path`."""
    if info.type is not Path:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="PATH",
        instance_from_str=lambda words: parse_path(words[0]),
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda value: [str(value)],
    )


def parse_number(text: str, whole: bool) -> float | str:
    """The number in a text, such as 1e6, 1_000_000 or 2.5e-4; the text itself if it holds no number.

    Args:
        whole: accept whole numbers only.
    """
    try:
        number = float(text)
    except ValueError:
        return text
    if not whole:
        return number
    if re.fullmatch(r"[+-]?[\d_]+", text) and len(text) <= MAX_DIGITS:
        return int(text)
    return int(number) if number.is_integer() else text


def _parse_json(text: str) -> Any:
    """The value of a JSON text. Other text is returned as it is, and the check of the option's type refuses it."""
    try:
        return json.loads(text)
    except ValueError:
        return text


JSON_WORD = PrimitiveConstructorSpec(
    nargs=1,
    metavar="JSON",
    instance_from_str=lambda words: _parse_json(words[0]),
    is_instance=lambda value: isinstance(value, dict),
    str_from_instance=lambda value: [json.dumps(value)],
)
"""The form of an option that is a dictionary: a JSON object."""

GpuOption = bool | int | Literal["auto"]
"""`auto`, `true`, `false` or the index of a GPU; see `hardware.choice.choose_device`."""


def gpu_index(option: bool | int | str) -> int | None:
    """The GPU that a `GpuOption` names by its index; None for `auto`, True and False (ints in Python)."""
    return option if isinstance(option, int) and not isinstance(option, bool) else None


GpuWord = Annotated[GpuOption, one_word("auto|true|false|INDEX"), Limits(0, 4_095)]
"""The type of an option that is a `GpuOption`."""

GpuOrLearner = Annotated[
    GpuOption | Literal["learner"], one_word("learner|auto|true|false|INDEX"), Limits(0, 4_095)
]
"""The type of an option that is a `GpuOption` or `learner`, the learner's own device."""

RunDir = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN_DIR")]
"""The type of the first word of a command that reads a run."""

AnyDir = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR")]
"""The type of the first word of a command that reads runs, suites and searches."""

MoreDirs = Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[DIR ...]")]
"""The type of the further words of such a command."""

ENV_STEPS = Limits(0, 10**12)
"""The env steps at which a session may have a checkpoint."""

SESSION_NUMBERS = Limits(0, 10_000)
"""The numbers that a session may have in its run."""

CheckpointChoice = Annotated[Literal["best", "latest"] | int, ENV_STEPS]
"""A checkpoint as the user chooses it: a number is that of env steps."""

CheckpointOption = Annotated[
    CheckpointChoice,
    tyro.conf.arg(
        help="`best` (the highest mean return of the last 100 games), `latest`, or the env step of a checkpoint."
    ),
]
"""The type of the option `--checkpoint` of a command that loads a policy."""

RuleSwitch = Annotated[bool | None, one_word("true|false|none")]
"""A rule of the protocol that is on or off; None: as in the protocol."""
