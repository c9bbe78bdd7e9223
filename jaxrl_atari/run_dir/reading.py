"""Reading the sessions of a run directory: RUN_DIR/session_<i>/metrics.csv, a row for each log point."""

import csv
import logging
import re
from pathlib import Path

import numpy as np

from jaxrl_atari.errors import UserError
from jaxrl_atari.run_dir.columns import REQUIRED_COLUMNS
from jaxrl_atari.run_dir.metrics import Table

_log = logging.getLogger(__name__)


def read_metrics(session_dir: str | Path) -> Table:
    """Reads a session's metrics.csv, which may still be growing: column name -> float64 `[N]`, N >= 1.

    Empty cells are NaN. A last line that was cut short is left out with a warning. Where a resumed session has logged
    an env step again, the later row replaces all earlier rows from that env step on.

    Raises:
      UserError: the file is missing or has no rows, lacks a column, or has an unreadable line before the last.
    """
    path = Path(session_dir) / "metrics.csv"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected a session's metrics") from error
    lines = text.splitlines(keepends=True)
    # Only a line feed completes a row: without it, the last cell may lack digits even if all cells are present.
    cut_short = bool(lines) and not lines[-1].endswith("\n")
    rows = list(csv.reader(lines[:-1] if cut_short else lines))
    if cut_short and len(lines) > 1:
        _log.warning("%s: line %d is cut short and was left out", path, len(lines))
    if len(rows) < 2:
        raise UserError(f"{path}: holds no log point yet; wait for the first one, or remove the session")
    header = rows[0]
    if missing := [name for name in REQUIRED_COLUMNS if name not in header]:
        raise UserError(f"{path}: has no column {', '.join(missing)}; expected a metrics.csv of jaxrl_atari")
    values = np.empty((len(rows) - 1, len(header)))
    for index, row in enumerate(rows[1:]):
        try:
            values[index] = [float(cell) if cell else np.nan for cell in row]
        except ValueError as error:
            raise UserError(f"{path}: line {index + 2} is not {len(header)} numbers; fix or remove it") from error
    env_steps = values[:, header.index("env_steps")]
    next_lowest = np.minimum.accumulate(np.append(env_steps[1:], np.inf)[::-1])[::-1]
    kept = values[env_steps < next_lowest]
    return {name: kept[:, index].copy() for index, name in enumerate(header)}


def session_dirs(run_dir: str | Path) -> list[Path]:
    """The directories `session_<i>` of a run, ordered by i."""
    numbered = {
        int(match[1]): path
        for path in Path(run_dir).glob("session_*")
        if path.is_dir() and (match := re.fullmatch(r"session_(\d+)", path.name))
    }
    return [numbered[index] for index in sorted(numbered)]


def read_sessions(run_dir: str | Path) -> dict[Path, Table]:
    """Session directory -> its metrics. Sessions without readable metrics are left out with a warning.

    Raises:
      UserError: no session has readable metrics.
    """
    tables, problems = {}, []
    for session_dir in session_dirs(run_dir):
        try:
            tables[session_dir] = read_metrics(session_dir)
        except UserError as error:
            problems.append(str(error))
    if not tables:
        raise UserError(problems[0] if problems else f"{run_dir}: holds no session_0; expected a run directory")
    for problem in problems:
        _log.warning("left out: %s", problem)
    return tables
