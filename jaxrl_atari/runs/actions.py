"""The log of actions, from which `python -m jaxrl_atari.verify` plays every game of a session again.

SESSION_DIR/actions/<first>_<last>.npz   steps first .. last - 1 of every environment:
    actions   uint8 [steps, environments]
    anchors   int64 [k, 3]: step, environment, seed of each game that started from a seed (`envs/record.py`)
    frame_crc uint32 [environments], CRC-32 of each environment's frame after these steps
    games     float64 [m, 4]: step, environment, return and length of each finished game
    rollout_length   int: steps of each update
"""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from jaxrl_atari.envs.record import Segment
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.progress import Game


def segments(session_dir: Path) -> list[tuple[int, int, Path]]:
    """First step, end and file of each segment, in their order."""
    found = ((path.stem.split("_"), path) for path in session_dir.glob("actions/*_*.npz"))
    return sorted((int(first), int(last), path) for (first, last), path in found)


def write_segment(session_dir: Path, parts: Sequence[Segment], games: Sequence[Game], rollout_length: int) -> None:
    """Writes the newest steps, before the checkpoint that ends with them.

    Args:
        parts: logs of groups of environments, in their order, with the same steps.
        games: that ended in them, with their steps in the session.
    """
    first = parts[0].first_step
    steps = len(parts[0].actions)
    if steps == 0:  # no step since the last checkpoint
        return
    content = io.BytesIO()
    np.savez_compressed(
        content,
        actions=np.concatenate([part.actions for part in parts], axis=1),
        anchors=np.concatenate([part.anchors for part in parts]),
        frame_crc=np.concatenate([part.frame_crc for part in parts]),
        games=np.array(games, np.float64).reshape(-1, 4),
        rollout_length=rollout_length,
    )
    (session_dir / "actions").mkdir(exist_ok=True)
    write_file(session_dir / "actions" / f"{first:010}_{first + steps:010}.npz", content.getvalue())


def cut_segments(session_dir: Path, steps: int) -> None:
    """Removes the segments beyond the checkpoint from which a session resumes, after `steps` of each
    environment."""
    for _, last, path in segments(session_dir):
        if last > steps:
            path.unlink()
