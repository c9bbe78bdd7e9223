"""Metrics of sessions and trials: pure functions of arrays and tables.

The table of a session is `metrics.csv` by columns: name -> float64 array `[N]`, with an entry for each log point
i = 1..N. The columns that the metrics need:

- `return_mean`, R_i: mean raw return of the last 100 finished full games (all lives). It is NaN until the first
  game ends; metrics leave such log points out.
- `return_ma`: mean of R over the last tenth of the budget, at most over the last 1M env steps, or since its first
  value if that is less. Scores are quoted as `return_ma`.
- `env_steps`: agent decisions so far, of 4 emulator frames each. `optimizer_steps`: gradient steps so far.

Strength, efficiency, stability and consistency are SLM Lab's trial metrics (Keng & Graesser, `slm_lab/lib`), with
str_i = R_i - (mean return of random play). They measure how much better than random play the agent is, how early,
how steadily, and how similarly over sessions. Strength is a mean of str_i, the others are ratios of sums of str_i.
A session whose sum of str_i is not positive, because it is no better than random play, has none of these ratios.
A trial has the mean of a metric only if every session has the metric.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_atari.envs.games import Game, Reference
from jaxrl_atari.runs.reading import Table

SESSION_METRICS = {
    "final_return_ma": "score",
    "final_return_mean": "final return_mean",
    "max_return_ma": "max return_ma",
    "strength": "strength",
    "max_strength": "max strength",
    "final_strength": "final strength",
    "sample_efficiency": "sample efficiency",
    "training_efficiency": "training efficiency",
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
"""Metric -> title in tables. A trial has the mean of each metric over its sessions; it alone has `consistency`."""

RATIOS_OF_STRENGTH = ("sample_efficiency", "training_efficiency", "stability")
"""The metrics that only a session has that is better than random play."""

REDUCTIONS = {
    "env_steps": np.nanmax,
    "episodes": np.nanmax,
    "sps": np.nanmedian,  # a slow log point (compilation, a checkpoint) does not affect it
    "emulators_percent": np.nanmean,
    "policy_percent": np.nanmean,
    "learning_percent": np.nanmean,
    "gpu_busy_percent": np.nanmean,
    "gpu_memory_gib": np.nanmax,
    "rss_gib": np.nanmax,
}
"""Metric that is made of the column of its name -> how: a function of the column."""


def _ratio(numerator: np.floating, denominator: np.floating) -> float:
    """The ratio of two sums; NaN unless the denominator is positive."""
    return float(numerator / denominator) if denominator > 0 else np.nan


def efficiency(strengths: np.ndarray, steps: np.ndarray) -> float:
    """sum_i (str_i / t_i) / sum_i str_i, in 1 / step. It is larger if the agent is strong earlier.

    Args:
        strengths: str `[N]`.
        steps: t `[N]`, all positive; env steps for sample efficiency, gradient steps for training efficiency.
    """
    return _ratio((strengths / steps).sum(), strengths.sum())


def stability(strengths: np.ndarray) -> float:
    """1 - |sum_{i<N} min(str_{i+1} - str_i, 0) / sum_{i<N} str_i| for str `[N]`, N > 1; 1 if str never falls."""
    return 1.0 - _ratio(-np.minimum(np.diff(strengths), 0.0).sum(), strengths[:-1].sum())


def consistency(strengths: np.ndarray) -> float:
    """1 - sum_i 2 std_j(str_ij) / sum_i mean_j(str_ij) for str `[sessions, N]`; 1 if all sessions are equal.

    As in SLM Lab, this standard deviation divides by the number of sessions. All others in this package are
    sample standard deviations.
    """
    return 1.0 - _ratio(2.0 * strengths.std(axis=0).sum(), strengths.mean(axis=0).sum())


def _normalised(score: Any, low: Reference | None, high: Reference | None) -> Any:
    """The score on a scale from `low` (0) to `high` (1); None if one is unknown, or `high` is not the larger."""
    if score is None or low is None or high is None or high.score <= low.score:
        return None
    return (score - low.score) / (high.score - low.score)


def human_normalised(score: Any, game: Game) -> Any:
    """(score - random) / (human - random) with DQN Zoo's scores; None if a score is unknown.

    Args:
        score: a number, an array, or None.
    """
    return _normalised(score, game.dqn_random, game.human)


def reference_normalised(score: Any, game: Game) -> Any:
    """(score - random) / (reference - random), with the game's first reference; it suits negative scores too.

    Args:
        score: a number, an array, or None.

    Returns:
        None if a score is unknown, or if the reference is no better than random play (Skiing, Solaris).
    """
    return _normalised(score, game.random, next(iter(game.references), None))


def random_score(game: Game) -> float:
    """The mean return of random play; NaN if it is unknown."""
    return game.random.score if game.random else np.nan


def session_metrics(table: Table, game: Game) -> dict[str, float | None]:
    """The metrics of one session: name in `SESSION_METRICS` -> value; None if it is unknown."""
    known = np.isfinite(table["return_mean"])
    returns = table["return_mean"][known]
    return_ma = table["return_ma"][known]
    metrics: dict[str, Any] = dict.fromkeys(SESSION_METRICS)
    metrics["wall_hours"] = table["wall_seconds"][-1] / 3600.0
    for name, reduce in REDUCTIONS.items():
        if name in table and np.isfinite(table[name]).any():
            metrics[name] = reduce(table[name])
    strengths = returns - random_score(game)
    if returns.size:
        metrics |= {
            "final_return_ma": return_ma[-1],
            "final_return_mean": returns[-1],
            "max_return_ma": return_ma.max(),
            "strength": strengths.mean(),
            "max_strength": strengths.max(),
            "final_strength": strengths[-1],
        }
    if strengths.sum() > 0:
        metrics |= {
            "sample_efficiency": efficiency(strengths, table["env_steps"][known]),
            "training_efficiency": efficiency(strengths, table["optimizer_steps"][known]),
            "stability": stability(strengths),
        }
    return {name: known_float(value) for name, value in metrics.items()}


def known_float(value: float | None) -> float | None:
    """A number for JSON; None for NaN and infinities, which JSON does not have."""
    return None if value is None or not np.isfinite(value) else float(value)


def align_sessions(
    tables: Sequence[Table], column: str, along: str = "env_steps"
) -> tuple[np.ndarray, np.ndarray]:
    """A column of several sessions at common points along another column.

    The session that goes furthest along `along` gives the points. Between log points, values are
    interpolated linearly. The values of a session are NaN before its first finite value, and stay at its last
    value after its last log point. The sessions of a mean end at nearly the same env steps, except those that a
    stop rule has ended (`summary.Run.members`), but not after the same hours.

    Returns:
        The points `[N]`, and the values `[sessions, N]`.
    """
    grid = max((table[along] for table in tables), key=lambda points: points[-1])
    values = np.full((len(tables), grid.size), np.nan)
    for row, table in zip(values, tables, strict=True):
        known = np.isfinite(table[column])
        if known.any():
            row[:] = np.interp(grid, table[along][known], table[column][known], left=np.nan)
    return grid, values
