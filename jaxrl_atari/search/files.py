"""Files of a search directory.

SEARCH_DIR/search.json            config and search options
SEARCH_DIR/stop                   exists while the search is being interrupted
SEARCH_DIR/trial_<i>/             a run directory like any other: config.json, session_<j>/
SEARCH_DIR/trial_<i>/record.json  number, searched fields, status and score of the trial (`search_records.py`)
SEARCH_DIR/trial_<i>/output.txt   output of the trial
"""

from pathlib import Path
from typing import Any

from jaxrl_atari.cli.stopping import StopRequest
from jaxrl_atari.config import Config, config_from_dict
from jaxrl_atari.errors import UserError
from jaxrl_atari.runs.files import read_json, write_json
from jaxrl_atari.runs.run_dir import SEARCH_FILE
from jaxrl_atari.search.space import SearchConfig, search_from_dict


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


class StopFile(StopRequest):
    """Stop request for all processes of a search: a signal creates a file, and the trials check for it.

    Ray runs trials in threads, which receive no signals, and perhaps on other machines.
    """

    def __init__(self, search_dir: Path):
        super().__init__(answer=None)
        self._path = search_dir / "stop"

    def requested(self) -> bool:
        return self._path.exists()

    def _handle(self, number: int, frame: Any) -> None:
        super()._handle(number, frame)
        self._path.touch()

    def clear(self) -> None:
        """Clears the stop request."""
        self._path.unlink(missing_ok=True)
