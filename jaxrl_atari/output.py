"""Text for the user. A stream that cannot be written to never ends the work."""

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TextIO, TypeVar

from jaxrl_atari.errors import correctable, reason

Item = TypeVar("Item")

CLEAR_LINE = "\r\x1b[K"
"""Erases the live line of a terminal."""


def write(text: str, stream: TextIO | None = None) -> None:
    """Writes text to standard output, or another stream, at once.

    A closed pipe or terminal or a full disk does not end a training run: the text is lost, and later text too.
    """
    output = sys.stdout if stream is None else stream
    try:
        output.write(text)
        output.flush()
    except OSError:
        with contextlib.suppress(OSError), open(os.devnull, "w") as nowhere:  # a stream without a descriptor
            os.dup2(nowhere.fileno(), output.fileno())


def say(line: str, stream: TextIO | None = None) -> None:
    """Prints a line, on a terminal in place of the live line; see `write`."""
    start = CLEAR_LINE if is_terminal(stream or sys.stdout) else ""
    write(f"{start}{line}\n", stream)


def say_traceback(error: BaseException) -> None:
    """Prints the traceback of an error to stderr, if it is a bug: not if the user can correct it."""
    if correctable(error) is None:
        say("".join(traceback.format_exception(error)).rstrip(), sys.stderr)


def say_changes(text: str, changed: Mapping[str, tuple[object, object]]) -> None:
    """Prints a text and the fields that have changed; nothing if there are none.

    Args:
        changed: name -> (before, after), as `config.changed_fields` returns them.
    """
    if changed:
        say(f"{text}: {', '.join(f'{name} {old!r} -> {new!r}' for name, (old, new) in changed.items())}")


def try_to(problem: str, action: Callable[[], object], again: str) -> None:
    """Calls a function that saves, draws or reports results, or prints why it cannot.

    The command goes on after any error, because its results are on disk. The traceback of a bug is printed too.

    Args:
        problem: what an error means, such as `the results are not saved`.
        action: the function.
        again: the command that tries again.
    """
    try:
        action()
    except Exception as error:
        say_traceback(error)
        say(f"{problem}: {reason(error)}; {again} tries again")


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal that can erase a line; False for a closed one."""
    try:
        return stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:
        return False


def tracked(items: Iterable[Item], description: str, total: int) -> Iterator[Item]:
    """Iterates over items, and prints every 10 seconds how many of them are done.

    Args:
        total: number of the items.
    """
    said = time.monotonic()
    for number, item in enumerate(items):
        if time.monotonic() > said + 10:
            said = time.monotonic()
            say(f"{description}: {number:,} of {total:,}")
        yield item


def counted(count: float, noun: str) -> str:
    """A count with its noun: `1 game`, `2,000 games`, `0.25 GPUs`."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {noun}" if count == 1 else f"{number} {noun}s"
