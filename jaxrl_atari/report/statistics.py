"""Statistics of scores over sessions and games, with intervals: pure functions of arrays.

One game has the t interval of the mean over its sessions: it holds the true mean in 95% of cases from 3 sessions
on (normal scores), where a bootstrap over so few sessions is far too narrow.

The figures over several games are those of Agarwal et al. 2021, "Deep RL at the Edge of the Statistical Precipice"
(arXiv:2108.13264), for scores x_mn of game m = 1..M and session n = 1..N_m, which are normalised by game before
they are aggregated.

`estimate` gives them intervals of the form figure ± t · spread, for few sessions:

- The scores are resampled within each game, around its mean: x*_mn = mean_m + sqrt(N_m / (N_m - 1)) · r, where r
  is drawn with replacement from the residuals x_mn - mean_m. The factor makes the variance of the resampled scores
  the sample's; without it, the spread is too small by 29% with two sessions.
- spread is the root mean square distance of the resampled figures from the figure.
- t is Student's quantile. A game with few sessions has an uncertain spread of its own; the degrees of freedom of
  all games together are those of Welch and Satterthwaite, (sum_m v_m)² / sum_m v_m² / (N_m - 1), where v_m is the
  variance of game m's part of the figure.

There is no interval where it could not hold, and the estimate says why. benchmarks/coverage.py measures how often
the intervals hold the true figure; docs/paper.md has the table. `bootstrap_interval` is rliable's interval, for
export.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from jaxrl_atari.report.metrics import sample_std

Scores = Mapping[str, ArrayLike]
"""Game -> scores of its sessions `[N_m]`; games may differ in their number of sessions."""

Games = Sequence[np.ndarray]
"""The scores of each game `[..., N_m]`; the leading axes are those of the result."""

RESAMPLES = 2000
CONFIDENCE = 0.95
UPPER = (1 + CONFIDENCE) / 2

INTERVALS = (
    f"In parentheses: {CONFIDENCE:.0%} intervals over sessions, from a bootstrap of the residuals and Student's t "
    "(docs/paper.md says how often they hold the true figure); (-) where there is none. The narrower percentile "
    "intervals of rliable are in the JSON file."
)
"""What the intervals of aggregates are, below their tables."""


class Estimate(NamedTuple):
    """A figure with its interval, or with the reason why it has none."""

    value: float
    interval: tuple[float, float] | None
    why_none: str = ""


# Figures: functions of a list of games.


def mean(games: Games) -> np.ndarray:
    """Mean over games of the mean over sessions: 1/M sum_m 1/N_m sum_n x_mn."""
    return np.mean([scores.mean(axis=-1) for scores in games], axis=0)


def median(games: Games) -> np.ndarray:
    """Median over games of the mean over sessions."""
    return np.median([scores.mean(axis=-1) for scores in games], axis=0)


def interquartile_mean(games: Games) -> np.ndarray:
    """IQM: mean of the middle half of all n scores; floor(n / 4) are cut at each end."""
    from scipy.stats import trim_mean  # takes a second to import

    return trim_mean(np.concatenate(games, axis=-1), 0.25, axis=-1)


def exact_middle_half(games: Games) -> np.ndarray:
    """Mean of the middle half of all n scores, where n / 4 are cut at each end: of a score at the edge, a part
    counts.

    Its distance from the IQM is what the rounding of n / 4 does. With 5 games of 2 sessions, 2 scores are cut at
    each end where 2.5 would be a quarter, so that the IQM is one of 60% of the scores, and differs from that of
    many sessions.
    """
    scores = np.sort(np.concatenate(games, axis=-1), axis=-1)
    count = scores.shape[-1]
    index = np.arange(count)
    weights = np.clip(np.minimum(index + 1 - count / 4, count - count / 4 - index), 0, 1)
    return (scores * weights).sum(axis=-1) / weights.sum()


def optimality_gap(games: Games) -> np.ndarray:
    """1 - mean of min(x_mn, 1) over all scores: the distance from the target 1, 0 if all scores reach it."""
    return 1.0 - np.minimum(np.concatenate(games, axis=-1), 1.0).mean(axis=-1)


def share_above(games: Games, threshold: float) -> np.ndarray:
    """Share of all scores that are greater than the threshold: one point of a performance profile."""
    return (np.concatenate(games, axis=-1) > threshold).mean(axis=-1)


def game_means(games: Games) -> np.ndarray:
    """Mean over sessions of each game `[M, ...]`."""
    return np.array([scores.mean(axis=-1) for scores in games])


def game_improvements(games: Games, others: Games) -> np.ndarray:
    """P(x > y) + P(x = y) / 2 for each game `[M, ...]`, over all pairs of a session of `games` and one of
    `others`."""
    pairs = ((x[..., :, None], y[..., None, :]) for x, y in zip(games, others, strict=True))
    return np.array([0.5 + 0.5 * np.sign(x - y).mean(axis=(-2, -1)) for x, y in pairs])


def improvement(games: Games, others: Games) -> np.ndarray:
    """Mean over games of `game_improvements`."""
    return game_improvements(games, others).mean(axis=0)


class Figure(NamedTuple):
    """A figure over games and what its interval needs."""

    title: str
    compute: Callable[..., np.ndarray]  # of the games of each suite
    low: float = -np.inf  # its possible values
    high: float = np.inf
    parts: Callable[..., np.ndarray] = game_means  # each game's part of it
    exact: Callable[..., np.ndarray] | None = None  # the figure without the rounding that biases it


FIGURES = {
    "mean": Figure("mean", mean),
    "median": Figure("median", median),
    "iqm": Figure("interquartile mean", interquartile_mean, exact=exact_middle_half),
    "optimality_gap": Figure("optimality gap", optimality_gap, low=0),
}
"""The aggregates over games by name. A smaller optimality gap is better."""

IMPROVEMENT = Figure("probability of improvement", improvement, 0, 1, parts=game_improvements)


# Estimates: figures with intervals.


def _lists(suites: Sequence[Scores]) -> list[list[np.ndarray]]:
    return [[np.asarray(scores, np.float64) for scores in suite.values()] for suite in suites]


def estimate(figure: Figure, *suites: Scores) -> Estimate:
    """A figure of one or more suites, with the interval that the module's docstring describes.

    Args:
        suites: as many as `figure.compute` takes. Several have the same games.
    """
    games = _lists(suites)
    value = float(figure.compute(*games))
    if any(scores.size < 2 for suite in games for scores in suite):
        return Estimate(value, None, "a game has a single session")
    rng = np.random.default_rng(0)
    resampled = [[_around_mean(scores, rng) for scores in suite] for suite in games]
    spread = np.sqrt(np.mean((figure.compute(*resampled) - value) ** 2))
    if figure.exact is not None and abs(figure.exact(*games) - value) > spread:
        count = sum(scores.size for scores in games[0])
        why = f"a quarter of {count} scores is no whole number, and cutting {count // 4} at each end biases it"
        return Estimate(value, None, why)
    if spread == 0 and value in (figure.low, figure.high):
        return Estimate(value, None, "it is at its limit in every game, so that the sessions show no spread")
    variances = figure.parts(*resampled).var(axis=-1)
    freedom = np.sum([[scores.size - 1 for scores in suite] for suite in games], axis=0)
    reach = 0.0
    if spread > 0 and variances.any():
        variances /= variances.max()
        reach = float(spread * stdtrit(variances.sum() ** 2 / (variances**2 / freedom).sum(), UPPER))
    return Estimate(value, (max(value - reach, figure.low), min(value + reach, figure.high)))


def _around_mean(scores: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Resamples of a game's scores `[RESAMPLES, N_m]` with the sample's variance."""
    residuals = (scores - scores.mean()) * np.sqrt(scores.size / (scores.size - 1))
    return scores.mean() + residuals[rng.integers(scores.size, size=(RESAMPLES, scores.size))]


def bootstrap_interval(figure: Figure, *suites: Scores) -> tuple[float, float] | None:
    """The interval of rliable: quantiles of the figure over stratified resamples of the scores themselves.

    The sessions of each game are resampled with replacement, and the games are kept. With few sessions it is too
    narrow. None if a game has a single session.
    """
    games = _lists(suites)
    if any(scores.size < 2 for suite in games for scores in suite):
        return None
    rng = np.random.default_rng(0)
    resampled = [
        [scores[rng.integers(scores.size, size=(RESAMPLES, scores.size))] for scores in suite] for suite in games
    ]
    low, high = np.quantile(figure.compute(*resampled), [1 - UPPER, UPPER])
    return float(low), float(high)


def aggregate(scores: Scores) -> dict[str, Any]:
    """All `FIGURES` of a suite, for JSON, and its performance profile.

    `games` is their number. Each figure has `iqm`, `iqm_interval`, `iqm_why_none` (empty if there is an interval)
    and `iqm_rliable_interval`. `profile` is a list of points: threshold, share above it, and the ends of the
    interval of the share, or None.
    """
    summary: dict[str, Any] = {"games": len(scores)}
    for name, figure in FIGURES.items():
        summary[name], summary[f"{name}_interval"], summary[f"{name}_why_none"] = estimate(figure, scores)
        summary[f"{name}_rliable_interval"] = bootstrap_interval(figure, scores)
    lowest = min(0.0, *map(np.min, scores.values()))
    highest = max(1.0, *map(np.max, scores.values()))
    summary["profile"] = []
    for threshold in np.linspace(lowest, highest, 51).tolist():
        share = Figure("share above", partial(share_above, threshold=threshold), 0, 1)
        value, interval, _ = estimate(share, scores)
        summary["profile"].append([threshold, value, *(interval or (None, None))])
    return summary


def score_interval(scores: ArrayLike) -> tuple[float, float] | None:
    """The t interval of the mean score of one game `[sessions]`; None with fewer than 3 sessions."""
    scores = np.asarray(scores, np.float64)
    if scores.size < 3:
        return None
    reach = stdtrit(scores.size - 1, UPPER) * sample_std(scores) / np.sqrt(scores.size)
    return float(scores.mean() - reach), float(scores.mean() + reach)


def probability_of_improvement(scores: Scores, others: Scores) -> Estimate:
    """How probably a session of `scores` beats a session of `others`, averaged over the games, which must be
    equal.

    0.5 means no difference. For two trials of one game, pass one game each.
    """
    return estimate(IMPROVEMENT, scores, {game: others[game] for game in scores})
