"""Statistics of scores over sessions and games, with intervals: pure functions of arrays.

The mean score of one game has the t interval over its sessions. With normal scores and at least 3 sessions, it
contains the true mean in 95% of cases. A bootstrap over so few sessions would be far too narrow.

The statistics over several games come from Agarwal et al. 2021, "Deep RL at the Edge of the Statistical
Precipice" (arXiv:2108.13264). The scores `[N, M]` of a suite are x_nm of session n = 1..N and game m = 1..M,
normalised by game. Leading axes hold further such suites.

`estimate` gives a statistic an interval that suits few sessions, statistic ± t · spread:

- The scores are resampled within each game, around its mean: x*_nm = mean_m + sqrt(N / (N - 1)) · r, where r is
  drawn with replacement from the residuals x_nm - mean_m. The factor gives the resampled scores the sample
  variance; without it, the spread would be too small by 29% with two sessions.
- spread is the root mean square distance of the resampled statistics from the statistic.
- t is Student's quantile. Its degrees of freedom follow Welch and Satterthwaite, for all games together:
  f (sum_m v_m)² / sum_m v_m². Here v_m is the variance of game m's value in the statistic, and f is N - 1, summed
  over the suites. The median and the IQM are no means of such values, and the game's mean stands in.

benchmarks/coverage.py measures how often the intervals cover the true value; docs/compare.md has the figures.

Two trials of one game are compared by Welch's t test (`difference`).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

RESAMPLES = 2000
CONFIDENCE = 0.95
UPPER_QUANTILE = (1 + CONFIDENCE) / 2
ROUNDING = 1e-12  # a relative spread below this is the effect of rounding


class Estimate(NamedTuple):
    """A statistic with its interval."""

    value: float
    interval: tuple[float, float] | None  # None if there is a single session, or no spread over sessions


# --- Statistics over games ---------------------------------------------------------------------------------------


def game_means(scores: np.ndarray) -> np.ndarray:
    """Mean over sessions of each game `[..., M]`."""
    return scores.mean(axis=-2)


def median(scores: np.ndarray) -> np.ndarray:
    """Median over games of the mean over sessions."""
    return np.median(game_means(scores), axis=-1)


def interquartile_mean(scores: np.ndarray) -> np.ndarray:
    """IQM: mean of exactly the middle half of all scores, where a score at its edge counts in part.

    It equals that of rliable if the number n of scores is a multiple of 4. rliable cuts floor(n / 4) scores at
    each end, and so keeps 60% of 10 scores.
    """
    ordered = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    count = ordered.shape[-1]
    position = np.arange(count)
    weights = np.clip(np.minimum(position + 1, count - position) - count / 4, 0, 1)
    return ordered @ weights / weights.sum()


def shortfalls(scores: np.ndarray) -> np.ndarray:
    """1 - mean over sessions of min(x_nm, 1) for each game `[..., M]`: 0 if all scores reach the target 1."""
    return 1.0 - np.minimum(scores, 1.0).mean(axis=-2)


def improvements(scores: np.ndarray, others: np.ndarray) -> np.ndarray:
    """P(x > y) + P(x = y) / 2 for each game `[..., M]`, over pairs of sessions x of `scores` and y of `others`."""
    pairs = np.sign(scores[..., :, None, :] - others[..., None, :, :])
    return 0.5 + 0.5 * pairs.mean(axis=(-3, -2))


class Statistic(NamedTuple):
    """A statistic of one or more suites over games. Its functions take the scores `[..., N, M]` of each suite."""

    title: str
    game_values: Callable[..., np.ndarray] = (
        game_means  # what it is a mean of, or what stands in for it `[..., M]`
    )
    combined: Callable[..., np.ndarray] | None = None  # None: the mean of `game_values`
    low: float = -np.inf  # its smallest possible value
    high: float = np.inf  # its largest possible value

    def compute(self, *suites: np.ndarray) -> np.ndarray:
        """The statistic `[...]`."""
        return self.game_values(*suites).mean(axis=-1) if self.combined is None else self.combined(*suites)


STATISTICS = {
    "mean": Statistic("mean"),
    "median": Statistic("median", combined=median),
    "iqm": Statistic("interquartile mean", combined=interquartile_mean),
    "optimality_gap": Statistic("optimality gap", shortfalls, low=0),
}
"""The aggregates over games by name. A smaller optimality gap is better."""


IMPROVEMENT = Statistic("probability of improvement", improvements, low=0, high=1)
"""The probability that a session of a suite beats one of another suite, as a mean over games."""


def estimate(statistic: Statistic, *suites: np.ndarray) -> Estimate:
    """A statistic of one or more suites, with its interval; the module's docstring describes the method.

    Args:
        suites: the scores `[N, M]` of as many suites as the statistic takes, of the same games.
    """
    value = float(statistic.compute(*suites))
    if any(len(scores) < 2 for scores in suites):
        return Estimate(value, None)
    rng = np.random.default_rng(0)
    resampled = [_around_mean(scores, rng) for scores in suites]
    values = statistic.compute(*resampled)
    spread = np.sqrt(np.mean((values - value) ** 2))
    if spread <= ROUNDING * np.abs(values).max():
        return Estimate(value, None)
    variances = statistic.game_values(*resampled).var(axis=0)
    shares = variances / variances.max()  # the result does not depend on the unit, and squares do not underflow
    freedom = sum(len(scores) - 1 for scores in suites) * shares.sum() ** 2 / (shares**2).sum()
    half_width = float(spread * stdtrit(freedom, UPPER_QUANTILE))
    return Estimate(value, (max(value - half_width, statistic.low), min(value + half_width, statistic.high)))


def _around_mean(scores: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Resampled scores `[RESAMPLES, N, M]`, with the sample variance in each game."""
    sessions = len(scores)
    residuals = (scores - scores.mean(axis=0)) * np.sqrt(sessions / (sessions - 1))
    drawn = rng.integers(sessions, size=(RESAMPLES, *scores.shape))
    return scores.mean(axis=0) + np.take_along_axis(residuals[None], drawn, axis=1)


# --- One game ----------------------------------------------------------------------------------------------------


def score_interval(scores: ArrayLike) -> tuple[float, float] | None:
    """The t interval of the mean score of one game `[sessions]`; None below 3 sessions or with equal scores."""
    scores = np.asarray(scores, np.float64)
    if scores.size < 3 or np.ptp(scores) == 0:
        return None
    half_width = stdtrit(scores.size - 1, UPPER_QUANTILE) * scores.std(ddof=1) / np.sqrt(scores.size)
    return float(scores.mean() - half_width), float(scores.mean() + half_width)


class Difference(NamedTuple):
    """The difference of the mean scores of two trials, by Welch's t test."""

    value: float
    p: float
    interval: tuple[float, float] | None  # None if one of the means has none; see `score_interval`
    sessions_needed: int | None  # of each trial, to find this difference in 4 of 5 experiments; None above 1,000


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
