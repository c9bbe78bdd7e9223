"""The tables of a session, metrics.csv and evaluations.csv: reading and writing them."""

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_atari.errors import MetricsError
from jaxrl_atari.runs.columns import COLUMNS, EVALUATION_COLUMNS
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.layout import EVALUATIONS_FILE, METRICS_FILE
from jaxrl_atari.runs.writers import Row, Writer, known_values


def read_table(path: Path, until: float = math.inf) -> list[dict[str, str]]:
    """Reads a table, which may still be growing. A last line without an end is being written, and left out.

    Args:
        until: env steps of the last row that is wanted. Lines after it are not read.

    Returns:
        The rows, in ascending order of env steps: column -> text of a number, or empty. No rows without a file.

    Raises:
        MetricsError: a line is not understood.
    """
    if not path.is_file():
        return []
    text = path.read_bytes().decode(errors="replace")
    lines = csv.DictReader(io.StringIO(text[: text.rfind("\n") + 1]), restval="missing")
    rows: list[dict[str, str]] = []
    try:
        if lines.fieldnames and "env_steps" not in lines.fieldnames:
            raise ValueError("the header has no column env_steps")
        for row in lines:
            for cell in row.values():
                cell_number(cell)
            if float(row["env_steps"]) <= until:
                rows.append(row)
            if float(row["env_steps"]) >= until:
                break
    except (ValueError, TypeError, csv.Error) as error:
        line = lines.line_num
        raise MetricsError(f"{path}: line {line} is not understood; restore the file from a copy") from error
    return rows


def cell_number(cell: str) -> float:
    """The number in a cell of a table; NaN if it is empty."""
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

    A value without a column gets a new one. A resumed session keeps the rows up to its checkpoint.

    Args:
        session_dir: directory of the session.
        metrics_until, evaluations_until: env steps of the last rows that are kept. The session will write later
            rows again.

    Raises:
        MetricsError: a line of these rows is not understood. No file has been changed.
    """

    def __init__(self, session_dir: Path, *, metrics_until: int, evaluations_until: int):
        self._metrics = session_dir / METRICS_FILE
        self._evaluations = session_dir / EVALUATIONS_FILE
        self._columns = {self._metrics: [*COLUMNS], self._evaluations: [*EVALUATION_COLUMNS]}
        kept = {
            self._metrics: read_table(self._metrics, metrics_until),
            self._evaluations: read_table(self._evaluations, evaluations_until),
        }
        for path, rows in kept.items():
            if path.is_file():
                self._add_columns(path, rows[0] if rows else ())
                write_file(path, table_text(self._columns[path], rows))

    def _add_columns(self, path: Path, columns: Iterable[str]) -> bool:
        """Adds columns to those of a table. Returns whether any is new."""
        new = [column for column in columns if column not in self._columns[path]]
        self._columns[path] += new
        return bool(new)

    def _append(self, path: Path, row: Mapping[str, Any]) -> None:
        if self._add_columns(path, row) and path.is_file():
            write_file(path, table_text(self._columns[path], read_table(path)))
        with path.open("a", encoding="utf-8", newline="") as file:
            file.write(table_text(self._columns[path], [row], header=file.tell() == 0))

    def write(self, row: Row) -> None:
        cells = known_values(row).items()
        # 9 digits identify every float32 number.
        self._append(self._metrics, {name: f"{x:.9g}" if isinstance(x, float) else x for name, x in cells})

    def evaluation(self, row: Row) -> None:
        self._append(self._evaluations, known_values(row))
