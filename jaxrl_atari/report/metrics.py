"""Figures of merit of sessions and trials: pure functions of arrays and tables.

A session's table is `metrics.csv` by column: a float64 array `[N]` for each name, with one entry for each log
point. At log point i = 1..N:

- `return_mean`, R_i: mean raw return of the last 100 finished full games (all lives). NaN until the first game
  ends; no figure counts such log points.
- `return_ma`: mean of R over the last 1M env steps, or over the run so far while that is shorter. Scores are quoted as
  `return_ma`. A run whose config.json has no `return_ma_env_steps` has the mean of the last 100 R_i.
- `env_steps`: agent decisions so far, 4 emulator frames each. `optimizer_steps`: gradient steps so far.

Strength, efficiency, stability and consistency are SLM Lab's trial metrics (Keng & Graesser, `slm_lab/lib`),
with str_i = R_i - (mean return of random play). They measure how much better than random play the agent is, how
early, how steadily, and how similarly over sessions. They are ratios of sums of str_i, meaningful where these sums are
positive: a session that is no better than random play has none of them.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxrl_atari.envs.games import Game
from jaxrl_atari.report.statistics import score_interval
from jaxrl_atari.runs.reading import Table

SESSION_FIGURES = {
    "final_return_ma": "score",
    "max_return_ma": "max return_ma",
    "human_normalised_score": "human-normalised",
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

_REDUCED = {name: np.mean for name in SESSION_FIGURES if name.endswith("percent")}
_REDUCED |= {"sps": np.median, "gpu_memory_gib": np.max, "rss_gib": np.max}


def moving_average(points: ArrayLike, window: int) -> np.ndarray:
    """Mean of the last `window` points at each point, or of all points while there are fewer: `[N]` -> float64 `[N]`.

    y_i = mean(x_max(1, i - window + 1) .. x_i). NaN is not a point: it enters no mean, does not count for the
    window, and stays NaN.
    """
    points = np.asarray(points, np.float64)
    average = np.full_like(points, np.nan)
    is_point = np.isfinite(points)
    kept = points[is_point]
    average[is_point] = [kept[max(0, i - window + 1) : i + 1].mean() for i in range(len(kept))]
    return average


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

    std is the population standard deviation (divided by the number of sessions), as everywhere in this module.
    """
    return 1.0 - _ratio(2.0 * strengths.std(axis=0).sum(), strengths.mean(axis=0).sum())


def human_normalised(score: Any, game: Game) -> Any:
    """(score - random) / (human - random) with DQN Zoo's scores: 0 is random, 1 is human; None if unknown."""
    if game.human is None or game.dqn_random is None:
        return None
    return (score - game.dqn_random.score) / (game.human.score - game.dqn_random.score)


def reference_normalised(score: Any, game: Game) -> Any:
    """(score - random) / (reference - random): 1 equals the first reference. Meaningful for negative scores, too.

    None if there is no reference, or if it is no better than random play (Skiing, Solaris).
    """
    if not game.references or game.random is None or game.references[0].score <= game.random.score:
        return None
    return (score - game.random.score) / (game.references[0].score - game.random.score)


def session_figures(table: Table, game: Game) -> dict[str, float | None]:
    """The figures of one session: each name of `SESSION_FIGURES` -> value, or None if there is no data for it.

    `sps` is the median over log points, which a slow one (compilation, a checkpoint) does not affect;
    percentages are means, the memory figures maxima.
    """
    known = np.isfinite(table["return_mean"]) & (table["env_steps"] > 0)
    returns, return_ma, env_steps, steps = (
        table[name][known] for name in ("return_mean", "return_ma", "env_steps", "optimizer_steps")
    )
    figures: dict[str, Any] = {name: table[name][-1] for name in ("env_steps", "episodes")}
    figures["wall_hours"] = table["wall_seconds"][-1] / 3600.0
    for name, reduce in _REDUCED.items():
        if name in table and np.isfinite(table[name]).any():
            figures[name] = reduce(table[name][np.isfinite(table[name])])
    if returns.size:
        figures |= {"final_return_ma": return_ma[-1], "max_return_ma": return_ma.max()}
        figures["human_normalised_score"] = human_normalised(return_ma[-1], game)
    strengths = returns - game.random.score if game.random else np.zeros(0)
    if strengths.sum() > 0:
        figures |= {
            "strength": strengths.mean(),
            "max_strength": strengths.max(),
            "final_strength": strengths[-1],
            "sample_efficiency": efficiency(strengths, env_steps),
            "training_efficiency": efficiency(strengths[steps > 0], steps[steps > 0]),
            "stability": stability(strengths),
        }
    return {name: _known(figures.get(name)) for name in SESSION_FIGURES}


def _known(value: Any) -> float | None:
    return None if value is None or np.isnan(value) else float(value)


def align_sessions(tables: Sequence[Table], column: str, along: str = "env_steps") -> tuple[np.ndarray, np.ndarray]:
    """A column of several sessions at common points along another one: (points `[N]`, values `[sessions, N]`).

    The points are the log points of the session that has come furthest. Sessions of one config usually log at the
    same env steps; where they differ, values are interpolated linearly between log points. A session is NaN before
    its first finite value and after its last log point, so a running trial can be drawn. The last value is held for
    less than one interval, which bridges a last log point slightly before the grid's.
    """
    grid = np.asarray(max((table[along] for table in tables), key=lambda points: points[-1]), np.float64)
    interval = float(np.median(np.diff(grid))) if grid.size > 1 else grid[-1]
    values = np.full((len(tables), grid.size), np.nan)
    for row, table in zip(values, tables, strict=True):
        known = np.isfinite(table[column])
        if known.any():
            points, known_values = table[along][known], table[column][known]
            row[:] = np.interp(grid, points, known_values, left=np.nan, right=np.nan)
            row[(grid > points[-1]) & (grid < points[-1] + interval)] = known_values[-1]
    return grid, values


def score_at(table: Table, point: float, along: str = "env_steps") -> float:
    """A session's `return_ma` at a point along a column, interpolated between log points.

    NaN before the first finished game; the last score is held after the end.
    """
    known = np.isfinite(table["return_ma"]) & np.isfinite(table[along])
    return (
        float(np.interp(point, table[along][known], table["return_ma"][known], left=np.nan)) if known.any() else np.nan
    )


def aggregate_trial(session_tables: Sequence[Table], game: Game) -> dict[str, Any]:
    """A trial's figures, ready for JSON: an unknown value is None.

    The score is the mean of `session_scores`: the final `return_ma` of the sessions that have finished a game.
    `sessions` has the figures of each session; `mean` and `std` are their mean and population standard deviation over
    sessions, and `std` is None for a single value. `consistency` is over the log points that all sessions have reached.

    Args:
        session_tables: at least one table with at least one row.
        game: provides the scores to compare with.
    """
    sessions = [session_figures(table, game) for table in session_tables]
    known = {name: [value for each in sessions if (value := each[name]) is not None] for name in SESSION_FIGURES}
    means = {name: float(np.mean(values)) if values else None for name, values in known.items()}
    stds = {name: float(np.std(values)) if len(values) > 1 else None for name, values in known.items()}
    score, scores = means["final_return_ma"], known["final_return_ma"]
    if len(known["strength"]) == len(sessions) > 1 and game.random is not None:
        _, returns = align_sessions(session_tables, "return_mean")
        means["consistency"] = _known(consistency(returns[:, np.isfinite(returns).all(axis=0)] - game.random.score))
    return {
        "game": game.name,
        "score": score,
        "session_scores": scores,
        "scored_sessions": len(scores),
        "score_std": stds["final_return_ma"],
        "score_interval": score_interval(scores),
        "references": [reference._asdict() for reference in game.comparisons],
        "reference_normalised_score": None if score is None else reference_normalised(score, game),
        "human_normalised_score": None if score is None else human_normalised(score, game),
        "consistency": means["consistency"],
        "mean": means,
        "std": stds,
        "sessions": sessions,
    }
