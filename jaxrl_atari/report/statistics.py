"""Statistics of scores over sessions and games, with intervals: pure functions of arrays.

One game has the t interval of the mean over its sessions: it holds the true mean in 95% of cases from 3 sessions on
(normal scores), where a bootstrap over so few sessions is far too narrow.

The figures are those of Agarwal et al. 2021, "Deep RL at the Edge of the Statistical Precipice" (arXiv:2108.13264),
for scores x_mn of game m = 1..M and session n = 1..N_m, which are normalised by game before they are aggregated.

The stratified bootstrap resamples the sessions of each game with replacement and keeps the games. An interval lies
between the quantiles (1 - CONFIDENCE) / 2 and (1 + CONFIDENCE) / 2 of the resampled figures. A game with a single
session has no spread to resample: a figure that includes such a game has the interval None. With few sessions the
intervals are too narrow; `INTERVALS` says so.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

Scores = Mapping[str, ArrayLike]
"""Game -> scores of its sessions `[N_m]`; games may differ in their number of sessions."""

RESAMPLES = 2000
CONFIDENCE = 0.95

INTERVALS = (
    f"In parentheses: {CONFIDENCE:.0%} intervals of the stratified bootstrap over sessions (Agarwal et al. 2021); (-) "
    "where a game has a single session. With fewer than 10 sessions a game they are too narrow: they hold the true "
    "figure in fewer than 90% of cases (docs/paper.md)."
)
"""What the intervals of aggregates are. benchmarks/coverage.py measures how often they hold the true figure."""


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
    pairs = ((x[..., :, None], y[..., None, :]) for x, y in zip(games, others, strict=True))
    return np.mean([0.5 + 0.5 * np.sign(x - y).mean(axis=(-2, -1)) for x, y in pairs], axis=0)


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
    """All `FIGURES` of a suite, for JSON: `games`, their number; `iqm`, `iqm_interval` and so on; `profile`.

    The performance profile is a list of points: threshold, share above it, and the ends of the interval of the share.
    """
    summary: dict[str, Any] = {"games": len(scores)}
    for name, (_, figure) in FIGURES.items():
        summary[name], summary[f"{name}_interval"] = estimate(figure, scores)
    summary["profile"] = []
    for threshold in np.linspace(0, max(1.0, *map(np.max, scores.values())), 51).tolist():
        share, interval = estimate(partial(share_above, threshold=threshold), scores)
        summary["profile"].append([threshold, share, *(interval or (None, None))])
    return summary


def score_interval(scores: ArrayLike) -> tuple[float, float] | None:
    """The t interval of the mean score of one game `[sessions]`; None with fewer than 3 sessions."""
    scores = np.asarray(scores, np.float64)
    if scores.size < 3:
        return None
    reach = stdtrit(scores.size - 1, (1 + CONFIDENCE) / 2) * scores.std(ddof=1) / np.sqrt(scores.size)
    return float(scores.mean() - reach), float(scores.mean() + reach)


def probability_of_improvement(scores: Scores, others: Scores) -> Estimate:
    """How probably a session of `scores` beats a session of `others`, averaged over the games, which must be equal.

    0.5 means no difference. For two trials of one game, pass one game each.
    """
    return estimate(improvement, scores, {game: others[game] for game in scores})
