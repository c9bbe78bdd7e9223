"""Reading the sessions of a run directory: metrics.csv, with a row for each log point, and evaluations.csv."""

import csv
import io
import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from jaxrl_atari.config import Config
from jaxrl_atari.errors import NoLogPoint
from jaxrl_atari.runs.run_dir import checkpoint_steps, latest_text, session_dirs, session_number

_log = logging.getLogger(__name__)

Table = Mapping[str, np.ndarray]
"""A session's log points: column name -> float64 `[N]`."""

METRICS_FILE = "metrics.csv"
EVALUATIONS_FILE = "evaluations.csv"
EVALUATION_COLUMNS = ("env_steps", "episodes", "mean", "std", "cut_off")
"""Columns of evaluations.csv; `cut_off` counts the games that reached `env.max_frames`."""


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file as text; none if there is no such file. Rows without a number of env steps are left out.

    Only a line feed completes a row: the last one may have been cut short when its process was killed.
    """
    if not path.is_file():
        return []
    text = path.read_text(encoding="utf-8", errors="replace")
    rows = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]))
    return [row for row in rows if number(row.get("env_steps")) >= 0]


def number(cell: str | None) -> float:
    """The number in a cell; NaN if it has none."""
    try:
        return float(cell or "nan")
    except ValueError:
        return np.nan


def read_metrics(session_dir: Path) -> Table:
    """Reads a session's metrics.csv, which may still be growing: column name -> float64 `[N]`, N >= 1.

    Empty cells are NaN.

    Raises:
        NoLogPoint: the file is missing or has no row.
    """
    path = session_dir / METRICS_FILE
    rows = read_rows(path)
    if not rows:
        raise NoLogPoint(f"{path}: holds no log point; wait for the first one, or remove the session")
    return {name: np.array([number(row.get(name)) for row in rows]) for name in rows[0] if name}


def read_evaluations(session_dir: Path) -> Table:
    """Reads a session's evaluations.csv, column of `EVALUATION_COLUMNS` -> float64 `[N]`."""
    rows = read_rows(session_dir / EVALUATIONS_FILE)
    return {name: np.array([number(row.get(name)) for row in rows]) for name in EVALUATION_COLUMNS}


def is_finished(config: Config, session_dir: Path) -> bool:
    """Whether a session has spent its budget and written its last evaluation. Starts no back end of JAX."""
    latest = max(checkpoint_steps(session_dir), default=0)
    if (session_dir / "checkpoints" / str(latest) / "evaluation").is_dir():  # it was running then
        evaluated = latest_text(session_dir, "evaluated_env_steps")
        if evaluated not in [row["env_steps"] for row in read_rows(session_dir / EVALUATIONS_FILE)]:
            return False
    return config.is_spent(latest)


def read_sessions(run_dir: Path, count: int) -> dict[Path, Table]:
    """Session directory -> its metrics, of the sessions with a number below `count`.

    Sessions without readable metrics are left out with a warning.

    Raises:
        NoLogPoint: no session has readable metrics.
    """
    tables = {}
    problems = []
    for session_dir in filter(lambda path: session_number(path) < count, session_dirs(run_dir)):
        try:
            tables[session_dir] = read_metrics(session_dir)
        except NoLogPoint as error:
            problems.append(str(error))
    if not tables:
        raise NoLogPoint(problems[0] if problems else f"{run_dir}: holds no session_0; expected a run directory")
    for problem in problems:
        _log.warning("left out: %s", problem)
    return tables
