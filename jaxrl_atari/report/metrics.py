"""Figures of merit of sessions and trials: pure functions of arrays and tables.

A session's table is `metrics.csv` by column: a float64 array `[N]` for each name, with one entry for each log
point. At log point i = 1..N:

- `return_mean`, R_i: mean raw return of the last 100 finished full games (all lives). NaN until the first game
  ends; no figure counts such log points.
- `return_ma`: mean of the last 100 R_i, or of all R_i while there are fewer. With a log point every 10,000 env
  steps, it covers the last 1M env steps. Scores are quoted as `return_ma`.
- `env_steps`: agent decisions so far, 4 emulator frames each. `optimizer_steps`: gradient steps so far.

Strength, efficiency, stability and consistency are SLM Lab's trial metrics (Keng & Graesser, `slm_lab/lib`),
with str_i = R_i - (mean return of random play). They measure how much better than random play the agent is, how
early, how steadily, and how similarly over sessions. They are ratios of sums of str_i and are meaningful where
these sums are positive; a quotient with a zero denominator is NaN.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from jaxrl_atari.envs.games import Game
from jaxrl_atari.report.statistics import score_interval

Table = Mapping[str, np.ndarray]
"""A session's log points: column name -> float64 `[N]`."""

WINDOW = 100
"""Log points in the window of `return_ma`."""

SESSION_FIGURES = {
    "final_return_ma": "final return_ma",
    "max_return_ma": "max return_ma",
    "strength": "strength",
    "max_strength": "max strength",
    "final_strength": "final strength",
    "sample_efficiency": "sample efficiency",
    "training_efficiency": "training efficiency",
    "stability": "stability",
    "human_normalised_score": "human-normalised",
    "env_steps": "env steps",
    "episodes": "games",
    "wall_hours": "hours",
    "sps": "SPS",
    "gpu_busy_percent": "GPU busy %",
    "gpu_memory_gib": "GPU memory, GiB",
    "rss_gib": "RSS, GiB",
}
"""Figures of a session -> their titles in the printed table. A trial's figure is the mean over its sessions."""


def _ratio(numerator: float, denominator: float) -> float:
    return float(numerator / denominator) if denominator else float("nan")


def moving_average(points: ArrayLike, window: int = WINDOW) -> np.ndarray:
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


def strength(strengths: ArrayLike) -> float:
    """Mean of str_i `[N]`: 1/N sum_i str_i."""
    strengths = np.asarray(strengths)
    return _ratio(strengths.sum(), strengths.size)


def efficiency(strengths: ArrayLike, steps: ArrayLike) -> float:
    """sum_i (str_i / t_i) / sum_i str_i, in 1 / step; larger is earlier. Both `[N]`, every t_i > 0.

    Sample efficiency has t in env steps, training efficiency in optimiser steps.
    """
    strengths = np.asarray(strengths, np.float64)
    return _ratio((strengths / np.asarray(steps)).sum(), strengths.sum())


def stability(strengths: ArrayLike) -> float:
    """1 - |sum_{i<N} min(str_{i+1} - str_i, 0) / sum_{i<N} str_i|; `[N]`, N > 1; 1 if it never falls."""
    strengths = np.asarray(strengths, np.float64)
    falls = np.minimum(np.diff(strengths), 0.0).sum()
    return 1.0 - abs(_ratio(falls, strengths[:-1].sum()))


def consistency(strengths: ArrayLike) -> float:
    """1 - sum_i 2 std_j(str_ij) / sum_i mean_j(str_ij) for str_ij `[sessions, N]`; 1 if all sessions are equal.

    std is the population standard deviation (divided by the number of sessions), as everywhere in this module.
    """
    strengths = np.asarray(strengths, np.float64)
    return 1.0 - _ratio(2.0 * strengths.std(axis=0).sum(), strengths.mean(axis=0).sum())


def human_normalised(score: float, game: Game) -> float | None:
    """(score - random) / (human - random) with DQN Zoo's scores: 0 is random, 1 is human; None if unknown."""
    if game.human is None or game.dqn_random is None:
        return None
    return (score - game.dqn_random) / (game.human - game.dqn_random)


def reference_normalised(score: float, game: Game) -> float | None:
    """(score - random) / (reference - random): 1 equals the reference. Meaningful for negative scores, too.

    None if there is no reference, or if it is no better than random play (Skiing, Solaris).
    """
    if game.reference_score is None or game.random_mean is None or game.reference_score <= game.random_mean:
        return None
    return (score - game.random_mean) / (game.reference_score - game.random_mean)


def session_figures(table: Table, game: Game) -> dict[str, float | None]:
    """The figures of one session: each name of `SESSION_FIGURES` -> value, or None if there is no data for it.

    `sps` is the median over log points, which a slow one (compilation, a checkpoint) does not affect;
    `gpu_busy_percent` is the mean; the memory figures are maxima.
    """
    started = np.isfinite(table["return_mean"]) & (table["env_steps"] > 0)
    returns, return_ma = table["return_mean"][started], table["return_ma"][started]
    figures: dict[str, float | None] = dict.fromkeys(SESSION_FIGURES)
    if returns.size:
        figures["final_return_ma"] = float(return_ma[-1])
        figures["max_return_ma"] = float(return_ma.max())
        figures["human_normalised_score"] = human_normalised(float(return_ma[-1]), game)
    if returns.size and game.random_mean is not None:
        strengths = returns - game.random_mean
        figures["strength"] = strength(strengths)
        figures["max_strength"] = float(strengths.max())
        figures["final_strength"] = float(strengths[-1])
        figures["sample_efficiency"] = efficiency(strengths, table["env_steps"][started])
        trained = table["optimizer_steps"][started] > 0
        figures["training_efficiency"] = efficiency(strengths[trained], table["optimizer_steps"][started][trained])
        figures["stability"] = stability(strengths)
    figures["env_steps"] = float(table["env_steps"][-1])
    figures["episodes"] = float(table["episodes"][-1])
    figures["wall_hours"] = float(table["wall_seconds"][-1]) / 3600.0
    for name, reduce in {
        "sps": np.median,
        "gpu_busy_percent": np.mean,
        "gpu_memory_gib": np.max,
        "rss_gib": np.max,
    }.items():
        values = table[name][np.isfinite(table[name])] if name in table else np.empty(0)
        figures[name] = float(reduce(values)) if values.size else None
    return {name: None if value is None or np.isnan(value) else value for name, value in figures.items()}


def align_sessions(tables: Sequence[Table], column: str) -> tuple[np.ndarray, np.ndarray]:
    """One column of several sessions on common env steps: (env_steps `[N]`, values `[sessions, N]`).

    The grid is the log points of the session with the most env steps. Sessions of one config usually log at the
    same env steps; where they differ, values are interpolated linearly between log points. A session is NaN before
    its first finite value and after its last log point, so a running trial can be drawn. The last value is held for
    less than one interval, which bridges a last log point slightly before the grid's.
    """
    furthest = max(tables, key=lambda table: table["env_steps"][-1])
    grid = np.asarray(furthest["env_steps"], np.float64)
    interval = float(np.median(np.diff(grid))) if grid.size > 1 else grid[-1]
    values = np.full((len(tables), grid.size), np.nan)
    for row, table in zip(values, tables, strict=True):
        known = np.isfinite(table[column])
        steps = table["env_steps"][known]
        if steps.size:
            inside = (grid >= steps[0]) & ((grid <= steps[-1]) | (grid < steps[-1] + interval))
            row[inside] = np.interp(grid[inside], steps, table[column][known])
    return grid, values


def mean_curve(tables: Sequence[Table], column: str) -> tuple[np.ndarray, np.ndarray]:
    """The mean of a column over sessions: (env_steps `[N]`, means `[N]`), where at least one session has a value."""
    env_steps, values = align_sessions(tables, column)
    known = np.isfinite(values).any(axis=0)
    return env_steps[known], np.nanmean(values[:, known], axis=0)


def score_at(table: Table, points: ArrayLike, along: str = "env_steps") -> np.ndarray:
    """A session's `return_ma` at points along a column: `[P]` -> float64 `[P]`.

    Interpolates between log points. NaN before the first finished game; the last score is held after the end.
    """
    points, known = np.asarray(points, np.float64), np.isfinite(table["return_ma"]) & np.isfinite(table[along])
    if not known.any():
        return np.full_like(points, np.nan)
    return np.interp(points, table[along][known], table["return_ma"][known], left=np.nan)


def aggregate_trial(session_tables: Sequence[Table], game: Game) -> dict[str, Any]:
    """A trial's summary, ready for JSON: an unknown value is None.

    The score is the mean of the final `return_ma` over the sessions that have finished a game, `scored_sessions` in
    number; `score_interval` is its 95% bootstrap interval, None for a single score. `sessions` has the figures of each
    session; `mean` and `std` are their mean and population standard deviation over sessions, and `std` is None for a
    single value. `consistency` is over the log points that all sessions have reached, and None
    for a single session.

    Args:
        session_tables: at least one table with at least one row.
        game: provides the scores to compare with.
    """
    sessions = [session_figures(table, game) for table in session_tables]
    known = {name: [value for each in sessions if (value := each[name]) is not None] for name in SESSION_FIGURES}
    means = {name: float(np.mean(values)) if values else None for name, values in known.items()}
    stds = {name: float(np.std(values)) if len(values) > 1 else None for name, values in known.items()}
    score, scores = means["final_return_ma"], known["final_return_ma"]
    interval = score_interval(scores) if scores else None
    similarity = None
    if len(session_tables) > 1 and game.random_mean is not None:
        _, returns = align_sessions(session_tables, "return_mean")
        shared = np.isfinite(returns).all(axis=0)
        value = consistency(returns[:, shared] - game.random_mean)
        similarity = None if np.isnan(value) else value
    return {
        "game": game.name,
        "score": score,
        "scored_sessions": len(scores),
        "score_std": stds["final_return_ma"],
        "score_interval": None if interval is None else list(interval),
        "reference_score": game.reference_score,
        "tutorial_score": game.tutorial_score,
        "random_score": game.random_mean,
        "human_score": game.human,
        "reference_normalised_score": None if score is None else reference_normalised(score, game),
        "human_normalised_score": None if score is None else human_normalised(score, game),
        "consistency": similarity,
        "mean": means,
        "std": stds,
        "sessions": sessions,
    }
