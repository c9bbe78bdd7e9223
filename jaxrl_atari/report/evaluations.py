"""The results that `evaluate` has written into the directories of runs and sessions; see `runs/layout.py`."""

from datetime import UTC, datetime
from pathlib import Path
from types import UnionType
from typing import Any, TypedDict, get_args, get_origin, get_type_hints

from jaxrl_atari.errors import UserError
from jaxrl_atari.runs.files import read_json, read_result

GAME_TEMPLATE = Path(__file__).with_name("templates") / "game.html"
"""Template of the page of a game. A report embeds only pages that have the script of this template."""


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


CHECKED = (
    "checkpoint",
    "greedy",
    "seed",
    "std",
    "compute_dtype",
    "env_steps",
    "sessions",
    "session_means",
    "cut_off",
    "returns",
    "truncated",
)
"""Values whose types are checked: those that reports, cards of a hub and exported policies read of a result."""


def evaluations(directory: Path) -> list[dict[str, Any]]:
    """The results that `evaluate` has written into the directory of a run or a session, oldest first.

    Each result is a `SessionEvaluation` or a `RunEvaluation`, with the path of its `file`. Files may be of unknown
    origin, so only `mean` and `episodes` are sure to be there. A value of None is left out.

    Raises:
        UserError: as `read_result`, or another value of a result has an unusable type.
    """
    results = []
    for path in directory.glob("evaluation*.json"):
        result = read_result(path, mean=float, episodes=int)
        record = RunEvaluation if "sessions" in result else SessionEvaluation
        types = get_type_hints(SessionEvaluation) | get_type_hints(RunEvaluation) | get_type_hints(record)
        known = {name: value for name, value in result.items() if value is not None}
        for name in CHECKED:
            if name in known and not _has_type(known[name], types[name]):
                raise UserError(
                    f"{path}: {name} is {known[name]!r:.40}; restore the file from a copy, or move it away"
                )
        results.append(known | {"file": path})
    return sorted(results, key=lambda each: (written_at(each["file"]), each["file"].name))


def _has_type(value: Any, hint: Any) -> bool:
    """Whether a JSON value has the type of a field above: a plain type, a union of types, or a list."""
    if isinstance(hint, UnionType):
        return any(_has_type(value, each) for each in get_args(hint))
    if get_origin(hint) is list:
        (item_hint,) = get_args(hint)
        return isinstance(value, list) and all(_has_type(item, item_hint) for item in value)
    return isinstance(value, (int, float) if hint is float else hint)


def written_at(file: Path) -> float:
    """The time at which a result or a video was made, in seconds since 1970 (UTC).

    A result has the time in the `date` of its JSON file, which a copy of the file keeps. A video has the date of
    its evaluation, `evaluation_STEP.json`. Without a date, the time is that of the file's last change.
    """
    described = file.with_name(f"{file.stem.replace('video', 'evaluation')}.json")
    try:
        date = str(read_json(described)["date"]).removesuffix(" UTC")
        return datetime.strptime(date, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
    except (OSError, ValueError, LookupError):  # no such file, or one without such a date
        return file.stat().st_mtime
