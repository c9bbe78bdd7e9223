"""Figures of sessions and trials, with expected values worked out by hand, and the summary of a run's files."""

from dataclasses import replace

import numpy as np
import pytest
from sample_runs import table, write_checkpoint, write_run

from jaxrl_atari.envs.games import GAMES, Game, Reference
from jaxrl_atari.errors import UserError
from jaxrl_atari.report import metrics
from jaxrl_atari.report.metrics import session_metrics
from jaxrl_atari.report.summary import read_run
from jaxrl_atari.report.text import differences, summary_table
from jaxrl_atari.runs.files import write_json

NAN = np.nan
# Random play scores 10, so that str_i = return_mean - 10.
GAME = Game(
    "Qbert",
    0.95,
    references=(Reference("PPO", 110.0),),
    random=Reference("random play", 10.0),
    human=Reference("human", 70.0),
    dqn_random=Reference("random", 20.0),
)


def test_normalised_scores():
    assert metrics.human_normalised(45, GAME) == 0.5  # (45 - 20) / (70 - 20)
    assert metrics.reference_normalised(60, GAME) == 0.5  # (60 - 10) / (110 - 10)
    assert metrics.reference_normalised(-8.105, GAMES["DoubleDunk"]) == pytest.approx(9.995 / 15.07)
    assert metrics.human_normalised(5.0, GAMES["Kaboom"]) is None
    assert metrics.reference_normalised(5.0, GAMES["Kaboom"]) is None
    assert metrics.reference_normalised(-20000.0, GAMES["Skiing"]) is None  # its reference is below random play


def test_session_metrics_skip_log_points_before_the_first_game_ends():
    shares = {"gpu_busy_percent": [NAN, 100, 80, 70, 70], "policy_percent": [NAN, 10, 20, 30, 40]}
    figures = session_metrics(table([NAN, 10, 20, 30, 20], **shares), GAME)
    # Strengths 0, 10, 20, 10 at env steps 200, 300, 400, 500 and optimiser steps 8, 12, 16, 20.
    expected = {
        "final_return_ma": 20,  # mean of 10, 20, 30, 20
        "final_return_mean": 20,
        "max_return_ma": 20,
        "strength": 10,
        "max_strength": 20,
        "final_strength": 10,
        "sample_efficiency": (10 / 300 + 20 / 400 + 10 / 500) / 40,
        "training_efficiency": (10 / 12 + 20 / 16 + 10 / 20) / 40,
        "stability": 1 - 10 / 30,
        "env_steps": 500,
        "episodes": 4,
        "wall_hours": 0.05,  # 500 * 0.36 s
        "sps": 500,
        "policy_percent": 25,
        "gpu_busy_percent": 80,
    }
    assert {name: value for name, value in figures.items() if value is not None} == pytest.approx(expected)


RETURNS = {"final_return_ma", "final_return_mean", "max_return_ma"}


@pytest.mark.parametrize(
    ("returns", "game", "known"),
    [
        ([NAN, NAN], GAME, set()),  # no finished game
        ([1, 2, 3], GAMES["Kaboom"], RETURNS),  # no score of random play
        ([1, 2, 3], GAME, RETURNS | {"strength", "max_strength", "final_strength"}),  # below random play
    ],
)
def test_figures_without_a_meaning_are_left_out(returns, game, known):
    figures = session_metrics(table(returns), game)
    assert {name for name, value in figures.items() if value is not None} == known | {
        "env_steps", "episodes", "wall_hours", "sps"
    }  # fmt: skip


def test_sessions_are_aligned_interpolated_and_held_at_their_end():
    grid, values = metrics.align_sessions([table([1, 2, 3]), table([NAN, 4, 5])], "return_mean")
    assert grid.tolist() == [100, 200, 300]
    np.testing.assert_array_equal(values, [[1, 2, 3], [NAN, 4, 5]])
    shorter = table([10, 20], env_steps=[150, 250])
    _, values = metrics.align_sessions([shorter, table([0, 0, 0, 0])], "return_mean")
    np.testing.assert_allclose(values[0], [NAN, 15, 20, 20])  # 200 is halfway from 10 to 20
    last = [table([1], env_steps=[396]), table([3], env_steps=[400])]  # auto-reset steps made the difference
    assert metrics.align_sessions(last, "return_mean")[1].tolist() == [[1], [3]]


def test_trial_aggregation(tmp_path):
    random = GAMES["Qbert"].random.score

    def trial(*returns):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        return read_run(write_run(path, [table(np.array(each) + random) for each in returns])).summary

    two, alone, half = trial([10, 30], [30, 70, 110]), trial([10, 30]), trial([NAN, NAN], [10, 30])
    empty, three = trial([NAN]), trial([10], [20], [30])
    # At 200 env steps, which both have reached, return_ma is 20 and 50 above random play: 35, std 30 / sqrt(2).
    assert (two["score"], two["score_std"]) == pytest.approx((random + 35, 30 / 2**0.5))
    assert two["session_scores"] == pytest.approx([random + 20, random + 50])
    assert (two["mean"]["strength"], two["std"]["strength"]) == pytest.approx((35, 30 / 2**0.5))
    assert two["human_normalised_score"] == pytest.approx((random + 35 - 163.9) / 13291.1)
    # Over the two shared log points: stds 10 and 20, mean strengths 20 and 50.
    assert two["mean"]["consistency"] == pytest.approx(1 - 2 * 30 / 70)
    assert (alone["score_std"], alone["mean"]["consistency"]) == (None, None)
    assert (len(half["session_scores"]), half["score_std"], half["mean"]["consistency"]) == (1, None, None)
    assert (empty["score"], empty["reference_normalised_score"]) == (None, None)
    low, high = three["score_interval"]
    assert (high - random, low - random) == pytest.approx((44.84, -4.84), abs=0.01)  # 20 ± 4.303 * 10 / sqrt(3)
    assert alone["score_interval"] is two["score_interval"] is None


def test_strength_is_a_mean_over_all_sessions_and_a_ratio_without_a_meaning_has_none(tmp_path):
    random = GAMES["Qbert"].random.score
    tables = [table(np.array([10, 30]) + random), table(np.array([-20, -60]) + random)]
    run = read_run(write_run(tmp_path / "run", tables, total_env_steps=200))
    summary = run.summary
    assert summary["mean"]["strength"] == pytest.approx((20 - 40) / 2)
    assert summary["mean"]["stability"] is summary["mean"]["sample_efficiency"] is None
    text = "no mean of sample efficiency, training efficiency, stability: a session is no better than random play"
    assert text in summary_table(run).splitlines()


# Texts and files.


def test_a_running_trial_is_not_complete_and_names_what_is_left_out(tmp_path, caplog):
    run_dir = write_run(tmp_path / "run", [table([1, 2, 3, 4]), table([2, 3]), table([1])])
    (run_dir / "session_2" / "metrics.csv").unlink()
    summary = read_run(run_dir).summary
    assert not summary["complete"]
    assert [each["session"] for each in summary["sessions"]] == ["session_0"]
    assert summary["session_scores"] == [2.5]
    assert summary["left_out"] == [{"session": "session_1", "reason": "unfinished, at 200 of 400 env steps"}]
    assert "session_2" in caplog.text


def test_a_run_that_was_read_keeps_the_early_ends_of_its_sessions(tmp_path):
    """All that is said of it belongs to one point in time, whatever becomes of its files."""
    run_dir = write_run(tmp_path, [table([20.0, 30.0])])
    write_checkpoint(run_dir / "session_0", 200)
    file = run_dir / "session_0" / "stopped.json"
    stopped = {"env_steps": 200, "reason": "enough", "total_env_steps": 400}
    write_json(file, stopped)
    run = read_run(run_dir)
    file.unlink()
    summary = run.summary
    assert (summary["complete"], summary["stopped"]) == (
        True, {"session_0": {"env_steps": 200, "reason": "enough"}}
    )  # fmt: skip
    assert not read_run(run_dir).summary["complete"]
    write_json(file, stopped)
    larger = read_run(run_dir, replace(run.config, total_env_steps=800))
    assert not larger.summary["complete"], "a larger budget is not spent"
    write_json(file, stopped | {"total_env_steps": "many"})
    with pytest.raises(UserError, match=r"stopped\.json: cannot be used"):
        read_run(run_dir)


def test_before_a_session_has_finished_the_sessions_are_compared_where_all_have_been(tmp_path):
    tables = [table([10, 20, 30]), table([30, 40]), table([5])]
    summary = read_run(write_run(tmp_path / "run", tables, total_env_steps=10_000)).summary
    assert summary["session_scores"] == [15, 35]  # return_ma at 200 env steps
    assert summary["left_out"] == [{"session": "session_2", "reason": "unfinished, at 100 of 10,000 env steps"}]
    first = [table([10]), table([20], env_steps=[93])]
    summary = read_run(write_run(tmp_path / "first", first, total_env_steps=10_000)).summary
    assert summary["session_scores"] == [10, 20], "each has one log point, a few env steps apart"
    late = [table([5, 7]), table([NAN, NAN, 30])]  # no game of the second had ended at 200 env steps
    summary = read_run(write_run(tmp_path / "late", late, total_env_steps=10_000)).summary
    assert summary["session_scores"] == [6]
    assert summary["left_out"] == [{"session": "session_1", "reason": "no finished game up to 200 env steps"}]


def test_two_sessions_each_can_suffice_and_a_running_run_is_not_compared(tmp_path):
    runs = []
    for name, returns, budget in (("a", (10, 11), 100), ("b", (20, 21), 100), ("running", (30, 31), 10_000)):
        tables = [table([each]) for each in returns]
        runs.append((name, read_run(write_run(tmp_path / name, tables, total_env_steps=budget))))
    (sentence,) = differences(runs)
    assert sentence.startswith("Qbert: b - a: 10, p 0.00496 ")
    assert sentence.endswith("; distinguishable with 2 sessions each")
