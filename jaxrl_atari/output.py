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

from jaxrl_atari.errors import UserError, correctable, reason

Item = TypeVar("Item")


def write(text: str, stream: TextIO | None = None) -> None:
    """Writes text to standard output, or another stream, at once.

    It never raises, so that a closed terminal does not end a training run. Characters that the stream cannot
    encode become "?". Text is lost if writing fails, or if there is no stream (`sys.stdout` may be None). After a
    closed pipe or terminal or a full disk, later text is lost too.
    """
    output = sys.stdout if stream is None else stream
    try:
        try:
            output.write(text)
        except UnicodeEncodeError:
            encoding = getattr(output, "encoding", None) or "ascii"
            output.write(text.encode(encoding, "replace").decode(encoding))
        if hasattr(output, "flush"):
            output.flush()
    except BlockingIOError:  # a terminal that takes no more for now
        pass
    except OSError:
        with contextlib.suppress(Exception):  # a stream without a descriptor
            descriptor = output.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)
    except Exception:  # None, a closed file, or a caller's own stream, which may raise anything
        pass


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
        changed: name -> (before, after), as `config_dicts.changed_fields` returns them.
    """
    if changed:
        say(f"{text}: {', '.join(f'{name} {old!r} -> {new!r}' for name, (old, new) in changed.items())}")


def try_to(problem: str, action: Callable[[], object], resume: str) -> bool:
    """Calls a function that reads or saves results, or prints why files cannot be read or written.

    An error that is a bug is raised. It stops no training either: launchers raise it once all sessions have ended
    (`trials/launch.py`).

    Args:
        problem: what an error means, such as `the results are not saved`.
        action: the function.
        resume: the command that tries again.

    Returns:
        Whether the function has succeeded.
    """
    try:
        action()
    except (OSError, UserError) as error:
        say(f"{problem}: {reason(error)}; {resume} tries again")
        return False
    return True


def try_to_draw(problem: str, draw: Callable[[], object], again: str) -> None:
    """Calls a function that draws graphs or writes a report at the end of a command, or prints why it cannot.

    The command goes on after any error, because its results do not depend on graphs. The traceback of a bug is
    printed too.

    Args:
        problem: what an error means, such as `no report`.
        draw: the function.
        again: the command that tries again.
    """
    try:
        draw()
    except Exception as error:
        say_traceback(error)
        say(f"{problem}: {reason(error)}; {again} tries again")


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream is a terminal; False for None and for a stream that cannot say."""
    try:
        return bool(stream is not None and stream.isatty())
    except Exception:  # a closed file, or a caller's own stream
        return False


class SafeStream(io.TextIOBase):
    """A stream for libraries that print, such as rich and tyro. It writes with `write`, and so never fails.

    Args:
        stream: receives the text; None drops it.
    """

    def __init__(self, stream: TextIO | None):
        self._stream = stream

    @property
    def encoding(self) -> str:  # pyright: ignore
        return getattr(self._stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if self._stream is not None:
            write(text, self._stream)
        return len(text)

    def isatty(self) -> bool:
        return is_terminal(self._stream)


def console() -> Console:
    """A console of rich on standard output that never fails; see `SafeStream`."""
    return Console(file=SafeStream(sys.stdout))  # pyright: ignore


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
