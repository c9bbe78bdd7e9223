"""The wish to stop: a signal, turned into something that the loops ask for between two updates."""

import os
import signal
import stat
import threading
from typing import Any


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a wish to stop after the update under way; a second one ends at once.

    SIGHUP, which says that the terminal was closed, counts as SIGTERM, however often it comes; under `nohup` it stays
    without effect.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def wanted(self) -> bool:
        """Whether it is time to stop."""
        return self.signal is not None

    def __enter__(self):
        self._before = {}
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no signals
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            drop_output()
            self.signal = self.signal or signal.SIGTERM
        elif self.signal is None:
            self.signal = number
        else:
            raise KeyboardInterrupt

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def drop_output() -> None:
    """Nobody reads any more what this process prints, and printing would fail: it goes nowhere, or on to its file."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        if not stat.S_ISREG(os.fstat(stream).st_mode):
            os.dup2(nowhere, stream)
    os.close(nowhere)
