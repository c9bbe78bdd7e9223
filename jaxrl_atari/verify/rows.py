"""The rows of metrics.csv, recomputed from the games of a log of actions."""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from jaxrl_atari.errors import VerificationFailed
from jaxrl_atari.runs.actions import ActionLog, games_of_rows
from jaxrl_atari.runs.layout import METRICS_FILE
from jaxrl_atari.runs.progress import EpisodeStatistics
from jaxrl_atari.runs.tables import read_table


def expected_rows(log: ActionLog, windows: Iterable[int]) -> dict[int, list[dict[str, float]]]:
    """Env steps at the end of each update -> the columns of metrics.csv that the games of a log give.

    Args:
        windows: those of `return_ma` under the budgets that the run has had; an update has a row for each.
    """
    # The step after the end of a game is an auto-reset step, which does not count. There is none where a resume
    # started new games just then.
    anchors = set(map(tuple, log.anchors[:, :2].tolist()))
    resets = np.array([step + 1 for step, env, *_ in log.games.tolist() if (step + 1, env) not in anchors])
    ends = np.array(log.ends, np.int64)
    env_steps = ends * log.actions.shape[1] - np.searchsorted(resets, ends)
    games_before = np.searchsorted(log.games[:, 0], ends).tolist()  # both are sorted by steps
    statistics = EpisodeStatistics()
    rows: dict[int, list[dict[str, float]]] = {}
    for reached, (first, last) in zip(env_steps.tolist(), itertools.pairwise([0, *games_before]), strict=True):
        statistics.count(games_of_rows(log.games[first:last]), reached)
        rows[reached] = []
        for statistics.window in windows:
            rows[reached].append(statistics.to_row())
    return rows


def check_rows(
    session_dir: Path, expected: dict[int, list[dict[str, float]]], logged_env_steps: int
) -> tuple[int, int]:
    """Compares the rows of metrics.csv with those that the games of the log give.

    A column that the file lacks is not checked.

    Args:
        expected: what `expected_rows` returned.
        logged_env_steps: env steps of the last row that the file had at the newest checkpoint; 0 if it had none.

    Returns:
        The rows compared, and all rows. Later rows are beyond the end of the log.

    Raises:
        VerificationFailed: a row has another number of env steps or games, or another `return_mean`, `return_ma`
            or length; a line is not understood; the file ends before `logged_env_steps`.
    """
    env_steps = max(expected, default=0)
    path = session_dir / METRICS_FILE
    table = read_table(path)
    rows = table.rows
    if table.problem:
        raise VerificationFailed(f"{path}: {table.problem}; restore it from a copy")
    last_row = max((float(row["env_steps"]) for row in rows), default=0)
    if last_row < logged_env_steps:
        raise VerificationFailed(
            f"{path}: ends at {last_row:,.0f} env steps, and had rows up to {logged_env_steps:,} at the newest"
            " checkpoint; restore it from a copy"
        )
    covered = [row for row in rows if float(row["env_steps"]) <= env_steps]
    for row in covered:
        at = f"{session_dir}, {row['env_steps']} env steps"
        if float(row["env_steps"]) not in expected:
            raise VerificationFailed(f"{at}: metrics.csv has a row where no update ended")
        differences = [_difference(row, games) for games in expected[int(float(row["env_steps"]))]]
        if all(differences):
            raise VerificationFailed(f"{at}: {differences[-1]}")
    return len(covered), len(rows)


def _difference(row: Mapping[str, str], games: Mapping[str, float]) -> str:
    """The first difference of a row of metrics.csv from what the games give; empty if there is none."""
    for name, value in games.items():
        text = "" if np.isnan(value) else f"{value:.9g}"
        recorded = row.get(name, text)
        if recorded != text:
            return f"{name} is {recorded}, the games give {text}"
    return ""
