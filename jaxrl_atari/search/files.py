"""Files of a search directory.

SEARCH_DIR/search.json            config and search options
SEARCH_DIR/stop                   exists while the search is being interrupted
SEARCH_DIR/trial_<i>/             a run directory like any other: config.json, session_<j>/
SEARCH_DIR/trial_<i>/record.json  number, searched fields, status and score of the trial (`Record`)
SEARCH_DIR/trial_<i>/output.txt   output of the trial
"""

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jaxrl_atari.cli.errors import UserError
from jaxrl_atari.cli.values import check_fields
from jaxrl_atari.config import Config
from jaxrl_atari.run_dir.config_file import SEARCH_FILE, config_from_dict
from jaxrl_atari.run_dir.files import read_json, write_json
from jaxrl_atari.search.space import Fields, SearchConfig, search_from_dict
from jaxrl_atari.trial.stopping import StopRequest


@dataclass(frozen=True)
class Record:
    """Status of one trial. A resumed search runs the unfinished ones."""

    number: int
    fields: Fields
    status: Literal["unfinished", "finished", "stopped", "failed"] = "unfinished"
    reason: str = ""  # why the trial ended
    score: float | None = None  # mean over sessions of the last return_ma; None before the first finished game
    env_steps: int = 0  # mean over sessions
    tries: int = 1  # of a trial that failed: how often it was started

    def is_open(self, retries: int) -> bool:
        """Whether the trial is still to be run, or to be tried again after it failed."""
        return self.status == "unfinished" or (self.status == "failed" and self.tries <= retries)


def write_search(search_dir: Path, config: Config, search: SearchConfig) -> None:
    """Writes search.json."""
    write_json(search_dir / SEARCH_FILE, {"config": config.to_dict(), "search": search.to_dict()})


def read_search(search_dir: Path) -> tuple[Config, SearchConfig]:
    """Reads search.json.

    Raises:
        UserError: the directory has none, or it is damaged.
    """
    path = search_dir / SEARCH_FILE
    try:
        values = read_json(path)
        return config_from_dict(values["config"]), search_from_dict(values["search"])
    except FileNotFoundError as error:
        raise UserError(f"{search_dir}: not a search directory (it has no {path.name})") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError) as error:
        raise UserError(f"{path}: damaged ({type(error).__name__}: {error}); restore it from a copy") from error


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


def value_text(value: Any) -> str:
    """The value of a field with four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class StopFile(StopRequest):
    """Stop request for all processes of a search: a signal creates a file, and the trials check for it.

    Ray runs trials in threads, which receive no signals, and perhaps on other machines.
    """

    def __init__(self, search_dir: Path):
        super().__init__()
        self._path = search_dir / "stop"

    def requested(self) -> bool:
        return self._path.exists()

    def _handle(self, number: int, frame: Any) -> None:
        super()._handle(number, frame)
        self._path.touch()

    def clear(self) -> None:
        """Clears the stop request."""
        self._path.unlink(missing_ok=True)
