"""Suites: the command, with games that are finished or train for two updates, and statistics of made-up games."""

import dataclasses
import json
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from sample_runs import read_csv, table, write_checkpoint, write_metrics

from jaxrl_atari import plots
from jaxrl_atari.config import Config, EnvConfig, LogConfig, PPOConfig
from jaxrl_atari.envs.games import GAMES
from jaxrl_atari.errors import ConfigError, UserError
from jaxrl_atari.report import suites
from jaxrl_atari.report.comparison import compare_suites
from jaxrl_atari.report.score_statistics import STATISTICS
from jaxrl_atari.report.suites import read_suite, save_results, suite_results
from jaxrl_atari.report.summary import read_run
from jaxrl_atari.runs.description import describe, read_config
from jaxrl_atari.runs.files import read_json, write_json
from jaxrl_atari.suite import __main__ as suite_command
from jaxrl_atari.suite import results as suite_results_module
from jaxrl_atari.suite.jobs import unfinished_jobs_of_sweep
from jaxrl_atari.suite.results import SuiteResultsKeeper
from jaxrl_atari.suite.suite import game_configs, write_suite_file
from jaxrl_atari.suite.sweep import plan_sweep, read_plan, write_plan

TINY = Config(
    name="suite", sessions=2, total_env_steps=64, env=EnvConfig(num_envs=2, num_threads=1),
    ppo=PPOConfig(rollout_length=8, minibatch_size=16, epochs=1),
    log=LogConfig(every_env_steps=16, tensorboard=False, graphs=False),
)  # fmt: skip
GAMES_OF_TINY = ("Pong", "Breakout", "Alien")


def make_suite(directory, config=TINY, games=GAMES_OF_TINY):
    directory.mkdir()
    write_suite_file(directory, config, games)
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


def add_games(suite_dir, scores, config=TINY):
    """Adds the sessions of complete games; `scores` are human-normalised. Each is learned in four log points."""
    for game, sessions in scores.items():
        for session, value in enumerate(sessions):
            add_session(
                suite_dir, game, session, [score(game, value * share) for share in (0, 0.5, 1, 2.5)], config
            )
    return suite_dir


# return_ma is the mean of 4 log points: 0, 0.25, 0.5, 1 times the value.
BETTER = {"Pong": [0.5, 1.0], "Breakout": [1.5, 2.0]}
WORSE = {"Pong": [0.0, 0.5], "Breakout": [0.5, 0.25]}


def results(suite_dir, failures=None):
    """results.md without its padding, results.json and the rows of results.csv by game."""
    save_results(suite_results(read_suite(suite_dir), failures or {}))
    rows = {row["game"]: row for row in read_csv(suite_dir / "results.csv")}
    text = re.sub(r" +", " ", (suite_dir / "results.md").read_text())
    return text, json.loads((suite_dir / "results.json").read_text()), rows


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


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--games", "Pong", "pong"], "each game once"),
        (["--games"], "at least one game"),
        (["--env.protocol", "machado"], "at least one game, or no --games under a protocol with reference scores"),
        (
            ["--games", "PongNoFrameskip-v4"],
            "expected Pong; a suite has one protocol: choose it with --env.protocol",
        ),
        (["--env.game", "Pong"], "choose with --games"),
        ([f"--env.game={Config().env.game}"], "choose with --games"),
        (
            ["--resources.gpu", "0.25"],
            "--resources.gpu = 0.25: expected 1.0 without --address; on this machine, --tr",
        ),
        (["--resources.cpu", "4"], "--resources.cpu = 4: expected 0 without --address"),
        (
            ["--address", "auto", "--trial.parallel", "2"],
            "trial.parallel = 2: expected 0 with --address; --resour",
        ),
        (
            ["--vary", f"network.name={'n' * 250}"],
            "expected a setting of at most 255 bytes, because its directory is named after it",
        ),
        (["--games", "Pong", "--devices.distributed"], "devices.distributed = True: expected false in a suite"),
        (["--vary", "ppo.gamma"], "--vary = 'ppo.gamma': expected FIELD=VALUE,VALUE,..."),
        (["--vary", "ppo.gama=0.9"], "did you mean ppo.gamma?"),
        (["--vary", "ppo.coefficients.a.b=1,2"], "expected a field of the config by its dotted name"),
        (["--vary", "ppo.coeficients.max_c=1,2"], "did you mean ppo.coefficients.max_c?"),
        (["--vary", "ppo.coefficients=1,2"], "expected a field that may differ between settings"),
        (["--vary", "total_env_steps=1,2"], "expected a field that may differ between settings"),
        (["--vary", "ppo.gamma=0.9,2"], "ppo.gamma = 2: expected a number from 0 to 1"),
        (["--vary", "ppo.gamma=0.9,0.90"], "each value once"),
        (["--vary", "ppo.gamma=1,1.0"], "each value once"),
        (
            ["--vary", "ppo.learning_rate=1e-4,1e-3", "--ppo.learning-rate", "5e-4"],
            "--ppo.learning-rate = 0.0005: expected no such option, because --vary has ppo.learning_rate",
        ),
        (
            ["--vary", "ppo.normalize_advantages=true,false", "--ppo.no-normalize-advantages"],
            "--ppo.normalize-advantages = False: expected no such option, because --vary has ppo.normalize_adv",
        ),
        (["--vary", "ppo.epochs=1,true"], "ppo.epochs = True: expected a whole number"),
        (["--vary", "ppo.gamma=0.9", "--vary", "ppo.gamma=0.8"], "expected ppo.gamma once, with all its values"),
        (
            ["--vary", "env.num_envs=8,16", "--vary", "ppo.minibatch_size=256,2048"],
            "ppo.minibatch_size = 2048: expected a divisor of the rollout's 128 x 8 = 1024 samples",
        ),
        (["--resume", "nowhere"], "nowhere: not a suite directory"),
    ],
)
def test_invalid_options_are_errors_before_anything_starts(arguments, words):
    with pytest.raises(UserError) as error:
        suite_command.parse_options(arguments)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"games": ["Foo"]}, "env.game = 'Foo': expected one of ALE's"),
        ({"games": ["Pong", "pong"]}, "games = 'pong': expected each game once"),
        ({"games": []}, "games = '': expected at least one game"),
        ({"vary": {}}, "vary = {}: expected a field that varies"),
        ({"vary": {"seed": [1, 2]}}, "--vary = 'seed': expected a field that may differ between settings"),
        ({"vary": {"ppo.gama": [0.9]}}, "--vary = 'ppo.gama': expected a field of the config"),
        ({"vary": {"ppo.gamma": []}}, "--vary = 'ppo.gamma=[]': expected a list of values"),
        ({"vary": {"network.name": "nature"}}, "--vary = 'network.name=nature': expected a list of values"),
        ({"vary": {"ppo.gamma": [0.9, 0.9]}}, "--vary = 'ppo.gamma=0.9,0.9': expected each value once"),
    ],
)
def test_a_plan_that_was_edited_by_hand_is_checked_as_the_options_are(tmp_path, changed, words):
    write_plan(tmp_path, plan_sweep(TINY, ["Pong"], {"ppo.gamma": [0.9, 0.99]} if "vary" in changed else {}))
    file = tmp_path / ("sweep.json" if "vary" in changed else "suite.json")
    write_json(file, read_json(file) | changed)
    with pytest.raises(UserError) as error:
        suite_command.parse_options(["--resume", str(tmp_path)])
    assert str(error.value).startswith(f"{file}: cannot be used (")
    assert words in str(error.value)


def test_the_protocol_of_the_configs_game_holds_for_every_game(tmp_path):
    path = tmp_path / "classic.py"
    path.write_text(
        "from jaxrl_atari.config import Config, EnvConfig\n"
        "def get_config(): return Config(env=EnvConfig(game='QbertNoFrameskip-v4'))\n"
    )
    _, suite, _ = suite_command.parse_options(["--games", "Pong", "Alien", "--config", str(path)])
    configs = game_configs(suite.config, suite.games).values()
    assert {config.env.resolved_protocol for config in configs} == {"classic"}


def test_run_dir_starts_a_suite_or_goes_on_with_the_one_it_holds(tmp_path, capsys):
    line = ["--games", "Pong", "Alien", "--run-dir", str(tmp_path / "suite"), "--config", "configs/qbert.py"]
    _, suite, before = suite_command.parse_options(line)
    assert (suite.games, suite.config.name, before) == (["Pong", "Alien"], "suite", None)
    make_suite(tmp_path / "suite", dataclasses.replace(suite.config, sessions=7), suite.games)
    _, suite, before = suite_command.parse_options(line)
    assert (suite.config.sessions, before.games) == (7, ["Pong", "Alien"])
    assert (
        f"configs/qbert.py differs from {tmp_path / 'suite'}, which keeps its own values: sessions 1 -> 7"
        in capsys.readouterr().out
    )
    with pytest.raises(UserError, match="--games = 'Qbert': expected Pong Alien, the games of the suite"):
        suite_command.parse_options([*line, "--games", "Qbert"])
    with pytest.raises(UserError, match=r"--vary = 'ppo\.gamma=0\.9': .*; this one has no --vary$"):
        suite_command.parse_options([*line, "--vary", "ppo.gamma=0.9"])


def test_games_and_fields_in_another_order_are_those_of_the_suite(tmp_path):
    vary = {"ppo.gamma": [0.9], "ppo.epochs": [1]}
    write_plan(tmp_path, plan_sweep(TINY, ["Pong", "Alien"], vary))
    line = [
        "--resume",
        str(tmp_path),
        "--games",
        "Alien,Pong",
        "--vary",
        "ppo.epochs=1,2",
        "--vary",
        "ppo.gamma=0.9",
    ]
    _, plan, before = suite_command.parse_options(line)
    assert (plan.games, before.games) == (["Pong", "Alien"], ["Pong", "Alien"])
    assert [setting.label for setting in plan.settings] == [
        "ppo.gamma=0.9,ppo.epochs=1",
        "ppo.gamma=0.9,ppo.epochs=2",
    ]


@pytest.mark.parametrize(
    "option", [("--seed", "7"), ("--env.protocol", "classic"), ("--env.full-action-space", "true")]
)
def test_a_suite_goes_on_with_its_own_protocol_and_seed(tmp_path, option):
    suite_dir = add_games(make_suite(tmp_path / "suite"), BETTER)
    before = (suite_dir / "suite.json").read_bytes()
    with pytest.raises(UserError, match="with which the run began; leave it out, or start a new run"):
        suite_command.main(["--resume", str(suite_dir), *option])
    assert (suite_dir / "suite.json").read_bytes() == before


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (TINY, r"total_env_steps = 32: expected at least 64, the env steps of a session"),
        (
            dataclasses.replace(TINY, env=EnvConfig(num_envs=2, protocol="machado")),
            r"expected machado, with which",
        ),
    ],
)
def test_a_game_that_was_trained_otherwise_is_refused(other, message, tmp_path):
    """By hand."""
    suite_dir = make_suite(tmp_path / "suite", dataclasses.replace(TINY, total_env_steps=32))
    add_session(suite_dir, "Pong", 0, [1.0], other)
    with pytest.raises(ConfigError, match=message):
        suite_command.main(["--resume", str(suite_dir)])


def test_a_finished_suite_is_left_alone_but_for_fewer_sessions(tmp_path, capsys):
    suite_dir = add_games(make_suite(tmp_path / "suite", games=("Pong", "Breakout")), BETTER)
    line = ["--resume", str(suite_dir)]
    before = (suite_dir / "suite.json").read_text()
    suite_command.main(line)
    assert capsys.readouterr().out.count("finished already") == 2
    assert (suite_dir / "suite.json").read_text() == before
    suite_command.main([*line, "--sessions", "1", "--ppo.gae-lambda", "0.5"])
    assert json.loads((suite_dir / "suite.json").read_text())["config"]["sessions"] == 1
    assert read_config(suite_dir / "Pong").sessions == 2
    _, _, rows = results(suite_dir)  # what the games were trained with
    assert {name: row["gae_lambda"] for name, row in rows.items()} == {"Pong": "0.85", "Breakout": "0.7"}


@pytest.mark.long
def test_games_train_in_processes_and_one_that_fails_does_not_stop_the_others(tmp_path):
    """A file takes the place of the directory of a session; a resume without it trains what is missing."""
    suite_dir = make_suite(tmp_path / "suite", games=("Pong", "CrazyClimber"))
    (suite_dir / "Pong").mkdir()
    for session in ("session_0", "session_1"):
        (suite_dir / "Pong" / session).write_text("in the way")
    command = [sys.executable, "-m", "jaxrl_atari.suite", "--resume", str(suite_dir)]

    def run(*options):
        return subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)

    done = run("--trial.parallel", "2")
    assert done.returncode == 1, done.stderr
    assert re.search(r"2 of 4 sessions failed \(game Pong session \d: .*; game Pong session \d: ", done.stderr)
    assert f"python -m jaxrl_atari.suite --resume {suite_dir} runs what is missing" in done.stderr
    assert re.search(r"^game CrazyClimber  session 1 .* env_steps 64 ", done.stdout, re.M)
    rows = {row["game"]: row for row in read_csv(suite_dir / "results.csv")}
    assert rows["Pong"]["status"].startswith("failed: session ")
    assert (rows["CrazyClimber"]["env_steps"], rows["CrazyClimber"]["sessions"]) == ("64.0", "2")
    for session in ("session_0", "session_1"):
        assert f"{session.replace('_', ' ')}: " in rows["Pong"]["status"]
        (suite_dir / "Pong" / session).unlink()
    done = run("--log.graphs")
    assert done.returncode == 0, done.stderr
    assert "CrazyClimber  finished already" in done.stdout
    assert str(suite_dir / "report.html") in done.stdout
    assert (suite_dir / "graphs" / "comparison.png").is_file()
    lines = re.findall(r"^\| (?:game|Pong|CrazyClimber) .* (?:status|complete) \|$", done.stdout, re.M)
    assert len(lines) == 3
    assert len({len(line) for line in lines}) == 1, "the columns are aligned"


def test_a_name_that_no_session_could_use_is_refused_before_a_session_starts(tmp_path):
    line = ["--games", "Pong", "--run-dir", str(tmp_path / "suite"), "--vary", "network.name=nature,Nature2"]
    with pytest.raises(UserError, match=r"network\.name = 'Nature2'"):
        suite_command.main(line)
    assert not (tmp_path / "suite").exists()


def test_results_that_cannot_be_read_do_not_stop_the_sessions(tmp_path, capsys):
    directory = tmp_path / "sweep"
    directory.mkdir()
    sweep = plan_sweep(TINY, ["Pong"], {"ppo.gamma": [0.9, 0.99]})
    write_plan(directory, sweep)
    first, second = sweep.settings
    jobs = unfinished_jobs_of_sweep(directory, sweep)
    (directory / second.label / "Pong").mkdir(exist_ok=True)
    damaged = directory / second.label / "suite.json"
    saved = damaged.read_text()
    damaged.write_text("{")
    results = SuiteResultsKeeper(directory, sweep)
    for _ in range(2):  # each time a job of the first setting ends
        results.on_end(next(job for job in jobs if job.setting_label == first.label), None)
        assert "the results cannot be read: " in capsys.readouterr().out
    assert (directory / first.label / "results.csv").is_file(), "a damaged setting keeps no other from its results"
    damaged.write_text(saved)
    results.on_end(jobs[-1], None)
    assert (directory / "results.csv").is_file()


def test_a_game_whose_config_is_damaged_at_the_end_keeps_no_other_from_the_table(tmp_path, capsys):
    sweep_dir = make_sweep(tmp_path / "sweep", [0.9, 0.99], [{"Pong": [0.5]}, {"Pong": [0.1]}], ["Pong"])
    sweep = read_plan(sweep_dir)
    first, _ = sweep.settings
    results = SuiteResultsKeeper(sweep_dir, sweep)
    (sweep_dir / first.label / "Pong" / "config.json").write_text("{")
    results.show_and_save_all()
    assert "Pong" in capsys.readouterr().out
    rows = {row["ppo.gamma"]: row for row in read_csv(sweep_dir / "results.csv")}
    assert re.match(r"damaged: .*Pong/config\.json: cannot be used ", rows["0.9"]["status"])
    assert rows["0.99"]["status"] == "not complete"


def test_games_that_are_complete_are_read_once_while_others_train(tmp_path, monkeypatch):
    """With 57 games and several settings, each end of a session would else read all of them again."""
    suite_dir = add_games(make_suite(tmp_path / "suite"), BETTER)
    plan = read_plan(suite_dir)
    results = SuiteResultsKeeper(suite_dir, plan)
    jobs = unfinished_jobs_of_sweep(suite_dir, plan)
    assert [job.name for job in jobs] == ["game Alien  session 0", "game Alien  session 1"]
    reads = []

    def read_and_note(run_dir, *arguments):
        reads.append(run_dir.name)
        return read_run(run_dir, *arguments)

    monkeypatch.setattr(suites, "read_run", read_and_note)
    for job in jobs:
        add_session(suite_dir, "Alien", job.session, [1.0])
        results.on_end(job, None)
    # Twice, because trial.json may have more sessions than the suite.
    assert {game: reads.count(game) for game in plan.games} == {"Pong": 2, "Breakout": 2, "Alien": 4}
    assert {row["status"] for row in read_csv(suite_dir / "results.csv")} == {"complete"}
    reads.clear()
    results.show_and_save_all()
    assert {*reads} == {*plan.games}, "at the end, all results are read anew"


@pytest.mark.long
def test_a_bug_in_the_results_stops_no_session_and_ends_the_command_with_an_error(tmp_path, monkeypatch, capfd):
    suite_dir = make_suite(tmp_path / "suite", games=("Pong",))
    monkeypatch.setattr(suite_results_module, "suite_results", lambda *arguments: {}["score"])
    with pytest.raises(KeyError):
        suite_command.main(["--resume", str(suite_dir), "--trial.parallel", "1"])
    assert not unfinished_jobs_of_sweep(suite_dir, read_plan(suite_dir)), "session 1 has trained too"
    output = capfd.readouterr()
    assert output.out.count("KeyError: 'score'; it stops no other job") == 2
    assert output.err.count("Traceback (most recent call last):\n") == 2


def test_results_that_could_not_be_saved_are_saved_when_any_session_ends(tmp_path, capsys):
    sweep_dir = make_sweep(tmp_path / "sweep", [0.9, 0.99], [{"Pong": [0.5]}, {"Pong": [0.1]}], ["Pong"])
    sweep = read_plan(sweep_dir)
    first, second = sweep.settings
    results = SuiteResultsKeeper(sweep_dir, sweep)
    (blocked,) = [job for job in unfinished_jobs_of_sweep(sweep_dir, sweep) if job.setting_label == first.label]
    (other,) = [job for job in unfinished_jobs_of_sweep(sweep_dir, sweep) if job.setting_label == second.label]
    (sweep_dir / first.label / "results.md").mkdir()
    results.on_end(blocked, None)
    assert "results are not saved: " in capsys.readouterr().out
    (sweep_dir / first.label / "results.md").rmdir()
    results.on_end(other, None)
    assert "not saved" not in capsys.readouterr().out
    assert (sweep_dir / first.label / "results.md").is_file()


@pytest.mark.long
@pytest.mark.parametrize("vary", [[], pytest.param(["--vary", "ppo.gamma=0.9,0.99"], marks=pytest.mark.slow)])
def test_a_suite_whose_sessions_are_all_refused_leaves_the_folder_as_it_was(tmp_path, monkeypatch, vary):
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules/wandb.py").write_text("import no_such_module")
    monkeypatch.syspath_prepend(tmp_path / "modules")  # the processes of the sessions have the same path
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/.notes").write_text("mine")
    options = [
        "--games",
        "Pong",
        "--run-dir",
        str(tmp_path / "mine"),
        "--log.wandb",
        "--devices.gpu",
        "false",
        *vary,
    ]
    with pytest.raises(
        UserError, match=r"^no session could begin: log.wandb = true: wandb cannot be imported [^;]*; pip"
    ) as error:
        suite_command.main(options)
    assert str(error.value).count("cannot be imported") == 1, "one reason, however many sessions had it"
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [".notes"]


@pytest.mark.long
def test_a_stopped_suite_says_how_to_go_on_and_how_far_it_came(tmp_path):
    suite_dir = make_suite(tmp_path / "suite", dataclasses.replace(TINY, total_env_steps=1_000_000), ["Pong"])
    command = [sys.executable, "-m", "jaxrl_atari.suite", "--resume", str(suite_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "env_steps" in line:
                break
        process.send_signal(signal.SIGTERM)
        output, error = process.communicate(timeout=120)
    assert line.startswith("game Pong  session 0    ")
    assert "\ngame Pong  session 0  stopping after this update, with a last checkpoint\n" in f"\n{output}"
    assert process.returncode == 130, error
    assert error.splitlines()[-1] == f"stopped; go on with {' '.join(['python', *command[1:]])}"
    last = read_csv(suite_dir / "Pong" / "session_0" / "metrics.csv")[-1]["env_steps"]
    assert (suite_dir / "Pong" / "session_0" / "checkpoints" / last).is_dir()
    (row,) = read_csv(suite_dir / "results.csv")
    assert (row["env_steps"], row["status"]) == (f"{last}.0", "not complete")
    assert (suite_dir / "Pong" / "trial.json").is_file()


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
        "human_normalised_score": human, "hours": 64 * 0.36 / 3600,  # of the sample tables
    }  # fmt: skip
    assert {name: float(rows["Breakout"][name]) for name in expected} == pytest.approx(expected)
    assert [rows[name]["status"] for name in GAMES_OF_TINY] == [
        "failed: out of memory | buy more", "complete", "waiting",
    ]  # fmt: skip
    assert (rows["Alien"]["score"], rows["Pong"]["sessions"]) == ("", "1")
    assert float(rows["Alien"]["reference_score"]) == GAMES["Alien"].references[0].score
    # Only complete games enter the aggregates: one game, whose score is the median and the mean.
    for kind, value in (("human-normalised", human), ("ratio", ratio)):
        aggregates = found["aggregates"][kind]
        assert (aggregates["games"], aggregates["median"]) == (1, pytest.approx(value))
        assert aggregates["median_interval"][0] < value < aggregates["median_interval"][1]
    assert "| Breakout | 0.70 | 2 | 64 | 12 | 2.83 |" in text
    assert " failed: out of memory / buy more |" in text


def test_the_summary_of_a_game_is_that_of_its_run_where_the_suite_has_fewer_sessions(tmp_path):
    fewer = make_suite(tmp_path / "suite", dataclasses.replace(TINY, sessions=1))
    results(add_games(fewer, BETTER))
    summary = read_json(fewer / "Pong" / "trial.json")
    assert (len(summary["sessions"]), summary["planned_sessions"], summary["complete"]) == (2, 2, True)


def test_statistics_do_not_depend_on_the_order_in_which_games_end(tmp_path):
    suite_dir = make_suite(tmp_path / "suite")
    scores = {"Pong": [0.5, 1.0], "Alien": [0.25, 2.0], "Breakout": [1.5, 2.0]}
    add_games(suite_dir, {"Alien": scores.pop("Alien")})
    earlier = read_suite(suite_dir)
    add_games(suite_dir, scores)
    live, fresh = read_suite(suite_dir, earlier), read_suite(suite_dir)
    assert list(live.runs) == list(fresh.runs) == list(GAMES_OF_TINY)
    assert suite_results(live, {}).statistics == suite_results(fresh, {}).statistics
    comparison = compare_suites({"suite": fresh})
    assert comparison.statistics["suite"] == suite_results(fresh, {}).statistics


def test_a_suite_may_have_any_name(tmp_path):
    suite_dir = add_games(make_suite(tmp_path / "file"), BETTER)
    results(suite_dir)
    with np.load(suite_dir / "scores_human_normalised.npz") as exported:
        np.testing.assert_allclose(exported["file"], [[1.5, 0.5], [2.0, 1.0]])


def test_the_scores_are_written_also_as_rliables_dictionary(tmp_path):
    suite_dir = add_games(make_suite(tmp_path / "suite"), BETTER)
    add_session(suite_dir, "Alien", 0, [500.0])  # not complete
    text, written, _ = results(suite_dir)
    expected = {game: [score(game, value) for value in BETTER[game]] for game in ("Pong", "Breakout")}
    assert written["scores"] == {game: pytest.approx(values) for game, values in expected.items()}
    with np.load(suite_dir / "scores_human_normalised.npz") as exported:  # sessions x games, in alphabetical order
        np.testing.assert_allclose(exported["suite"], [[1.5, 0.5], [2.0, 1.0]])
    with np.load(suite_dir / "scores_ratio.npz") as exported:
        assert exported["suite"].shape == (2, 2)
    assert written["rliable_games"] == {"human-normalised": ["Breakout", "Pong"], "ratio": ["Breakout", "Pong"]}
    found = written["aggregates"]["human-normalised"]
    assert [found[name] for name in STATISTICS] == pytest.approx(
        [1.25, 1.25, 1.25, 0.125]
    )  # mean, median, IQM, gap
    # The mean of each game has the variance 1/16, and their mean half of that: 4.303 (2 degrees of freedom) *
    # 0.177.
    assert found["mean_interval"] == pytest.approx([1.25 - 0.761, 1.25 + 0.761], abs=0.05)
    assert re.search(r"human-normalised \| +2 \| 1\.25 \(0\.[45]\d to 2\.?0?\d?\)", text)
    assert found["mean_rliable_interval"] == pytest.approx([1, 1.5])


def test_with_one_session_a_game_the_interval_is_a_dash(tmp_path):
    config = dataclasses.replace(TINY, sessions=1)
    suite_dir = make_suite(tmp_path / "suite", config, ["Pong", "Breakout"])
    add_games(suite_dir, {game: scores[:1] for game, scores in BETTER.items()}, config)
    text, written, rows = results(suite_dir)
    assert "| human-normalised | 2 | 1 (-) | 1 (-) | 1 (-) | 0.25 (-) |" in text
    assert "\nNo intervals: a game has a single session.\n" in text
    assert [rows["Pong"][name] for name in ("score_std", "score_low", "score_high")] == ["", "", ""]
    assert written["aggregates"]["human-normalised"]["iqm_interval"] is None


def test_a_suite_of_another_protocol_is_compared_with_no_reference(tmp_path):
    config = dataclasses.replace(TINY, sessions=1, env=EnvConfig(num_envs=2, life_loss_terminal=False))
    suite_dir = make_suite(tmp_path / "suite", config, ["Pong"])
    add_session(suite_dir, "Pong", 0, [1.0, 2.0], config)
    suite_command.main(["--resume", str(suite_dir), "--log.graphs"])
    text, written, _ = results(suite_dir)
    assert "Protocol v5, life_loss_terminal=false. " in text
    assert "No aggregates: not compared: " in text
    assert (written["protocol"], written["aggregates"]) == ("v5, life_loss_terminal=false", {})
    (row,) = written["games"]
    assert row["score"] == 1.5
    assert {row[name] for name in row if name.startswith(("reference", "human"))} == {None}
    assert (suite_dir / "graphs" / "comparison.png").is_file()
    assert not list(suite_dir.glob("**/suites.*"))


# --- Sweeps ------------------------------------------------------------------------------------------------------

VARY = {"ppo.learning_rate": [0.0001, 0.001], "ppo.normalize_advantages": [True, False]}


def test_commas_separate_games_and_several_fields_that_vary_make_a_grid():
    line = ["--games", "Pong,breakout", "Alien", "--vary", "ppo.learning-rate=1e-4, 0.001"]
    _, sweep, _ = suite_command.parse_options([*line, "--vary", "ppo.normalize_advantages=true,false"])
    assert (sweep.games, sweep.vary) == (["Pong", "Breakout", "Alien"], VARY)
    assert {setting.label: list(setting.fields.values()) for setting in sweep.settings} == {
        "ppo.learning_rate=0.0001,ppo.normalize_advantages=true": [0.0001, True],
        "ppo.learning_rate=0.0001,ppo.normalize_advantages=false": [0.0001, False],
        "ppo.learning_rate=0.001,ppo.normalize_advantages=true": [0.001, True],
        "ppo.learning_rate=0.001,ppo.normalize_advantages=false": [0.001, False],
    }
    last = sweep.settings[-1].config.ppo
    assert (last.learning_rate, last.normalize_advantages) == (0.001, False)


def make_sweep(folder, values, scores, games=("Pong", "Breakout"), field="ppo.gamma"):
    """A finished sweep of a field with made-up returns: `scores` has those of each value, game and session."""
    folder.mkdir()
    sweep = plan_sweep(TINY, list(games), {field: values})
    write_plan(folder, sweep)
    for setting, by_game in zip(sweep.settings, scores, strict=True):
        for game, sessions in by_game.items():
            for session, value in enumerate(sessions):
                config = setting.config
                add_session(folder / setting.label, game, session, [score(game, value)] * 2, config)
    return folder


def test_a_sweep_has_one_table_and_is_resumed(tmp_path, capsys):
    scores = [{"Pong": [0.5, 1.0], "Breakout": [1.5, 2.0]}, {"Pong": [0.1, 0.2], "Breakout": [0.5, 0.25]}]
    sweep_dir = make_sweep(tmp_path / "sweep", [0.9, 0.99], scores)
    line = ["--resume", str(sweep_dir)]
    suite_command.main(line)
    said = capsys.readouterr().out
    assert said.count("finished already") == 4
    rows = read_csv(sweep_dir / "results.csv")
    assert [(row["ppo.gamma"], row["game"], row["sessions"]) for row in rows] == [
        ("0.9", "Pong", "2"), ("0.99", "Pong", "2"), ("0.9", "Breakout", "2"), ("0.99", "Breakout", "2"),
    ]  # fmt: skip
    human = [float(row["human_normalised_score"]) for row in rows]
    assert human == pytest.approx([0.75, 0.15, 1.75, 0.375])
    table = re.sub(r" +", " ", said)
    assert "# sweep: 2 settings of ppo.gamma, 2 games, 2 sessions of 64 env steps each" in table
    assert "| Breakout | 0.99 | 2 | 64 |" in table
    assert "| ppo.gamma=0.9 | 2 | 1.25 (" in table  # mean over the games
    assert "| ppo.gamma=0.99 | 2 | 0.26 (" in table
    assert (sweep_dir / "ppo.gamma=0.99" / "results.csv").is_file()
    before = (sweep_dir / "sweep.json").read_bytes()
    _, again, _ = suite_command.parse_options(line)
    assert again.vary == {"ppo.gamma": [0.9, 0.99]}
    _, more, _ = suite_command.parse_options([*line, "--vary", "ppo.gamma=0.9,0.95,0.99"])
    assert len(more.settings) == 3
    with pytest.raises(UserError, match=r"; this one has --vary ppo\.gamma=0\.9,0\.99$"):
        suite_command.parse_options([*line, "--vary", "ppo.gamma=0.9"])
    assert (sweep_dir / "sweep.json").read_bytes() == before
    with pytest.raises(
        UserError, match=r"sweep: not a run directory .*; it holds a sweep: name a directory in it"
    ):
        read_config(sweep_dir)


def test_the_value_none_of_a_sweep_is_no_empty_cell(tmp_path):
    sweep_dir = make_sweep(
        tmp_path / "sweep", [None, 0.02], [{"Pong": [0.5]}, {"Pong": [0.1]}], ["Pong"], "ppo.target_kl"
    )
    suite_command.main(["--resume", str(sweep_dir), "--sessions", "1"])
    assert [row["ppo.target_kl"] for row in read_csv(sweep_dir / "results.csv")] == ["none", "0.02"]


def test_a_bug_in_the_graph_of_a_sweep_does_not_end_the_command(tmp_path, monkeypatch, capsys):
    sweep_dir = make_sweep(tmp_path / "sweep", [0.9, 0.99], [{"Pong": [0.5]}, {"Pong": [0.1]}], ["Pong"])
    monkeypatch.setattr(suite_results_module, "draw_sweep", lambda *arguments: {}["score"])
    suite_command.main(["--resume", str(sweep_dir), "--sessions", "1", "--log.graphs", "true"])
    output = capsys.readouterr()
    last = output.out.splitlines()[-1]
    assert re.fullmatch(r"no graph: KeyError: 'score'; python .*suite --resume .* tries again", last)
    assert output.err.startswith("Traceback (most recent call last):\n")


def test_results_are_shown_before_they_are_saved_and_the_rest_goes_on(tmp_path, capsys):
    sweep_dir = make_sweep(tmp_path / "sweep", [0.9, 0.99], [{"Pong": [0.5]}, {"Pong": [0.1]}], ["Pong"])
    (sweep_dir / "results.md").mkdir()
    suite_command.main(["--resume", str(sweep_dir), "--sessions", "1"])
    said = capsys.readouterr().out
    assert said.index("# sweep: 2 settings") < said.index("results are not saved: ")
    assert (sweep_dir / "ppo.gamma=0.9" / "results.md").is_file()
    suite_dir = add_games(make_suite(tmp_path / "suite", games=("Pong", "Breakout")), BETTER)
    (suite_dir / "results.md").mkdir()
    suite_command.main(["--resume", str(suite_dir)])
    said = capsys.readouterr().out
    assert said.index("over the complete games") < said.index("results are not saved: ")


@pytest.mark.long
def test_a_sweep_trains_and_goes_on(tmp_path):
    """Two learning rates, each with its own directory; then a third."""
    config = dataclasses.replace(TINY, sessions=1, env=dataclasses.replace(TINY.env, max_frames=64))
    (tmp_path / "tiny.py").write_text(f"from jaxrl_atari.config import *\nget_config = lambda: {config!r}\n")
    line = ["--config", str(tmp_path / "tiny.py"), "--run-dir", str(tmp_path / "sweep"), "--games", "Pong"]

    def run(values, *options):
        command = [
            sys.executable,
            "-m",
            "jaxrl_atari.suite",
            *line,
            "--vary",
            f"ppo.learning_rate={values}",
            *options,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout, read_csv(tmp_path / "sweep" / "results.csv")

    _, rows = run("1e-4,1e-3")
    assert [(row["ppo.learning_rate"], row["status"]) for row in rows] == [
        ("0.0001", "complete"),
        ("0.001", "complete"),
    ]
    for value in ("0.0001", "0.001"):
        run_dir = tmp_path / "sweep" / f"ppo.learning_rate={value}" / "Pong"
        assert read_config(run_dir).ppo.learning_rate == float(value)
        assert float(read_csv(run_dir / "session_0" / "metrics.csv")[0]["learning_rate"]) < float(value)
    said, rows = run("1e-4,1e-3,1e-2", "--log.graphs")
    assert said.count("finished already") == 2
    assert len(rows) == 3
    for name in ("graphs/comparison.png", "ppo.learning_rate=0.01/report.html"):
        assert (tmp_path / "sweep" / name).is_file()


# --- Comparison --------------------------------------------------------------------------------------------------


def test_two_suites_are_compared(tmp_path, capsys):
    better = add_games(make_suite(tmp_path / "better", games=("Pong", "Breakout")), BETTER)
    worse = add_games(make_suite(tmp_path / "worse"), {**WORSE, "Alien": [1.0, 1.0]})
    output = tmp_path / "comparison"
    plots.main([str(better), str(worse), "--output", str(output)])
    printed = capsys.readouterr().out
    # Pong: 3.5 of 4 pairs, Breakout: all.
    assert re.search(r"Probability of improvement of better over worse: 0.94 \(0\.\d+ to 1\)\.", printed)
    assert "| worse | 2 | 0.31 (" in re.sub(r" +", " ", printed)  # without Alien, which only one of them has
    assert f"- worse: {TINY.total_env_steps} env steps a session" in printed
    names = ("comparison", "suites", "scores_human_normalised", "scores_ratio")
    assert {path.stem for path in output.iterdir()} == {*names}
    compared = json.loads((output / "comparison.json").read_text())
    assert (compared["suites"], compared["games"]) == (["better", "worse"], ["Breakout", "Pong"])
    assert compared["human-normalised"]["probability_of_improvement"]["worse"]["value"] == 0.9375
    with np.load(output / "scores_human_normalised.npz") as exported:
        np.testing.assert_allclose(exported["better"], [[1.5, 0.5], [2.0, 1.0]])
        np.testing.assert_allclose(exported["worse"], [[0.5, 0.0], [0.25, 0.5]], atol=1e-12)


def test_only_the_suites_own_complete_games_count(tmp_path):
    suite_dir = add_games(make_suite(tmp_path / "suite", games=("Pong", "Qbert")), {"Pong": [0.5, 1.0]})
    shutil.copytree(suite_dir / "Pong", suite_dir / "Pong_old")
    add_games(suite_dir, {"Breakout": [0.5, 1.0]})  # no game of this suite
    add_session(suite_dir, "Qbert", 0, [1.0])  # one session of two
    assert list(read_suite(suite_dir).scores()) == ["Pong"]
    # Resumed with one.
    write_suite_file(suite_dir, dataclasses.replace(TINY, sessions=1), ["Pong", "Qbert"])
    assert {game: len(scores) for game, scores in read_suite(suite_dir).scores().items()} == {
        "Pong": 1,
        "Qbert": 1,
    }
    # Trained longer.
    write_suite_file(suite_dir, dataclasses.replace(TINY, total_env_steps=640), ["Pong"])
    assert not read_suite(suite_dir).scores()
    assert results(suite_dir)[2]["Pong"]["status"] == "not complete"
