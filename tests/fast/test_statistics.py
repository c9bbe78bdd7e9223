"""Statistics of scores, with numbers worked out by hand, scipy and rliable as second opinions, and coverage."""

import numpy as np
import pytest
from scipy import stats  # a dependency of JAX

from jaxrl_atari.report.score_statistics import (
    IMPROVEMENT,
    STATISTICS,
    difference,
    estimate,
    interquartile_mean,
    score_interval,
    sessions_needed,
)

RLIABLE = {"mean": 0.92, "median": 0.98, "optimality_gap": 0.2571428571428571}
"""rliable 1.2.0 for `random_matrix` 0."""


def games(*scores):
    """The scores [sessions, games] of some games."""
    return np.array(scores, float).T


def random_matrix(seed, sessions=5, count=7):
    """Scores [sessions, games], with ties."""
    return np.random.default_rng(seed).normal(1.0, 0.7, (sessions, count)).round(1)


def test_the_interquartile_mean_counts_a_score_at_its_edge_in_part():
    # 1.5 of 6 scores are cut at each end.
    assert interquartile_mean(games([0, 2], [5, 5], [9, 11])) == pytest.approx((2 / 2 + 5 + 5 + 9 / 2) / 3)
    assert interquartile_mean(games([1], [2], [6])) == pytest.approx((1 / 4 + 2 + 6 / 4) / 1.5)


def test_statistics_are_those_of_rliable():
    x = random_matrix(0)
    for name, value in RLIABLE.items():
        assert estimate(STATISTICS[name], x).value == pytest.approx(value)
    assert estimate(STATISTICS["iqm"], x[:4]).value == pytest.approx(
        stats.trim_mean(x[:4], 0.25, axis=None)
    )  # as rliable


def test_the_interval_of_the_mean_is_welchs():
    """For the mean over games, the method has an exact form: the normalised sum of the games' means."""
    scores = games([1.0, 2.0, 4.0], [10.0, 30.0, 26.0], [5.0, 5.5, 7.5])
    variances = scores.var(axis=0, ddof=1) / 3
    freedom = variances.sum() ** 2 / (variances**2 / 2).sum()
    reach = stats.t.ppf(0.975, freedom) * np.sqrt(variances.sum()) / 3
    found = estimate(STATISTICS["mean"], scores)
    assert found.value == pytest.approx(scores.mean())
    low, high = found.interval
    assert ((high - low) / 2, (low + high) / 2) == pytest.approx((reach, found.value), rel=0.05)  # 2,000 resamples


def test_where_an_interval_cannot_hold_there_is_none():
    assert estimate(IMPROVEMENT, games([3.0, 4.0]), games([1.0, 2.0])) == (1, None)
    one, other = games([10.0, 11.0], [0.0, 1.0]), games([0.0, 1.0], [10.0, 11.0])
    assert estimate(IMPROVEMENT, one, other) == (0.5, None)  # each wins a game by far
    equal = games([0.1, 0.1, 0.1], [0.3, 0.3, 0.3])
    assert {estimate(statistic, equal).interval for statistic in STATISTICS.values()} == {None}
    single = games([1.0], [2.0])
    assert [estimate(statistic, single).interval for statistic in STATISTICS.values()] == [None] * 4
    assert estimate(IMPROVEMENT, games([1.0, 2.0]), games([0.0])) == (1.0, None)
    assert estimate(IMPROVEMENT, random_matrix(0), random_matrix(1)) == estimate(
        IMPROVEMENT, random_matrix(0), random_matrix(1)
    ), "the same in every report"


def test_a_game_that_contributes_nothing_to_a_statistic_lends_it_no_degrees_of_freedom():
    gap = STATISTICS["optimality_gap"]
    below = games([0.4, 0.6])
    beside = games([0.4, 0.6], [2.0, 5.0])  # beyond the target, where the spread does not matter
    width, shared = (found.interval[1] - found.value for found in (estimate(gap, below), estimate(gap, beside)))
    assert shared == pytest.approx(width / 2, rel=0.05)  # with one degree of freedom in both


@pytest.mark.parametrize(("statistic", "at_least"), [("iqm", 0.88), ("mean", 0.91)])
def test_the_intervals_over_games_hold(statistic, at_least):
    """26 games with 3 sessions. Loose: 150 suites; benchmarks/coverage.py has the measurement."""
    rng = np.random.default_rng(1)
    means, stds = rng.lognormal(0, 1, 26), rng.lognormal(-2, 1, 26)
    true = float(STATISTICS[statistic].compute(rng.normal(means, stds, (20_000, 26))))
    held = []
    for _ in range(150):
        low, high = estimate(STATISTICS[statistic], rng.normal(means, stds, (3, 26))).interval
        held.append(low <= true <= high)
    assert np.mean(held) >= at_least


def test_probability_of_improvement():
    x, y = random_matrix(0), random_matrix(1, sessions=4)
    expected = [stats.mannwhitneyu(a, b).statistic / (a.size * b.size) for a, b in zip(x.T, y.T, strict=True)]
    assert IMPROVEMENT.compute(x, y) == pytest.approx(np.mean(expected))


def test_the_interval_of_one_game_is_the_t_interval_from_three_sessions_on():
    assert score_interval([3.0]) is score_interval([3.0, 4.0]) is None
    for sessions in (3, 4, 10):
        scores = np.random.default_rng(sessions).normal(size=sessions)
        expected = stats.t.interval(0.95, sessions - 1, loc=scores.mean(), scale=stats.sem(scores))
        assert score_interval(scores) == pytest.approx(expected)
    assert score_interval([21.0, 21.0, 21.0]) is None


def test_the_difference_of_two_trials_is_welchs_test():
    x, y = [10.0, 14.0, 12.0, 16.0], [1.0, 2.0, 9.0]
    variances = [np.var(scores, ddof=1) / len(scores) for scores in (x, y)]
    freedom = sum(variances) ** 2 / (variances[0] ** 2 / 3 + variances[1] ** 2 / 2)
    error = sum(variances) ** 0.5
    found = difference(x, y)
    assert found.value == pytest.approx(9)
    reach = stats.t.ppf(0.975, freedom) * error
    assert found.interval == pytest.approx((9 - reach, 9 + reach))
    assert found.p == pytest.approx(2 * stats.t.sf(9 / error, freedom))
    assert difference([1.0], y) is None
    two = difference([10.0, 11.0], [20.0, 21.0])
    assert two.interval is None, "as the table of scores has no interval of these"


def test_the_sessions_needed_are_those_of_the_table_in_the_docs():
    table = {(0.10, 0.09): 14, (0.20, 0.09): 5, (0.10, 0.15): 37, (0.05, 0.22): 305}
    assert {case: sessions_needed(case[0] / case[1]) for case in table} == table
    assert sessions_needed(0.0) is None
