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

from jaxrl_atari.envs.pool import FinishedGame
from jaxrl_atari.envs.record import Segment
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.layout import ACTIONS_FOLDER


def segments(session_dir: Path) -> list[tuple[int, int, Path]]:
    """The segments in their order: first step, step after the last one, and file."""
    found = ((path.stem.split("_"), path) for path in (session_dir / ACTIONS_FOLDER).glob("*_*.npz"))
    return sorted((int(first), int(last), path) for (first, last), path in found)


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
    content = io.BytesIO()
    np.savez_compressed(
        content,
        actions=np.concatenate([part.actions for part in parts], axis=1),
        anchors=np.concatenate([part.anchors for part in parts]),
        frame_crc=np.concatenate([part.frame_crc for part in parts]),
        games=game_rows(games),
        rollout_length=rollout_length,
    )
    (session_dir / ACTIONS_FOLDER).mkdir(exist_ok=True)
    write_file(session_dir / ACTIONS_FOLDER / f"{first:010}_{first + steps:010}.npz", content.getvalue())


def game_rows(games: Sequence[FinishedGame]) -> np.ndarray:
    """Finished games as rows of the log, float64 [m, 4]: step, environment, return, length."""
    rows = [(game.step, game.env, game.episode_return, game.length) for game in games]
    return np.array(rows, np.float64).reshape(-1, 4)


def games_of_rows(rows: np.ndarray) -> list[FinishedGame]:
    """The finished games that `game_rows` wrote."""
    return [FinishedGame(int(step), int(env), total, int(length)) for step, env, total, length in rows.tolist()]


def cut_segments(session_dir: Path, steps: int) -> None:
    """Removes the segments beyond a checkpoint that was written after `steps` steps of each environment."""
    for _, last, path in segments(session_dir):
        if last > steps:
            path.unlink()
