"""Stop requests: signals, turned into a flag that training reads between two updates."""

import contextlib
import os
import signal
import sys
import threading
from typing import Any

from jaxrl_atari.cli import CLEAR_LINE, was_interrupted

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class StopRequest:
    """Turns SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 into a request to stop after the current update.

    The first signal is answered with a line. Before the first update, when there is nothing to save, it raises
    KeyboardInterrupt, and so does a second Ctrl-C (SIGINT) at any time. The other signals may come any number of times:
    a cluster sends them to every process of a job, and so does a parent to its sessions. Signals that the parent
    ignores stay ignored: SIGHUP, sent when the terminal closes, under `nohup`; SIGINT in a script's background (`&`).

    Args:
        label: stands before the line, such as `session 0`.
        quick: False for a process that others would wait for: it does not end before its first update.
        answer: the line.
    """

    def __init__(
        self,
        label: str = "",
        quick: bool = True,
        answer: str = "stopping after this update, with a last checkpoint",
    ):
        self._label, self._quick, self._answer = f"{label}  " if label else "", quick, answer
        self._requested = False
        self._before: dict[int, Any] = {}
        self.training = False  # set it once an update is finished

    def requested(self) -> bool:
        """Whether a signal has asked for a stop."""
        return self._requested

    def __enter__(self):
        if was_interrupted():
            raise KeyboardInterrupt
        if threading.current_thread() is threading.main_thread():  # elsewhere Python handles no signals
            for number in REQUESTS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self._requested:
            raise KeyboardInterrupt
        if self._requested:
            return
        self._requested = True
        ends = self._quick and not self.training
        answer = "interrupted before the first update: there is nothing to save" if ends else self._answer
        with contextlib.suppress(OSError):  # a closed terminal. Not `print`, which fails within another `print`
            os.write(1, f"{CLEAR_LINE * sys.stdout.isatty()}{self._label}{answer}\n".encode())
        if ends:
            raise KeyboardInterrupt

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
