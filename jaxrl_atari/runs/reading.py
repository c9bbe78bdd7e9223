"""What the sessions of a run have written: log points and evaluations as arrays, the latest meta, an early end."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_atari.config import Config
from jaxrl_atari.errors import MetricsError, NoLogPoint, UserError
from jaxrl_atari.runs.columns import EVALUATION_COLUMNS
from jaxrl_atari.runs.files import read_json, read_result
from jaxrl_atari.runs.layout import (
    EVALUATIONS_FILE,
    METRICS_FILE,
    STOPPED_FILE,
    VERIFIED_FILE,
    checkpoint_path,
    latest_env_steps,
    meta_file,
    session_dirs,
    session_number,
)
from jaxrl_atari.runs.progress import evaluation_due
from jaxrl_atari.runs.tables import cell_number, read_table

_log = logging.getLogger(__name__)

Table = Mapping[str, np.ndarray]
"""A session's log points: column name -> float64 `[N]`."""


def read_metrics(session_dir: Path) -> Table:
    """Reads a session's metrics.csv, which may still be growing: column name -> float64 `[N]`, N >= 1.

    Empty cells are NaN.

    Raises:
        MetricsError: the file cannot be read.
        NoLogPoint: the session has no log point yet.
    """
    path = session_dir / METRICS_FILE
    rows = read_table(path)
    if not rows:
        raise NoLogPoint(f"{path}: holds no log point; wait for the first one, or remove the session")
    return {name: np.array([cell_number(row[name]) for row in rows]) for name in rows[0]}


def read_evaluations(session_dir: Path) -> Table:
    """Reads a session's evaluations.csv: column of `EVALUATION_COLUMNS` -> float64 `[N]`.

    Raises:
        MetricsError: the file cannot be read.
    """
    rows = read_table(session_dir / EVALUATIONS_FILE)
    return {name: np.array([cell_number(row.get(name, "")) for row in rows]) for name in EVALUATION_COLUMNS}


def latest_meta(session_dir: Path) -> dict[str, Any]:
    """The meta of a session's latest checkpoint, unchecked; empty if there is none, or if it cannot be read."""
    try:
        return read_json(meta_file(session_dir, latest_env_steps(session_dir)))
    except (OSError, ValueError):
        return {}


def require_own_seed(config: Config, session_dir: Path) -> None:
    """Raises `UserError` unless a session was trained with the seed that its number says, `seed + i`.

    A session that was copied from another run would count as one that it is not.
    """
    expected = config.seed + session_number(session_dir)
    seed = latest_meta(session_dir).get("seed", expected)
    if seed != expected:
        raise UserError(
            f"{session_dir}: was trained with seed {seed}, and this session of the run has seed {expected};"
            " keep it in its own run, and use `plots --merge`"
        )


def is_finished(config: Config, session_dir: Path) -> bool:
    """Whether a session has trained to its end and written its last evaluation. Starts no back end of JAX.

    A session ends with its budget, or early; see `EarlyEnd`. A session whose latest checkpoint is damaged has not
    finished: a resume says what is wrong with it. `report.summary.Run.is_finished` asks the log points
    instead, and leaves the evaluation out.
    """
    latest = latest_env_steps(session_dir)
    if not config.is_spent(latest) and read_early_end(session_dir, config.total_env_steps) is None:
        return False
    evaluated = latest_meta(session_dir).get("evaluated_env_steps")
    if evaluated is None:
        return False
    rows = {row["env_steps"] for row in read_table(session_dir / EVALUATIONS_FILE)}
    was_running = (checkpoint_path(session_dir, latest) / "evaluation").is_dir()
    if was_running and str(evaluated) not in rows:
        return False
    # A stop may have left out the last evaluation.
    return not evaluation_due(config, evaluated, latest) or str(latest) in rows


class EarlyEnd(NamedTuple):
    """The end of a session before its budget was spent, by `stop` of `run_training` or a
    rule of `log`: SESSION_DIR/stopped.json."""

    env_steps: int
    reason: str
    total_env_steps: int  # the budget that the session had


def read_early_end(session_dir: Path, total_env_steps: int) -> EarlyEnd | None:
    """Reads the early end of a session under a budget; None if it has none, or if a resume has taken it further.

    A session that is resumed with another budget trains on.

    Raises:
        UserError: stopped.json is damaged.
    """
    path = session_dir / STOPPED_FILE
    if not path.is_file():
        return None
    values = read_result(path, env_steps=int, reason=str, total_env_steps=int)
    end = EarlyEnd(values["env_steps"], values["reason"], values["total_env_steps"])
    # A published copy may hold another checkpoint than the last. It is not resumed.
    is_last = end.env_steps == latest_env_steps(session_dir) or latest_meta(session_dir).get("parameters_only")
    return end if is_last and end.total_env_steps == total_env_steps else None


def read_sessions(run_dir: Path, count: int) -> dict[Path, Table]:
    """Reads the metrics of the sessions with a number below `count`: session directory -> metrics.

    Sessions without readable metrics are left out with a warning.

    Raises:
        NoLogPoint, MetricsError: no session has readable metrics.
    """
    tables = {}
    problems: list[MetricsError] = []
    for session_dir in session_dirs(run_dir):
        if session_number(session_dir) < count:
            try:
                tables[session_dir] = read_metrics(session_dir)
            except MetricsError as error:
                problems.append(error)
    if not tables:
        raise problems[0] if problems else NoLogPoint(f"{run_dir}: holds no session_0; expected a run directory")
    for problem in problems:
        _log.warning("left out: %s", problem)
    return tables


def read_verification(session_dir: Path) -> dict[str, Any] | None:
    """Reads a session's verified.json, what `verify` has found equal: `date` (UTC), `version` (of this package),
    `rows` of metrics.csv, `games`, and `env_steps` of the log of actions. None if there is none.

    Raises:
        UserError: it is damaged.
    """
    path = session_dir / VERIFIED_FILE
    if not path.is_file():
        return None
    return read_result(path, date=str, version=str, rows=int, games=int, env_steps=int)


def evaluations(directory: Path) -> list[dict[str, Any]]:
    """The results that `evaluate` has written into the directory of a run or a session, oldest first.

    session_<i>/evaluation_STEP.json has the games that were played with one checkpoint:

    | value | content |
    |---|---|
    | date, game, protocol, backend, greedy, num_envs, device, compute_dtype | when and how they were played |
    | checkpoint, env_steps | `best`, `latest` or an env step; the env steps of training at that checkpoint |
    | episodes, seed | number of games, and their seed |
    | mean, std | of the returns; the sample standard deviation is null for a single game |
    | returns, lengths, truncated | of each game: return, env steps, whether it reached its time limit |
    | cut_off | number of games that reached their time limit |

    evaluation.json has the games of all sessions of a run: the same values, where `seed` is that of the first
    session, `sessions`, `env_steps` and `returns` have an entry for each session, and `mean` and `interval` are
    those of the `session_means`. Each result also gets the path of its `file`.

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
