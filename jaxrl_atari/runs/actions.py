"""The log of actions, from which `python -m jaxrl_atari.verify` plays every game of a session again.

SESSION_DIR/actions/<first>_<last>.npz   a segment: steps first .. last - 1 of every environment
    actions   uint8 [steps, environments]
    anchors   int64 [k, 3]: step, environment, seed of each game that started from a seed (`envs/record.py`)
    frame_crc uint32 [environments], CRC-32 of each environment's frame after these steps
    games     float64 [m, 4]: step, environment, return and length of each finished game
    rollout_length   int: steps of each update
"""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxrl_atari.envs.pool import FinishedGame
from jaxrl_atari.envs.record import Segment
from jaxrl_atari.errors import UserError, VerificationFailed
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.layout import ACTIONS_FOLDER

SEGMENT_NAME = re.compile(r"(?P<first>\d{10,})_(?P<last>\d{10,})\.npz", re.ASCII)
"""The name of a segment's file, which `write_segment` gives it."""

SEGMENT_ARRAYS = ("actions", "anchors", "frame_crc", "games", "rollout_length")
"""The arrays of a segment."""


# --- Writing -----------------------------------------------------------------------------------------------------


def write_segment(
    session_dir: Path, parts: Sequence[Segment], games: Sequence[FinishedGame], rollout_length: int
) -> None:
    """Writes the steps since the last checkpoint; called before the next checkpoint is saved.

    Args:
        parts: the steps of each group of environments, in the order of the environments.
        games: the games that ended in these steps.
        rollout_length: steps of each update.
    """
    first = parts[0].first_step
    steps = len(parts[0].actions)
    if steps == 0:  # no step since the last checkpoint
        return
    rows = [(game.step, game.env, game.episode_return, game.length) for game in games]
    content = io.BytesIO()
    np.savez_compressed(
        content,
        actions=np.concatenate([part.actions for part in parts], axis=1),
        anchors=np.concatenate([part.anchors for part in parts]),
        frame_crc=np.concatenate([part.frame_crc for part in parts]),
        games=np.array(rows, np.float64).reshape(-1, 4),
        rollout_length=rollout_length,
    )
    (session_dir / ACTIONS_FOLDER).mkdir(exist_ok=True)
    write_file(session_dir / ACTIONS_FOLDER / f"{first:010}_{first + steps:010}.npz", content.getvalue())


def remove_segments_after(session_dir: Path, steps: int) -> None:
    """Removes the segments beyond a checkpoint that was written after `steps` steps of each environment."""
    for _, last, path in segments(session_dir):
        if last > steps:
            path.unlink()


# --- Reading -----------------------------------------------------------------------------------------------------


class ActionLog(NamedTuple):
    """The log of actions of a session: S steps of B environments."""

    actions: np.ndarray  # uint8 [S, B]
    anchors: np.ndarray  # int64 [k, 3]: step, environment, seed
    games: np.ndarray  # float64 [m, 4]: step, environment, return, length; sorted by step, then environment
    frame_crc: dict[int, np.ndarray]  # step -> uint32 [B], of the frames after so many steps
    ends: list[int]  # ends of the updates, in steps


def read_actions(session_dir: Path) -> ActionLog:
    """Reads the log of actions of a session.

    Raises:
        UserError: there is none, or `env.num_envs` was changed by a resume.
        VerificationFailed: a segment is missing or damaged, or two segments overlap.
    """
    parts: list[dict[str, np.ndarray]] = []
    frame_crc: dict[int, np.ndarray] = {}
    ends: list[int] = []
    reached = 0
    for first, _, path in segments(session_dir):
        if first != reached:
            raise VerificationFailed(
                f"{path}: begins at step {first}, and the segments before it end at step {reached}: one was"
                " removed, or is not of this session, or `log.actions` was off for a while"
            )
        part = _read_segment(path)
        length = int(part["rollout_length"])
        reached += len(part["actions"])
        ends += range(first + length, reached + 1, length)
        frame_crc[reached] = part["frame_crc"]
        parts.append(part)
    if not parts:
        raise UserError(f"{session_dir}: has no log of actions; `log.actions` writes one")
    if len({part["actions"].shape[1] for part in parts}) > 1:
        raise UserError(
            f"{session_dir}: env.num_envs was changed by a resume; `verify` needs the same number throughout"
        )
    games = np.concatenate([part["games"] for part in parts])
    return ActionLog(
        actions=np.concatenate([part["actions"] for part in parts]),
        anchors=np.concatenate([part["anchors"] for part in parts]),
        games=games[np.lexsort((games[:, 1], games[:, 0]))],
        frame_crc=frame_crc,
        ends=ends,
    )


def _read_segment(path: Path) -> dict[str, np.ndarray]:
    """The arrays of a segment. Raises `VerificationFailed` if it is damaged."""
    try:
        with np.load(io.BytesIO(path.read_bytes())) as arrays:  # a damaged file would stay open
            return {name: arrays[name] for name in SEGMENT_ARRAYS}
    except Exception as error:  # a damaged archive raises many types
        raise VerificationFailed(f"{path}: damaged ({type(error).__name__}: {error})") from error


def segments(session_dir: Path) -> list[tuple[int, int, Path]]:
    """The segments in their order: first step, step after the last one, and file. Other files are ignored."""
    matches = ((SEGMENT_NAME.fullmatch(path.name), path) for path in (session_dir / ACTIONS_FOLDER).glob("*.npz"))
    return sorted((int(name["first"]), int(name["last"]), path) for name, path in matches if name)
