"""The results that `evaluate` has written into the directories of runs and sessions; see `runs/layout.py`."""

from pathlib import Path
from typing import Any, TypedDict

from jaxrl_atari.runs.files import read_result


class EvaluationSettings(TypedDict):
    """When and how the games of an evaluation were played."""

    date: str  # UTC
    game: str
    protocol: str
    backend: str
    checkpoint: str | int  # best, latest, or an env step
    greedy: bool
    num_envs: int  # games played at once
    device: str
    compute_dtype: str
    episodes: int  # games of each session


class SessionEvaluation(EvaluationSettings):
    """The content of session_<i>/evaluation_STEP.json: games with one checkpoint."""

    session: str
    env_steps: int  # env steps of training at the checkpoint
    seed: int
    mean: float  # of the returns
    std: float | None  # their sample standard deviation; None for a single game
    cut_off: int  # number of games that reached their time limit
    returns: list[float]  # of each game, in the order in which the games ended
    lengths: list[int]  # env steps of each game
    truncated: list[bool]  # whether each game reached its time limit


class RunEvaluation(EvaluationSettings):
    """The content of evaluation.json: games of all sessions of a run."""

    seed: int  # of the first session; the next ones have the next numbers
    sessions: list[str]
    env_steps: list[int]  # of each session's checkpoint
    mean: float  # of the sessions' means
    interval: tuple[float, float] | None  # of that mean
    session_means: list[float]
    cut_off: int  # number of games of all sessions that reached their time limit
    returns: list[list[float]]  # [sessions, games]


def evaluations(directory: Path) -> list[dict[str, Any]]:
    """The results that `evaluate` has written into the directory of a run or a session, oldest first.

    Each result is a `SessionEvaluation` or a `RunEvaluation`, with the path of its `file`.

    Raises:
        UserError: as `read_result`.
    """
    results = [
        read_result(path, mean=float, episodes=int) | {"file": path} for path in directory.glob("evaluation*.json")
    ]
    return sorted(results, key=lambda each: (played_at(each["file"]), each["file"].name))


def played_at(file: Path) -> str:
    """The date of a result of `evaluate`, or of the result to which a video belongs; empty if it has none.

    The date stands in the JSON file, so that a copy keeps it.
    """
    described = file.with_name(f"{file.stem.replace('video', 'evaluation')}.json")
    return str(read_result(described).get("date", "")) if described.is_file() else ""
