"""What all commands share: one-line errors on stderr, exit statuses, and stop requests."""

import contextlib
import errno
import io
import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from jaxrl_atari.errors import UserError
from jaxrl_atari.output import counted, is_terminal, say, write

__all__ = ["StopRequest", "correctable", "counted", "resume_command", "run", "say", "write"]

INTERRUPTED = 130
"""Exit status after any signal that asks for a stop: 128 + SIGINT, as in shells."""

CLEAR_LINE = "\r\x1b[K"
"""Erases the live line of a terminal."""

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals of a `StopRequest`."""

OUTSIDE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPIPE}
"""Operating system errors that the user can correct. EPIPE comes of `--help | head`."""

_interrupted: list[int] = []
"""Signals that the running command has received outside a `StopRequest`."""


def run(main: Callable[[], object]) -> NoReturn:
    """Calls `main` and exits with status 0, or with 1 or 2 after an error that the user can correct.

    - An exception that `correctable` recognises is printed in one line. Any other is a bug and keeps its
      traceback.
    - Ctrl-C, SIGTERM, SIGUSR1 and SIGUSR2 raise `KeyboardInterrupt` in `main`. Its message is printed, and the
      status is 130. A second signal ends the process at once.
    """
    _open_streams()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    _interrupted.clear()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) != signal.SIG_IGN:  # as SIGINT is in the background of a script
            signal.signal(number, _interrupt)
    status = 0
    try:
        main()
        if _interrupted:
            raise KeyboardInterrupt
    except KeyboardInterrupt as stop:
        say(str(stop) or "interrupted", sys.stderr)
        status = INTERRUPTED
    except Exception as error:
        known = correctable(error)
        if _interrupted:  # an extension module whose import is interrupted raises an error of its own
            say("interrupted", sys.stderr)
            status = INTERRUPTED
        elif known is None:
            raise
        else:
            say(f"error: {known}", sys.stderr)
            status = known.exit_status
    write("")  # drops text that a closed pipe has not taken; otherwise Python would report it at exit
    if status == INTERRUPTED:
        os._exit(status)  # a normal exit would crash while XLA runs a computation whose start was interrupted
    sys.exit(status)


def _open_streams() -> None:
    """Opens standard streams that the shell has closed (`>&-`), and lets an ASCII terminal show "?" for "±"."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # the next file to be opened would become the output
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Signal handler: interrupts the command; at a second signal, ends the process."""
    if _interrupted:
        os._exit(INTERRUPTED)
    _interrupted.append(number)
    raise KeyboardInterrupt  # Python swallows it in callbacks, such as those of the garbage collector


def correctable(error: Exception) -> UserError | None:
    """The error as a `UserError`, if the user can correct it; None for a bug.

    A full or read-only disk, an exceeded quota, a missing permission and a closed pipe can be corrected.
    """
    if isinstance(error, OSError) and error.errno in OUTSIDE_ERRORS:
        return UserError(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror))
    return error if isinstance(error, UserError) else None


def resume_command(command: str, directory: Path) -> str:
    """The command line that continues what a directory holds: `python -m jaxrl_atari.train --resume DIR`."""
    return f"python -m jaxrl_atari.{command} --resume {shlex.quote(str(directory))}"


# --- Stop requests -----------------------------------------------------------------------------------------------


class StopRequest:
    """Turns SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 into a request to stop after the current update.

    The first signal is answered with a line. It raises KeyboardInterrupt before the first update, when there is
    nothing to save. Ctrl-C (SIGINT) after an earlier signal raises KeyboardInterrupt too. The other signals may
    come any number of times, because clusters and parent processes send them to every process of a job. Signals
    that the parent process ignores stay ignored: SIGHUP under `nohup`, SIGINT in the background of a script (`&`).

    Args:
        label: precedes the line, such as `session 0`.
        quick: False for a process that others would wait for; it goes on until its first update.
        answer: the line that answers the first signal.
    """

    def __init__(
        self,
        label: str = "",
        quick: bool = True,
        answer: str = "stopping after this update, with a last checkpoint",
    ):
        self._label = f"{label}  " if label else ""
        self._quick = quick
        self._answer = answer
        self.requested = False
        """Whether a signal has asked for a stop."""
        self.training = False
        """The session sets this to True after its first update."""
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self):
        if _interrupted:  # a signal that came during a callback; see `_interrupt`
            raise KeyboardInterrupt
        if threading.current_thread() is threading.main_thread():  # elsewhere Python handles no signals
            for number in REQUESTS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        if self.requested:
            return
        self.requested = True
        ends = self._quick and not self.training
        answer = "interrupted before the first update: there is nothing to save" if ends else self._answer
        with contextlib.suppress(OSError):  # a closed terminal; and `print` fails within another `print`
            start = CLEAR_LINE if is_terminal(sys.stdout) else ""
            os.write(1, f"{start}{self._label}{answer}\n".encode())
        if ends:
            raise KeyboardInterrupt

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
