"""Signals: they interrupt a command, or ask a session to stop after its current update."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn, Self

from jaxrl_atari.output import CLEAR_LINE, is_terminal

INTERRUPTED = 130
"""Exit status after any signal that asks for a stop: 128 + SIGINT, as in shells."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that interrupt a command or, within a `StopRequest`, ask a session to stop."""

received: list[int] = []
"""Signals that the running command has received outside a `StopRequest`."""


def interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Signal handler: interrupts the command; at a second signal, ends the process."""
    if received:
        os._exit(INTERRUPTED)
    received.append(number)
    raise KeyboardInterrupt


class StopRequest:
    """Turns SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 into a request to stop after the current update.

    The first signal is answered with a line. While there is nothing to save, it raises KeyboardInterrupt at once.
    Ctrl-C (SIGINT) after an earlier signal raises KeyboardInterrupt too. The
    other signals may come any number of times, because clusters and parent processes send them to every process of
    a job. Signals that the parent process ignores stay ignored: SIGHUP under `nohup`, SIGINT in the background of
    a script (`&`). Handlers that Python has not set, such as those of a program that embeds it, stay.

    Args:
        label: precedes the line, such as `session 0`.
        saves: whether there is something to save. A session sets it after its first update; it is true from the
            start in a process that others would wait for.
        answer: the line that answers the first signal if there is something to save.
    """

    def __init__(
        self,
        label: str = "",
        saves: bool = False,
        answer: str = "stopping after this update, with a last checkpoint",
    ):
        self._label = f"{label}  " if label else ""
        self._answer = answer
        self.saves = saves
        self.requested = False  # whether a signal has asked for a stop
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # elsewhere Python handles no signals
            for number in SIGNALS:
                handler = signal.getsignal(number)
                if handler is not None and handler != signal.SIG_IGN:
                    self._before[number] = handler
                    signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.requested:
            raise KeyboardInterrupt
        if self.requested:
            return
        self.requested = True
        answer = self._answer if self.saves else "interrupted before the first update: there is nothing to save"
        with contextlib.suppress(OSError):  # a closed terminal; and `print` fails within another `print`
            start = CLEAR_LINE if is_terminal(sys.stdout) else ""
            os.write(1, f"{start}{self._label}{answer}\n".encode())
        if not self.saves:
            raise KeyboardInterrupt

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
