"""Reading the sessions of a run directory.

RUN_DIR/session_<i>/metrics.csv has a row for each log point, evaluations.csv one for each evaluation during training.
"""

import csv
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrl_atari.errors import UserError
from jaxrl_atari.report.metrics import Table
from jaxrl_atari.runs.columns import REQUIRED_COLUMNS
from jaxrl_atari.runs.files import write_file

_log = logging.getLogger(__name__)

EVALUATIONS_FILE = "evaluations.csv"
EVALUATIONS_HEADER = ["env_steps", "episodes", "mean", "std"]


class MetricsFile(NamedTuple):
    """The lines of a metrics.csv, checked."""

    header: list[str]
    rows: list[list[str]]  # sound ones: as many cells as the header, each empty or a number
    damaged: list[int]  # numbers of the other lines
    cut_short: bool  # the last line has no line feed: the process that wrote it was killed


def parse_metrics(path: Path) -> MetricsFile:
    """Reads the lines of a metrics.csv. Raises `OSError`."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    # Only a line feed completes a row: without it, the last cell may lack digits even if all cells are present.
    cut_short = bool(lines.pop())
    header, *others = map(_cells, lines or [""])
    column = header.index("env_steps") if "env_steps" in header else None
    rows, damaged = [], []
    for number, row in enumerate(others, 2):
        if column is not None and len(row) == len(header) and all(map(_is_number, row)) and row[column] != "":
            rows.append(row)
        else:
            damaged.append(number)
    return MetricsFile(header, rows, damaged, cut_short)


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


def _is_number(cell: str) -> bool:
    try:
        return not cell or abs(float(cell)) <= 1e30  # not NaN
    except ValueError:
        return False


def read_metrics(session_dir: str | Path) -> Table:
    """Reads a session's metrics.csv, which may still be growing: column name -> float64 `[N]`, N >= 1.

    Empty cells are NaN. Damaged lines, and a last line that was cut short, are left out with a warning. Where a resumed
    session has logged an env step again, the later row replaces all earlier rows from that env step on.

    Raises:
        UserError: the file is missing, has no sound row, or lacks a column.
    """
    path = Path(session_dir) / "metrics.csv"
    try:
        header, rows, damaged, cut_short = parse_metrics(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected a session's metrics") from error
    if cut_short and header:
        _log.warning("%s: line %d is cut short and was left out", path, len(rows) + len(damaged) + 2)
    if damaged:
        _log.warning("%s: %s", path, damaged_lines(damaged))
    if not header or not (rows or damaged):
        raise UserError(f"{path}: holds no log point yet; wait for the first one, or remove the session")
    if missing := [name for name in REQUIRED_COLUMNS if name not in header]:
        raise UserError(f"{path}: has no column {', '.join(missing)}; expected a metrics.csv of jaxrl_atari")
    if len(set(header)) < len(header):
        raise UserError(f"{path}: has a column twice; expected a metrics.csv of jaxrl_atari")
    if not rows:
        raise UserError(f"{path}: every line is damaged; restore it from a copy, or remove the session")
    values = np.array([[float(cell) if cell else np.nan for cell in row] for row in rows])
    env_steps = values[:, header.index("env_steps")]
    next_lowest = np.minimum.accumulate(np.append(env_steps[1:], np.inf)[::-1])[::-1]
    kept = values[env_steps < next_lowest]
    return {name: kept[:, index].copy() for index, name in enumerate(header)}


def damaged_lines(numbers: Sequence[int]) -> str:
    """`line 7 is damaged and was left out`, or the same of several lines."""
    if len(numbers) == 1:
        return f"line {numbers[0]} is damaged and was left out"
    return f"{len(numbers)} lines are damaged and were left out; the first is line {numbers[0]}"


def read_evaluations(session_dir: Path) -> list[list[str]]:
    """The rows of a session's evaluations.csv, as text, without damaged ones; none if there is no such file."""
    try:
        text = (session_dir / EVALUATIONS_FILE).read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, IsADirectoryError):
        return []
    lines = text.split("\n")[:-1]  # only a line feed completes a row
    rows = [row for row in map(_cells, lines) if len(row) == len(EVALUATIONS_HEADER) and all(row)]
    return [row for row in rows if all(map(_is_number, row)) and float(row[-1]) >= 0]


def cut_evaluations(session_dir: Path, env_steps: int) -> None:
    """Drops damaged rows of evaluations.csv, and those beyond the env steps at which a session resumes."""
    path = session_dir / EVALUATIONS_FILE
    if path.is_file():
        kept = [row for row in read_evaluations(session_dir) if float(row[0]) <= env_steps]
        write_file(path, "".join(f"{','.join(row)}\r\n" for row in (EVALUATIONS_HEADER, *kept)))


def session_dirs(run_dir: str | Path) -> list[Path]:
    """The directories `session_<i>` of a run, ordered by i."""
    found = (path for path in Path(run_dir).glob("session_*") if re.fullmatch(r"session_(0|[1-9]\d*)", path.name))
    return sorted(filter(Path.is_dir, found), key=session_number)


def session_number(session_dir: Path) -> int:
    """The i of a directory `session_<i>`."""
    return int(session_dir.name.removeprefix("session_"))


def checkpoint_steps(session_dir: Path) -> list[int]:
    """Env steps of a session's complete checkpoints, in ascending order; none before its first one."""
    directory = session_dir / "checkpoints"
    names = [path.name for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []
    return sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]{0,17}", name))


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
