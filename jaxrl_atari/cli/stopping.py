"""Stop requests: signals, turned into a flag that training reads between two updates."""

import os
import signal
import sys
import threading
from typing import Any

from jaxrl_atari.cli import CLEAR_LINE, INTERRUPTED, drop_output, is_command, say

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class StopRequest:
    """Turns SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 into a request to stop after the current update.

    The first signal is answered with a line at once, also while the main thread is inside a compiled function, where
    Python handles no signals. A command that has nothing to save yet ends there. A second Ctrl-C (SIGINT) raises
    KeyboardInterrupt. The other signals may come any number of times: a cluster sends them to every process of a job,
    and so does a parent to its sessions. Signals that the parent ignores stay ignored: SIGHUP, sent when the terminal
    closes, under `nohup`; SIGINT in a script's background (`&`).

    Args:
        label: stands before the line, such as `session 0`.
        quick: False for a process that others would wait for: it does not end before its first update.
        answer: the line; None prints nothing.
    """

    def __init__(
        self,
        label: str = "",
        quick: bool = True,
        answer: str | None = "stopping after this update, with a last checkpoint",
    ):
        self._label, self._quick, self._answer = f"{label}  " if label else "", quick, answer
        self._requested, self._writing = False, -1
        self._before: dict[int, Any] = {}
        self.training = False  # set it once an update is finished

    def requested(self) -> bool:
        """Whether a signal has asked for a stop."""
        return self._requested

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # elsewhere Python handles no signals
            for number in REQUESTS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
            reading, self._writing = os.pipe()
            os.set_blocking(self._writing, False)
            self._wakeup_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
            threading.Thread(target=self._watch, args=(reading,), name="stop request", daemon=True).start()
        return self

    def _watch(self, pipe: int) -> None:
        """Answers the first request, by the numbers of the signals that arrive, until the block has ended."""
        answered = False
        while received := os.read(pipe, 1):
            if received[0] not in self._before or answered:
                continue
            answered = True
            if received[0] == signal.SIGHUP:
                drop_output()
            if self._quick and not self.training and is_command():
                say(f"{self._label}interrupted before the first update: there is nothing to save")
                os._exit(INTERRUPTED)
            if self._answer is not None:
                say(f"{CLEAR_LINE * sys.stdout.isatty()}{self._label}{self._answer}")
        os.close(pipe)

    def _handle(self, number: int, frame: Any) -> None:
        if number == signal.SIGINT and self._requested:
            raise KeyboardInterrupt
        self._requested = True

    def __exit__(self, *exception: object) -> None:
        if self._writing >= 0:
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._writing)
        for number, handler in self._before.items():
            signal.signal(number, handler)
