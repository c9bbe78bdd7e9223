"""Writers, which receive the log points of a session: the interface `Writer`, and the writer for the terminal."""

import contextlib
import math
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import MappingProxyType
from typing import Any

from jaxrl_atari.output import CLEAR_LINE, is_terminal, say, write
from jaxrl_atari.runs.columns import COLUMNS

SHOWN = {
    "games_in_progress": 0,
    "return_in_progress": 1,
    "length_in_progress": 0,
    "return_mean": 1,
    "return_ma": 1,
    "sps": 0,
    "episodes": 0,
    "entropy": 2,
    "approx_kl": 4,
    "gpu_busy_percent": 0,
}
"""Columns that the terminal shows where they are known -> digits after the point."""

SECONDS_BETWEEN_DRAWINGS = 0.5
"""How often a terminal's live line is drawn."""

Row = Mapping[str, Any]
"""A log point: column -> number. An unknown value is NaN, None, or left out."""


class Writer:
    """Receives the log points of a session. A method that a writer does not override does nothing."""

    def write(self, row: Row) -> None:
        """Writes a log point."""

    def evaluation(self, row: Row) -> None:
        """Writes an evaluation during training: a value for each of `EVALUATION_COLUMNS`, which may be unknown."""

    def progress(self, env_steps: int, row: Row) -> None:
        """Called after each update.

        Args:
            row: what is known now: the newest log point with the newest figures of games and losses and, before
                the first finished game, `games_in_progress` with the means `return_in_progress` and
                `length_in_progress`.
        """

    def message(self, text: str) -> None:
        """Shows a line to the user."""

    def close(self) -> None:
        """Flushes and closes files. Called once, also after an error."""


class WriterGroup(Writer):
    """Several writers as one. `close` closes the added writers, and not those that a caller has lent.

    Args:
        lent: writers of the caller. They receive everything after the added writers.
        columns: values that each row gets.
    """

    def __init__(self, lent: Sequence[Writer] = (), columns: Row = MappingProxyType({})):
        self._writers = [*lent]
        self._columns = columns
        self._exits = contextlib.ExitStack()

    def add(self, writer: Writer) -> None:
        """Adds a writer, which `close` closes."""
        self._writers.insert(0, writer)
        self._exits.callback(writer.close)

    def write(self, row: Row) -> None:
        for writer in self._writers:
            writer.write({**self._columns, **row})

    def evaluation(self, row: Row) -> None:
        for writer in self._writers:
            writer.evaluation({**self._columns, **row})

    def progress(self, env_steps: int, row: Row) -> None:
        for writer in self._writers:
            writer.progress(env_steps, {**self._columns, **row})

    def message(self, text: str) -> None:
        for writer in self._writers:
            writer.message(text)

    def close(self) -> None:
        self._exits.close()


def known_values(row: Row) -> dict[str, int | float]:
    """The known values of a log point: those in `COLUMNS` in the order of the columns, then all others."""
    names = dict.fromkeys([*COLUMNS, *row])
    return {name: row[name] for name in names if row.get(name) is not None and math.isfinite(row[name])}


class TerminalWriter(Writer):
    """Prints a line for each log point. On a terminal it is a live line, which is drawn anew twice a second.

    Args:
        total_env_steps: the budget, 100%.
        label: stands before each line.
    """

    def __init__(self, total_env_steps: int, label: str):
        self._total = total_env_steps
        self._label = label
        self._is_live = is_terminal(sys.stdout)
        self._drawn = 0.0  # when the live line was drawn, on the monotonic clock
        self._speeds = 0  # log points with a speed; the first one leaves out an update that is still running

    def _line(self, row: Row) -> str:
        known = known_values(row)
        env_steps = row["env_steps"]
        parts = [self._label, f"{min(100 * env_steps / self._total, 100):5.1f}%", f"env_steps {env_steps:,}"]
        if "sps" in known and self._speeds > 1:
            parts.append(f"eta {timedelta(seconds=round(max(self._total - env_steps, 0) / known['sps']))}")
        parts += [f"{name} {known[name]:,.{digits}f}" for name, digits in SHOWN.items() if name in known]
        return "  ".join(parts)

    def _draw(self, row: Row) -> None:
        width = shutil.get_terminal_size().columns - 1
        write(CLEAR_LINE + self._line(row)[:width])
        self._drawn = time.monotonic()

    def progress(self, env_steps: int, row: Row) -> None:
        if self._is_live and time.monotonic() > self._drawn + SECONDS_BETWEEN_DRAWINGS:
            self._draw({**row, "env_steps": env_steps})

    def write(self, row: Row) -> None:
        self._speeds += "sps" in known_values(row)
        if self._is_live:
            self._draw(row)
        else:
            say(self._line(row))

    def message(self, text: str) -> None:
        say(f"{self._label}  {text}")

    def close(self) -> None:
        if self._drawn:
            write("\n")
