"""Progress of a session on the terminal: a live line, or plain lines if the output is not a terminal."""

import math
import os
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO

from jaxrl_atari.cli import write


class Pace:
    """Env steps per second over the last minute, from which the remaining time is estimated."""

    SECONDS = 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._points: deque[tuple[float, int]] = deque()  # (time, env steps)

    def add(self, env_steps: int) -> None:
        """Adds a point. Time before the first point, such as compilation, does not count."""
        now = self._clock()
        self._points.append((now, env_steps))
        while len(self._points) > 2 and self._points[1][0] < now - self.SECONDS:
            self._points.popleft()

    @property
    def sps(self) -> float:
        """NaN until there are two points."""
        if len(self._points) < 2:
            return math.nan
        (first_time, first), (last_time, last) = self._points[0], self._points[-1]
        return (last - first) / (last_time - first_time) if last_time > first_time else math.nan


def _count(value: float) -> str:
    """1234567 -> 1.23M"""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.{2 if value < 10 * size else 1}f}{unit}"
    return f"{value:.0f}"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


class ProgressWriter:
    """Draws a live line on a terminal; in a file, pipe or notebook, prints a plain line for each log point.

    Args:
        total_env_steps: the budget, 100%.
        stream: the output; standard output by default.
        clock: a monotonic clock in seconds.
    """

    REDRAW_SECONDS = 0.2

    def __init__(
        self,
        total_env_steps: int,
        *,
        label: str,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total, self._label = total_env_steps, label
        self._stream = sys.stdout if stream is None else stream
        self._live = self._stream is not None and self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._clock, self._pace = clock, Pace(clock)
        self._drawn_at = -math.inf
        self._line = ""  # the text on the terminal's last line

    def progress(self, env_steps: int, row: Mapping[str, Any]) -> None:
        self._pace.add(env_steps)
        now = self._clock()
        if self._live and (now - self._drawn_at >= self.REDRAW_SECONDS or env_steps >= self._total):
            self._drawn_at = now
            self._draw(self._live_line(env_steps, row, shutil.get_terminal_size().columns))

    def write(self, row: Mapping[str, Any]) -> None:
        if not self._live:
            self._print(self._plain_line(row))

    def evaluation(self, env_steps: int, mean: float, std: float) -> None:
        """Nothing: the evaluator has a message."""

    def message(self, text: str) -> None:
        line = self._line
        self._draw("")
        self._print(f"{self._label}  {text}")
        self._draw(line)

    def close(self) -> None:
        if self._line:
            self._print("")
        self._line = ""

    def _print(self, text: str) -> None:
        write(text + "\n", self._stream)

    def _draw(self, line: str) -> None:
        if self._live and (line or self._line):
            write(f"\r{line}\x1b[K", self._stream)  # \x1b[K clears the rest of the old line
            self._line = line

    def _eta(self, env_steps: int) -> str:
        sps = self._pace.sps
        return _duration(max(self._total - env_steps, 0) / sps if sps > 0 else math.nan)

    def _live_line(self, env_steps: int, row: Mapping[str, Any], width: int) -> str:
        """The line for a terminal of this width. It never wraps, because a wrapped line cannot be overwritten."""
        fraction = min(env_steps / self._total, 1.0)
        head = f"{self._label} {int(100 * fraction):3d}%"
        fields = [
            f"{_count(env_steps)}/{_count(self._total)}",
            f"{_number(self._pace.sps, 0)} SPS",
            f"ETA {self._eta(env_steps)}",
            f"return_ma {_number(row.get('return_ma'))}",
        ]
        if (gpu := _number(row.get("gpu_busy_percent"), 0)) != "-":
            fields.append(f"GPU {gpu}%")
        fields.append(f"return_mean {_number(row.get('return_mean'))}")
        room = width - 1  # a character in the last column makes some terminals wrap
        # On a narrow terminal the last fields are dropped.
        while fields and len("  ".join([head, *fields])) > room:
            fields.pop()
        bar = min(room - len("  ".join([head, "[]", *fields])), 30)
        if bar >= 5:
            filled = int(bar * fraction)
            fields.insert(0, f"[{'#' * filled}{'.' * (bar - filled)}]")
        return "  ".join([head, *fields])[:room]

    def _plain_line(self, row: Mapping[str, Any]) -> str:
        env_steps = int(row["env_steps"])
        fields = [
            f"env_steps {env_steps:{len(str(self._total))}d}",
            f"{100 * env_steps / self._total:5.1f}%",
            f"sps {_number(row.get('sps'), 0):>6}",
            f"eta {self._eta(env_steps):>9}",
            f"return_ma {_number(row.get('return_ma')):>9}",
            f"return_mean {_number(row.get('return_mean')):>9}",
            f"episodes {_number(row.get('episodes'), 0):>6}",
        ]
        if (gpu := _number(row.get("gpu_busy_percent"), 0)) != "-":
            fields.append(f"gpu_busy_percent {gpu:>3}")
        return "  ".join([self._label, *fields])
