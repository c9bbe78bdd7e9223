"""Writers, which receive the log points of a session: the interface `Writer`, and the writer for the terminal.

`tables.py` writes tables, and `tracking.py` writes for TensorBoard and Weights & Biases. `logs.py` opens the
writers that a config selects.
"""

import contextlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import rich.progress

from jaxrl_atari.output import console, is_terminal, say
from jaxrl_atari.runs.columns import COLUMNS

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
    """

    def __init__(self, lent: Sequence[Writer] = ()):
        self._lent = tuple(lent)
        self._added: list[Writer] = []
        self._exits = contextlib.ExitStack()

    def _writers(self) -> list[Writer]:
        return [*self._added, *self._lent]

    def add(self, writer: Writer) -> None:
        """Adds a writer, which `close` closes."""
        self._added.append(writer)
        self._exits.callback(writer.close)

    def write(self, row: Row) -> None:
        for writer in self._writers():
            writer.write(row)

    def evaluation(self, row: Row) -> None:
        for writer in self._writers():
            writer.evaluation(row)

    def progress(self, env_steps: int, row: Row) -> None:
        for writer in self._writers():
            writer.progress(env_steps, row)

    def message(self, text: str) -> None:
        for writer in self._writers():
            writer.message(text)

    def close(self) -> None:
        self._exits.close()


def known_values(row: Row) -> dict[str, int | float]:
    """The known values of a log point: those in `COLUMNS` in the order of the columns, then all others."""
    names = dict.fromkeys([*COLUMNS, *row])
    return {name: row[name] for name in names if row.get(name) is not None and math.isfinite(row[name])}


class TerminalWriter(Writer):
    """Draws a live line on a terminal; in a file, pipe or notebook, prints a plain line for each log point.

    Args:
        total_env_steps: the budget, 100%.
        label: stands before each line.
    """

    def __init__(self, total_env_steps: int, label: str):
        self._label = label
        self._live = is_terminal(sys.stdout) and os.environ.get("TERM") != "dumb"
        self._bar = rich.progress.Progress(
            "{task.description}", rich.progress.BarColumn(None), console=console(),
            refresh_per_second=2, speed_estimate_period=60.0, disable=not self._live,
        )  # fmt: skip
        self._bar.add_task(label, total=total_env_steps)
        self._task = self._bar.tasks[0]
        self._news: Row = {}

    def _line(self, row: Row) -> str:
        task = self._task
        eta = task.time_remaining
        left = "-" if eta is None else timedelta(seconds=round(eta))
        speed = f"sps {_text(task.speed)}  eta {left}"
        parts = [self._label, f"{task.percentage:5.1f}%", f"env_steps {task.completed:,}"]
        if "games_in_progress" in row:
            games = row["games_in_progress"]
            mean = _text(row["return_in_progress"], 1)
            length = _text(row["length_in_progress"])
            parts.append(speed)
            parts.append(f"{games} games in progress: mean return {mean} after {length} env steps")
        else:
            parts.append(f"return_ma {_text(row.get('return_ma'), 1)}")
            parts.append(speed)
            parts.append(f"return_mean {_text(row.get('return_mean'), 1)}")
            parts.append(f"episodes {_text(row.get('episodes'))}")
        if row.get("entropy") is not None and row.get("approx_kl") is not None:
            parts.append(f"entropy {_text(row['entropy'], 2)}")
            parts.append(f"approx_kl {_text(row['approx_kl'], 4)}")
        busy = _text(row.get("gpu_busy_percent"))
        if busy != "-":
            parts.append(f"gpu_busy_percent {busy}")
        return "  ".join(parts)

    def progress(self, env_steps: int, row: Row) -> None:
        self._news = row
        self._bar.start()
        self._bar.update(self._task.id, completed=env_steps)
        self._bar.update(self._task.id, description=self._line(row))

    def write(self, row: Row) -> None:
        self.progress(row["env_steps"], {**self._news, **known_values(row)})
        if not self._live:
            say(self._line(self._news))

    def message(self, text: str) -> None:
        say(f"{self._label}  {text}")  # above the live line: rich has redirected `sys.stdout`

    def close(self) -> None:
        with contextlib.suppress(OSError):  # the terminal has gone away
            self._bar.stop()


def _text(value: float | None, digits: int = 0) -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"
