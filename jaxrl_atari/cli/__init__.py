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
from typing import Any, NoReturn

from jaxrl_atari.errors import UserError
from jaxrl_atari.output import counted, is_terminal, say, write

__all__ = ["StopRequest", "correctable", "counted", "resume_command", "run", "say", "write"]

INTERRUPTED = 130  # 128 + SIGINT, as in shells: stopped on request, by whatever signal; nothing failed

CLEAR_LINE = "\r\x1b[K"
"""What overwrites the live line of a terminal."""

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals of a `StopRequest`."""

OUTSIDE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPIPE}  # EPIPE: `--help | head`

_interrupted: list[int] = []  # signals that the running command has received, outside of a `StopRequest`


def run(main: Callable[[], object]) -> NoReturn:
    """Calls `main` and exits: with 0 when it returns, the error's status (2 or 1) on a `UserError`.

    Ctrl-C, SIGTERM, SIGUSR1 and SIGUSR2 end it with status 130 and the message of the `KeyboardInterrupt` that
    `main` raises; a second one ends it at once. An exception that `correctable` recognises is printed in one line.
    Any other is a bug and keeps its traceback.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # closed by a shell's `>&-`: the next file to be opened would become the output
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal shows "?" for "±"
    logging.basicConfig(format="%(levelname)s: %(message)s")

    def end(number: int, frame: Any) -> NoReturn:
        if _interrupted:
            os._exit(INTERRUPTED)
        _interrupted.append(number)
        raise KeyboardInterrupt  # Python swallows it in callbacks, as of the garbage collector

    _interrupted.clear()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        if signal.getsignal(number) != signal.SIG_IGN:  # SIGINT, in the background of a script
            signal.signal(number, end)
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
        if _interrupted:  # an extension module that is interrupted while it is imported raises an error of its own
            say("interrupted", sys.stderr)
            status = INTERRUPTED
        elif known is None:
            raise
        else:
            say(f"error: {known}", sys.stderr)
            status = known.exit_status
    write("")  # flushes: text that a closed pipe did not take is dropped here, and not reported at Python's end
    if status == INTERRUPTED:
        os._exit(status)  # Python's end would crash while XLA runs a computation whose start was interrupted
    sys.exit(status)


def correctable(error: Exception) -> UserError | None:
    """The one-line error that a user can correct: the `UserError` itself, or one made from a full or read-only
    disk, an exceeded quota, a missing permission or a closed pipe. None for a bug."""
    if isinstance(error, OSError) and error.errno in OUTSIDE_ERRORS:
        return UserError(f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror))
    return error if isinstance(error, UserError) else None


def resume_command(command: str, directory: Path) -> str:
    """The command line that goes on with what a directory holds: `python -m jaxrl_atari.train --resume DIR`."""
    return f"python -m jaxrl_atari.{command} --resume {shlex.quote(str(directory))}"


# --- Stop requests -----------------------------------------------------------------------------------------------


class StopRequest:
    """Turns SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 into a request to stop after the current update.

    The first signal is answered with a line. Before the first update, when there is nothing to save, it raises
    KeyboardInterrupt, and so does Ctrl-C (SIGINT) after any earlier signal. The other signals may come any number
    of times: a cluster sends them to every process of a job, and so does a parent to its sessions. Signals that
    the parent ignores stay ignored: SIGHUP, sent when the terminal closes, under `nohup`; SIGINT in a script's
    background (`&`).

    Args:
        label: stands before the line, such as `session 0`.
        quick: False for a process that others would wait for: it does not end before its first update.
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
        self.requested = False  # whether a signal has asked for a stop
        self._before: dict[int, Any] = {}
        self.training = False  # set it once an update is finished

    def __enter__(self):
        if _interrupted:  # a signal that came within a callback; see `run`
            raise KeyboardInterrupt
        if threading.current_thread() is threading.main_thread():  # elsewhere Python handles no signals
            for number in REQUESTS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        if self.requested:
            return
        self.requested = True
        ends = self._quick and not self.training
        answer = "interrupted before the first update: there is nothing to save" if ends else self._answer
        with contextlib.suppress(OSError):  # a closed terminal. Not `print`, which fails within another `print`
            start = CLEAR_LINE if is_terminal(sys.stdout) else ""
            os.write(1, f"{start}{self._label}{answer}\n".encode())
        if ends:
            raise KeyboardInterrupt

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
