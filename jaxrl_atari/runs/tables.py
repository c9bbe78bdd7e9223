"""The tables of a session, metrics.csv and evaluations.csv: reading and writing them."""

import csv
import io
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_atari.runs.columns import COLUMNS, EVALUATION_COLUMNS
from jaxrl_atari.runs.files import unused, write_file
from jaxrl_atari.runs.layout import EVALUATIONS_FILE, METRICS_FILE
from jaxrl_atari.runs.writers import Row, Writer, known_values


class TableFile(NamedTuple):
    """The content of a table, up to its first unreadable line."""

    columns: Sequence[str] = ()  # their names; none if there is no header
    rows: Sequence[Mapping[str, str]] = ()  # in ascending order of env steps: column -> text of a number, or empty
    problem: str = ""  # the unreadable line, such as `line 7 is not understood`; empty if there is none


def read_table(path: Path) -> TableFile:
    """Reads a table, which may still be growing. A file that does not exist has no columns and no rows.

    A last line without an end is left out: it is being written, or a killed process has left it.
    """
    text = path.read_bytes().decode(errors="replace") if path.is_file() else ""
    lines = text.split("\n")[:-1]
    if not lines:
        return TableFile()
    columns = _cells(lines[0])
    if "env_steps" not in columns:
        return TableFile(problem="line 1 is no header with a column env_steps")
    rows: list[dict[str, str]] = []
    for number, line in enumerate(lines[1:], start=2):
        cells = _cells(line)
        if len(cells) != len(columns) or not all(map(_is_cell, cells)):
            return TableFile(columns, rows, f"line {number} is not understood")
        rows.append(dict(zip(columns, cells, strict=True)))
    return TableFile(columns, rows)


def _cells(line: str) -> list[str]:
    """The cells of a line. Lines are parsed one by one, so that an open quote cannot swallow the next line."""
    return next(csv.reader([line]), [])


def _is_cell(text: str) -> bool:
    """Whether a cell is empty or holds a number."""
    try:
        float(text or "nan")
    except ValueError:
        return False
    return True


def cell_number(cell: str | None) -> float:
    """The number in a cell of a table; NaN if it has none."""
    return float(cell or "nan")


def table_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], header: bool = True) -> str:
    """Rows as lines of CSV. A value that a row lacks is an empty cell."""
    text = io.StringIO()
    table = csv.DictWriter(text, columns, restval="", lineterminator="\n")
    if header:
        table.writeheader()
    table.writerows(rows)
    return text.getvalue()


class CsvWriter(Writer):
    """Writes metrics.csv and evaluations.csv: a header, then a row for each log point or evaluation.

    A value without a column gets a new one. A resumed session keeps the rows up to its checkpoint. Where some of
    these cannot be read, it keeps a copy of the file as it was.

    Args:
        session_dir: directory of the session.
        say: receives lines for the user.
        metrics_until, evaluations_until: env steps of the last rows that are kept. The session will write later
            rows again.
    """

    def __init__(
        self, session_dir: Path, say: Callable[[str], object], *, metrics_until: int, evaluations_until: int
    ):
        self._dir = session_dir
        self._columns = {METRICS_FILE: list(COLUMNS), EVALUATIONS_FILE: list(EVALUATION_COLUMNS)}
        for name, last in ((METRICS_FILE, metrics_until), (EVALUATIONS_FILE, evaluations_until)):
            path = session_dir / name
            if not path.is_file():
                continue
            table = read_table(path)
            kept = [row for row in table.rows if float(row["env_steps"]) <= last]
            if table.problem and len(kept) == len(table.rows):
                copy = unused(path)
                shutil.copy2(path, copy)
                say(f"{path}: {table.problem}; the file as it was is now {copy.name}")
            self._add_columns(name, table.columns)
            write_file(path, table_text(self._columns[name], kept))

    def _add_columns(self, name: str, columns: Iterable[str]) -> bool:
        """Adds columns to those of a table. Returns whether any is new."""
        new = [column for column in columns if column not in self._columns[name]]
        self._columns[name] += new
        return bool(new)

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        path = self._dir / name
        if self._add_columns(name, row) and path.is_file():
            write_file(path, table_text(self._columns[name], read_table(path).rows))
        with path.open("a", encoding="utf-8", newline="") as file:
            file.write(table_text(self._columns[name], [row], header=file.tell() == 0))

    def write(self, row: Row) -> None:
        cells = known_values(row).items()
        # 9 digits identify every float32 number.
        self._append(METRICS_FILE, {name: f"{x:.9g}" if isinstance(x, float) else x for name, x in cells})

    def evaluation(self, row: Row) -> None:
        self._append(EVALUATIONS_FILE, known_values(row))
