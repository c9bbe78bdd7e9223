"""Digests of all checkpoints that a session has written, which `verify --retrain` compares.

SESSION_DIR/digests.jsonl   a line for each checkpoint, a `WrittenCheckpoint` as JSON

A line stays when its checkpoint is removed.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.layout import DIGESTS_FILE


class WrittenCheckpoint(NamedTuple):
    """A checkpoint that a session has written, and may have removed since."""

    env_steps: int
    updates: int
    digests: dict[str, str]  # `ITEM/PATH` of each array -> digest of its bytes
    config: dict[str, Any]  # of the session
    provenance: dict[str, Any]  # what the bits depend on besides the config; see `find_provenance`


def read_digests(session_dir: Path) -> list[WrittenCheckpoint]:
    """The checkpoints that a session has written, in ascending order; none without a digests.jsonl.

    Raises:
        UserError: the file is damaged.
    """
    path = session_dir / DIGESTS_FILE
    if not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [WrittenCheckpoint(**json.loads(line)) for line in lines]
    except (ValueError, TypeError) as error:
        raise UserError(f"{path}: damaged ({reason(error)}); restore it from a copy, or remove it") from error


def add_digests(session_dir: Path, written: WrittenCheckpoint) -> None:
    """Adds a checkpoint to digests.jsonl, in place of those at its env steps or later ones, before a resume."""
    kept = [each for each in read_digests(session_dir) if each.env_steps < written.env_steps]
    lines = [json.dumps(each._asdict(), sort_keys=True) + "\n" for each in [*kept, written]]
    write_file(session_dir / DIGESTS_FILE, "".join(lines))
