"""Stop requests: signals, turned into a flag that training reads between two updates."""

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from jaxrl_atari.cli import INTERRUPTED, drop_output, is_command, say

REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class StopRequest:
    """Turns SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 into a request to stop after the current update.

    A second Ctrl-C (SIGINT) raises KeyboardInterrupt. The other signals may come any number of times: a cluster sends
    them to every process of a job, and so does a parent to its sessions. Signals that the parent ignores stay ignored:
    SIGHUP, sent when the terminal closes, under `nohup`; SIGINT in a script's background (`&`).

    Args:
        on_signal: called once, in a thread, as soon as the first signal arrives: also while the main thread is inside a
            compiled function, where Python handles no signals.
    """

    def __init__(self, on_signal: Callable[[], None] | None = None) -> None:
        self._requested = False
        self._on_signal = on_signal
        self._before: dict[int, Any] = {}
        self._pipe: tuple[int, int] | None = None

    def requested(self) -> bool:
        """Whether a signal has asked for a stop."""
        return self._requested

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():  # elsewhere Python handles no signals
            for number in REQUESTS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
            if self._on_signal is not None:
                self._pipe = os.pipe()
                os.set_blocking(self._pipe[1], False)
                self._wakeup_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
                threading.Thread(target=self._watch, args=self._pipe[:1], name="stop request", daemon=True).start()
        return self

    def _watch(self, pipe: int) -> None:
        """Reads the numbers of the signals that arrive, until the block has ended."""
        answered = False
        while received := os.read(pipe, 1):
            if received[0] in self._before and not answered:
                answered = True
                if received[0] == signal.SIGHUP:
                    drop_output()
                assert self._on_signal is not None
                self._on_signal()
        os.close(pipe)

    def _handle(self, number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            drop_output()
        if number == signal.SIGINT and self._requested:
            raise KeyboardInterrupt
        self._requested = True

    def __exit__(self, *exception: object) -> None:
        if self._pipe is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            os.close(self._pipe[1])
        for number, handler in self._before.items():
            signal.signal(number, handler)


class SessionStop(StopRequest):
    """Stop request of a process that trains sessions: it answers the first signal with a line.

    A command that has not finished its first update has nothing to save: it ends at once, also while it compiles.

    Args:
        label: stands before the line, such as `session 0`.
        quick: False for a process that others would wait for.
    """

    def __init__(self, label: str = "", quick: bool = True) -> None:
        super().__init__(self._answer)
        self._label, self._quick = f"{label}  " if label else "", quick
        self.training = False  # set it once an update is finished

    def _answer(self) -> None:
        if self._quick and not self.training and is_command():
            say(f"{self._label}interrupted before the first update: there is nothing to save")
            os._exit(INTERRUPTED)
        say(f"{self._label}stopping after this update, with a last checkpoint")
