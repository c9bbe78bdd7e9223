"""Figures of merit of sessions and trials: pure functions of arrays and tables.

A session's table is `metrics.csv` by column: a float64 array `[N]` for each name, with one entry for each log
point. At log point i = 1..N:

- `return_mean`, R_i: mean raw return of the last 100 finished full games (all lives). NaN until the first game
  ends; no figure counts such log points.
- `return_ma`: mean of R over the last 1M env steps, or over the run so far while that is shorter. Scores are
  quoted as `return_ma`. A run whose config.json has no `return_ma_env_steps` has the mean of the last 100 R_i.
- `env_steps`: agent decisions so far, 4 emulator frames each. `optimizer_steps`: gradient steps so far.

Strength, efficiency, stability and consistency are SLM Lab's trial metrics (Keng & Graesser, `slm_lab/lib`), with
str_i = R_i - (mean return of random play). They measure how much better than random play the agent is, how early,
how steadily, and how similarly over sessions. They are ratios of sums of str_i, meaningful where these sums are
positive: a session that is no better than random play has none of them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxrl_atari.envs.games import Game, Reference
from jaxrl_atari.runs.reading import Table

SESSION_FIGURES = {
    "final_return_ma": "score",
    "max_return_ma": "max return_ma",
    "strength": "strength",
    "max_strength": "max strength",
    "final_strength": "final strength",
    "sample_efficiency": "sample efficiency (1 / 1M env steps)",
    "training_efficiency": "training efficiency (1 / 1M gradient steps)",
    "stability": "stability",
    "consistency": "consistency",
    "env_steps": "env steps",
    "episodes": "games",
    "wall_hours": "hours",
    "sps": "SPS",
    "emulators_percent": "time: emulators %",
    "policy_percent": "time: policy %",
    "learning_percent": "time: learning %",
    "gpu_busy_percent": "GPU busy %",
    "gpu_memory_gib": "GPU memory, GiB",
    "rss_gib": "RSS, GiB",
}
"""Figures -> their titles in tables. A trial's figure is the mean over its sessions, but for `consistency`."""

REDUCTIONS = {
    "env_steps": np.max,
    "episodes": np.max,
    "sps": np.median,  # a slow log point (compilation, a checkpoint) does not affect it
    "emulators_percent": np.mean,
    "policy_percent": np.mean,
    "learning_percent": np.mean,
    "gpu_busy_percent": np.mean,
    "gpu_memory_gib": np.max,
    "rss_gib": np.max,
}
"""Columns -> how their log points become a figure of the session."""


def _ratio(numerator: Any, denominator: Any) -> float:
    return float(numerator / denominator) if denominator > 0 else np.nan


def efficiency(strengths: np.ndarray, steps: np.ndarray) -> float:
    """sum_i (str_i / t_i) / sum_i str_i, in 1 / step; larger is earlier. Both `[N]`, every t_i > 0.

    Sample efficiency has t in env steps, training efficiency in gradient steps.
    """
    return _ratio((strengths / steps).sum(), strengths.sum())


def stability(strengths: np.ndarray) -> float:
    """1 - |sum_{i<N} min(str_{i+1} - str_i, 0) / sum_{i<N} str_i|; `[N]`, N > 1; 1 if it never falls."""
    return 1.0 - _ratio(-np.minimum(np.diff(strengths), 0.0).sum(), strengths[:-1].sum())


def consistency(strengths: np.ndarray) -> float:
    """1 - sum_i 2 std_j(str_ij) / sum_i mean_j(str_ij) for str_ij `[sessions, N]`; 1 if all sessions are equal.

    This std divides by the number of sessions, as in SLM Lab, so that the figure can be compared with SLM Lab's.
    Every other standard deviation of this package is the sample's, `sample_std`.
    """
    return 1.0 - _ratio(2.0 * strengths.std(axis=0).sum(), strengths.mean(axis=0).sum())


def _normalised(score: Any, low: Reference | None, high: Reference | None) -> Any:
    if score is None or low is None or high is None or high.score <= low.score:
        return None
    return (score - low.score) / (high.score - low.score)


def human_normalised(score: Any, game: Game) -> Any:
    """(score - random) / (human - random) with DQN Zoo's scores: 0 is random, 1 is human; None if unknown."""
    return _normalised(score, game.dqn_random, game.human)


def reference_normalised(score: Any, game: Game) -> Any:
    """(score - random) / (reference - random): 1 equals the first reference. Meaningful for negative scores, too.

    None if there is no reference, or if it is no better than random play (Skiing, Solaris).
    """
    return _normalised(score, game.random, next(iter(game.references), None))


def random_score(game: Game) -> float:
    """The mean return of random play; NaN if it is unknown."""
    return game.random.score if game.random else np.nan


def session_figures(table: Table, game: Game) -> dict[str, float | None]:
    """The figures of one session: each name of `SESSION_FIGURES` -> value, or None if there is no data for it."""
    known = np.isfinite(table["return_mean"])
    returns, return_ma, env_steps, steps = (
        table[name][known] for name in ("return_mean", "return_ma", "env_steps", "optimizer_steps")
    )
    figures: dict[str, Any] = dict.fromkeys(SESSION_FIGURES)
    figures["wall_hours"] = table["wall_seconds"][-1] / 3600.0
    for name, reduce in REDUCTIONS.items():
        if name in table and np.isfinite(table[name]).any():
            figures[name] = reduce(table[name][np.isfinite(table[name])])
    if returns.size:
        figures |= {"final_return_ma": return_ma[-1], "max_return_ma": return_ma.max()}
    strengths = returns - random_score(game)
    if strengths.sum() > 0:
        figures |= {
            "strength": strengths.mean(),
            "max_strength": strengths.max(),
            "final_strength": strengths[-1],
            "sample_efficiency": efficiency(strengths, env_steps),
            "training_efficiency": efficiency(strengths[steps > 0], steps[steps > 0]),
            "stability": stability(strengths),
        }
    return {name: known_float(value) for name, value in figures.items()}


def known_float(value: float | None) -> float | None:
    """A number for JSON, which has no NaN."""
    return None if value is None or np.isnan(value) else float(value)


def sample_std(values: ArrayLike, axis: int | None = None) -> Any:
    """The sample standard deviation, sqrt(sum (x - mean)² / (N - 1)); needs N > 1 values along `axis`.

    It estimates the spread of the sessions that might have been trained. The population's, which divides by N,
    would be too small: by 29% with two sessions.
    """
    return np.std(np.asarray(values), axis=axis, ddof=1)


def cut_table(table: Table, env_steps: float) -> Table:
    """The log points of a session up to a number of env steps."""
    kept = table["env_steps"] <= env_steps
    return {name: column[kept] for name, column in table.items()}


def align_sessions(
    tables: Sequence[Table], column: str, along: str = "env_steps"
) -> tuple[np.ndarray, np.ndarray]:
    """A column of several sessions at common points along another one: (points `[N]`, values `[sessions, N]`).

    The points are those of the session that goes furthest along `along`. Sessions of one config usually log at the
    same env steps; where points differ, values are interpolated linearly between log points. A session is NaN
    before its first finite value. After its last log point it keeps its last value: the sessions of a mean end at
    the same env steps (`summary.members`), give or take a few auto-reset steps, though not after the same hours.
    """
    grid = max((table[along] for table in tables), key=lambda points: points[-1])
    values = np.full((len(tables), grid.size), np.nan)
    for row, table in zip(values, tables, strict=True):
        known = np.isfinite(table[column])
        if known.any():
            row[:] = np.interp(grid, table[along][known], table[column][known], left=np.nan)
    return grid, values
