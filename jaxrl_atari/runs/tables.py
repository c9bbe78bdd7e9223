"""The files of a session's tables, metrics.csv and evaluations.csv, as text: rows, and unreadable lines.

A spreadsheet may have saved a table: with a byte order mark, CRLF, quotes, semicolons or tabs between the cells,
decimal commas, columns in another order, further columns. Such a table is read like one of this package. A line
that cannot be read, for example because it was cut in half, becomes a `Problem`. A table with problems is damaged,
and not merely short.
"""

import codecs
import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_atari.runs.columns import COLUMNS, EVALUATION_COLUMNS

DELIMITERS = ",;\t|"
"""What may stand between the cells of a line."""
DECIMAL_COMMA = re.compile(r"[-+]?\d*,\d+([eE][-+]?\d+)?")
"""A number with one comma, such as `0,5` or `1,234`."""
COMMA_OF_THOUSANDS = re.compile(r"[-+]?[1-9]\d{0,2},\d{3}")
"""A number such as `1,234`, whose comma may be decimal or mark thousands; `_with_decimal_point` decides."""


class Problem(NamedTuple):
    """An unreadable line."""

    rows: int  # number of readable rows before it
    text: str  # "line 7: ..."


class TableFile(NamedTuple):
    """The content of a table."""

    columns: Sequence[str] = ()  # their names; none if there is no header
    rows: Sequence[Mapping[str, str]] = ()  # readable rows by env steps: column -> text, with a decimal point
    problems: Sequence[Problem] = ()
    unfinished: str = ""  # text after the last line feed: a line being written, or left by a killed process

    def lost_before(self, env_steps: float) -> list[str]:
        """The texts of the problems before the row that reaches `env_steps`. A resume writes later rows again."""
        reaching = (index for index, row in enumerate(self.rows) if float(row["env_steps"]) >= env_steps)
        last = next(reaching, None)
        texts = [problem.text for problem in self.problems if last is None or problem.rows <= last]
        if self.unfinished and last is None:
            texts.append("the last line: it does not end")
        return texts


def read_table(path: Path) -> TableFile:
    """Reads metrics.csv or evaluations.csv. A file that does not exist has no columns and no rows."""
    if not path.is_file():
        return TableFile()
    *lines, unfinished = _decode(path.read_bytes()).replace("\r\n", "\n").replace("\r", "\n").split("\n")
    # A spreadsheet may add rows of empty cells.
    filled = [(number, line) for number, line in enumerate(lines, start=1) if line.strip(f" {DELIMITERS}")]
    if not filled:
        return TableFile(unfinished=unfinished)
    first, header = filled[0]
    delimiter, names = _header(header)
    if problem := _problem_of_header(names):
        return TableFile(problems=[Problem(0, f"line {first}: {problem}")])

    rows: list[dict[str, str]] = []
    problems: list[Problem] = []
    for number, line in filled[1:]:
        cells = [_with_decimal_point(cell, delimiter) for cell in _cells(line, delimiter)]
        if problem := _problem_of_line(cells, names):
            problems.append(Problem(len(rows), f"line {number}: {problem}"))
            continue
        row = {name: cell for name, cell in zip(names, cells, strict=True) if name}
        row["env_steps"] = f"{float(row['env_steps']):.0f}"
        if problem := _problem_of_cells(row):  # the rest of the row can be read
            problems.append(Problem(len(rows), f"line {number}: {problem}"))
        rows.append(row)

    ordered = sorted(rows, key=lambda row: float(row["env_steps"]))
    if ordered != rows:  # the file has another order, so a problem may belong before any row
        problems = [problem._replace(rows=0) for problem in problems]
    return TableFile([name for name in names if name], ordered, problems, unfinished)


def not_understood(problems: Sequence[str]) -> str:
    """The problems of a table as a message names them: `2 lines are not understood (line 7: ...)`."""
    lines = "1 line is" if len(problems) == 1 else f"{len(problems)} lines are"
    return f"{lines} not understood ({problems[0]})"


def cell_number(cell: str | None) -> float:
    """The number in a cell; NaN if it has none."""
    try:
        return float(cell or "nan")
    except ValueError:
        return math.nan


def table_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]], header: bool = True) -> str:
    """Rows as CSV in this package's form: commas, decimal points, a line feed at the end of each line."""
    text = io.StringIO()
    table = csv.DictWriter(text, columns, restval="", extrasaction="ignore", lineterminator="\n")
    if header:
        table.writeheader()
    table.writerows(rows)
    return text.getvalue()


def _decode(content: bytes) -> str:
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):  # a spreadsheet's "Unicode text"
        return content.decode("utf-16", errors="replace")
    return content.decode("utf-8-sig", errors="replace")


def _cells(line: str, delimiter: str) -> list[str]:
    """The cells of a line. Lines are parsed one by one, so that an open quote cannot swallow the next line."""
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=delimiter))]
    except csv.Error:  # longer than any cell may be
        return []


def _header(line: str) -> tuple[str, list[str]]:
    """The delimiter of a table and the names of its columns, from its first line."""
    for delimiter in DELIMITERS:
        names = _cells(line, delimiter)
        if "env_steps" in names:
            return delimiter, names
    return ",", _cells(line, ",")


def _problem_of_header(names: Sequence[str]) -> str:
    """What is wrong with the names of columns; empty if nothing is."""
    if "env_steps" not in names:
        return "it is no header with a column env_steps"
    twice = next((name for name in names if name and names.count(name) > 1), "")
    return f"the column {twice} is there twice" if twice else ""


def _problem_of_line(cells: Sequence[str], names: Sequence[str]) -> str:
    """Why a line is no row; empty if it is one."""
    if len(cells) != len(names):
        return f"it has {len(cells)} cells, the header {len(names)}"
    env_steps = cells[names.index("env_steps")]
    if not _is_number(env_steps) or not 0 <= float(env_steps) < math.inf:
        return f"env_steps is {env_steps!r:.40}"
    nameless = next((cell for cell, name in zip(cells, names, strict=True) if cell and not name), "")
    return f"{nameless!r:.40} is in a column without a name" if nameless else ""


def _problem_of_cells(row: Mapping[str, str]) -> str:
    """The first cell of a known column that holds something else than a number; empty if there is none."""
    for name, cell in row.items():
        if cell and (name in COLUMNS or name in EVALUATION_COLUMNS) and not _is_number(cell):
            return f"{name} is {cell!r:.40}"
    return ""


def _with_decimal_point(cell: str, delimiter: str) -> str:
    """The cell, with a decimal point in place of a decimal comma.

    Between semicolons, each comma in a number is a decimal comma: `1,234` means 1.234. Between other delimiters,
    `1,234` may mean 1234. It stays as it is, and counts as no number.
    """
    if DECIMAL_COMMA.fullmatch(cell) and (delimiter == ";" or not COMMA_OF_THOUSANDS.fullmatch(cell)):
        return cell.replace(",", ".")
    return cell


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True
