"""Types of options, with the forms on the command line that tyro cannot derive from a type."""

import json
from typing import Annotated, Any, Literal

from tyro.constructors import PrimitiveConstructorSpec

from jaxrl_atari.checks import Limits


def parse_word(text: str) -> bool | int | str | None:
    """The value that a word of a command line stands for: True, False, None, a whole number, or the word."""
    word = text.lower()
    named = {"true": True, "false": False, "none": None}
    if word in named:
        return named[word]
    return int(word) if word.isdecimal() else word


def one_word(metavar: str) -> PrimitiveConstructorSpec:
    """The form of an option with several types: one word, read by `parse_word`.

    Args:
        metavar: shown in `--help` for the value.
    """
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: parse_word(words[0]),
        is_instance=lambda value: isinstance(value, bool | int | str | None),
        str_from_instance=lambda value: [str(value).lower()],
    )


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
"""`auto`, `true`, `false` or the index of a GPU; see `devices.pick_device`."""


def index_of(option: bool | int | str) -> int | None:
    """The index that a `GpuOption` names; None for `auto`, True and False (which are ints in Python)."""
    return option if isinstance(option, int) and not isinstance(option, bool) else None


GpuWord = Annotated[GpuOption, one_word("auto|true|false|INDEX"), Limits(0, 4_095)]
"""The type of an option that is a `GpuOption`."""

GpuOrLearner = Annotated[
    GpuOption | Literal["learner"], one_word("learner|auto|true|false|INDEX"), Limits(0, 4_095)
]
"""The same, or `learner`: the learner's own device."""

Switch = Annotated[bool | None, one_word("true|false|none")]
"""A rule of the protocol that is on or off; None: as in the protocol."""
