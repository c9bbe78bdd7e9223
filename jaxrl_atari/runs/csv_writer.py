"""Writer of a session's tables, metrics.csv and evaluations.csv."""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_atari.errors import UserError
from jaxrl_atari.runs.columns import COLUMNS, EVALUATION_COLUMNS
from jaxrl_atari.runs.files import unused, write_file
from jaxrl_atari.runs.layout import EVALUATIONS_FILE, METRICS_FILE
from jaxrl_atari.runs.tables import not_understood, read_table, table_text
from jaxrl_atari.runs.writers import Row, Writer, known_values


class CsvWriter(Writer):
    """metrics.csv and evaluations.csv: a header, then a row for each log point or evaluation, flushed at once.

    An unknown value is an empty cell. A name without a column becomes a new column. A resumed session keeps the
    rows up to its checkpoint. Another program, such as a spreadsheet, may save a table before a resume or while
    the session trains. Such a table is written anew in this package's form. If it has unreadable lines, a copy of
    the file as it was is kept.

    Args:
        session_dir: its tables have readable headers (`require_headers`).
        say: receives lines for the user.
        metrics_until, evaluations_until: env steps of the last rows that are kept at a resume. Later rows are
            dropped from the files, because the session will write them again.
    """

    def __init__(
        self, session_dir: Path, say: Callable[[str], object], *, metrics_until: int, evaluations_until: int
    ):
        self._dir = session_dir
        self._say = say
        self._columns = {METRICS_FILE: list(COLUMNS), EVALUATIONS_FILE: list(EVALUATION_COLUMNS)}
        self._states: dict[str, tuple[int, int]] = {}  # `_state` of each table after this writer last wrote it
        rows = self._take_over(METRICS_FILE, metrics_until)
        self._take_over(EVALUATIONS_FILE, evaluations_until)
        last_row = max((float(row["env_steps"]) for row in rows), default=0)
        if last_row < metrics_until:
            say(
                f"{METRICS_FILE} ends at {last_row:,.0f} env steps: the rows up to {metrics_until:,} are not there"
            )

    def _take_over(self, name: str, last: float = math.inf) -> Sequence[Mapping[str, str]]:
        """Writes a table anew with its rows up to `last` env steps, and returns them.

        A file with unreadable lines is copied first.
        """
        path = self._dir / name
        if not path.is_file():
            return ()
        table = read_table(path)
        if lost := table.lost_before(last):
            copy = unused(path)
            shutil.copy2(path, copy)
            self._say(f"{name}: {not_understood(lost)}; the file as it was is now {copy.name}")
        self._columns[name] += [column for column in table.columns if column not in self._columns[name]]
        rows = [row for row in table.rows if float(row["env_steps"]) <= last]
        write_file(path, table_text(self._columns[name], rows))  # at no moment are the rows lost
        self._states[name] = _state(path)
        return rows

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        path = self._dir / name
        exists = path.is_file() and path.stat().st_size > 0
        if name in self._states and not exists:
            self._say(f"{name} was moved away or emptied while the session trains; it goes on as a new file")
        further = [column for column in row if column not in self._columns[name]]
        self._columns[name] += further
        was_saved_by_another = exists and _state(path) != self._states.get(name)
        if exists and (further or was_saved_by_another):
            self._take_over(name)
        with path.open("a", encoding="utf-8", newline="") as file:
            file.write(table_text(self._columns[name], [row], header=not exists))
        self._states[name] = _state(path)

    def write(self, row: Row) -> None:
        cells = known_values(row).items()
        # 9 digits identify every float32 number.
        self._append(METRICS_FILE, {name: f"{x:.9g}" if isinstance(x, float) else x for name, x in cells})

    def evaluation(self, row: Row) -> None:
        self._append(EVALUATIONS_FILE, known_values(row))


def require_headers(session_dir: Path) -> None:
    """Refuses a session's tables if they cannot be continued.

    Raises:
        UserError: a table has no readable header.
    """
    for name in (METRICS_FILE, EVALUATIONS_FILE):
        table = read_table(session_dir / name)
        if table.problems and not table.columns:
            raise UserError(
                f"{session_dir / name}: {table.problems[0].text}; restore it from a copy, or move it away to go on"
                " without its rows"
            )


def _state(path: Path) -> tuple[int, int]:
    """Size and modification time of a file, which change if another program saves it."""
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns
