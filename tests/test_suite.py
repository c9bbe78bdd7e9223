import csv
import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sample_runs import table, write_checkpoint, write_metrics

from jaxrl_atari import plots
from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, PPOConfig, TrialConfig
from jaxrl_atari.envs.games import GAMES
from jaxrl_atari.errors import ConfigError, UserError
from jaxrl_atari.report import group_pages
from jaxrl_atari.report.statistics import FIGURES
from jaxrl_atari.report.suites import compare_suites, describe_suite, draw_suites, read_suite
from jaxrl_atari.report.summary import read_run
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.runs.description import describe, write_description
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.suite import __main__ as suite_command
from jaxrl_atari.suite import results, suite
from jaxrl_atari.suite.processes import Failure

TINY = Config(
    name="suite",
    sessions=2,
    total_env_steps=64,
    env=EnvConfig(num_envs=2),
    ppo=PPOConfig(rollout_length=8, minibatch_size=8),
)


def make_suite(directory, config=TINY, games=("Pong", "Breakout", "Alien")):
    directory.mkdir()
    suite.write_suite_file(directory, config, games)
    return directory


def add_session(suite_dir, game, session, returns, config=TINY):
    """Writes the files of a finished session with the given returns."""
    run_dir = suite_dir / game
    run_dir.mkdir(exist_ok=True)
    write_json(run_dir / "config.json", describe(suite.game_configs(config, [game])[game]))
    steps = [config.total_env_steps * (i + 1) / len(returns) for i in range(len(returns))]
    write_metrics(run_dir / f"session_{session}", table(returns, steps))
    write_checkpoint(run_dir / f"session_{session}", config.total_env_steps)


def test_the_default_games_have_a_reference_score_and_each_gets_its_lambda():
    config, games, suite_dir, report_at, other = suite_command.parse([])
    assert (suite_dir, report_at, other) == (None, [], None)
    assert len(games) == sum(game.reference_score is not None for game in GAMES.values()) > 50
    configs = suite.game_configs(config, ["qbert", "ms_pacman", "Pong"])
    assert {name: game_config.resolved_gae_lambda for name, game_config in configs.items()} == {
        "Qbert": 0.95,
        "MsPacman": 0.85,
        "Pong": 0.85,
    }
    assert suite_command.parse(["--games", "Pong", "--games", "Breakout"]).games == ["Pong", "Breakout"]
    fixed, games, *_ = suite_command.parse(["--games", "Pong", "--ppo.gae-lambda", "0.9", "--sessions", "3"])
    assert suite.game_configs(fixed, games)["Pong"].resolved_gae_lambda == 0.9
    assert fixed.sessions == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--games", "Pong", "pong"], "each game once"),
        (["--games"], "at least one game"),
        (["--env.game", "Pong"], "choose with --games"),
        (["--env.game=Pong"], "choose with --games"),
        (["--resume", "nowhere", "--games", "Pong"], "leave --games"),
        (["--sesions", "2"], "sesions"),
        (["--total-env-steps", "5000", "--report-at", "6000"], "--report-at 6000: expected env steps from 1 to"),
        (["--games", "PongNoFrameskip-v4"], "expected Pong; a suite has one protocol: choose it with --env.protocol"),
        (["--games", "Pong", "--devices.distributed"], "devices.distributed = True: expected false in a suite"),
    ],
)
def test_invalid_options_are_errors_before_anything_starts(arguments, words):
    with pytest.raises(UserError) as error:
        suite_command.parse(arguments)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_a_resumed_suite_keeps_the_software_that_began_it(tmp_path, monkeypatch):
    suite_dir = make_suite(tmp_path / "suite")
    add_session(suite_dir, "Breakout", 0, [1.0])  # its second session is missing
    for path in (suite_dir / "suite.json", suite_dir / "Breakout" / "config.json"):
        write_json(path, json.loads(path.read_text()) | {"git_revision": "abc"})
    monkeypatch.setattr(suite, "run_processes", lambda *_, **__: None)
    suite_command.main(["--run-dir", str(suite_dir), "--log.no-graphs"])
    assert json.loads((suite_dir / "Breakout" / "config.json").read_text())["git_revision"] == "abc"
    described = json.loads((suite_dir / "suite.json").read_text())
    assert (described["git_revision"], len(described["resumed"])) == ("abc", 1)


def test_run_dir_starts_a_suite_or_continues_the_one_it_holds(tmp_path):
    line = ["--games", "Pong", "Alien", "--run-dir", str(tmp_path / "suite")]
    config, games, suite_dir, *_ = suite_command.parse(line)
    assert (games, suite_dir) == (["Pong", "Alien"], tmp_path / "suite")
    make_suite(suite_dir, dataclasses.replace(config, sessions=7), games)
    assert suite_command.parse(line)[0].sessions == 7
    with pytest.raises(UserError, match="--games = 'Qbert': expected Pong Alien, the games of"):
        suite_command.parse(["--games", "Qbert", "--run-dir", str(suite_dir)])


@pytest.mark.parametrize(
    "option", [("--seed", "7"), ("--env.protocol", "classic"), ("--env.full-action-space", "true")]
)
def test_a_suite_goes_on_with_its_own_protocol_and_seed(tmp_path, option):
    suite_dir = add_games(make_suite(tmp_path / "suite"), BETTER)
    before = (suite_dir / "suite.json").read_bytes()
    with pytest.raises(UserError, match="with which the run began; leave it out, or start a new run"):
        suite_command.main(["--resume", str(suite_dir), *option])
    assert (suite_dir / "suite.json").read_bytes() == before


def test_the_protocol_of_the_configs_game_holds_for_every_game(tmp_path, capsys):
    path = tmp_path / "classic.py"
    path.write_text(
        "from jaxrl_atari.config import Config, EnvConfig\n"
        "def get_config(): return Config(env=EnvConfig(game='QbertNoFrameskip-v4'))\n"
    )
    config, games, *_ = suite_command.parse(["--games", "Pong", "Alien", "--config", str(path)])
    assert {each.env.resolved_protocol for each in suite.game_configs(config, games).values()} == {"classic"}
    line = ["--config", str(path), "--run-dir", str(tmp_path / "suite")]
    make_suite(tmp_path / "suite", config, games)
    suite_command.parse(line)
    assert "differs from the run" not in capsys.readouterr().out
    path.write_text(path.read_text().replace("Config(env", "Config(seed=3, env"))
    suite_command.parse(line)
    expected = "differs from the run, which keeps its own seed = 0; give an option to change a value"
    assert expected in capsys.readouterr().out


def test_a_finished_suite_that_is_started_again_is_left_alone(tmp_path, capsys):
    suite_dir = add_games(make_suite(tmp_path / "suite", games=("Pong", "Breakout")), BETTER)
    line = ["--resume", str(suite_dir), "--log.no-graphs"]
    suite_command.main(line)  # the option is new
    before = (suite_dir / "suite.json").read_text()
    suite_command.main(line)
    assert (suite_dir / "suite.json").read_text() == before
    # An option of training changes nothing any more.
    capsys.readouterr()
    suite_command.main([*line, "--ppo.gae-lambda", "0.5"])
    assert "changed" not in capsys.readouterr().out
    assert (suite_dir / "suite.json").read_text() == before
    rows, _ = results.read_rows(suite_dir)
    assert {row["game"]: row["gae_lambda"] for row in rows} == {"Pong": 0.85, "Breakout": 0.7}


def test_a_game_that_was_trained_beyond_the_budget_of_its_suite_is_refused(tmp_path):
    """By hand, and stopped on the way: its score is not that of the suite's budget."""
    suite_dir = make_suite(tmp_path / "suite", games=("Pong", "Breakout"))
    longer = dataclasses.replace(suite.game_configs(TINY, ["Pong"])["Pong"], total_env_steps=640)
    write_description(suite_dir / "Pong", describe(longer))
    write_checkpoint(suite_dir / "Pong" / "session_0", 320)
    with pytest.raises(ConfigError, match=r"total_env_steps = 64: expected at least 320, the env steps of .*Pong"):
        suite_command.parse(["--resume", str(suite_dir)])


@pytest.mark.parametrize(
    ("protocol", "sessions", "why"), [("machado", 2, "not compared: "), ("v5", 1, "no complete game that has a score")]
)
def test_the_curves_of_a_suite_without_statistics_are_drawn(protocol, sessions, why, tmp_path, capsys):
    config = dataclasses.replace(TINY, env=dataclasses.replace(TINY.env, protocol=protocol))
    suite_dir = make_suite(tmp_path / "suite", config, games=("Pong",))
    for session in range(sessions):
        add_session(suite_dir, "Pong", session, [1.0, 2.0], config)
    plots.main([str(suite_dir), "--output", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert f"no statistics: {suite_dir}: {why}" in printed
    assert (tmp_path / "out" / "comparison.png").is_file()


def test_suites_of_another_protocol_are_not_compared(tmp_path):
    suite_dir = make_suite(tmp_path / "suite", games=("Pong",))
    with pytest.raises(UserError, match=r"--compare .*suite: this suite is not compared: .*\(machado\)"):
        suite_command.parse(["--games", "Pong", "--compare", str(suite_dir), "--env.protocol", "machado"])


def test_a_suite_that_is_trained_longer_counts_games_of_the_new_budget_alone(tmp_path):
    suite_dir = add_games(make_suite(tmp_path / "suite"), BETTER)
    assert set(read_suite(suite_dir)) == {"Pong", "Breakout"}
    suite.write_suite_file(suite_dir, dataclasses.replace(TINY, total_env_steps=640), ["Pong", "Breakout"])
    assert not read_suite(suite_dir)
    rows, _ = results.read_rows(suite_dir)
    assert [row["status"] for row in rows] == ["not complete", "not complete"]


def test_damaged_description(tmp_path):
    (tmp_path / "suite.json").write_text('{"games": ["Pong"], "config": {"no_such": 1}}')
    with pytest.raises(UserError, match="no_such"):
        suite.read_suite_file(tmp_path)
    (tmp_path / "suite.json").write_text("{")
    with pytest.raises(UserError, match=r"suite\.json: damaged \(JSONDecodeError: .*\); expected the games"):
        suite.read_suite_file(tmp_path)


@pytest.mark.parametrize(
    ("devices", "games", "gpus", "expected"),
    [
        ({}, 57, 0, [()]),
        ({}, 57, 1, [()]),
        ({}, 57, 2, [(0,), (1,)]),
        ({}, 2, 8, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ({"data_parallel": 2}, 57, 5, [(0, 1), (2, 3)]),
        ({"data_parallel": "all"}, 57, 8, [()]),
        ({"gpu": False}, 57, 8, [()]),
        ({"gpu": 0}, 57, 8, [()]),
        ({"actor": 3}, 57, 8, [()]),
    ],
)
def test_games_share_the_gpus(devices, games, gpus, expected):
    config = dataclasses.replace(TINY, devices=DevicesConfig(**devices))
    assert suite.share_gpus(config, games, gpus) == expected


def test_the_table_has_our_scores_beside_the_reference(tmp_path):
    suite_dir = make_suite(tmp_path / "suite")
    for session, score in enumerate((10.0, 14.0)):
        add_session(suite_dir, "Breakout", session, [score, score])
    add_session(suite_dir, "Pong", 0, [-20.0, -20.0])  # the second session is missing
    text = results.write_results(suite_dir, {"Pong": "out of memory | buy more"})
    rows = {row["game"]: row for row in csv.DictReader((suite_dir / "results.csv").read_text().splitlines())}
    breakout, game = rows["Breakout"], GAMES["Breakout"]
    assert float(breakout["score"]) == 12.0
    assert float(breakout["score_std"]) == 2.0
    assert float(breakout["gae_lambda"]) == 0.70
    ratio = (12 - game.random_mean) / (game.reference_score - game.random_mean)
    assert float(breakout["reference_normalised_score"]) == pytest.approx(ratio)
    human = (12 - 1.7) / (30.5 - 1.7)  # the pair in DQN Zoo's atari_data.py
    assert float(breakout["human_normalised_score"]) == pytest.approx(human)
    assert float(breakout["hours"]) == pytest.approx(64 * 0.36 / 3600)  # of the sample tables
    assert breakout["status"] == "complete"
    assert rows["Alien"]["status"] == "waiting"
    assert rows["Alien"]["score"] == ""
    assert rows["Pong"]["status"] == "failed: out of memory / buy more"
    assert rows["Pong"]["sessions"] == "1"
    # Only complete games enter the aggregates: one game, whose score is the median and the mean.
    aggregates = json.loads((suite_dir / "results.json").read_text())["aggregates"]
    assert aggregates["human-normalised"]["games"] == 1
    assert aggregates["human-normalised"]["median"] == pytest.approx(human)
    assert aggregates["ratio"]["median"] == pytest.approx(ratio)
    low, high = aggregates["ratio"]["median_interval"]
    assert low < ratio < high
    assert (float(breakout["score_low"]), float(breakout["score_high"])) == (10.0, 14.0)
    assert (rows["Pong"]["score_low"], rows["Alien"]["score_low"]) == ("", "")  # one session, and none
    assert (suite_dir / "results.md").read_text() == text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert {line.count("|") for line in lines[:4]} == {len(results.TABLE_COLUMNS) + 1}
    assert "12.00 | 2.00" in text
    assert not list(suite_dir.glob("*.partial"))


def test_nothing_to_compare_yet(tmp_path):
    suite_dir = make_suite(tmp_path / "suite")
    assert "no aggregates yet" in results.write_results(suite_dir)
    assert draw_suites({"suite": describe_suite(read_suite(suite_dir))}, tmp_path / "out") == []


def score(game, human_normalised):
    """The raw score with a human-normalised score."""
    return GAMES[game].dqn_random + human_normalised * (GAMES[game].human - GAMES[game].dqn_random)


def add_games(suite_dir, scores, config=TINY):
    """Adds the sessions of complete games; `scores` are human-normalised. Each is learned in four log points."""
    for game, sessions in scores.items():
        for session, value in enumerate(sessions):
            add_session(suite_dir, game, session, [score(game, value * share) for share in (0, 0.5, 1, 2.5)], config)
    return suite_dir


# return_ma is the mean of 4 log points: 0, 0.25, 0.5, 1 times the value.
BETTER = {"Pong": [0.5, 1.0], "Breakout": [1.5, 2.0]}
WORSE = {"Pong": [0.0, 0.5], "Breakout": [0.5, 0.25]}


def test_the_score_matrix_is_written_also_as_rliables_dictionary(tmp_path):
    suite_dir = add_games(make_suite(tmp_path / "suite"), BETTER)
    add_session(suite_dir, "Alien", 0, [500.0])  # not complete
    text = results.write_results(suite_dir)
    written = json.loads((suite_dir / "results.json").read_text())
    assert written["scores"]["games"] == ["Pong", "Breakout", "Alien"]
    expected = [[score("Pong", 0.5), score("Breakout", 1.5), 500.0], [score("Pong", 1.0), score("Breakout", 2.0), None]]
    for row, wanted in zip(written["scores"]["matrix"], expected, strict=True):
        assert row == pytest.approx(wanted)
    with np.load(suite_dir / "scores_human_normalised.npz") as exported:
        assert list(exported) == ["suite"]
        np.testing.assert_allclose(
            exported["suite"], [[1.5, 0.5], [2.0, 1.0]]
        )  # sessions x games, in alphabetical order
    with np.load(suite_dir / "scores_ratio.npz") as exported:
        assert exported["suite"].shape == (2, 2)
    assert written["rliable_games"] == {"human-normalised": ["Breakout", "Pong"], "ratio": ["Breakout", "Pong"]}
    found = written["aggregates"]["human-normalised"]
    assert [found[name] for name in FIGURES] == pytest.approx([1.25, 1.25, 1.25, 0.125])  # mean, median, IQM, gap
    assert "| human-normalised | 2 | 1.250 (1.000 to 1.500) | 1.250 (1.000 to 1.500) |" in text


def test_profiles_and_learning_curves_of_a_suite(tmp_path):
    suite_dir = add_games(make_suite(tmp_path / "suite"), BETTER)
    found = describe_suite(read_suite(suite_dir))["human-normalised"]
    profile = found["profile"]
    assert (profile["x"][0], profile["x"][30], profile["x"][-1]) == pytest.approx((0, 1.2, 2))
    assert [profile["value"][i] for i in (0, 30, -1)] == [1, 0.5, 0]  # 1.5 and 2 are above 1.2, and none above 2
    assert all(
        low <= value <= high for value, low, high in zip(*(profile[k] for k in ("value", "low", "high")), strict=True)
    )
    curve = found["iqm_by_env_steps"]
    assert (curve["x"][0], curve["x"][-1]) == (16, 64)
    assert (curve["value"][0], curve["value"][-1]) == pytest.approx((0, 1.25))
    middle = np.interp(32, curve["x"], curve["value"])
    assert middle == pytest.approx(1.25 / 4, rel=0.05)
    by_hours = found["iqm_by_hours"]
    assert by_hours["x"][-1] == pytest.approx(64 * 0.36 / 3600)
    assert by_hours["value"] == pytest.approx(curve["value"])


def test_with_one_session_a_game_the_interval_is_a_dash(tmp_path):
    config = dataclasses.replace(TINY, sessions=1)
    suite_dir = make_suite(tmp_path / "suite", config, ["Pong", "Breakout"])
    add_games(suite_dir, {game: scores[:1] for game, scores in BETTER.items()}, config)
    text = results.write_results(suite_dir)
    assert "| human-normalised | 2 | 1.000 (-) | 1.000 (-) | 1.000 (-) | 0.250 (-) |" in text
    pong = next(line for line in text.splitlines() if line.startswith("| Pong"))
    assert pong.split(" | ")[5:8] == ["-", "-", "-"]  # no standard deviation, either
    found = json.loads((suite_dir / "results.json").read_text())["aggregates"]["human-normalised"]
    assert (found["iqm_interval"], found["profile"]["low"], found["iqm_by_hours"]["high"]) == (None, None, None)
    assert len(draw_suites({"suite": {"human-normalised": found}}, tmp_path / "out")) == 2


def test_scores_at_reporting_points(tmp_path):
    suite_dir = make_suite(tmp_path / "suite", games=("Pong", "Breakout"))
    suite.write_suite_file(suite_dir, TINY, ["Pong", "Breakout"], report_at=[32, 64])
    add_games(suite_dir, {"Pong": BETTER["Pong"]})
    for session in range(2):
        add_session(suite_dir, "Breakout", session, [5.0, 7.0])
        path = suite_dir / "Breakout" / f"session_{session}" / "metrics.csv"
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))  # 32 env steps so far
    text = results.write_results(suite_dir)
    report = json.loads((suite_dir / "results.json").read_text())["report_at"]
    assert list(report) == ["32", "64"]
    assert report["32"]["scores"]["Pong"] == pytest.approx([score("Pong", 0.125), score("Pong", 0.25)])
    assert report["32"]["scores"]["Breakout"] == [5.0, 5.0]
    assert list(report["64"]["scores"]) == ["Pong"]
    assert report["64"]["aggregates"]["human-normalised"]["iqm"] == pytest.approx(0.75)
    assert "| `return_ma` at | 32 | 64 |" in text
    assert "| Breakout | 5.00 (5.00 to 5.00) | - |" in text
    assert "| IQM, human-normalised |" in text
    assert "0.750 (0.500 to 1.000), 1 game |" in text
    # A resumed suite keeps its reporting points, unless it gets others.
    assert suite_command.parse(["--resume", str(suite_dir)]).report_at == [32, 64]
    assert suite_command.parse(["--resume", str(suite_dir), "--report-at", "48", "16"]).report_at == [16, 48]
    with pytest.raises(ConfigError, match=r"total_env_steps = 48: expected at least 64, the env steps of .*Pong"):
        suite_command.parse(["--resume", str(suite_dir), "--total-env-steps", "48"])
    begun = make_suite(tmp_path / "begun", games=("Pong",))
    suite.write_suite_file(begun, TINY, ["Pong"], report_at=[32, 64])
    assert suite_command.parse(["--resume", str(begun), "--total-env-steps", "48"]).report_at == [32]


def test_two_suites_are_compared(tmp_path, capsys):
    better = add_games(make_suite(tmp_path / "better", games=("Pong", "Breakout")), BETTER)
    worse = add_games(
        make_suite(tmp_path / "worse", games=("Pong", "Breakout", "Alien")), {**WORSE, "Alien": [1.0, 1.0]}
    )
    suite_command.main(["--resume", str(better), "--compare", str(worse), "--log.no-graphs"])
    printed = capsys.readouterr().out
    # Pong: 3.5 of 4 pairs, Breakout: all.
    assert "Probability of improvement of better over worse: 0.938 (0.750 to 1.000)." in printed
    assert "| better | 2 | 1.250 (1.000 to 1.500) |" in printed
    assert "| worse | 2 | 0.312 (" in printed  # without Alien, which only one of them has
    output = better / "comparison"
    assert {path.name for path in output.iterdir()} == {
        "comparison.md", "comparison.json", "suites.png", "suites.svg", "scores_human_normalised.npz",
        "scores_ratio.npz",
    }  # fmt: skip
    compared = json.loads((output / "comparison.json").read_text())
    assert (compared["suites"], compared["games"]) == (["better", "worse"], ["Breakout", "Pong"])
    assert compared["rliable_games"]["human-normalised"] == ["Breakout", "Pong"]
    assert compared["human-normalised"]["probability_of_improvement"]["worse"]["value"] == 0.9375
    with np.load(output / "scores_human_normalised.npz") as exported:
        np.testing.assert_allclose(exported["better"], [[1.5, 0.5], [2.0, 1.0]])
        np.testing.assert_allclose(exported["worse"], [[0.5, 0.0], [0.25, 0.5]], atol=1e-12)

    plots.main([str(better), str(worse), "--output", str(tmp_path / "out")])
    again = capsys.readouterr().out
    assert "Probability of improvement of better over worse: 0.938 (0.750 to 1.000)." in again
    assert {"comparison.png", "suites.png"} <= {path.name for path in (tmp_path / "out").iterdir()}
    drawn = (tmp_path / "out" / "suites.svg").read_text()
    for words in (
        "human-normalised scores of 2 games",
        "performance profile",
        "interquartile mean against hours",
        "worse",
    ):
        assert words in drawn


def test_budgets_that_differ_are_named(tmp_path):
    shorter = dataclasses.replace(TINY, total_env_steps=TINY.total_env_steps - 1)
    one = add_games(make_suite(tmp_path / "one"), {"Pong": [0.5, 1.0]})
    two = add_games(make_suite(tmp_path / "two", shorter), {"Pong": [0.5, 1.0]}, shorter)
    (tmp_path / "out").mkdir()
    text = compare_suites([one, two], tmp_path / "out")
    steps = TINY.total_env_steps
    assert f"The budgets differ, in env steps: one {steps:,}; two {steps - 1:,}." in text
    assert "budgets differ" not in compare_suites([one, one], tmp_path / "out")


def test_suites_that_cannot_be_compared(tmp_path):
    one = add_games(make_suite(tmp_path / "one"), {"Pong": [0.5, 1.0]})
    two = add_games(make_suite(tmp_path / "two"), {"Breakout": [0.5, 1.0]})
    with pytest.raises(UserError, match="no complete game in common"):
        plots.main([str(one), str(two), "--output", str(tmp_path / "out")])
    with pytest.raises(UserError, match="compare runs with runs, suites with suites"):
        plots.main([str(one), str(two / "Breakout")])
    with pytest.raises(UserError, match="no game has a session yet"):
        plots.main([str(make_suite(tmp_path / "new"))])


def test_a_game_without_a_log_point_and_a_copy_of_a_game_are_left_out(tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.setattr("jaxrl_atari.report.suites.draw_suites", lambda *arguments: [])
    suite_dir = add_games(make_suite(tmp_path / "suite"), {"Pong": [0.5, 1.0], "Breakout": [2.0, 3.0]})
    before = read_suite(suite_dir)["Pong"][0]["return_mean"].tolist()
    shutil.copytree(suite_dir / "Pong", suite_dir / "Pong_old")
    for metrics in suite_dir.glob("Pong_old/session_*/metrics.csv"):
        metrics.write_text(metrics.read_text().replace(repr(before[0]), "1.0"))
    assert read_run(suite_dir / "Pong_old").tables.popitem()[1]["return_mean"].tolist() != before
    add_session(suite_dir, "Alien", 0, [1.0])
    metrics = suite_dir / "Alien" / "session_0" / "metrics.csv"
    metrics.write_text(metrics.read_text().splitlines()[0] + "\n")
    assert read_suite(suite_dir)["Pong"][0]["return_mean"].tolist() == before
    drawn = []

    def plot_comparison(runs, output):
        drawn.extend(run.path.name for run in runs)
        output.mkdir()
        return []

    monkeypatch.setattr(plots, "plot_comparison", plot_comparison)
    plots.main([str(suite_dir), "--output", str(tmp_path / "out")])
    assert drawn == ["Breakout", "Pong"]
    assert any(f"left out: {suite_dir}/Alien" in record.getMessage() for record in caplog.records)


def test_runs_that_somebody_has_put_into_a_suite_are_not_its_games(tmp_path, capsys, monkeypatch):
    suite_dir = add_games(make_suite(tmp_path / "suite", games=("Pong", "Alien")), {"Pong": [0.5, 1.0]})
    other = dataclasses.replace(TINY, env=dataclasses.replace(TINY.env, protocol="machado"))
    add_games(suite_dir, {"Breakout": [0.5, 1.0]})  # no game of this suite
    add_games(suite_dir, {"Alien": [0.5, 1.0]}, other)  # one, under other rules
    assert list(read_suite(suite_dir)) == ["Pong"]
    monkeypatch.setattr(suite, "run_processes", lambda *_, **__: None)
    with pytest.raises(UserError, match=r"env\.protocol = 'v5': expected machado, with which the run began"):
        suite_command.main(["--resume", str(suite_dir), "--log.no-graphs"])


def test_a_game_that_failed_before_its_first_log_point_does_not_hide_the_others(tmp_path, monkeypatch, capsys):
    suite_dir = add_games(make_suite(tmp_path / "suite", games=("Pong", "Alien")), {"Pong": [0.5, 1.0]})
    (suite_dir / "Alien").mkdir()
    write_json(suite_dir / "Alien" / "trial.json", {})  # of an earlier try
    monkeypatch.setattr(suite, "run_processes", lambda *_, on_end: on_end("Alien", Failure("out of memory", 2)))
    with pytest.raises(UserError, match=r"1 of 2 games failed \(Alien: out of memory\)") as error:
        suite_command.main(["--resume", str(suite_dir)])
    assert error.value.exit_status == 1
    assert (suite_dir / "graphs" / "comparison.png").is_file()


def test_a_complete_game_with_a_session_without_a_score_says_so(tmp_path):
    suite_dir = make_suite(tmp_path / "suite")
    add_session(suite_dir, "Pong", 0, [-20.0, -20.0])
    add_session(suite_dir, "Pong", 1, [np.nan, np.nan])
    assert "| complete; 1 session has no score |" in results.write_results(suite_dir)
    (row,) = [row for row in group_pages.describe_suite_page(suite_dir, set())["games"] if row["name"] == "Pong"]
    assert (row["status"], row["sessions"]) == ("complete; 1 session has no score", "-20, -")


def test_the_table_shows_lambda_as_it_was_set():
    assert [results._cell("gae_lambda", value) for value in (0.7, 0.95, 0.999)] == ["0.70", "0.95", "0.999"]


def test_hours_that_are_unknown_leave_out_their_curve_alone(tmp_path):
    suite_dir = add_games(make_suite(tmp_path / "suite"), {"Pong": [0.5, 1.0]})
    games = read_suite(suite_dir)
    games["Pong"][0]["wall_seconds"][:2] = np.nan  # resumed after its header was damaged
    assert describe_suite(games)["human-normalised"]["iqm_by_hours"]["x"]
    games["Pong"][0]["wall_seconds"][:] = np.nan
    described = describe_suite(games)["human-normalised"]
    assert (described["iqm_by_hours"]["x"], len(described["iqm_by_env_steps"]["x"])) == ([], 50)
    assert len(group_pages._suite_charts({"human-normalised": described})) == 2
    assert draw_suites({"suite": describe_suite(games)}, tmp_path / "graphs")


def test_suites_of_one_name_show_their_parents(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxrl_atari.report.suites.draw_suites", lambda *arguments: [])
    for parent in ("a", "b", "c/b"):
        (tmp_path / parent).mkdir(parents=True)
        add_games(make_suite(tmp_path / parent / "suite"), BETTER)
    (tmp_path / "out").mkdir()
    suites = [tmp_path / parent / "suite" for parent in ("a", "b", "c/b")]
    text = compare_suites(suites, tmp_path / "out")
    assert "improvement of suite over b/suite: 0.500 (" in text
    assert f"improvement of suite over {suites[2]}: 0.500 (" in text


def test_finished_games_are_skipped_and_a_failure_does_not_stop_the_others(tmp_path, capsys, monkeypatch):
    suite_dir = make_suite(tmp_path / "suite")
    for session in range(2):
        add_session(suite_dir, "Breakout", session, [1.0])
    started = []

    def run(tasks, parallel, on_end):
        started.extend(task.label for task in tasks)
        on_end("Pong", Failure("no reason; --resume somewhere runs what is missing", 1))

    monkeypatch.setattr(suite, "run_processes", run)
    with pytest.raises(UserError) as error:
        suite_command.main(["--resume", str(suite_dir), "--log.no-graphs"])
    assert started == ["game Pong", "game Alien"]
    assert error.value.exit_status == 1
    assert "1 of 3 games failed (Pong: no reason)" in str(error.value)
    assert "game Breakout  finished already" in capsys.readouterr().out
    assert "failed: no reason" in (suite_dir / "results.md").read_text()

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(suite_command, "write_results", full)
    with pytest.raises(UserError, match=r"1 of 3 games failed \(Pong: no reason\)"):
        suite_command.main(["--resume", str(suite_dir), "--log.no-graphs"])


def test_an_interrupted_suite_shows_how_far_it_came(tmp_path, capsys, monkeypatch):
    suite_dir = make_suite(tmp_path / "suite")

    def run(tasks, parallel, on_end):
        for session in range(2):
            add_session(suite_dir, "Pong", session, [1.0])
        on_end("Pong", None)
        assert "| Pong |" in (suite_dir / "results.md").read_text()
        on_end("Breakout", Failure("no reason", 1))
        raise KeyboardInterrupt

    monkeypatch.setattr(suite, "run_processes", run)
    with pytest.raises(KeyboardInterrupt):
        suite_command.main(["--resume", str(suite_dir)])
    assert capsys.readouterr().out.endswith(f"interrupted; --resume {suite_dir} continues\n")
    assert (suite_dir / "Pong" / "trial.json").is_file()
    rows = {line.split(" | ")[0]: line for line in (suite_dir / "results.md").read_text().splitlines()}
    assert "complete" in rows["| Pong"]
    assert "failed: no reason" in rows["| Breakout"]
    assert "waiting" in rows["| Alien"]


def test_a_damaged_config_of_one_game_does_not_stop_the_others(tmp_path, monkeypatch):
    suite_dir = add_games(make_suite(tmp_path / "suite"), {"Breakout": [1.0, 1.0]})
    (suite_dir / "Pong").mkdir()
    (suite_dir / "Pong" / "config.json").write_text("{")
    started = []
    monkeypatch.setattr(suite, "run_processes", lambda tasks, *_, **__: started.extend(task.label for task in tasks))
    with pytest.raises(UserError, match=r"1 of 3 games failed \(Pong: .*config.json: damaged"):
        suite_command.main(["--resume", str(suite_dir), "--log.no-graphs"])
    assert started == ["game Alien"]
    assert (suite_dir / "Pong" / "config.json").read_text() == "{"


def test_a_game_of_another_seed_is_refused(tmp_path, monkeypatch):
    suite_dir = add_games(make_suite(tmp_path / "suite"), {"Pong": [1.0, 1.0]})
    other = dataclasses.replace(TINY, seed=7)
    monkeypatch.setattr(suite, "run_processes", lambda *_, **__: pytest.fail("something was started"))
    with pytest.raises(UserError, match="seed"):
        suite.run_suite(suite_dir, other, ["Pong"])


def test_a_finished_suite_that_is_resumed_with_fewer_sessions_counts_those(tmp_path):
    suite_dir = add_games(make_suite(tmp_path / "suite"), {"Pong": [0.5, 1.0], "Breakout": [2.0, 3.0], "Alien": [1, 1]})
    suite_command.main(["--resume", str(suite_dir), "--sessions", "1", "--log.no-graphs"])
    assert read_run(suite_dir / "Pong").config.sessions == 1


def test_a_finished_suite_trains_nothing(tmp_path, capsys, monkeypatch):
    suite_dir = make_suite(tmp_path / "suite")
    for game in ("Breakout", "Pong", "Alien"):
        for session in range(2):
            add_session(suite_dir, game, session, [1.0])
    monkeypatch.setattr(suite, "run_processes", lambda *_, **__: pytest.fail("something was started"))
    suite_command.main(["--run-dir", str(suite_dir), "--log.no-graphs"])
    assert capsys.readouterr().out.count("finished already") == 3


def test_a_real_game_fails_and_another_finishes(tmp_path):
    """With the command and real processes: a file takes the place of the directory of Pong's session."""
    arguments = "--sessions 1 --total-env-steps 32 --env.num-envs 2 --ppo.rollout-length 8 --ppo.minibatch-size 16"
    arguments += " --ppo.epochs 1"  # as in faults/rehearsal.py: the same program
    command = [sys.executable, "-m", "jaxrl_atari.suite", *arguments.split(), "--log.no-graphs", "--log.no-tensorboard"]
    suite_dir = make_suite(tmp_path / "suite", games=("Pong", "CrazyClimber"))
    (suite_dir / "Pong").mkdir()
    (suite_dir / "Pong" / "session_0").write_text("in the way")
    done = subprocess.run(
        [*command, "--resume", str(suite_dir)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "1 of 2 games failed (Pong: " in done.stderr
    rows = {row["game"]: row for row in csv.DictReader((suite_dir / "results.csv").read_text().splitlines())}
    assert rows["CrazyClimber"]["env_steps"] == "32.0"
    assert rows["Pong"]["status"].startswith("failed: ")
    assert Checkpoints(suite_dir / "CrazyClimber" / "session_0").steps()[-1] == 32
    assert Path(suite_dir / "CrazyClimber" / "trial.json").is_file()


@pytest.mark.parametrize(
    ("fields", "shares", "threads"),
    [
        ({}, [()], 0),  # one game at a time: its trial shares the cores among its sessions
        ({"sessions": 4}, [(0,), (1,)], 8),
        ({"sessions": 4}, [(0, 1), (2, 3)], 4),
        ({"sessions": 4, "trial": TrialConfig(parallel=4)}, [(0,), (1,)], 2),
        ({"env": EnvConfig(num_envs=2, num_threads=3)}, [(0,), (1,)], 3),
    ],
)
def test_sessions_of_games_side_by_side_share_the_cores(fields, shares, threads, monkeypatch):
    monkeypatch.setattr(suite, "usable_cores", lambda: 16)
    config = Config(**fields)
    assert suite.emulator_threads(config, shares) == threads


def test_each_game_sees_its_gpus_by_the_names_in_cuda_visible_devices(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXRL_ATARI_SIMULATED_GPUS", "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setattr(suite, "usable_cores", lambda: 16)
    started = []
    monkeypatch.setattr(suite, "run_processes", lambda tasks, parallel, **_: started.append((tasks, parallel)))
    suite.run_suite(make_suite(tmp_path / "suite"), TINY, ["Pong", "Breakout", "Alien"])
    ((tasks, parallel),) = started
    assert [task.environment["CUDA_VISIBLE_DEVICES"] for task in tasks] == ["3", "1", "3"]
    assert {task.arguments[-1] for task in tasks} == {"8"}  # threads: half of the cores
    assert parallel == 2


def test_a_suite_of_another_protocol_is_compared_with_no_reference(tmp_path):
    config = dataclasses.replace(TINY, sessions=1, env=EnvConfig(num_envs=2, life_loss_terminal=False))
    suite_dir = make_suite(tmp_path / "suite", config, ["Pong"])
    add_session(suite_dir, "Pong", 0, [1.0, 2.0], config)
    text = results.write_results(suite_dir)
    assert "Protocol v5, life_loss_terminal=false. " in text
    assert "No aggregates. Scores are not compared: " in text
    written = json.loads((suite_dir / "results.json").read_text())
    assert (written["protocol"], written["aggregates"]) == ("v5, life_loss_terminal=false", {})
    (row,) = written["games"]
    assert row["score"] == 1.5
    for name in ("reference_score", "reference_normalised_score", "human_normalised_score"):
        assert row[name] is None
    suite_command.plot(suite_dir, config, ["Pong"])
    assert not list(suite_dir.glob("**/suites.*"))
