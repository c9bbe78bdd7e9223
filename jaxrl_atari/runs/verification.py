"""verified.json: what `verify` has found equal in a session. `verify` writes it, and reports show it."""

from pathlib import Path
from typing import NamedTuple

from jaxrl_atari.runs.files import read_result, try_write_json
from jaxrl_atari.runs.layout import VERIFIED_FILE


class Verification(NamedTuple):
    """The content of verified.json."""

    date: str  # UTC
    version: str  # of this package
    rows: int  # of metrics.csv
    games: int
    env_steps: int  # of the log of actions


def try_write_verification(session_dir: Path, verification: Verification) -> str:
    """Writes a session's verified.json, and returns why that was not possible; empty if it was written."""
    return try_write_json(session_dir / VERIFIED_FILE, verification._asdict())


def read_verification(session_dir: Path) -> Verification | None:
    """Reads a session's verified.json; None if there is none.

    Raises:
        UserError: it is damaged.
    """
    path = session_dir / VERIFIED_FILE
    if not path.is_file():
        return None
    values = read_result(path, date=str, version=str, rows=int, games=int, env_steps=int)
    return Verification(**{name: values[name] for name in Verification._fields})
