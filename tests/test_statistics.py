"""Statistics of scores, with numbers worked out by hand and scipy as a second opinion."""

from functools import partial

import numpy as np
import pytest
from scipy import stats  # a dependency of JAX

from jaxrl_atari.report import statistics
from jaxrl_atari.report.statistics import aggregate, estimate, performance_profile, probability_of_improvement

RLIABLE = {
    "mean": 0.92,
    "median": 0.9800000000000001,
    "iqm": 0.9157894736842106,
    "optimality_gap": 0.2571428571428571,
    "improvement": 0.46785714285714286,
}
RLIABLE_INTERVALS = {
    "mean": (0.7457, 1.0914),
    "median": (0.72, 1.12),
    "iqm": (0.7421, 1.1),
    "optimality_gap": (0.1514, 0.3714),
    "improvement": (0.325, 0.6036),
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


def test_mean_and_median_are_over_games_of_the_mean_over_sessions():
    assert statistics.mean(games(*SCORES.values())) == pytest.approx((1 + 5 + 10) / 3)
    assert statistics.median(games(*SCORES.values())) == 5
    assert statistics.median(games([0, 2], [5, 5])) == 3


def test_interquartile_mean():
    assert statistics.interquartile_mean(games([100, 1, 2, 3])) == 2.5
    assert statistics.interquartile_mean(games([0, 8], [1, 2], [3, 4], [5, 1000])) == 3.5  # of 2, 3, 4, 5
    assert statistics.interquartile_mean(games([1, 2, 6])) == 3  # floor(3 / 4) = 0 are cut


def test_interquartile_mean_equals_scipys_trimmed_mean():
    for size in range(1, 30):
        scores = np.random.default_rng(size).normal(size=size)
        assert statistics.interquartile_mean([scores]) == pytest.approx(stats.trim_mean(scores, 0.25))


def test_optimality_gap():
    # min(x, 1) is 0, 1, 0.5, 1: mean 0.625.
    assert statistics.optimality_gap(games([0.0, 3.0], [0.5, 1.0])) == 0.375
    assert statistics.optimality_gap(games([2.0], [1.0])) == 0


def test_a_performance_profile_is_the_share_of_sessions_above_each_threshold():
    profile = performance_profile({"A": [0.0, 1.0], "B": [1.0, 3.0]}, [-1.0, 0.0, 1.0, 3.0])
    assert [point.value for point in profile] == [1, 0.75, 0.25, 0]  # greater, not equal
    assert profile[0].interval == (1, 1)
    # A's sessions are 0 or 1 and B's 1 or 3: above 0 are 2, 3 or 4 of 4; above 1 are 0, 1 or 2.
    assert profile[1].interval == (0.5, 1.0)
    assert profile[2].interval == (0.0, 0.5)


def test_probability_of_improvement():
    # A: 3 > 1, 3 > 2, 2 > 1 and 2 = 2: 3.5 of 4. B: never.
    chance = probability_of_improvement({"A": [3, 2], "B": [0, 0]}, {"B": [1, 1, 1], "A": [1, 2], "C": [9, 9]})
    assert chance.value == pytest.approx((0.875 + 0) / 2)
    low, high = chance.interval
    assert 0.125 <= low < chance.value < high <= 0.5
    assert probability_of_improvement({"A": [1, 2]}, {"A": [1, 2]}).value == 0.5
    assert probability_of_improvement({"A": [2, 3]}, {"A": [0, 1]}) == (1.0, (1.0, 1.0))  # two trials of one game


def test_probability_of_improvement_equals_the_mann_whitney_statistic():
    x, y = random_matrix(0), random_matrix(1, sessions=4)
    expected = [stats.mannwhitneyu(a, b).statistic / (a.size * b.size) for a, b in zip(x.T, y.T, strict=True)]
    assert probability_of_improvement(by_game(x), by_game(y)).value == pytest.approx(np.mean(expected))


def test_figures_are_those_of_rliable():
    """Values of rliable 1.2.0 (`rliable.metrics` and `rliable.library`) for these matrices."""
    x, y = random_matrix(0), random_matrix(1, sessions=4)
    found = {name: estimate(figure, by_game(x)) for name, (_, figure) in statistics.FIGURES.items()}
    found["improvement"] = probability_of_improvement(by_game(x), by_game(y))
    assert {name: value for name, (value, _) in found.items()} == pytest.approx(RLIABLE)
    for name, (low, high) in RLIABLE_INTERVALS.items():
        assert found[name].interval == pytest.approx((low, high), abs=0.03)
    profile = performance_profile(by_game(x), [0.0, 0.5, 1.0, 1.5])
    assert [value for value, _ in profile] == pytest.approx(RLIABLE_PROFILE)


def test_aggregate_over_games():
    summary = aggregate(SCORES)
    assert summary["games"] == 3
    assert summary["median"] == 5  # of the means 1, 5, 10
    assert summary["iqm"] == pytest.approx((2 + 5 + 5 + 9 + 10) / 5)  # without 0 and 11
    # B's sessions are equal and between A's and C's: resampling cannot change the median.
    assert summary["median_interval"] == [5, 5]
    low, high = summary["iqm_interval"]
    assert low < summary["iqm"] < high
    assert summary == aggregate(SCORES)


def test_the_bootstrap_is_stratified():
    # The sessions of each game are equal, so resampling within games changes nothing. Resampling over all games
    # would change which games occur, and the interval would not be a point.
    summary = aggregate({"A": [0.0, 0.0], "B": [1.0, 1.0], "C": [9.0, 9.0]})
    assert summary["median_interval"] == [1, 1]
    assert summary["iqm_interval"] == [summary["iqm"], summary["iqm"]]


def test_the_bootstrap_interval_of_one_game_is_that_of_its_mean():
    # The interval of the mean of n sessions is about mean +- 1.96 std / sqrt(n).
    scores = np.random.default_rng(0).normal(1.0, 2.0, size=100)
    half_width = 1.96 * scores.std() / 10
    for low, high in (statistics.score_interval(scores), aggregate({"A": scores})["median_interval"]):
        assert low == pytest.approx(scores.mean() - half_width, abs=0.06)
        assert high == pytest.approx(scores.mean() + half_width, abs=0.06)


def test_a_smaller_confidence_gives_a_narrower_interval(monkeypatch):
    scores = {"A": np.random.default_rng(0).normal(size=30)}
    wide_low, wide_high = estimate(statistics.mean, scores).interval
    monkeypatch.setattr(statistics, "CONFIDENCE", 0.5)
    low, high = estimate(statistics.mean, scores).interval
    assert wide_low < low < high < wide_high
    draws = np.random.default_rng(0).choice(scores["A"], (20_000, 30)).mean(axis=1)
    assert (low, high) == pytest.approx(np.quantile(draws, [0.25, 0.75]), abs=0.02)


def test_the_interval_covers_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        low, high = estimate(statistics.mean, {"A": rng.normal(size=20), "B": rng.normal(size=20)}).interval
        covered += low <= 0 <= high
    assert 0.88 <= covered / 200 <= 0.99


def test_with_one_session_of_a_game_there_is_no_interval():
    assert statistics.score_interval([3.0]) is None
    summary = aggregate({"A": [1.0], "B": [2.0, 4.0]})
    assert summary["mean"] == 2
    assert {summary[f"{name}_interval"] for name in statistics.FIGURES} == {None}
    assert performance_profile({"A": [1.0]}, [0.0]) == [(1.0, None)]
    assert probability_of_improvement({"A": [1.0, 2.0]}, {"A": [0.0]}) == (1.0, None)


def test_an_iqm_curve_is_the_iqm_at_each_point():
    curves = {"A": np.array([[0.0, 1.0, 2.0], [0.0, 3.0, 4.0]]), "B": np.array([[1.0, 1.0, 8.0], [1.0, 7.0, 6.0]])}
    curve = statistics.iqm_curve(curves)
    assert [value for value, _ in curve] == [0.5, 2.0, 5.0]
    assert curve[0].interval == (0.5, 0.5)
    low, high = curve[1].interval
    assert 1 <= low < 2 < high <= 7


def test_resampled_figures_are_those_of_each_resample():
    """The leading axis of a resample is carried through every figure."""
    x, y = random_matrix(0), random_matrix(1)
    pair = [np.stack([a, b]) for a, b in zip(x.T, y.T, strict=True)]
    functions = [figure for _, figure in statistics.FIGURES.values()]
    for figure in [*functions, partial(statistics.share_above, threshold=1.0)]:
        np.testing.assert_allclose(figure(pair), [figure(list(x.T)), figure(list(y.T))])
    np.testing.assert_allclose(
        statistics.improvement(pair, pair[::-1]),
        [statistics.improvement(list(m.T), list(m.T[::-1])) for m in (x, y)],
    )
