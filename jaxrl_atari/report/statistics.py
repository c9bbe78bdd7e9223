"""Statistics of scores over sessions and games, with bootstrap intervals: pure functions of arrays.

The figures are those of Agarwal et al. 2021, "Deep RL at the Edge of the Statistical Precipice" (arXiv:2108.13264),
for scores x_mn of game m = 1..M and session n = 1..N_m, which are normalised by game before they are aggregated.

The stratified bootstrap resamples the sessions of each game with replacement and keeps the games. An interval lies
between the quantiles (1 - CONFIDENCE) / 2 and (1 + CONFIDENCE) / 2 of the resampled figures. A game with a single
session has no spread to resample: a figure that includes such a game has the interval None.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

Scores = Mapping[str, ArrayLike]
"""Game -> scores of its sessions `[N_m]`; games may differ in their number of sessions."""

RESAMPLES = 2000
CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """A figure and its interval, which is None if a game has a single session."""

    value: float
    interval: tuple[float, float] | None


# Figures: functions of a list of games, each an array `[..., N_m]`; the leading axes are those of the result.


def mean(games: Sequence[np.ndarray]) -> np.ndarray:
    """Mean over games of the mean over sessions: 1/M sum_m 1/N_m sum_n x_mn."""
    return np.mean([scores.mean(axis=-1) for scores in games], axis=0)


def median(games: Sequence[np.ndarray]) -> np.ndarray:
    """Median over games of the mean over sessions."""
    return np.median([scores.mean(axis=-1) for scores in games], axis=0)


def interquartile_mean(games: Sequence[np.ndarray]) -> np.ndarray:
    """IQM: mean of the middle half of all n scores; floor(n / 4) are cut at each end."""
    scores = np.sort(np.concatenate(games, axis=-1), axis=-1)
    cut = scores.shape[-1] // 4
    return scores[..., cut : scores.shape[-1] - cut].mean(axis=-1)


def optimality_gap(games: Sequence[np.ndarray]) -> np.ndarray:
    """1 - mean of min(x_mn, 1) over all scores: the distance from the target 1, 0 if all scores reach it."""
    return 1.0 - np.minimum(np.concatenate(games, axis=-1), 1.0).mean(axis=-1)


def share_above(games: Sequence[np.ndarray], threshold: float) -> np.ndarray:
    """Share of all scores that are greater than the threshold: one point of a performance profile."""
    return (np.concatenate(games, axis=-1) > threshold).mean(axis=-1)


def improvement(games: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> np.ndarray:
    """Mean over games of P(x > y) + P(x = y) / 2 over all pairs of a session of `games` and one of `others`."""

    def of_pair(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        x, y = x[..., :, None], y[..., None, :]
        return ((x > y) + 0.5 * (x == y)).mean(axis=(-2, -1))

    return np.mean([of_pair(x, y) for x, y in zip(games, others, strict=True)], axis=0)


FIGURES: dict[str, tuple[str, Callable[[Sequence[np.ndarray]], np.ndarray]]] = {
    "mean": ("mean", mean),
    "median": ("median", median),
    "iqm": ("interquartile mean", interquartile_mean),
    "optimality_gap": ("optimality gap", optimality_gap),
}
"""Name -> title and function of each aggregate over games. A smaller optimality gap is better."""


# Estimates: figures with intervals.


def estimate(figure: Callable[..., np.ndarray], *suites: Scores) -> Estimate:
    """A figure of one or more suites, with the interval of its stratified bootstrap.

    Args:
        figure: called with one list of games for each suite.
    """
    games = [[np.asarray(scores, np.float64) for scores in suite.values()] for suite in suites]
    value = float(figure(*games))
    if any(scores.size < 2 for suite in games for scores in suite):
        return Estimate(value, None)
    rng = np.random.default_rng(0)
    resampled = [
        [scores[rng.integers(scores.size, size=(RESAMPLES, scores.size))] for scores in suite] for suite in games
    ]
    low, high = np.quantile(figure(*resampled), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value, (float(low), float(high)))


def aggregate(scores: Scores) -> dict[str, Any]:
    """All `FIGURES` of a suite, ready for JSON: `iqm` and `iqm_interval`, and so on."""
    summary: dict[str, Any] = {"games": len(scores), "confidence": CONFIDENCE}
    for name, (_, figure) in FIGURES.items():
        value, interval = estimate(figure, scores)
        summary |= {name: value, f"{name}_interval": None if interval is None else list(interval)}
    return summary


def score_interval(scores: ArrayLike) -> tuple[float, float] | None:
    """Interval of the mean score of one game `[sessions]`."""
    return estimate(mean, {"": scores}).interval


def performance_profile(scores: Scores, thresholds: Sequence[float]) -> list[Estimate]:
    """The share of scores above each threshold."""
    return [estimate(partial(share_above, threshold=threshold), scores) for threshold in thresholds]


def probability_of_improvement(scores: Scores, others: Scores) -> Estimate:
    """How probably a session of `scores` beats a session of `others`, averaged over the games, which must be equal.

    0.5 means no difference. For two trials of one game, pass one game each.
    """
    return estimate(improvement, scores, {game: others[game] for game in scores})


def iqm_curve(scores: Mapping[str, np.ndarray]) -> list[Estimate]:
    """The IQM at each point of learning curves, which are `[sessions, points]` for each game."""
    points = next(iter(scores.values())).shape[1]
    return [
        estimate(interquartile_mean, {game: curves[:, i] for game, curves in scores.items()}) for i in range(points)
    ]
