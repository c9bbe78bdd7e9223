"""Progress of a session on the terminal: a live line, or plain lines if the output is not a terminal."""

import math
import os
import shutil
import sys
import time
from collections import deque
from typing import Any

from jaxrl_atari.cli import CLEAR_LINE, write
from jaxrl_atari.runs.writers import Row, Writer


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def _duration(seconds: float) -> str:
    if not math.isfinite(seconds):
        return "-"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}"


class TerminalWriter(Writer):
    """Draws a live line on a terminal; in a file, pipe or notebook, prints a plain line for each log point.

    Args:
        total_env_steps: the budget, 100%.
        label: stands before each line.
    """

    REDRAW_SECONDS = 0.2
    PACE_SECONDS = 60.0

    def __init__(self, total_env_steps: int, label: str):
        self._total, self._label = total_env_steps, label
        self._live = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
        self._pace: deque[tuple[float, int]] = deque()  # time and env steps, of the last minute
        self._drawn_at, self._line = -math.inf, ""

    def progress(self, env_steps: int, row: Row) -> None:
        now = time.monotonic()
        self._pace.append((now, env_steps))
        while len(self._pace) > 2 and self._pace[1][0] < now - self.PACE_SECONDS:
            self._pace.popleft()
        if self._live and now - self._drawn_at >= self.REDRAW_SECONDS:
            self._draw(env_steps, row)

    def write(self, row: Row) -> None:
        if self._live:
            self._draw(row["env_steps"], row)
        else:
            write("  ".join([self._label, *self._fields(row["env_steps"], row)]) + "\n")

    def message(self, text: str) -> None:
        write(f"{CLEAR_LINE * bool(self._line)}{self._label}  {text}\n{self._line}")

    def close(self) -> None:
        write("\n" * bool(self._line))
        self._line = ""

    def _fields(self, env_steps: int, row: Row) -> list[str]:
        (start, first), (now, last) = (self._pace[0], self._pace[-1]) if self._pace else ((0.0, 0), (0.0, 0))
        sps = (last - first) / (now - start) if now > start else math.nan
        fields: dict[str, Any] = {
            "env_steps": f"{env_steps:,}",
            "return_ma": _number(row.get("return_ma")),
            "sps": _number(sps, 0),
            "eta": _duration(max(self._total - env_steps, 0) / sps if sps else math.nan),
            "return_mean": _number(row.get("return_mean")),
            "episodes": _number(row.get("episodes"), 0),
            "gpu_busy_percent": _number(row.get("gpu_busy_percent"), 0),
        }
        shares = [f"{name} {value}" for name, value in fields.items() if name != "gpu_busy_percent" or value != "-"]
        return [f"{100 * env_steps / self._total:5.1f}%", *shares]

    def _draw(self, env_steps: int, row: Row) -> None:
        """Draws what fits into the terminal's width: a wrapped line could not be overwritten."""
        self._drawn_at = time.monotonic()
        filled = min(int(20 * env_steps / self._total), 20)
        bar, width = f"[{'#' * filled}{'.' * (20 - filled)}]", shutil.get_terminal_size().columns
        self._line = self._label
        for field in (*self._fields(env_steps, row), bar):
            if len(self._line) + 2 + len(field) < width:
                self._line += f"  {field}"
        write(f"{CLEAR_LINE}{self._line}")
