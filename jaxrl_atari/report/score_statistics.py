"""Statistics of scores over sessions and games, with intervals: pure functions of arrays.

The mean score of one game has the t interval over its sessions. With normal scores and at least 3 sessions, it
contains the true mean in 95% of cases. A bootstrap over so few sessions would be far too narrow.

The statistics over several games come from Agarwal et al. 2021, "Deep RL at the Edge of the Statistical
Precipice" (arXiv:2108.13264). The scores x_mn of game m = 1..M and session n = 1..N_m are normalised by game
before they are aggregated.

`estimate` gives a statistic an interval that suits few sessions, statistic ± t · spread:

- The scores are resampled within each game, around its mean: x*_mn = mean_m + sqrt(N_m / (N_m - 1)) · r, where r
  is drawn with replacement from the residuals x_mn - mean_m. The factor gives the resampled scores the sample
  variance; without it, the spread would be too small by 29% with two sessions.
- spread is the root mean square distance of the resampled statistics from the statistic.
- t is Student's quantile. Its degrees of freedom follow Welch and Satterthwaite, for all games together:
  (sum_m v_m)² / sum_m (v_m² / f_m). Here v_m is the variance of game m's part of the statistic, and f_m is
  N_m - 1, summed over the suites. The median and the IQM are no sums of such parts, and the game's mean stands in.

Where such an interval would not hold, there is none, and the estimate says why. benchmarks/coverage.py measures
how often the intervals cover the true value; docs/compare.md has the table.

Two trials of one game are compared by Welch's t test (`difference`).
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from jaxrl_atari.report.metrics import sample_std

Scores = Mapping[str, ArrayLike]
"""Game -> scores of its sessions `[N_m]`. Games may have different numbers of sessions."""

GameScores = Sequence[np.ndarray]
"""The scores of each game `[..., N_m]`. A statistic has their leading axes."""

RESAMPLES = 2000
CONFIDENCE = 0.95
UPPER_QUANTILE = (1 + CONFIDENCE) / 2
ROUNDING = 1e-12  # a relative spread below this is the effect of rounding

INTERVALS_NOTE = (
    f"In parentheses: {CONFIDENCE:.0%} intervals over sessions, from a bootstrap of the residuals and Student's t "
    "(docs/compare.md says how often they cover the true value); (-) where there is none."
)
"""Explanation below tables of aggregates."""


class Estimate(NamedTuple):
    """A statistic with its interval, or with the reason why it has none."""

    value: float
    interval: tuple[float, float] | None
    why_none: str = ""


# --- Statistics --------------------------------------------------------------------------------------------------


def mean(games: GameScores) -> np.ndarray:
    """Mean over games of the mean over sessions: 1/M sum_m 1/N_m sum_n x_mn."""
    return np.mean([scores.mean(axis=-1) for scores in games], axis=0)


def median(games: GameScores) -> np.ndarray:
    """Median over games of the mean over sessions."""
    return np.median([scores.mean(axis=-1) for scores in games], axis=0)


def interquartile_mean(games: GameScores) -> np.ndarray:
    """IQM: mean of the middle half of all n scores. floor(n / 4) scores are cut at each end."""
    from scipy.stats import trim_mean  # takes a second to import

    return trim_mean(np.concatenate(games, axis=-1), 0.25, axis=-1)


def exact_middle_half(games: GameScores) -> np.ndarray:
    """Mean of exactly the middle half of all n scores: n / 4 are cut at each end, if need be a part of a score.

    Its distance from the IQM is the effect of rounding n / 4. For example, with 5 games of 2 sessions, the IQM
    cuts 2 scores at each end instead of 2.5. It is then the mean of 60% of the scores.
    """
    scores = np.sort(np.concatenate(games, axis=-1), axis=-1)
    count = scores.shape[-1]
    index = np.arange(count)
    weights = np.clip(np.minimum(index + 1 - count / 4, count - count / 4 - index), 0, 1)
    return (scores * weights).sum(axis=-1) / weights.sum()


def optimality_gap(games: GameScores) -> np.ndarray:
    """1 - mean of min(x_mn, 1) over all scores: 0 if all scores reach the target 1."""
    return 1.0 - np.minimum(np.concatenate(games, axis=-1), 1.0).mean(axis=-1)


def share_above(games: GameScores, threshold: float) -> np.ndarray:
    """Share of all scores that are greater than the threshold: one point of a performance profile."""
    return (np.concatenate(games, axis=-1) > threshold).mean(axis=-1)


def game_means(games: GameScores) -> np.ndarray:
    """Mean over sessions of each game `[M, ...]`."""
    return np.array([scores.mean(axis=-1) for scores in games])


def capped_parts(games: GameScores) -> np.ndarray:
    """The part of each game in the sum of min(x_mn, 1) over all scores `[M, ...]`."""
    return np.array([np.minimum(scores, 1.0).sum(axis=-1) for scores in games])


def parts_above(games: GameScores, threshold: float) -> np.ndarray:
    """The number of scores of each game that are greater than the threshold `[M, ...]`."""
    return np.array([(scores > threshold).sum(axis=-1) for scores in games])


def game_improvements(games: GameScores, others: GameScores) -> np.ndarray:
    """P(x > y) + P(x = y) / 2 for each game `[M, ...]`, over all pairs of sessions x of `games`, y of `others`."""
    pairs = ((x[..., :, None], y[..., None, :]) for x, y in zip(games, others, strict=True))
    return np.array([0.5 + 0.5 * np.sign(x - y).mean(axis=(-2, -1)) for x, y in pairs])


def improvement(games: GameScores, others: GameScores) -> np.ndarray:
    """Mean over games of `game_improvements`."""
    return game_improvements(games, others).mean(axis=0)


class Statistic(NamedTuple):
    """A statistic over games, with what its interval needs. The functions take the `GameScores` of each suite."""

    title: str
    compute: Callable[..., np.ndarray]
    low: float = -np.inf  # its smallest possible value
    high: float = np.inf  # its largest possible value
    parts: Callable[..., np.ndarray] = game_means  # what each game adds to it, or its mean instead `[M, ...]`
    exact: Callable[..., np.ndarray] | None = None  # the statistic without the rounding that biases it


STATISTICS = {
    "mean": Statistic("mean", mean),
    "median": Statistic("median", median),
    "iqm": Statistic("interquartile mean", interquartile_mean, exact=exact_middle_half),
    "optimality_gap": Statistic("optimality gap", optimality_gap, low=0, parts=capped_parts),
}
"""The aggregates over games by name. A smaller optimality gap is better."""


def share_statistic(threshold: float) -> Statistic:
    """A point of the performance profile: `share_above` with its interval."""
    compute = partial(share_above, threshold=threshold)
    return Statistic("share above", compute, 0, 1, parts=partial(parts_above, threshold=threshold))


IMPROVEMENT = Statistic("probability of improvement", improvement, 0, 1, parts=game_improvements)


# --- Estimates: statistics with intervals ------------------------------------------------------------------------


def _lists(suites: Sequence[Scores]) -> list[list[np.ndarray]]:
    """The scores of each game of each suite, without the names of the games.

    The games are sorted by name. Their order decides which random numbers each one gets in a bootstrap, and the
    same scores are to have the same intervals in whatever order their games ended.
    """
    return [[np.asarray(suite[game], np.float64) for game in sorted(suite)] for suite in suites]


def estimate(statistic: Statistic, *suites: Scores) -> Estimate:
    """A statistic of one or more suites, with its interval; the module's docstring describes the method.

    Args:
        suites: as many as `statistic.compute` takes, all with the same games.
    """
    games = _lists(suites)
    value = float(statistic.compute(*games))
    if any(scores.size < 2 for suite in games for scores in suite):
        return Estimate(value, None, "a game has a single session")
    rng = np.random.default_rng(0)
    resampled = [[_around_mean(scores, rng) for scores in suite] for suite in games]
    resampled_values = statistic.compute(*resampled)
    spread = np.sqrt(np.mean((resampled_values - value) ** 2))
    parts = statistic.parts(*resampled)
    if spread <= ROUNDING * np.abs(resampled_values).max() or not np.ptp(parts, axis=-1).any():
        return Estimate(value, None, "resampling the sessions does not change it")
    if statistic.exact is not None and abs(statistic.exact(*games) - value) > spread:
        count = sum(scores.size for scores in games[0])
        cut = count // 4
        reason = f"a quarter of {count} scores is not a whole number, and cutting {cut} at each end biases the IQM"
        return Estimate(value, None, reason)
    half_width = float(spread * stdtrit(_degrees_of_freedom(parts.var(axis=-1), games), UPPER_QUANTILE))
    return Estimate(value, (max(value - half_width, statistic.low), min(value + half_width, statistic.high)))


def _degrees_of_freedom(variances: np.ndarray, games: Sequence[Sequence[np.ndarray]]) -> float:
    """The degrees of freedom of Welch and Satterthwaite for all games together.

    Args:
        variances: v `[M]`, the variance of each game's part of the statistic, not all 0.
        games: the scores of each game of each suite.
    """
    shares = variances / variances.max()  # the result does not depend on the unit, and squares do not underflow
    freedom = np.sum([[scores.size - 1 for scores in suite] for suite in games], axis=0)  # f
    return float(shares.sum() ** 2 / (shares**2 / freedom).sum())


def _around_mean(scores: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Resampled scores of a game `[RESAMPLES, N_m]`, with the sample variance."""
    residuals = (scores - scores.mean()) * np.sqrt(scores.size / (scores.size - 1))
    return scores.mean() + residuals[rng.integers(scores.size, size=(RESAMPLES, scores.size))]


def score_interval(scores: ArrayLike) -> tuple[float, float] | None:
    """The t interval of the mean score of one game `[sessions]`; None below 3 sessions or with equal scores."""
    scores = np.asarray(scores, np.float64)
    if scores.size < 3 or np.ptp(scores) == 0:
        return None
    half_width = stdtrit(scores.size - 1, UPPER_QUANTILE) * sample_std(scores) / np.sqrt(scores.size)
    return float(scores.mean() - half_width), float(scores.mean() + half_width)


def probability_of_improvement(scores: Scores, others: Scores) -> Estimate:
    """The probability that a session of `scores` beats a session of `others`, as a mean over the games.

    0.5 means no difference. For two trials of one game, pass one game each.

    Args:
        scores, others: scores of the same games.
    """
    return estimate(IMPROVEMENT, scores, {game: others[game] for game in scores})


# --- Two trials of one game --------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """The difference of the mean scores of two trials, by Welch's t test."""

    value: float
    p: float
    interval: tuple[float, float] | None  # None if one of the means has none; see `score_interval`
    sessions_needed: int | None  # of each trial, to find this difference in 4 of 5 experiments; None above 1,000

    @property
    def is_significant(self) -> bool:
        """Whether chance alone would rarely make such a difference, and both means have intervals."""
        return self.interval is not None and self.p < 1 - CONFIDENCE


def difference(scores: ArrayLike, others: ArrayLike) -> Difference | None:
    """How much larger the mean of `scores` is than that of `others`; both `[sessions]`, at least 2 of each.

    Returns:
        None if a trial has a single session, or if neither has a spread.
    """
    from scipy.stats import ttest_ind  # takes a second to import

    x, y = np.asarray(scores, np.float64), np.asarray(others, np.float64)
    if min(x.size, y.size) < 2 or np.ptp(x) == np.ptp(y) == 0:
        return None
    test = ttest_ind(x, y, equal_var=False)
    p = float(np.asarray(test)[1])
    interval = None
    if score_interval(x) and score_interval(y):
        found = test.confidence_interval(CONFIDENCE)
        interval = (float(found.low), float(found.high))
    value = float(x.mean() - y.mean())
    std = np.sqrt((x.var(ddof=1) + y.var(ddof=1)) / 2)
    return Difference(value, p, interval, sessions_needed(abs(value) / std))


def sessions_needed(effect: float) -> int | None:
    """The sessions of each of two trials with which a t test finds a difference in 4 of 5 experiments.

    Args:
        effect: the true difference of the means, in standard deviations over sessions.

    Returns:
        The smallest such number; None above 1,000.
    """
    from scipy.stats import nct

    count = np.arange(2, 1001)
    freedom = 2 * (count - 1)
    threshold = stdtrit(freedom, UPPER_QUANTILE)
    power = nct.sf(threshold, freedom, effect * np.sqrt(count / 2))
    enough = count[power >= 0.8]
    return int(enough[0]) if enough.size else None
