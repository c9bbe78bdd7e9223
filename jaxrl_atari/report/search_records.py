"""Records of the trials of a search: SEARCH_DIR/trial_<i>/record.json."""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from jaxrl_atari.errors import Limits, UserError, check_fields
from jaxrl_atari.runs.files import read_json, write_json


@dataclass(frozen=True)
class Record:
    """Status of one trial. A resumed search runs the unfinished ones."""

    number: int
    fields: dict[str, Any]  # the searched fields: dotted name -> value
    status: Literal["unfinished", "finished", "stopped", "failed"] = "unfinished"
    reason: str = ""  # why the trial ended
    # Mean over sessions of the last return_ma; None before the first finished game.
    score: Annotated[float | None, Limits(-1e30, 1e30)] = None
    env_steps: Annotated[int, Limits(0, 10**15)] = 0  # mean over sessions
    tries: int = 1  # of a trial that failed: how often it was started, in the last start of the search

    def is_open(self, retries: int) -> bool:
        """Whether the trial is still to be run, or to be tried again after it failed."""
        return self.status == "unfinished" or (self.status == "failed" and self.tries <= retries)


def trial_dir(search_dir: Path, number: int) -> Path:
    """The directory of trial `number`."""
    return search_dir / f"trial_{number}"


def write_record(search_dir: Path, record: Record) -> None:
    """Writes a trial's record.json, in a new directory if there is none."""
    directory = trial_dir(search_dir, record.number)
    directory.mkdir(exist_ok=True)
    write_json(directory / "record.json", dataclasses.asdict(record))


def read_records(search_dir: Path) -> dict[int, Record]:
    """The records of all trials, by number. Raises `UserError` for a damaged one."""
    records = {}
    for path in search_dir.glob("trial_*/record.json"):
        if not re.fullmatch(r"trial_\d+", path.parent.name):
            continue  # a user's copy
        try:
            record = Record(**read_json(path))
            check_fields(record)
            if path.parent != trial_dir(search_dir, record.number):
                raise ValueError("not the record of this trial")
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"{path}: damaged ({type(error).__name__}: {error}); restore it from a copy") from error
        records[record.number] = record
    return dict(sorted(records.items()))


def ranked(records: Sequence[Record]) -> list[Record]:
    """The finished and stopped trials that have a score, best first.

    Trials that ASHA stopped come last: they were worse than others at the same env steps, though perhaps not in the
    end.
    """
    scored = [record for record in records if record.score is not None and record.status in ("finished", "stopped")]
    return sorted(scored, key=lambda record: (record.status == "stopped", -(record.score or 0.0), record.number))


def best_first(records: Sequence[Record]) -> list[Record]:
    """All trials: the ranked ones, then the others in the order given."""
    best = ranked(records)
    return [*best, *(record for record in records if record not in best)]


def value_text(value: Any) -> str:
    """The value of a field; a fraction has four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
