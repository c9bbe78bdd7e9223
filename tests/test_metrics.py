import json

import numpy as np
import pytest
from sample_runs import table, write_metrics, write_run

from jaxrl_atari.envs.games import GAMES, Game
from jaxrl_atari.errors import UserError
from jaxrl_atari.report import metrics
from jaxrl_atari.report.summary import seeds_text, summary_table, write_trial_summary
from jaxrl_atari.runs.config_file import read_config
from jaxrl_atari.runs.reading import read_evaluations, read_metrics, read_sessions, session_dirs

NAN = np.nan
# Random play scores 10, so that str_i = return_mean - 10.
GAME = Game("Qbert", 0.95, reference_score=110.0, random_mean=10.0, dqn_random=20.0, human=70.0)


# Figures, with expected values worked out by hand.


def test_moving_average_covers_the_last_points_or_all_while_there_are_fewer():
    np.testing.assert_allclose(metrics.moving_average([1, 2, 3, 4, 8], window=3), [1, 1.5, 2, 3, 5])


def test_moving_average_skips_nan():
    np.testing.assert_allclose(metrics.moving_average([NAN, NAN, 2, 4, 6], window=2), [NAN, NAN, 2, 3, 5])
    np.testing.assert_allclose(metrics.moving_average([2, NAN, 4, 6], window=2), [2, NAN, 3, 5])
    assert np.isnan(metrics.moving_average([NAN, NAN])).all()
    assert metrics.moving_average([]).shape == (0,)


def test_return_ma_covers_a_hundred_log_points():
    points = np.arange(1.0, 151.0)
    assert metrics.moving_average(points)[-1] == pytest.approx(100.5)  # mean of 51 .. 150
    assert metrics.moving_average(points)[99] == pytest.approx(50.5)  # mean of 1 .. 100


def test_strength():
    assert metrics.strength([0, 10, 20, 10]) == 10


def test_efficiency():
    # (0/100 + 10/200 + 20/300 + 10/400) / 40 = (0.05 + 0.066667 + 0.025) / 40
    assert metrics.efficiency([0, 10, 20, 10], [100, 200, 300, 400]) == pytest.approx(0.1416667 / 40, rel=1e-6)
    # All strength at one step: the efficiency is one over that step.
    assert metrics.efficiency([0, 5, 0], [1, 50, 100]) == pytest.approx(1 / 50)


def test_stability():
    # The falls are -10 and -5; the strengths before the last are 0 + 20 + 10 + 30 = 60.
    assert metrics.stability([0, 20, 10, 30, 25]) == pytest.approx(1 - 15 / 60)
    assert metrics.stability([1, 2, 3]) == 1
    # All strength lost at once: 1 - |-20 / 20|.
    assert metrics.stability([20, 0]) == 0


def test_consistency():
    # Stds 0, 5, 10 (population), means 10, 15, 20: 1 - 2 * 15 / 45.
    assert metrics.consistency([[10, 10, 10], [10, 20, 30]]) == pytest.approx(1 - 30 / 45)
    assert metrics.consistency([[1, 2], [1, 2], [1, 2]]) == 1


def test_a_zero_denominator_is_nan_without_a_warning():
    for value in (
        metrics.strength([]),
        metrics.efficiency([0, 0], [1, 2]),
        metrics.stability([3]),
        metrics.stability([1, -1, 5]),
        metrics.consistency([[1, -1], [1, -1]]),
    ):
        assert np.isnan(value)


def test_normalised_scores():
    assert metrics.human_normalised(45, GAME) == 0.5  # (45 - 20) / (70 - 20)
    assert metrics.reference_normalised(60, GAME) == 0.5  # (60 - 10) / (110 - 10)
    assert metrics.human_normalised(15460.48, GAMES["Qbert"]) == pytest.approx(15296.58 / 13291.1)
    assert metrics.reference_normalised(-8.105, GAMES["DoubleDunk"]) == pytest.approx(9.995 / 15.07)
    assert metrics.human_normalised(5.0, GAMES["Kaboom"]) is None
    assert metrics.reference_normalised(5.0, GAMES["Kaboom"]) is None
    assert metrics.reference_normalised(-20000.0, GAMES["Skiing"]) is None  # its reference is below random play


def test_session_figures_skip_log_points_before_the_first_game_ends():
    session = table([NAN, 10, 20, 30, 20], gpu_busy_percent=[NAN, 100, 80, 70, 70])
    figures = metrics.session_figures(session, GAME)
    # Strengths 0, 10, 20, 10 at env steps 200, 300, 400, 500 and optimiser steps 8, 12, 16, 20.
    assert figures["strength"] == 10
    assert figures["max_strength"] == 20
    assert figures["final_strength"] == 10
    assert figures["sample_efficiency"] == pytest.approx((10 / 300 + 20 / 400 + 10 / 500) / 40)
    assert figures["training_efficiency"] == pytest.approx((10 / 12 + 20 / 16 + 10 / 20) / 40)
    assert figures["stability"] == pytest.approx(1 - 10 / 30)
    assert figures["final_return_ma"] == 20  # mean of 10, 20, 30, 20
    assert figures["max_return_ma"] == 20
    assert figures["human_normalised_score"] == 0
    assert figures["wall_hours"] == pytest.approx(0.05)  # 500 * 0.36 s
    assert (figures["env_steps"], figures["episodes"], figures["sps"]) == (500, 4, 500)
    assert figures["gpu_busy_percent"] == 80
    assert figures["rss_gib"] is None


def test_a_session_without_a_finished_game_has_counters_but_no_score():
    figures = metrics.session_figures(table([NAN, NAN]), GAME)
    known = {name for name, value in figures.items() if value is not None}
    assert known == {"env_steps", "episodes", "wall_hours", "sps"}


def test_a_game_without_a_random_score_has_a_score_but_no_strength():
    figures = metrics.session_figures(table([1, 2, 3]), GAMES["Kaboom"])
    assert figures["final_return_ma"] == 2
    assert figures["strength"] is None
    assert figures["human_normalised_score"] is None


# Several sessions.


def test_sessions_that_log_at_the_same_steps_are_aligned_row_by_row():
    grid, values = metrics.align_sessions([table([1, 2, 3]), table([NAN, 4, 5])], "return_mean")
    np.testing.assert_array_equal(grid, [100, 200, 300])
    np.testing.assert_array_equal(values, [[1, 2, 3], [NAN, 4, 5]])


def test_sessions_that_log_at_other_steps_are_interpolated_within_their_range():
    longer = table([0, 0, 0, 0], env_steps=[100, 200, 300, 400])
    shorter = table([10, 20], env_steps=[150, 250])
    grid, values = metrics.align_sessions([shorter, longer], "return_mean")
    np.testing.assert_array_equal(grid, [100, 200, 300, 400])
    # 200 is halfway from 10 to 20; 300 is half an interval after the last point, which is held; 400 is too far.
    np.testing.assert_allclose(values[0], [NAN, 15, 20, NAN])


def test_a_short_session_does_not_shorten_the_others():
    _, values = metrics.align_sessions([table([1, 2]), table([3, 4, 5, 6])], "return_mean")
    np.testing.assert_array_equal(values, [[1, 2, NAN, NAN], [3, 4, 5, 6]])


def test_sessions_with_one_log_point_each_share_it():
    last = [table([1], env_steps=[396]), table([3], env_steps=[400])]  # auto-reset steps made the difference
    grid, values = metrics.align_sessions(last, "return_mean")
    assert (grid.tolist(), values.tolist()) == ([400], [[1], [3]])


def test_the_mean_curve_is_over_the_sessions_that_have_a_value():
    env_steps, means = metrics.mean_curve([table([NAN, 1, 3, 5]), table([NAN, NAN, 5])], "return_mean")
    assert (env_steps.tolist(), means.tolist()) == ([200, 300, 400], [1, 4, 5])
    assert [part.size for part in metrics.mean_curve([table([NAN]), table([NAN])], "return_mean")] == [0, 0]


def test_trial_aggregation():
    trial = metrics.aggregate_trial([table([20, 40]), table([40, 80, 120])], GAME)
    # Final return_ma 30 and 80: score 55, std 25. Strengths 20 (of 10, 30) and 70 (of 30, 70, 110).
    assert (trial["score"], trial["score_std"]) == (55, 25)
    assert (trial["mean"]["strength"], trial["std"]["strength"]) == (45, 25)
    assert trial["mean"]["final_strength"] == 70
    assert trial["reference_normalised_score"] == 0.45
    assert trial["human_normalised_score"] == 0.7
    # Over the two shared log points: stds 10 and 20, mean strengths 20 and 50.
    assert trial["consistency"] == pytest.approx(1 - 2 * 30 / 70)
    assert [session["final_return_ma"] for session in trial["sessions"]] == [30, 80]
    json.dumps(trial, allow_nan=False)


def test_a_trial_of_one_session_or_without_finished_games():
    alone = metrics.aggregate_trial([table([20, 40])], GAME)
    assert (alone["score"], alone["score_std"], alone["consistency"]) == (30, None, None)
    empty = metrics.aggregate_trial([table([NAN]), table([NAN])], GAME)
    assert (empty["score"], empty["consistency"], empty["reference_normalised_score"]) == (None, None, None)
    half = metrics.aggregate_trial([table([NAN, NAN]), table([20, 40])], GAME)
    assert (half["score"], half["scored_sessions"], half["score_std"]) == (30, 1, None)
    assert {trial["score_interval"] for trial in (alone, empty, half)} == {None}
    json.dumps([alone, empty, half], allow_nan=False)


def test_a_score_is_read_between_log_points_and_held_after_the_end():
    session = table([NAN, 10.0, 30.0])  # at env steps 100, 200, 300; return_ma is NaN, 10, 20
    np.testing.assert_array_equal(metrics.score_at(session, [100, 200, 250, 300, 900]), [NAN, 10, 15, 20, 20])
    hours = metrics.score_at(session, [90.0], along="wall_seconds")  # 250 env steps
    np.testing.assert_array_equal(hours, [15])
    assert metrics.score_at(session, np.inf) == 20
    assert np.isnan(metrics.score_at(table([NAN]), np.inf))


# Files.


def test_metrics_are_read_back_as_written(tmp_path):
    session = table([NAN, 20.5, 31.25], gpu_busy_percent=[NAN, 91.5, 92.0])
    write_metrics(tmp_path / "session_0", session)
    read = read_metrics(tmp_path / "session_0")
    assert list(read) == list(session)
    for name, column in session.items():
        np.testing.assert_array_equal(read[name], column)


def test_a_last_line_that_was_cut_short_is_left_out_with_a_warning(tmp_path, caplog):
    write_metrics(tmp_path / "session_0", table([1, 2, 3]))
    path = tmp_path / "session_0" / "metrics.csv"
    whole = path.read_text()
    for cut in (1, 2, 40):  # without its line feed, without its last digit, in its middle
        caplog.clear()
        path.write_text(whole[:-cut])
        np.testing.assert_array_equal(read_metrics(path.parent)["return_mean"], [1, 2])
        assert "line 4 is cut short" in caplog.text


def test_rows_logged_again_by_a_resumed_session_replace_the_earlier_ones(tmp_path):
    session = table([1, 2, 3, 20, 30, 40], env_steps=[100, 200, 300, 200, 300, 400])
    write_metrics(tmp_path / "session_0", session)
    read = read_metrics(tmp_path / "session_0")
    np.testing.assert_array_equal(read["env_steps"], [100, 200, 300, 400])
    np.testing.assert_array_equal(read["return_mean"], [1, 20, 30, 40])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: "", "holds no log point yet"),
        (lambda text: text.splitlines()[0] + "\n", "holds no log point yet"),
        (lambda text: text.splitlines()[0] + "\n1.0,2", "holds no log point yet"),
        (lambda text: text.replace("return_ma,", "", 1), "has no column return_ma"),
        (lambda text: text.replace("00.0,", "oo.0,"), "every line is damaged"),
    ],
)
def test_a_bad_metrics_file_is_a_one_line_error(tmp_path, change, message):
    write_metrics(tmp_path / "session_0", table([1, 2]))
    path = tmp_path / "session_0" / "metrics.csv"
    path.write_text(change(path.read_text()))
    with pytest.raises(UserError, match=message) as caught:
        read_metrics(path.parent)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("garbled", ["1oo.0,", "", "1e999,", "nan,", ",", '"', "\0\0,", "x" * 200_000])
def test_damaged_lines_are_left_out_with_a_warning(tmp_path, caplog, garbled):
    write_metrics(tmp_path / "session_0", table([1, 2, 3]))
    path = tmp_path / "session_0" / "metrics.csv"
    path.write_text(path.read_text().replace("\n200.0,", f"\n{garbled}", 1))
    np.testing.assert_array_equal(read_metrics(path.parent)["return_mean"], [1, 3])
    assert "line 3 is damaged and was left out" in caplog.text


def test_a_missing_metrics_file_is_a_one_line_error(tmp_path):
    with pytest.raises(UserError, match=r"metrics\.csv: cannot be read \(No such file or directory\)"):
        read_metrics(tmp_path)


def test_session_directories_are_ordered_by_number(tmp_path):
    for name in ("session_10", "session_2", "session_0", "session_x", "graphs"):
        (tmp_path / name).mkdir()
    (tmp_path / "session_3").write_text("not a directory")
    assert [path.name for path in session_dirs(tmp_path)] == ["session_0", "session_2", "session_10"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"it has no config\.json"),
        ("{", r"config\.json: damaged"),
        ("[]", r"config\.json: damaged"),
        ('{"config": {"ppo": {"magic": 1}}}', r"config\.json: ppo\.magic: this version"),
        ('{"config": {"env": {"game": "Qbret", "protocol": "auto"}}}', "did you mean Qbert"),
    ],
)
def test_a_bad_config_is_a_one_line_error(tmp_path, content, message):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=message):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("game", "protocol", "expected"),
    [
        ("qbert", "auto", ("Qbert", "v5")),
        ("QbertNoFrameskip-v4", "auto", ("Qbert", "classic")),
        ("Qbert", "classic", ("Qbert", "classic")),
    ],
)
def test_the_summary_has_the_resolved_game_and_protocol(tmp_path, game, protocol, expected):
    summary = write_trial_summary(write_run(tmp_path, [table([1])], game=game, protocol=protocol))
    assert (summary["game"], summary["protocol"]) == expected


@pytest.mark.parametrize("protocol", ["classic", "machado"])
def test_a_score_of_another_protocol_is_compared_with_no_reference(tmp_path, protocol):
    summary = write_trial_summary(write_run(tmp_path, [table([1000, 2000])], protocol=protocol))
    assert summary["score"] == 1500
    for name in ("reference_score", "random_score", "human_score"):
        assert summary[name] is None
    for name in ("reference_normalised_score", "human_normalised_score"):
        assert summary[name] is None
    assert protocol in summary["comparison_note"]
    assert summary["comparison_note"] in summary_table(summary).splitlines()


def test_the_trial_summary_is_written_and_printed(tmp_path):
    run_dir = write_run(tmp_path / "run", [table([1000, 2000, 3000, 4000]), table([2000, 3000, 4000, 5000])])
    summary = write_trial_summary(run_dir)
    assert json.loads((run_dir / "trial.json").read_text()) == summary
    assert (summary["game"], summary["protocol"], summary["complete"]) == ("Qbert", "v5", True)
    assert (summary["score"], summary["score_std"]) == (3000, 500)
    assert [session["session"] for session in summary["sessions"]] == ["session_0", "session_1"]
    assert not list(run_dir.glob("*.partial"))
    text = summary_table(summary)
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert "trial: Qbert, protocol v5, 2 sessions, 400 env steps each" in lines
    assert "final return_ma 3,000 500 2,500 3,500" in lines
    assert "reference score 15,460 SLM Lab's PPO, protocol v5, 10,000,000 env steps" in lines
    assert summary["score_interval"] == [2500, 3500]
    assert "95% interval 2,500 to 3,500 of the score, by bootstrap over sessions" in lines
    assert "tutorial score 15,094 the same in SLM Lab's tutorial" in lines
    assert max(map(len, text.splitlines())) <= 100


def test_a_running_trial_is_not_complete(tmp_path, caplog):
    run_dir = write_run(tmp_path / "run", [table([1, 2, 3, 4]), table([2, 3])])
    (run_dir / "session_2").mkdir()
    summary = write_trial_summary(run_dir)
    assert not summary["complete"]
    assert len(summary["sessions"]) == 2
    assert "(not complete)" in summary_table(summary)
    assert "left out" in caplog.text
    assert "session_2" in caplog.text


def test_a_game_without_a_reference_score_has_a_summary(tmp_path):
    summary = write_trial_summary(write_run(tmp_path / "run", [table([NAN, 1])], game="Kaboom"))
    assert "reference score -" in " ".join(summary_table(summary).split())


def test_tables_that_nobody_wrote(tmp_path):
    """As in a run from the Hub."""
    write_metrics(tmp_path / "session_0", table([1, 2]))
    evaluations, metrics = (tmp_path / "session_0" / name for name in ("evaluations.csv", "metrics.csv"))
    evaluations.write_text("env_steps,episodes,mean,std\n100,2,1.5,-0.5\n200,2,1.5,0.5\n")
    assert read_evaluations(tmp_path / "session_0") == [["200", "2", "1.5", "0.5"]]
    evaluations.unlink()
    evaluations.mkdir()
    assert read_evaluations(tmp_path / "session_0") == []
    metrics.write_text("\n".join(f"{line},{line.split(',')[0]}" for line in metrics.read_text().split()) + "\n")
    with pytest.raises(UserError, match="has a column twice"):
        read_metrics(tmp_path / "session_0")


def test_a_run_without_metrics_is_an_error_that_names_what_is_missing(tmp_path):
    (tmp_path / "session_0").mkdir()
    with pytest.raises(UserError, match=r"session_0/metrics\.csv: cannot be read"):
        read_sessions(tmp_path)
    (tmp_path / "session_0").rmdir()
    with pytest.raises(UserError, match="holds no session_0"):
        read_sessions(tmp_path)


def test_session_figures_are_maxima_and_a_median():
    session = table([10, 30, 20, 0], sps=[500, 510, 490, 10], gpu_memory_gib=[1, 3, 2, 2], rss_gib=[4, 4, 9, 5])
    figures = metrics.session_figures(session, GAME)
    assert (figures["max_return_ma"], figures["final_return_ma"]) == (20, 15)  # return_ma is 10, 20, 20, 15
    assert figures["sps"] == 495  # a slow log point does not affect it
    assert (figures["gpu_memory_gib"], figures["rss_gib"]) == (3, 9)


@pytest.mark.parametrize(
    ("planned", "counted", "expected"),
    [(1, ["session_0"], "seed 5"), (4, ["session_0"], "seeds 5 to 8"), (1, ["session_0", "session_3"], "seeds 5 to 8")],
)
def test_the_seeds_of_a_trial(planned, counted, expected):
    """A finished session counts, although the run has fewer of them now."""
    sessions = [{"session": name} for name in counted]
    assert seeds_text({"seed": 5, "planned_sessions": planned, "sessions": sessions}) == expected
