"""Statistics of scores, with numbers worked out by hand, scipy and rliable as second opinions, and coverage."""

import numpy as np
import pytest
from scipy import stats  # a dependency of JAX

from jaxrl_atari.report import score_statistics as statistics
from jaxrl_atari.report.aggregates import suite_statistics
from jaxrl_atari.report.score_statistics import (
    IMPROVEMENT,
    STATISTICS,
    difference,
    estimate,
    probability_of_improvement,
    score_interval,
    sessions_needed,
    share_above,
)

RLIABLE = {  # rliable 1.2.0 for `random_matrix` 0, and 0 against 1
    "mean": 0.92,
    "median": 0.98,
    "iqm": 0.9157894736842106,
    "optimality_gap": 0.2571428571428571,
    "improvement": 0.46785714285714286,
}
RLIABLE_PROFILE = [0.9714285714285714, 0.7428571428571429, 0.42857142857142855, 0.14285714285714285]
SCORES = {"A": [0.0, 2.0], "B": [5.0, 5.0], "C": [9.0, 11.0, 10.0]}


def games(*scores):
    return [np.asarray(game, float) for game in scores]


def random_matrix(seed, sessions=5, count=7):
    """Scores [sessions, games], with ties."""
    return np.random.default_rng(seed).normal(1.0, 0.7, (sessions, count)).round(1)


def by_game(matrix):
    return {str(game): column for game, column in enumerate(matrix.T)}


def test_statistics_worked_out_by_hand():
    assert statistics.mean(games(*SCORES.values())) == pytest.approx((1 + 5 + 10) / 3)
    assert statistics.median(games(*SCORES.values())) == 5
    assert statistics.interquartile_mean(games([0, 8], [1, 2], [3, 4], [5, 1000])) == 3.5  # of 2, 3, 4, 5
    assert statistics.interquartile_mean(games([1, 2, 6])) == 3  # floor(3 / 4) = 0 are cut
    assert statistics.optimality_gap(games([0.0, 3.0], [0.5, 1.0])) == 0.375  # min(x, 1) is 0, 1, 0.5, 1
    assert share_above(games([0.0, 1.0], [1.0, 3.0]), 1.0) == 0.25  # greater, not equal


def test_statistics_are_those_of_rliable():
    x, y = by_game(random_matrix(0)), by_game(random_matrix(1, sessions=4))
    for name, value in RLIABLE.items():
        suites = (x, y) if name == "improvement" else (x,)
        statistic = IMPROVEMENT if name == "improvement" else STATISTICS[name]
        assert estimate(statistic, *suites).value == pytest.approx(value)
    columns = list(x.values())
    profile = [share_above(columns, threshold) for threshold in (0.0, 0.5, 1.0, 1.5)]
    assert profile == pytest.approx(RLIABLE_PROFILE)


def test_the_interval_of_the_mean_is_welchs():
    """For the mean over games, the method has an exact form: the normalised sum of the games' means."""
    scores = {"A": [1.0, 2.0, 4.0], "B": [10.0, 30.0], "C": [5.0, 5.5, 6.0, 7.5]}
    variances = np.array([np.var(game, ddof=1) / len(game) for game in scores.values()])
    freedom = variances.sum() ** 2 / sum(
        v**2 / (len(g) - 1) for v, g in zip(variances, scores.values(), strict=True)
    )
    center = np.mean([np.mean(game) for game in scores.values()])
    reach = stats.t.ppf(0.975, freedom) * np.sqrt(variances.sum()) / 3
    found = estimate(STATISTICS["mean"], scores)
    assert found.value == pytest.approx(center)
    assert found.interval == pytest.approx((center - reach, center + reach), rel=0.05)  # 2,000 resamples


def test_where_an_interval_cannot_hold_there_is_none_and_the_reason():
    rng = np.random.default_rng(0)
    close = {str(i): i**2 + rng.normal(0, 0.01, 2) for i in range(5)}  # 10 scores: 2 are cut, not 2.5
    found = estimate(STATISTICS["iqm"], close)
    assert found.interval is None
    why = "a quarter of 10 scores is not a whole number, and cutting 2 at each end biases the IQM"
    assert found.why_none == why
    assert estimate(STATISTICS["mean"], close).interval is not None
    six = close | {"5": 25 + rng.normal(0, 0.01, 2)}  # 12 scores: 3 are cut
    assert estimate(STATISTICS["iqm"], six).interval is not None
    ahead = probability_of_improvement({"A": [3.0, 4.0]}, {"A": [1.0, 2.0]})
    assert ahead.interval is None
    assert ahead.why_none == "resampling the sessions does not change it"


def test_a_game_that_contributes_nothing_to_a_statistic_lends_it_no_degrees_of_freedom():
    gap = STATISTICS["optimality_gap"]
    below = {"A": [0.4, 0.6]}
    above = {"B": [2.0, 5.0, 3.0, 4.0]}  # beyond the target, where the spread does not matter
    alone, beside = estimate(gap, below), estimate(gap, below | above)
    width, shared = (found.interval[1] - found.value for found in (alone, beside))
    assert shared == pytest.approx(width * 2 / 6)  # 2 of 6 scores, with one degree of freedom in both


def test_sessions_without_spread_have_no_interval_of_width_zero():
    none = (None, "resampling the sessions does not change it")
    one, other = {"A": [10.0, 11.0], "B": [0.0, 1.0]}, {"A": [0.0, 1.0], "B": [10.0, 11.0]}
    assert probability_of_improvement(one, other) == (0.5, *none)  # each wins a game by far
    equal = {"A": [0.1, 0.1, 0.1], "B": [0.3, 0.3, 0.3]}
    for statistic in STATISTICS.values():
        assert estimate(statistic, equal)[1:] == none
    bands = {(low, high) for _, _, low, high in suite_statistics(one).profile if low is not None}
    assert all(low < high for low, high in bands)


@pytest.mark.parametrize(("statistic", "at_least"), [("iqm", 0.88), ("mean", 0.91)])
def test_the_intervals_over_games_hold(statistic, at_least):
    """26 games with 3 sessions. Loose: 150 suites; benchmarks/coverage.py has the measurement."""
    rng = np.random.default_rng(1)
    means, stds = rng.lognormal(0, 1, 26), rng.lognormal(-2, 1, 26)
    many = [rng.normal(mean, std, 20_000) for mean, std in zip(means, stds, strict=True)]
    true = float(STATISTICS[statistic].compute(many))
    held = []
    for _ in range(150):
        scores = {str(i): rng.normal(mean, std, 3) for i, (mean, std) in enumerate(zip(means, stds, strict=True))}
        low, high = estimate(STATISTICS[statistic], scores).interval
        held.append(low <= true <= high)
    assert np.mean(held) >= at_least


def test_probability_of_improvement():
    # A: 3 > 1, 3 > 2, 2 > 1 and 2 = 2: 3.5 of 4. B: never.
    chance = probability_of_improvement({"A": [3, 2], "B": [0, 0]}, {"B": [1, 1, 1], "A": [1, 2], "C": [9, 9]})
    assert chance.value == pytest.approx((0.875 + 0) / 2)
    x, y = random_matrix(0), random_matrix(1, sessions=4)
    expected = [stats.mannwhitneyu(a, b).statistic / (a.size * b.size) for a, b in zip(x.T, y.T, strict=True)]
    assert probability_of_improvement(by_game(x), by_game(y)).value == pytest.approx(np.mean(expected))


def test_aggregate_over_games_by_a_stratified_bootstrap():
    found = suite_statistics(SCORES)
    iqm = found.aggregates["iqm"]
    assert found.games == 3
    assert iqm.value == pytest.approx((2 + 5 + 5 + 9 + 10) / 5)  # without 0 and 11
    # B's sessions are equal and between A's and C's: resampling within games cannot change the median.
    assert found.aggregates["median"] == (5, None, "resampling the sessions does not change it")
    low, high = iqm.interval
    assert low < iqm.value < high
    assert found == suite_statistics(SCORES)
    profile = np.array(found.profile)  # thresholds 0 to 11, the highest score
    assert profile[[0, 25, -1], 0] == pytest.approx([0, 5.5, 11])
    assert profile[[0, 25, -1], 1] == pytest.approx([6 / 7, 3 / 7, 0])
    known = profile[profile[:, 2] != None].astype(float)  # noqa: E711  # without an interval where no score can be
    assert np.all(np.diff(known[:, [2, 1, 3]]) >= 0)


def test_with_one_session_of_a_game_there_is_no_interval():
    aggregates = suite_statistics({"A": [1.0], "B": [2.0, 4.0]}).aggregates
    assert aggregates["mean"].value == 2
    assert {each[1:] for each in aggregates.values()} == {(None, "a game has a single session")}
    assert probability_of_improvement({"A": [1.0, 2.0]}, {"A": [0.0]})[:2] == (1.0, None)


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
    assert found.is_significant == (found.p < 0.05)
    assert difference([1.0], y) is None
    two = difference([1.0, 2.0], [5.0, 9.0])
    assert (two.interval, two.is_significant) == (None, False)  # as the table of scores has no interval of these


def test_the_sessions_needed_are_those_of_the_table_in_the_docs():
    """How often a t test finds the difference, by simulation, is about 0.8 with so many and less with fewer."""
    table = {(0.10, 0.09): 14, (0.20, 0.09): 5, (0.10, 0.15): 37, (0.05, 0.22): 305}
    assert {case: sessions_needed(case[0] / case[1]) for case in table} == table
    rng = np.random.default_rng(0)
    x, y = rng.normal(10, 9, (4000, 14)), rng.normal(0, 9, (4000, 14))
    assert np.mean(stats.ttest_ind(x, y, axis=1).pvalue < 0.05) == pytest.approx(0.8, abs=0.03)
    assert sessions_needed(0.0) is None
