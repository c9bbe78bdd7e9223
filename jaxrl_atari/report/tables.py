"""Tables of results: rows in; Markdown, CSV and JSON out. Numbers as text, for tables, terminals and pages."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_atari.runs.files import write_file


def number_text(value: float | None) -> str:
    """A number of any size as text: 14,482, 21, 1.44, 0.000343; `-` for None.

    From 1 on, the text has two decimals, or none if they are zero; from 1,000 on, it has none. Below 1, it has
    three significant digits.
    """
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 999.995:
        return f"{value:,.0f}"
    if abs(value) >= 1:
        return f"{value:.2f}".removesuffix(".00")
    if abs(value) < 1e-6:
        return f"{value:.3g}"
    return np.format_float_positional(value, precision=3, fractional=False, trim="-")


def cell_text(value: Any) -> str:
    """A value of a table as text: numbers as `number_text`, whole numbers with all digits."""
    if isinstance(value, float) or value is None:
        return number_text(value)
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
        titles: column, as in CSV and JSON -> its title in Markdown and on pages.
        rows: column -> value. None is an unknown value; other columns are left out.
    """

    titles: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]

    def text_rows(self) -> list[list[str]]:
        """The table as text, with a header."""
        cells = [[cell_text(row[name]) for name in self.titles] for row in self.rows]
        return [[*self.titles.values()], *cells]

    def to_markdown(self) -> str:
        """The table in Markdown; see `markdown_table`."""
        return markdown_table(self.text_rows())

    def to_json(self) -> list[dict[str, Any]]:
        """The rows as JSON values."""
        return [{name: row[name] for name in self.titles} for row in self.rows]

    def write_csv(self, file: Path) -> None:
        """Writes the rows, with all digits, below a header of column names. An unknown value is an empty cell."""
        text = io.StringIO()
        writer = csv.DictWriter(text, [*self.titles], extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.rows)
        write_file(file, text.getvalue())
