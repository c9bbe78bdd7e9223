"""Tables and sections of results: rows in; Markdown, CSV and JSON out. Numbers as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_atari.report.score_statistics import Estimate
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.tables import table_text


def number_text(value: float | None) -> str:
    """A number of any size as text: 14,482, 21, 1.44, 0.000343; `-` for None.

    From 1 on, the text has two decimals, or none if they are zero; from 1,000 on, it has none. Below 1, it has
    three significant digits.
    """
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 999.995:
        return f"{value:,.0f}"
    return f"{value:.2f}".removesuffix(".00") if abs(value) >= 1 else f"{value:.3g}"


def cell_text(value: Any) -> str:
    """A value of a table as text.

    Numbers are as in `number_text`, but whole ones have all digits. An estimate is `0.85 (0.80 to 0.91)`, or
    `0.85 (-)` without an interval. A list is its values, with commas between them.
    """
    if isinstance(value, list):
        return ", ".join(map(cell_text, value))
    if isinstance(value, float) or value is None:
        return number_text(value)
    if isinstance(value, Estimate):
        bounds = "-" if value.interval is None else " to ".join(map(number_text, value.interval))
        return f"{number_text(value.value)} ({bounds})"
    return f"{value:,}" if type(value) is int else str(value)


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned in plain text too: the first to the left, others to the right.

    Args:
        rows: rows of cells; the first row is the header.
    """
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for name, *cells in (rows[0], rule, *rows[1:]):
        padded = [name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in padded)} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Table:
    """A table of results.

    Args:
        titles: column, as in CSV -> its title in Markdown and on pages.
        rows: column -> value. A value that is None or missing is unknown.
    """

    titles: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]

    def __len__(self) -> int:
        return len(self.rows)

    def text_rows(self) -> list[list[str]]:
        """The table as text, with a header. If there are rows, a column without a known value is left out."""
        known = {name for row in self.rows for name, value in row.items() if value is not None}
        shown = [name for name in self.titles if name in known or not self.rows]
        cells = [[cell_text(row.get(name)) for name in shown] for row in self.rows]
        return [[self.titles[name] for name in shown], *cells]

    def to_markdown(self) -> str:
        """The table in Markdown; see `markdown_table`."""
        return markdown_table(self.text_rows())

    def write_csv(self, file: Path) -> None:
        """Writes the rows, with all digits, below a header of column names. An unknown value is an empty cell."""
        write_file(file, table_text([*self.titles], self.rows))


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table whose titles are the names of its columns."""
    return Table({name: name for row in rows for name in row}, rows)


class Section(NamedTuple):
    """A part of a page, below a heading. What is empty is not shown."""

    title: str
    table: Table | None = None
    notes: Sequence[str] = ()  # below the table
    score: str = ""  # in large figures
    facts: Mapping[str, Any] = {}  # name -> value
    graphs: Sequence[Path] = ()  # files, of which the page shows those that are SVG
    video: Path | None = None
    link: str = ""  # path of another page, relative to this one

    def to_markdown(self) -> str:
        """The title, the table and the notes in Markdown."""
        table = self.table.to_markdown() if self.table else ""
        return "\n\n".join(filter(None, [f"## {self.title}", table, *self.notes]))
