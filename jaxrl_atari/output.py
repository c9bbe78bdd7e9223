"""Text for the user. A stream that cannot be written to never ends the work."""

import contextlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import TextIO, TypeVar

from rich.console import Console
from rich.progress import track

from jaxrl_atari.errors import correctable, reason

Item = TypeVar("Item")


def write(text: str, stream: TextIO | None = None) -> None:
    """Writes text to standard output, or another stream, at once.

    A closed pipe or terminal or a full disk does not end a training run: the text is lost, and later text too.
    """
    output = sys.stdout if stream is None else stream
    try:
        output.write(text)
        output.flush()
    except OSError:
        with contextlib.suppress(OSError):  # a stream without a descriptor
            descriptor = output.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def say(line: str, stream: TextIO | None = None) -> None:
    """Prints a line; see `write`."""
    write(line + "\n", stream)


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


def try_to(problem: str, action: Callable[[], object], again: str) -> bool:
    """Calls a function that saves, draws or reports results, or prints why it cannot.

    The command goes on after any error, because its results are on disk. The traceback of a bug is printed too.

    Args:
        problem: what an error means, such as `the results are not saved`.
        action: the function.
        again: the command that tries again.

    Returns:
        Whether the function has succeeded.
    """
    try:
        action()
    except Exception as error:
        say_traceback(error)
        say(f"{problem}: {reason(error)}; {again} tries again")
        return False
    return True


def is_terminal(stream: TextIO) -> bool:
    """Whether a stream is a terminal; False for a closed one."""
    try:
        return stream.isatty()
    except ValueError:
        return False


class _Output(io.TextIOBase):
    """A stream for rich, which would end a command whose terminal is closed; see `write`.

    Args:
        stream: where the text goes. rich redirects `sys.stdout` to its own console, so it is not looked up later.
    """

    def __init__(self, stream: TextIO):
        self._stream = stream

    @property
    def encoding(self) -> str:  # pyright: ignore
        return self._stream.encoding  # rich draws with ASCII characters where there are no others

    def write(self, text: str) -> int:
        write(text, self._stream)
        return len(text)

    def isatty(self) -> bool:
        return is_terminal(self._stream)


def console() -> Console:
    """A console of rich on standard output that does not fail with it."""
    return Console(file=_Output(sys.stdout))  # pyright: ignore


def tracked(
    items: Iterable[Item], description: str, *, total: float | None = None, transient: bool = False
) -> Generator[Item, None, None]:
    """Iterates over items and draws a progress bar.

    Wrap it in `contextlib.closing` if the loop may end early. Otherwise Python may collect the bar as garbage in
    rich's drawing thread, which then waits for its own end and hangs.

    Args:
        total: number of the items; None: their length.
        transient: remove the bar from a terminal at the end.
    """
    bar = track(items, description, total, console=console(), transient=transient)
    with contextlib.closing(bar) as shown:  # pyright: ignore
        yield from shown


def counted(count: float, noun: str) -> str:
    """A count with its noun: `1 game`, `2,000 games`, `0.25 GPUs`."""
    number = f"{count:,}" if isinstance(count, int) else f"{count:g}"
    return f"{number} {noun}" if count == 1 else f"{number} {noun}s"
