"""Stop requests: signals, turned into a flag that training reads between two updates."""

import signal
import threading
from typing import Any

from jaxrl_atari.cli import drop_output


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a request to stop after the current update; a second one ends at once.

    SIGHUP, sent when the terminal closes, counts as SIGTERM, however often it comes; under `nohup` it is ignored.
    """

    def __init__(self) -> None:
        self.signal: int | None = None

    def requested(self) -> bool:
        """Whether a signal has asked for a stop."""
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
