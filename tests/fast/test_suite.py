"""Suites: the command, with games that are finished, and statistics of made-up games."""

import dataclasses
import re
import shutil

import numpy as np
import pytest
import small_training
from sample_runs import read_csv, table, write_checkpoint, write_metrics
from small_training import change

from jaxrl_atari import plots
from jaxrl_atari.envs.games import GAMES
from jaxrl_atari.errors import ConfigError, UserError
from jaxrl_atari.report.page import write_report
from jaxrl_atari.report.score_statistics import STATISTICS
from jaxrl_atari.report.suites import read_results, read_suite, save_results
from jaxrl_atari.runs.description import describe, read_config
from jaxrl_atari.runs.files import only_writer, read_json, write_json
from jaxrl_atari.suite import __main__ as suite_command
from jaxrl_atari.suite.sweep import game_configs, plan_sweep, write_plan

TINY = change(small_training.TINY, name="suite", sessions=2, env={"max_frames": None})
GAMES_OF_TINY = ("Pong", "Breakout", "Alien")


def make_suite(directory, config=TINY, games=GAMES_OF_TINY):
    directory.mkdir()
    write_plan(directory, plan_sweep(config, list(games), {}))
    return directory


def add_session(suite_dir, game, session, returns, config=TINY):
    """Writes the files of a finished session with the given returns."""
    (suite_dir / game).mkdir(exist_ok=True)
    write_json(suite_dir / game / "config.json", describe(game_configs(config, [game])[game]))
    steps = [config.total_env_steps * (i + 1) / len(returns) for i in range(len(returns))]
    write_metrics(suite_dir / game / f"session_{session}", table(returns, steps))
    write_checkpoint(suite_dir / game / f"session_{session}", config.total_env_steps)


def score(game, human_normalised):
    """The raw score with a human-normalised score."""
    random, human = GAMES[game].dqn_random.score, GAMES[game].human.score
    return random + human_normalised * (human - random)


def add_games(suite_dir, scores):
    """Adds the sessions of complete games; `scores` are human-normalised. Each is learned in four log points."""
    for game, sessions in scores.items():
        for session, value in enumerate(sessions):
            add_session(suite_dir, game, session, [score(game, value * share) for share in (0, 0.5, 1, 2.5)])
    return suite_dir


# return_ma is the mean of 4 log points: 0, 0.25, 0.5, 1 times the value.
BETTER = {"Pong": [0.5, 1.0], "Breakout": [1.5, 2.0]}
WORSE = {"Pong": [0.0, 0.5], "Breakout": [0.5, 0.25]}


def results(suite_dir, failures=None):
    """results.md without its padding, results.json and the rows of results.csv by game."""
    reasons = {
        (suite_dir / game / "session_1").absolute(): UserError(why) for game, why in (failures or {}).items()
    }
    save_results(read_results(suite_dir, reasons), suite_dir)
    rows = {row["game"]: row for row in read_csv(suite_dir / "results.csv")}
    text = re.sub(r" +", " ", (suite_dir / "results.md").read_text())
    return text, read_json(suite_dir / "results.json"), rows


# --- The command -------------------------------------------------------------------------------------------------


def test_the_default_games_have_a_reference_score_under_the_protocol_and_each_gets_its_lambda():
    _, suite, before = suite_command.parse_options([])
    assert before is None
    assert suite.games == [name for name, game in GAMES.items() if game.references]
    _, classic, _ = suite_command.parse_options(["--env.protocol", "classic"])
    assert (len(suite.games), len(classic.games)) == (57, 63)
    assert "MontezumaRevenge" in {*classic.games} - {*suite.games}
    configs = game_configs(suite.config, ["qbert", "ms_pacman", "Pong"])
    lambdas = {name: config.resolved_gae_lambda for name, config in configs.items()}
    assert lambdas == {"Qbert": 0.95, "MsPacman": 0.85, "Pong": 0.85}
    _, fixed, _ = suite_command.parse_options(["--games", "pong", "--ppo.gae-lambda", "0.9", "--sessions", "3"])
    assert (fixed.games, fixed.config.sessions) == (["Pong"], 3)
    assert game_configs(fixed.config, fixed.games)["Pong"].resolved_gae_lambda == 0.9


REFUSED = [
    (["--games"], "at least one game"),
    (["--env.protocol", "machado"], "under a protocol with reference scores"),
    (["--games", "PongNoFrameskip-v4"], "expected Pong"),
    (["--env.game", "Pong"], "choose with --games"),
    (["--games", "Pong", "--devices.distributed"], "devices.distributed = True"),
    (["--vary", "ppo.gamma"], "expected FIELD=VALUE,VALUE,..."),
    (["--vary", "ppo.gama=0.9"], "did you mean ppo.gamma?"),
    (["--vary", "total_env_steps=1,2"], "expected a field that may differ between settings"),
    (["--vary", "ppo.gamma=0.9,2"], "ppo.gamma = 2"),
    (["--vary", "ppo.gamma=0.9", "--ppo.gamma", "0.8"], "because --vary has ppo.gamma"),
    (["--vary", "ppo.epochs=1,true"], "ppo.epochs = True"),
]


def test_options_that_cannot_be_used_are_errors_before_anything_starts():
    for arguments, words in REFUSED:
        with pytest.raises(UserError) as error:
            suite_command.parse_options(arguments)
        assert words in str(error.value), arguments


def test_sizes_that_do_not_fit_in_a_setting_leave_no_directory(tmp_path):
    sizes = ["--vary", "env.num_envs=8,16", "--vary", "ppo.minibatch_size=256,2048"]
    with pytest.raises(UserError, match="= 1024 samples"):
        suite_command.main(["--games", "Pong", "--run-dir", str(tmp_path / "suite"), *sizes])
    assert not (tmp_path / "suite").exists()


def test_the_protocol_of_the_configs_game_holds_for_every_game(tmp_path):
    path = tmp_path / "classic.py"
    path.write_text(
        "from jaxrl_atari.config import Config, EnvConfig\n"
        "def get_config(): return Config(env=EnvConfig(game='QbertNoFrameskip-v4'))\n"
    )
    _, suite, _ = suite_command.parse_options(["--games", "Pong", "Alien", "--config", str(path)])
    configs = game_configs(suite.config, suite.games).values()
    assert {config.env.resolved_protocol for config in configs} == {"classic"}
    line = ["--games", "Pong", "--config", str(path), "--env.protocol", "v5"]
    _, suite, _ = suite_command.parse_options(line)
    assert game_configs(suite.config, suite.games)["Pong"].env.resolved_protocol == "v5", "as in `train`"


def test_run_dir_starts_a_suite_or_goes_on_with_the_one_it_holds(tmp_path):
    line = ["--games", "Pong", "Alien", "--run-dir", str(tmp_path / "suite"), "--config", "configs/qbert.py"]
    _, suite, before = suite_command.parse_options(line)
    assert (suite.games, suite.config.name, before) == (["Pong", "Alien"], "suite", None)
    make_suite(tmp_path / "suite", dataclasses.replace(suite.config, sessions=7), suite.games)
    _, suite, before = suite_command.parse_options(line)
    assert (suite.config.sessions, before.games) == (7, ["Pong", "Alien"])
    _, suite, _ = suite_command.parse_options([*line, "--games", "Qbert", "Pong"])
    assert suite.games == ["Pong", "Alien", "Qbert"]
    with pytest.raises(UserError, match=r"--vary = 'ppo\.gamma': expected no field, as in this directory"):
        suite_command.parse_options([*line, "--vary", "ppo.gamma=0.9"])


def test_a_suite_goes_on_as_it_began(tmp_path):
    """With its own seed; and a game that was trained otherwise, by hand, is refused."""
    suite_dir = add_games(make_suite(tmp_path / "suite"), BETTER)
    before = (suite_dir / "suite.json").read_bytes()
    with pytest.raises(UserError, match="with which the run began"):
        suite_command.main(["--resume", str(suite_dir), "--seed", "7"])
    assert (suite_dir / "suite.json").read_bytes() == before
    shorter = make_suite(tmp_path / "shorter", dataclasses.replace(TINY, total_env_steps=128))
    add_session(shorter, "Pong", 0, [1.0])
    with pytest.raises(ConfigError, match="total_env_steps = 128: expected at least 256"):
        suite_command.main(["--resume", str(shorter)])
    busy = make_suite(tmp_path / "busy")
    (busy / "Pong").mkdir()
    with only_writer(busy / "Pong"), pytest.raises(UserError, match="Pong: another process is training there"):
        suite_command.main(["--resume", str(busy)])


def test_a_finished_suite_is_left_alone_but_for_fewer_sessions(tmp_path, capsys):
    suite_dir = add_games(make_suite(tmp_path / "suite", games=("Pong", "Breakout")), BETTER)
    line = ["--resume", str(suite_dir)]
    before = (suite_dir / "suite.json").read_text()
    suite_command.main(line)
    assert capsys.readouterr().out.count("finished already") == 2
    assert (suite_dir / "suite.json").read_text() == before
    suite_command.main([*line, "--sessions", "1", "--ppo.gae-lambda", "0.5"])
    assert read_json(suite_dir / "suite.json")["config"]["sessions"] == 1
    assert read_config(suite_dir / "Pong").sessions == 2
    _, _, rows = results(suite_dir)  # what the games were trained with
    assert {name: row["gae_lambda"] for name, row in rows.items()} == {"Pong": "0.85", "Breakout": "0.7"}


# --- Results -----------------------------------------------------------------------------------------------------


def test_the_table_has_our_scores_beside_the_reference(tmp_path):
    suite_dir = make_suite(tmp_path / "suite")
    for session, value in enumerate((10.0, 14.0)):
        add_session(suite_dir, "Breakout", session, [value, value])
    add_session(suite_dir, "Pong", 0, [-20.0, -20.0])  # the second session is missing
    text, found, rows = results(suite_dir, {"Pong": "out of memory | buy more"})
    game, random = GAMES["Breakout"], GAMES["Breakout"].random.score
    ratio = (12 - random) / (game.references[0].score - random)
    human = (12 - 1.7) / (30.5 - 1.7)  # the pair in DQN Zoo's atari_data.py
    expected = {
        "score": 12, "score_std": 8**0.5, "gae_lambda": 0.70, "sessions": 2, "reference_normalised_score": ratio,
        "human_normalised_score": human, "hours": 256 * 0.36 / 3600,  # of the sample tables
    }  # fmt: skip
    assert {name: float(rows["Breakout"][name]) for name in expected} == pytest.approx(expected)
    assert [rows[name]["status"] for name in GAMES_OF_TINY] == [
        "not complete; session 1 failed: out of memory | buy more", "complete", "not complete",
    ]  # fmt: skip
    assert (rows["Alien"]["score"], rows["Pong"]["sessions"]) == ("", "1")
    assert float(rows["Alien"]["reference_score"]) == GAMES["Alien"].references[0].score
    # Only complete games enter the aggregates: one game, whose score is the median and the mean.
    for each, (kind, value) in zip(
        found["statistics"], (("human-normalised", human), ("ratio", ratio)), strict=True
    ):
        assert (each["normalisation"], each["games"]) == (kind, 1)
        median, (low, high) = each["median"]
        assert median == pytest.approx(value)
        assert low < value < high
    assert " session 1 failed: out of memory / buy more |" in text


def test_the_scores_are_written_also_as_rliables_dictionary(tmp_path):
    suite_dir = add_games(make_suite(tmp_path / "suite"), BETTER)
    add_session(suite_dir, "Alien", 0, [500.0])  # not complete
    _, written, _ = results(suite_dir)
    expected = {game: [score(game, value) for value in BETTER[game]] for game in ("Pong", "Breakout")}
    assert written["scores"]["suite"] == {game: pytest.approx(values) for game, values in expected.items()}
    found, ratio = written["statistics"]
    assert (found["normalisation"], found["names"]) == ("human-normalised", ["Breakout", "Pong"])
    np.testing.assert_allclose(found["scores"], [[1.5, 0.5], [2.0, 1.0]])  # sessions x games
    assert np.shape(ratio["scores"]) == (2, 2)
    values = [found[name][0] for name in STATISTICS]
    assert values == pytest.approx([1.25, 1.25, 1.25, 0.125])  # mean, median, IQM, gap
    # The mean of each game has the variance 1/16, and their mean half of that: 4.303 (2 degrees of freedom) *
    # 0.177.
    assert found["mean"][1] == pytest.approx([1.25 - 0.761, 1.25 + 0.761], abs=0.05)


# --- Sweeps ------------------------------------------------------------------------------------------------------

VARY = {"ppo.learning_rate": [0.0001, 0.001], "ppo.normalize_advantages": [True, False]}


def test_commas_separate_games_and_several_fields_that_vary_make_a_grid():
    line = ["--games", "Pong,breakout", "Alien", "--vary", "ppo.learning-rate=1e-4, 0.001"]
    _, sweep, _ = suite_command.parse_options([*line, "--vary", "ppo.normalize_advantages=true,false"])
    assert (sweep.games, sweep.vary) == (["Pong", "Breakout", "Alien"], VARY)
    assert len(sweep.settings) == 4
    last = [*sweep.settings.values()][-1].ppo
    assert (last.learning_rate, last.normalize_advantages) == (0.001, False)


def make_sweep(folder, scores):
    """A finished sweep of gamma with made-up returns: `scores` has those of each value, game and session."""
    folder.mkdir()
    sweep = plan_sweep(TINY, list(scores[0]), {"ppo.gamma": [0.9, 0.99]})
    write_plan(folder, sweep)
    for (setting, config), by_game in zip(sweep.settings.items(), scores, strict=True):
        for game, sessions in by_game.items():
            for session, value in enumerate(sessions):
                add_session(folder / setting, game, session, [score(game, value)] * 2, config)
    return folder


def test_a_sweep_has_one_table_and_is_resumed(tmp_path, capsys):
    scores = [{"Pong": [0.5, 1.0], "Breakout": [1.5, 2.0]}, {"Pong": [0.1, 0.2], "Breakout": [0.5, 0.25]}]
    sweep_dir = make_sweep(tmp_path / "sweep", scores)
    line = ["--resume", str(sweep_dir)]
    suite_command.main(line)
    said = capsys.readouterr().out
    assert said.count("finished already") == 4
    rows = read_csv(sweep_dir / "results.csv")
    assert [(row["suite"], row["game"], row["sessions"]) for row in rows] == [
        ("ppo.gamma=0.9", "Pong", "2"), ("ppo.gamma=0.99", "Pong", "2"),
        ("ppo.gamma=0.9", "Breakout", "2"), ("ppo.gamma=0.99", "Breakout", "2"),
    ]  # fmt: skip
    human = [float(row["human_normalised_score"]) for row in rows]
    assert human == pytest.approx([0.75, 0.15, 1.75, 0.375])
    assert "| ppo.gamma=0.9 | human-normalised | 2 | 1.25 (" in re.sub(r" +", " ", said)  # mean over the games
    assert (sweep_dir / "ppo.gamma=0.99" / "results.csv").is_file()
    assert "Pong: ppo.gamma=0.99 - ppo.gamma=0.9: -" in said
    assert "not distinguishable with 2 sessions each; about" in said
    write_report(sweep_dir / "ppo.gamma=0.99")
    assert "./ppo.gamma%3D0.99/report.html" in write_report(sweep_dir).read_text()
    before = (sweep_dir / "sweep.json").read_bytes()
    _, again, _ = suite_command.parse_options(line)
    assert again.vary == {"ppo.gamma": [0.9, 0.99]}
    _, more, _ = suite_command.parse_options([*line, "--vary", "ppo.gamma=0.9,0.95,0.99"])
    assert len(more.settings) == 3
    _, less, _ = suite_command.parse_options([*line, "--vary", "ppo.gamma=0.9"])
    assert less.vary == {"ppo.gamma": [0.9, 0.99]}
    with pytest.raises(UserError, match=r"--vary = 'ppo\.epochs': expected ppo\.gamma, as in this directory"):
        suite_command.parse_options([*line, "--vary", "ppo.epochs=2"])
    assert (sweep_dir / "sweep.json").read_bytes() == before


def test_results_are_shown_before_they_are_saved_and_the_rest_goes_on(tmp_path, capsys):
    sweep_dir = make_sweep(tmp_path / "sweep", [{"Pong": [0.5]}, {"Pong": [0.1]}])
    (sweep_dir / "results.md").mkdir()
    suite_command.main(["--resume", str(sweep_dir), "--sessions", "1"])
    said = capsys.readouterr().out
    assert said.index("# sweep: 1 game") < said.index("results are not saved: ")
    assert (sweep_dir / "ppo.gamma=0.9" / "results.md").is_file()


# --- Comparison --------------------------------------------------------------------------------------------------


def test_two_suites_are_compared(tmp_path, capsys):
    better = add_games(make_suite(tmp_path / "better", games=("Pong", "Breakout")), BETTER)
    worse = add_games(make_suite(tmp_path / "worse"), {**WORSE, "Alien": [1.0, 1.0]})
    output = tmp_path / "comparison"
    plots.main([str(better), str(worse), "--output", str(output)])
    printed = capsys.readouterr().out
    # Pong: 0.5 of 4 pairs, Breakout: none.
    assert re.search(r"\| worse +\| human-normalised \| +2 \| .* 0.0625 \(0 to 0\.\d+\) \|", printed)
    assert {path.stem for path in output.iterdir()} == {"comparison"}
    compared = read_json(output / "comparison.json")
    better, worse, *_ = compared["statistics"]
    assert (better["suite"], worse["suite"]) == ("better", "worse")
    assert worse["improvement"][0] == 0.0625
    rows = [(row["game"], row["suite"]) for row in compared["games"]]
    assert rows[:3] == [("Pong", "better"), ("Pong", "worse"), ("Breakout", "better")]
    assert re.search(
        r"Pong: worse - better: -.* \(Welch's t test\); not dist", (output / "comparison.md").read_text()
    )


def test_only_the_suites_own_complete_games_count(tmp_path):
    suite_dir = add_games(make_suite(tmp_path / "suite", games=("Pong", "Qbert")), {"Pong": [0.5, 1.0]})
    shutil.copytree(suite_dir / "Pong", suite_dir / "Pong_old")
    add_games(suite_dir, {"Breakout": [0.5, 1.0]})  # no game of this suite
    add_session(suite_dir, "Qbert", 0, [1.0])  # one session of two
    assert list(read_suite(suite_dir).scores()) == ["Pong"]
    # Resumed with one.
    write_plan(suite_dir, plan_sweep(dataclasses.replace(TINY, sessions=1), ["Pong", "Qbert"], {}))
    assert {game: len(scores) for game, scores in read_suite(suite_dir).scores().items()} == {
        "Pong": 1,
        "Qbert": 1,
    }
    # Trained longer.
    write_plan(suite_dir, plan_sweep(dataclasses.replace(TINY, total_env_steps=640), ["Pong"], {}))
    assert not read_suite(suite_dir).scores()
    assert results(suite_dir)[2]["Pong"]["status"].startswith("not complete")
