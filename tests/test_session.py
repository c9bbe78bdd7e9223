"""Sessions end to end on the real emulator: files, resuming, stopping, errors."""

import contextlib
import dataclasses
import errno
import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jaxrl_atari.runs.checkpoint_writer import CheckpointWriter
from jaxrl_atari.runs.config_file import read_config
from jaxrl_atari.runs.description import describe, write_description
from sample_runs import flip_bit, read_csv

from jaxrl_atari import session, train
from jaxrl_atari.cli.stopping import SessionStop, StopRequest
from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, EvaluationConfig, LogConfig, NetworkConfig, PPOConfig
from jaxrl_atari.errors import ConfigError, SessionsFailed, UserError
from jaxrl_atari.evaluate import during_training
from jaxrl_atari.evaluate.during_training import Evaluator
from jaxrl_atari.evaluate.play import run_evaluation
from jaxrl_atari.evaluate.policy import load_policy
from jaxrl_atari.hardware import gpus
from jaxrl_atari.hardware.cpu import Cpu
from jaxrl_atari.learner import Learner, abstract_arrays, first_arrays
from jaxrl_atari.rollout import Collected, collect
from jaxrl_atari.runs import resume, session_log
from jaxrl_atari.runs.checkpoints import Checkpoints, Restored
from jaxrl_atari.runs.columns import TIME_COLUMNS
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.runs.progress import EpisodeStatistics, Progress
from jaxrl_atari.runs.reading import cut_evaluations
from jaxrl_atari.runs.session_log import NonFiniteError, SessionLog
from jaxrl_atari.session import hyperparameters, prepare, run_session
from jaxrl_atari.suite import trial
from jaxrl_atari.suite.trial import run_training

TINY = Config(
    name="tiny",
    total_env_steps=192,
    env=EnvConfig(game="Breakout", num_envs=2, num_threads=1, max_frames=128),
    ppo=PPOConfig(rollout_length=16, minibatch_size=16, epochs=1),
    devices=DevicesConfig(gpu=False, check=True),
    log=LogConfig(every_env_steps=32, checkpoint_every_env_steps=64, graphs=False),
)


class Lines:
    """A writer that keeps what it is given."""

    def __init__(self):
        self.rows, self.evaluations, self.messages = [], [], []

    def write(self, row):
        self.rows.append(row)

    def message(self, text):
        self.messages.append(text)

    def evaluation(self, env_steps, mean, std):
        self.evaluations.append((env_steps, mean, std))

    def progress(self, env_steps, row):
        pass

    def close(self):
        pass


def rows(session_dir):
    return read_csv(session_dir / "metrics.csv")


def latest(session_dir, config=TINY):
    checkpoints = Checkpoints(session_dir)
    step = checkpoints.steps()[-1]
    meta = checkpoints.read_meta(step)
    place = jax.devices("cpu")[0]
    return jax.device_get(checkpoints.restore(step, abstract_arrays(config, meta["num_actions"], place))), meta


def leaves(tree):
    return [np.asarray(jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x)
            for x in jax.tree.leaves(tree)]  # fmt: skip


def assert_equal(tree, other):
    for a, b in zip(leaves(tree), leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_tiny_training_from_the_command_line(tmp_path, capsys):
    config = tmp_path / "tiny.py"
    config.write_text(
        "from jaxrl_atari.config import *\n"
        "def get_config():\n"
        "    return Config(name='tiny', total_env_steps=96, env=EnvConfig(game='breakout', num_envs=2, num_threads=1,\n"
        "        max_frames=128), ppo=PPOConfig(rollout_length=16, minibatch_size=16, epochs=1),\n"
        "        log=LogConfig(every_env_steps=32))\n"
    )
    train.main(
        ["--config", str(config), "--output-dir", str(tmp_path / "data"), "--seed", "7", "--devices.gpu", "false"]
    )
    out = capsys.readouterr().out
    (run_dir,) = (tmp_path / "data").iterdir()
    described = json.loads((run_dir / "session_0" / "config.json").read_text())
    assert (described["seed"], described["game"], described["protocol"]) == (7, "Breakout", "v5, max_frames=128")
    assert described["config"]["env"]["num_envs"] == 2
    assert described["versions"]["jax"] == jax.__version__
    assert described["gae_lambda"] == 0.7
    names = {path.name for path in run_dir.rglob("*") if path.is_file()}
    assert {"trial.json", "metrics.csv", "config.json", "trial.png", "trial.svg", "session.png", "report.html"} <= names
    assert described["hardware"]["cores"] >= 1
    page = (run_dir / "report.html").read_text()
    assert "cpu:0 (devices.gpu = false)" in page  # from the checkpoint's meta
    assert out.splitlines()[-1] == str(run_dir / "report.html")
    row = rows(run_dir / "session_0")[-1]
    assert sum(float(row[name]) for name in TIME_COLUMNS) == pytest.approx(100)
    assert all(float(row[name]) > 0 for name in TIME_COLUMNS)
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert "devices.gpu = false" in out
    assert "first env step" in out
    assert "reference score" in out


def test_log_points_and_checkpoints(tmp_path):
    # No game ends in the first three rollouts: the step after an end is no env step, and a log point would be late.
    config = dataclasses.replace(TINY, env=dataclasses.replace(TINY.env, max_frames=256))
    lines, began = Lines(), []
    run_session(config, tmp_path / "session_0", writers=[lines], on_first_update=lambda: began.append(len(lines.rows)))
    assert began == [1]
    written = rows(tmp_path / "session_0")
    steps = [int(row["env_steps"]) for row in written]
    assert steps == sorted(set(steps))
    assert [int(row["updates"]) for row in written][:3] == [1, 2, 3]  # the interval is that of a rollout
    assert TINY.total_env_steps - TINY.rollout_size < steps[-1] <= TINY.total_env_steps + TINY.rollout_size
    assert float(written[-1]["learning_rate"]) < 0.2 * 2.5e-4
    assert all(math.isfinite(float(written[-1][name])) for name in ("policy_loss", "value_loss", "entropy", "rss_gib"))
    _, meta = latest(tmp_path / "session_0")
    assert meta["env_steps"] == steps[-1]
    assert meta["statistics"]["episodes"] == int(written[-1]["episodes"]) > 0
    assert any("first env step" in message for message in lines.messages)


def test_a_budget_of_one_update_has_its_log_point(tmp_path):
    config = dataclasses.replace(TINY, total_env_steps=TINY.rollout_size)
    run_session(config, tmp_path / "session_0")
    (row,) = rows(tmp_path / "session_0")
    assert (int(row["updates"]), int(row["env_steps"])) == (1, latest(tmp_path / "session_0")[1]["env_steps"])
    assert row["sps"] == ""  # the first iteration compiles
    assert math.isfinite(float(row["policy_loss"]))


@pytest.mark.parametrize(("every", "last"), [(300, 5), (600, 5), (900, 6)])
def test_sps_counts_as_many_updates_as_rollouts(every, last, tmp_path, monkeypatch):
    """On a clock of its own: acting takes 1 s, then the update 2 s, during which nobody waits for it."""
    clock, lines, progress, updated_at = SimpleNamespace(now=0.0), Lines(), Progress(), 0.0

    def device_get(metrics):  # waits for the update
        clock.now = max(clock.now, *metrics.values())
        return metrics

    monkeypatch.setattr(session_log.jax, "device_get", device_get)
    monkeypatch.setattr(session_log.time, "monotonic", lambda: clock.now)
    log = SessionLog([lines], LogConfig(every_env_steps=every), progress, 0, tmp_path, lambda: None)
    for _ in range(last):
        clock.now = max(clock.now, updated_at) + 1.0
        updated_at = clock.now + 2.0
        progress.count(300, [], 2)
        log.after_update({"loss": updated_at}, 1e-3, 0.0)
    log.last_point(1e-3)
    assert lines.rows[-1]["env_steps"] == 300 * last
    known = [row["sps"] for row in lines.rows if math.isfinite(row["sps"])]
    assert len(known) >= 2
    assert known == pytest.approx([100.0] * len(known))


@pytest.mark.parametrize("overlap", ["none", "update"])
def test_resume_is_bit_exact_for_the_learner(overlap, tmp_path):
    """Given the same rollouts, a learner that was saved and restored computes what one that was not computes."""
    config = dataclasses.replace(TINY, seed=3, overlap=overlap)
    with prepare(config, tmp_path / "straight") as straight:
        assert len(list(itertools.islice(session.train(straight), 2))) == 2
        straight.finish()
        shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
        with prepare(config, tmp_path / "resumed", resume=True) as resumed:
            env_steps = straight.progress.env_steps
            assert (resumed.progress.env_steps, resumed.progress.updates) == (env_steps, 2) != (0, 0)
            assert resumed.progress.optimizer_steps == straight.progress.optimizer_steps
            assert resumed.progress.statistics.to_dict() == straight.progress.statistics.to_dict()
            assert_equal(resumed.learner.state, straight.learner.state)
            acting = straight.learner._acting_network.acting_params(straight.learner.state.params)
            assert_equal(resumed.learner.acting_params(), [acting])
            assert_equal(resumed.keys(2), straight.keys(2))
            key = jax.random.key(5)
            rollouts = collect(straight.groups, straight.learner.acting_params(), key).rollouts
            for run in (straight, resumed):
                run.learner.update(rollouts, hyperparameters(config, env_steps), key)
                run.learner.settle()
            assert_equal(resumed.learner.state, straight.learner.state)


def test_a_longer_budget_on_resume(tmp_path):
    session_dir = tmp_path / "session_0"
    run_session(TINY, session_dir)
    before = [int(row["env_steps"]) for row in rows(session_dir)]
    lines = Lines()
    longer = dataclasses.replace(TINY, total_env_steps=320)
    run_session(longer, session_dir, resume=True, writers=[lines])
    after = [int(row["env_steps"]) for row in rows(session_dir)]
    assert after[: len(before)] == before
    assert after[-1] == latest(session_dir)[1]["env_steps"] > 280
    (message,) = [m for m in lines.messages if m.startswith("resumed at")]
    assert f"resumed at {before[-1]:,} env steps" in message
    assert "budget 192 -> 320 env steps: the learning rate continues at" in message
    assert float(lines.rows[0]["learning_rate"]) > 0.2 * 2.5e-4


@pytest.mark.parametrize("who", ["this process", "another process"])
def test_a_stop_request_is_granted_after_the_update_with_a_last_checkpoint(who, tmp_path, monkeypatch):
    class Signal(Lines):
        def progress(self, env_steps, row):
            if who == "this process" and env_steps > 60:
                signal.raise_signal(signal.SIGTERM)

    if who == "another process":  # of those that learn this session together
        asked = iter([0, 0, 1])
        monkeypatch.setattr("jaxrl_atari.session.sum_over_processes", lambda here: here + next(asked))
    with StopRequest() as stop, pytest.raises(KeyboardInterrupt):
        run_session(TINY, tmp_path / "session_0", writers=[Signal()], stop_requested=stop.requested)
    _, meta = latest(tmp_path / "session_0")
    assert meta["updates"] == 2
    assert meta["env_steps"] == int(rows(tmp_path / "session_0")[-1]["env_steps"]) < TINY.total_env_steps


def test_a_stop_before_the_first_update_leaves_no_checkpoint(tmp_path):
    """An evaluation would play an untrained network and count it in the score."""
    with pytest.raises(KeyboardInterrupt):
        run_session(TINY, tmp_path / "session_0", stop_requested=lambda: True)
    assert not list((tmp_path / "session_0").glob("checkpoints/*"))


@pytest.mark.parametrize(
    ("has", "dtype", "used"), [(True, "auto", "bfloat16"), (False, "auto", "float32"), (True, "float32", "float32")]
)
def test_auto_is_bfloat16_where_the_cpu_multiplies_it(has, dtype, used, tmp_path, monkeypatch):
    sets = ("AVX2", "AVX-512", "BF16") if has else ("AVX2",)
    monkeypatch.setattr(gpus, "read_cpu", lambda: Cpu("a CPU", sets or (), 2))
    lines = Lines()
    config = dataclasses.replace(TINY, network=NetworkConfig(compute_dtype=dtype))
    with prepare(config, tmp_path / "session_0", writers=[lines]) as run:
        assert any(f"; computes in {used}" in message for message in lines.messages)
        assert run._meta()["compute_dtype"] == used


def test_a_session_that_resumes_in_another_arithmetic_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "collect", lambda *_: Collected([], TINY.rollout_size, [], 0.0, 1.0, 2.0))
    monkeypatch.setattr(Learner, "update", lambda *_: {"policy_loss": 0.0})
    lines, session_dir = Lines(), tmp_path / "session_0"
    config = dataclasses.replace(TINY, total_env_steps=TINY.rollout_size)
    for dtype in ("float32", "float32", "bfloat16"):
        config = dataclasses.replace(config, network=NetworkConfig(compute_dtype=dtype))
        with prepare(config, session_dir, resume=True, writers=[lines]) as run:
            for _ in session.train(run):  # the first one trains, the others find the budget spent
                pass
            run.finish()
    (change,) = [message for message in lines.messages if "arithmetic" in message]
    assert "; arithmetic float32 -> bfloat16: --network.compute-dtype float32 keeps what it was" in change


def test_a_second_process_is_refused_and_disturbs_nothing(tmp_path):
    held = []

    class Intruder(Lines):
        def progress(self, env_steps, row):
            with pytest.raises(UserError, match="session_0: another process is training there; wait until it ends"):
                run_session(TINY, tmp_path / "session_0", resume=True)
            held.append(env_steps)

    run_session(TINY, tmp_path / "session_0", writers=[Intruder()])
    assert held
    assert latest(tmp_path / "session_0")[1]["env_steps"] == held[-1]
    run_session(TINY, tmp_path / "session_0", resume=True)  # free again


def test_the_last_checkpoint_is_on_disk_before_signals_count_again(tmp_path, monkeypatch):
    there = []

    class Stop(SessionStop):
        def __exit__(self, *exception):
            super().__exit__(*exception)
            there.extend(path.name for path in (tmp_path / "session_0" / "checkpoints").iterdir())

    monkeypatch.setattr(trial, "SessionStop", Stop)
    trial.run_trial(TINY, tmp_path)
    assert str(latest(tmp_path / "session_0")[1]["env_steps"]) in there
    assert not any("tmp" in name for name in there)


def test_closing_an_evaluator_drops_what_it_plays(tmp_path, monkeypatch):
    asked, ended, begun, play = [], [], threading.Event(), during_training.run_evaluation

    def spy(policy, *options, cancelled):
        asked.append(options)
        begun.set()
        try:
            return play(policy, *options, cancelled=cancelled)
        except CancelledError:
            ended.append("cancelled")
            raise

    monkeypatch.setattr(during_training, "run_evaluation", spy)
    config = dataclasses.replace(TINY, env=EnvConfig(game="Pong", num_envs=4, num_threads=1))  # thousands of steps
    config = dataclasses.replace(
        config, evaluation=EvaluationConfig(every_env_steps=64, episodes=16, num_envs=1, greedy=True)
    )
    device = jax.devices("cpu")[0]
    evaluator = Evaluator(config, 3, 6, device, tmp_path, print, print)
    evaluator.start(first_arrays(config, 6, 0, device)["train_state"].params, 64)
    assert begun.wait(timeout=60)
    assert evaluator.poll()
    evaluator.close()
    assert ended == ["cancelled"]
    ((episodes, seed, greedy, num_envs),) = asked
    assert (episodes, greedy, num_envs) == (16, True, 1)
    expected = np.random.SeedSequence([3, 64]).generate_state(1)[0]  # of the session's seed and the env steps
    assert seed == expected
    assert not (tmp_path / "evaluations.csv").exists()


def test_the_last_graphs_are_drawn_after_those_of_a_checkpoint(tmp_path, monkeypatch):
    """A drawing that began earlier does not show the end."""
    events = []

    class Drawing:
        def __init__(self, *_, **__):
            self.ended = False
            events.append("begins")

        def poll(self):
            return 0 if self.ended else None

        def wait(self):
            if not self.ended:
                events.append("ends")
            self.ended = True

    monkeypatch.setattr(session_log.subprocess, "Popen", Drawing)
    (tmp_path / "config.json").touch()
    log = SessionLog([], LogConfig(), Progress(), 0, tmp_path / "session_0", lambda: None)
    log.row = {"env_steps": 1.0}
    log.draw_graphs()
    log.draw_graphs()  # the first still draws
    assert events == ["begins"]
    log.draw_graphs(wait=True)
    assert events == ["begins", "ends", "begins", "ends"]

    def refuse(*_, **__):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(session_log.subprocess, "Popen", refuse)
    log.draw_graphs()  # training goes on without them


def test_evaluations_beyond_the_checkpoint_are_dropped_on_resume(tmp_path):
    (tmp_path / "evaluations.csv").write_text("env_steps,episodes,mean,std\n64,2,1.5,0.5\n128,2,2.5,0.5\n96,2,2.5,0")
    cut_evaluations(tmp_path, 128)  # the one at the step of the checkpoint stays
    assert len((tmp_path / "evaluations.csv").read_text().split()) == 3
    cut_evaluations(tmp_path, 100)
    assert (tmp_path / "evaluations.csv").read_text().split() == ["env_steps,episodes,mean,std", "64,2,1.5,0.5"]


def test_going_on_with_another_game_protocol_or_seed_is_refused_and_changes_nothing(tmp_path):
    run_dir = run_training(dataclasses.replace(TINY, output_dir=str(tmp_path), total_env_steps=96))
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    for option, value, message in (
        ("--env.game", "SpaceInvaders", "env.game = 'SpaceInvaders': expected Breakout, with which the run began"),
        (
            "--env.protocol",
            "classic",
            "env.protocol = 'classic, max_frames=128': expected v5, max_frames=128, with which the run began",
        ),
        (
            "--env.life-loss-terminal",
            "false",
            "env.protocol = 'v5, life_loss_terminal=false, max_frames=128': expected v5, max_frames=128, with",
        ),
        ("--seed", "9", "seed = 9: expected 0, with which the run began"),
    ):
        with pytest.raises(ConfigError) as error:
            train.main(["--resume", str(run_dir), option, value])
        assert message in str(error.value)
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}

    began = json.loads((run_dir / "config.json").read_text())
    assert "resumed" not in began
    files = [run_dir / "config.json", run_dir / "session_0" / "config.json"]
    for path in files:
        path.write_text(json.dumps(began | {"git_revision": "abc", "python": "3.0"}))
    train.main(["--resume", str(run_dir), "--total-env-steps", "160"])
    for path in files:
        resumed = json.loads(path.read_text())
        assert resumed["git_revision"] == "abc"  # what began it; what went on with it comes after
        assert [entry["python"] for entry in resumed["resumed"]] == [began["python"]]
        assert resumed["config"]["total_env_steps"] == 160


def test_a_trial_with_a_failed_session_is_summed_up(tmp_path, capsys, monkeypatch):
    run_dir = run_training(dataclasses.replace(TINY, output_dir=str(tmp_path)))
    (run_dir / "session_1").mkdir()
    (run_dir / "session_1" / "checkpoints").write_text("in the way")
    with pytest.raises(SessionsFailed, match="1 of 2 sessions failed"):
        train.main(["--resume", str(run_dir), "--sessions", "2"])
    summary = json.loads((run_dir / "trial.json").read_text())
    assert (summary["planned_sessions"], summary["complete"], len(summary["sessions"])) == (2, False, 1)
    assert "tiny: Breakout, protocol v5, max_frames=128, 1 session" in capsys.readouterr().out

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(trial, "write_json", full)
    monkeypatch.setattr(trial, "write_description", full)
    with pytest.raises(SessionsFailed, match="1 of 2 sessions failed"):
        train.main(["--resume", str(run_dir), "--sessions", "2"])


@contextlib.contextmanager
def steady_session(config, session_dir, monkeypatch, writers=(), games=None, resume=False):
    """A session that neither acts nor learns: 300 env steps an update, whose number is the loss.

    Args:
        games: for each rollout, the games that end in it.

    Yields:
        The session, and a list that receives (env_steps, meta) of each checkpoint.
    """
    saved, numbers, games = [], itertools.count(1), iter(games or itertools.repeat([]))
    monkeypatch.setattr(session, "collect", lambda *_: Collected([], 300, next(games), 0.0, 1.0, 2.0))
    monkeypatch.setattr(Learner, "update", lambda *_: {"policy_loss": float(next(numbers))})
    monkeypatch.setattr(
        CheckpointWriter, "save", lambda self, env_steps, arrays, meta, score: saved.append((env_steps, meta))
    )
    with prepare(dataclasses.replace(config, total_env_steps=10**6), session_dir, 0, resume, writers) as run:
        yield run, saved


def test_an_evaluation_that_failed_ends_training_after_the_checkpoint_that_is_due(tmp_path, monkeypatch):
    def poll():
        raise OSError("the disk is full")

    config = dataclasses.replace(TINY, log=LogConfig(checkpoint_every_env_steps=900, graphs=False))
    with steady_session(config, tmp_path / "session_0", monkeypatch) as (run, saved):
        ends = itertools.chain([lambda: False] * 2, [poll])
        run.evaluator = SimpleNamespace(poll=lambda: next(ends)())
        with pytest.raises(OSError, match="the disk is full"):
            list(session.train(run))
    assert [env_steps for env_steps, _ in saved] == [900]


class FakeEvaluator:
    """Notes what it would evaluate."""

    def __init__(self):
        self.at, self.evaluated = 0, []

    def poll(self):
        return False

    def settle(self, stop_requested):
        pass

    def start(self, params, env_steps):
        self.at = env_steps
        self.evaluated.append(env_steps)


def test_log_points_checkpoints_and_evaluations_come_at_their_intervals(tmp_path, monkeypatch):
    config = dataclasses.replace(
        TINY,
        log=LogConfig(every_env_steps=600, checkpoint_every_env_steps=900, graphs=False),
        evaluation=EvaluationConfig(every_env_steps=750),
    )
    lines = Lines()
    with steady_session(config, tmp_path / "session_0", monkeypatch, [lines]) as (run, saved):
        run.evaluator = FakeEvaluator()
        keys, settled, rates, act, learn = [], [], [], session.collect, Learner.update
        monkeypatch.setattr(session, "collect", lambda *given: keys.append(given[2]) or act(*given))

        def update(*given):
            keys.append(given[3])
            rates.append(float(given[2].learning_rate))
            return learn(*given)

        monkeypatch.setattr(Learner, "update", update)
        monkeypatch.setattr(run.log, "settle", lambda: settled.append(run.progress.env_steps))
        list(itertools.islice(session.train(run), 7))
        run.finish()
    assert [row["env_steps"] for row in lines.rows] == [600, 1200, 1800, 2100]
    assert [env_steps for env_steps, _ in saved] == [900, 1800, 2100]
    assert run.evaluator.evaluated == [900, 1500]
    # Means over the updates since the log point before; each update is in one of them.
    counts = np.diff([row["updates"] for row in lines.rows])
    assert counts.tolist() == [2, 2, 1]
    assert [row["policy_loss"] for row in lines.rows] == [1.0, 2.5, 4.5, 6.5]
    assert lines.rows[-1]["policy_percent"] == pytest.approx(2 * lines.rows[-1]["emulators_percent"])
    assert len({tuple(jax.random.key_data(key).tolist()) for key in keys}) == 14  # two for each update
    assert rates == pytest.approx([TINY.ppo.learning_rate * (1 - 300 * i / 10**6) for i in range(7)])
    assert 1500 in settled  # an evaluation without a checkpoint waits for the update, too


def test_only_the_leader_draws_graphs(tmp_path, monkeypatch):
    config = dataclasses.replace(TINY, log=dataclasses.replace(TINY.log, checkpoint_every_env_steps=300))
    with steady_session(config, tmp_path / "session_0", monkeypatch) as (run, saved):
        drawn = []
        monkeypatch.setattr(run.log, "draw_graphs", lambda wait=False: drawn.append(run.progress.env_steps))
        iterations = session.train(run)
        next(iterations)
        monkeypatch.setattr(run, "_checkpoints", None)  # as in a follower
        next(iterations)
        assert (drawn, len(saved)) == ([300], 1)
        monkeypatch.undo()


def test_an_evaluation_that_is_due_waits_for_the_one_that_is_running(tmp_path, monkeypatch):
    config = dataclasses.replace(TINY, evaluation=EvaluationConfig(every_env_steps=600))
    evaluated = []
    with steady_session(config, tmp_path / "session_0", monkeypatch) as (run, _):
        run.evaluator = SimpleNamespace(poll=lambda: True)
        run.evaluator.start = lambda params, env_steps: evaluated.append(env_steps)
        iterations = session.train(run)
        list(itertools.islice(iterations, 3))
        assert not evaluated
        run.evaluator.poll = lambda: False
        next(iterations)
        assert evaluated == [1200]


@pytest.mark.parametrize(
    ("budget", "every", "expected"),
    [(1199, 599, [600, 1200]), (1200, 600, [600, 1200]), (1210, 605, [900, 1200]), (1210, 5, [300, 600, 900, 1200])],
)
def test_an_evaluation_that_is_due_at_the_budget_is_played_once(tmp_path, monkeypatch, budget, every, expected):
    """The last update may end on either side of the budget."""
    config = dataclasses.replace(TINY, evaluation=EvaluationConfig(every_env_steps=every))
    assert config.rollout_size / 2 > 10
    with steady_session(config, tmp_path / "session_0", monkeypatch) as (run, _):
        run.config = dataclasses.replace(run.config, total_env_steps=budget)
        run.evaluator = FakeEvaluator()
        list(session.train(run))
        run.finish()
    assert run.evaluator.evaluated == expected


def test_sps_are_those_since_the_log_point_before(tmp_path, monkeypatch):
    clock, lines, progress = SimpleNamespace(now=0.0), Lines(), Progress()
    monkeypatch.setattr(session_log.time, "monotonic", lambda: clock.now)
    log = SessionLog([lines], LogConfig(every_env_steps=300), progress, 0, tmp_path, lambda: None)
    for seconds in (3, 3, 3, 3, 6, 6, 6):
        clock.now += seconds
        progress.count(300, [], 2)
        log.after_update({"policy_loss": 1.0}, 1e-3, 0.0)
    known = [row["sps"] for row in lines.rows if math.isfinite(row["sps"])]
    assert (known[0], known[-1]) == (100.0, 50.0)


def test_where_the_time_since_the_log_point_before_went(tmp_path, monkeypatch):
    clock, lines, progress = SimpleNamespace(now=0.0), Lines(), Progress()
    monkeypatch.setattr(session_log.time, "monotonic", lambda: clock.now)
    log = SessionLog([lines], LogConfig(every_env_steps=600), progress, 0, tmp_path, lambda: None)
    # Seconds of each iteration, of which the emulators and the policy have these. The first compiles; after the
    # second the clock of the log points starts.
    for seconds, acting in ((50, (9, 9)), (4, (9, 9)), (4, (1, 2)), (6, (2, 1)), (5, (0, 4)), (5, (1, 4))):
        clock.now += seconds
        progress.count(300, [], 2)
        log.after_update({"policy_loss": 1.0}, 1e-3, 0.0, acting)
    shares = [[row.get(name) for name in TIME_COLUMNS] for row in lines.rows]
    assert [row["wall_seconds"] for row in lines.rows] == [4, 14, 24]  # without the first 50
    assert shares[0] == [None] * 3
    np.testing.assert_allclose(shares[1:], [[30, 30, 40], [10, 80, 10]])


def test_a_resumed_session_continues_what_it_counted(tmp_path, monkeypatch):
    """Best score, hours, gradient steps (now 6 an update), intervals, evaluations."""
    config = dataclasses.replace(
        TINY, ppo=dataclasses.replace(TINY.ppo, epochs=3), evaluation=EvaluationConfig(every_env_steps=10**6),
        log=LogConfig(every_env_steps=500, checkpoint_every_env_steps=500, graphs=False),
    )  # fmt: skip
    meta = {
        "config": TINY.to_dict(), "env_steps": 600, "updates": 2, "statistics": EpisodeStatistics().to_dict(),
        "best_score": 7.0, "wall_seconds": 100.0,
    }  # fmt: skip
    arrays = first_arrays(config, 4, 0, jax.devices("cpu")[0])
    arrays["train_state"] = arrays["train_state"].replace(optimizer_steps=jax.numpy.int32(50))
    monkeypatch.setattr(session, "restore_session", lambda *_: (Restored(600, arrays, meta, {}), []))
    session_dir, lines = tmp_path / "session_0", Lines()
    session_dir.mkdir()
    (session_dir / "evaluations.csv").write_text("env_steps,episodes,mean,std\n300,2,1.5,0.5\n900,2,2.5,0.5\n")
    games = [[(5.0, 1)], [(5.0, 1)], [(17.0, 1)], [(1.0, 1)], [(0.0, 1)]]  # means 5, 5, 9, 7, 5.6
    with steady_session(config, session_dir, monkeypatch, [lines], games, resume=True) as (run, saved):
        list(itertools.islice(session.train(run), 5))
    assert [meta["best_score"] for _, meta in saved] == [7.0, 9.0, 9.0]
    assert [meta["env_steps"] for _, meta in saved] == [1200, 1500, 2100]
    assert [(row["env_steps"], row["optimizer_steps"]) for row in lines.rows] == [(1200, 62), (1500, 68), (2100, 80)]
    assert (session_dir / "evaluations.csv").read_text().split() == ["env_steps,episodes,mean,std", "300,2,1.5,0.5"]
    assert 100.0 <= saved[0][1]["wall_seconds"] < 160.0


def test_a_checkpoint_waits_for_the_update_under_way(tmp_path, monkeypatch):
    config = dataclasses.replace(TINY, log=dataclasses.replace(TINY.log, checkpoint_every_env_steps=600))
    under_way = []
    monkeypatch.setattr(Learner, "settle", lambda self: under_way.pop() if under_way else None)
    with steady_session(config, tmp_path / "session_0", monkeypatch) as (run, saved):
        iterations = session.train(run)
        next(iterations)
        under_way.append({"loss": math.nan})
        with pytest.raises(NonFiniteError, match="loss = nan"):
            next(iterations)
    assert not saved


@pytest.mark.parametrize("leader", [True, False], ids=["leader", "follower"])
def test_parameters_that_are_not_finite_are_not_saved(leader, tmp_path, monkeypatch):
    """The metrics of an update are computed before its last gradient step, which can still spoil the parameters.

    All processes of a session end there: a leader that left alone would let the others wait for it.
    """
    config = dataclasses.replace(TINY, log=dataclasses.replace(TINY.log, checkpoint_every_env_steps=600))
    with steady_session(config, tmp_path / "session_0", monkeypatch) as (run, saved):
        iterations = session.train(run)
        next(iterations)
        if not leader:
            monkeypatch.setattr(run, "_checkpoints", None)
        state = run.learner.state
        bias = state.params["policy"]["bias"].at[0].set(math.inf)
        run.learner.reset(state.replace(params=state.params | {"policy": state.params["policy"] | {"bias": bias}}))
        with pytest.raises(NonFiniteError, match=r"update 2: parameter_norm = inf; .* the last checkpoint is kept"):
            next(iterations)
    assert not saved


def test_session_i_has_the_seed_of_the_trial_plus_i(tmp_path, monkeypatch):
    """In everything that is random: parameters, keys, games."""
    make_groups, games, found = session.make_groups, [], []
    monkeypatch.setattr(session, "make_groups", lambda *given: games.append(given[2]) or make_groups(*given))
    for seed, number in ((5, 2), (7, 0), (5, 0)):
        folder = tmp_path / str(seed) / f"session_{number}"
        with prepare(dataclasses.replace(TINY, seed=seed), folder, number, quiet=True) as run:
            assert run._meta()["seed"] == seed + number
            found.append((run.learner.state.params, jax.tree.map(jax.random.key_data, run.keys(0))))
    jax.tree.map(np.testing.assert_array_equal, found[0], found[1])
    assert games[0] == games[1] != games[2]
    assert not np.array_equal(*(params["dense"]["kernel"] for params, _ in found[1:]))
    assert not np.array_equal(*(acting for _, (acting, _) in found[1:]))


def test_evaluations_run_where_they_are_placed_and_report_their_env_step(tmp_path, monkeypatch):
    there = jax.devices("cpu")[2]  # stands for GPU 1
    monkeypatch.setenv("JAXRL_ATARI_SIMULATED_GPUS", "2")
    config = dataclasses.replace(
        TINY,
        total_env_steps=96,
        devices=dataclasses.replace(TINY.devices, evaluator=1),
        evaluation=EvaluationConfig(every_env_steps=64, episodes=2, num_envs=2),
    )
    lines = Lines()
    run_session(config, tmp_path / "session_0", writers=[lines])
    (result,) = read_csv(tmp_path / "session_0" / "evaluations.csv")
    assert int(result["episodes"]) == 2
    assert float(result["mean"]) >= 0
    assert 64 <= int(result["env_steps"]) <= 96
    assert lines.evaluations == [(int(result["env_steps"]), float(result["mean"]), float(result["std"]))]
    (message,) = [m for m in lines.messages if m.startswith("evaluation at")]
    assert message.startswith(f"evaluation at {result['env_steps']} env steps")
    assert message.endswith(f"full games on {there}")


def test_an_evaluation_plays_the_parameters_of_its_moment(tmp_path):
    """On the learner's own device, whose next update consumes them."""
    config = dataclasses.replace(
        TINY,
        total_env_steps=128,
        env=dataclasses.replace(TINY.env, game="SpaceInvaders", max_frames=1000),
        evaluation=EvaluationConfig(every_env_steps=64, episodes=3, num_envs=2),
        devices=dataclasses.replace(TINY.devices, evaluator=False),
    )
    directory = tmp_path / "session_1"
    run_session(config, directory, session=1)
    found = read_csv(directory / "evaluations.csv")
    assert found
    for row in found:
        step = int(row["env_steps"])
        seed = int(np.random.SeedSequence([config.seed + 1, step]).generate_state(1)[0])
        played = run_evaluation(load_policy(directory, step, jax.devices("cpu")[0]), 3, seed, num_envs=2)
        assert played.std > 0, "all games alike: this test tests little"
        assert (int(row["episodes"]), float(row["mean"]), float(row["std"])) == (3, played.mean, played.std)


def test_an_error_of_an_evaluation_is_raised(tmp_path, monkeypatch):
    def fails(*_, **__):
        raise OSError("the disk is full")

    monkeypatch.setattr(during_training, "run_evaluation", fails)
    device = jax.devices("cpu")[0]
    evaluator = Evaluator(TINY, 0, 4, device, tmp_path, print, print)
    evaluator.start(first_arrays(TINY, 4, 0, device)["train_state"].params, 64)
    with contextlib.closing(evaluator), pytest.raises(OSError, match="the disk is full"):
        evaluator.settle()


def test_a_resume_that_cannot_be_leaves_everything_as_it_was(tmp_path, monkeypatch):
    run_dir = run_training(dataclasses.replace(TINY, output_dir=str(tmp_path), total_env_steps=96))
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match=f"session_0: is a session's directory; expected the run's, {run_dir}"):
        train.main(["--resume", str(run_dir / "session_0")])

    def no_writers(*arguments, **options):
        raise UserError("no key")

    make_writers = session.make_writers
    monkeypatch.setattr(session, "make_writers", no_writers)
    with pytest.raises(UserError, match="no key"):
        train.main(["--resume", str(run_dir), "--total-env-steps", "160"])
    assert before == {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}

    class Failing(Lines):  # once training has begun, the options that it was given stay
        def write(self, row):
            super().write(row)
            if len(self.rows) > 1:
                raise UserError("no more")

    monkeypatch.setattr(session, "make_writers", lambda *a, **k: [*make_writers(*a, **k), Failing()])
    with pytest.raises(UserError, match="no more"):
        train.main(["--resume", str(run_dir), "--total-env-steps", "160"])
    assert json.loads((run_dir / "config.json").read_text())["config"]["total_env_steps"] == 160


def damage(step_dir):
    """Flips a bit in each array of a checkpoint."""
    for path in (step_dir / "arrays").rglob("[0-9]*"):
        flip_bit(path)


def checkpoint_steps(session_dir):
    return Checkpoints(session_dir).steps()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run, to be copied."""
    return run_training(dataclasses.replace(TINY, output_dir=str(tmp_path_factory.mktemp("trained"))))


def test_one_resume_survives_a_damaged_checkpoint_config_and_line_of_metrics(trained, tmp_path, capsys, caplog):
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    before, latest_step = checkpoint_steps(run_dir / "session_0")[-2:]
    damage(run_dir / "session_0" / "checkpoints" / str(latest_step))
    sound_config, sound_lines = (run_dir / "config.json").read_bytes(), rows(run_dir / "session_0")
    (run_dir / "config.json").write_bytes(sound_config[:100])
    table = run_dir / "session_0" / "metrics.csv"
    lines = table.read_text().splitlines(keepends=True)
    garbled = "".join([*lines[:2], lines[2].replace(",", ",x", 1), *lines[3:]])
    table.write_text(garbled)
    capsys.readouterr()

    train.main(["--resume", str(run_dir), "--total-env-steps", "320"])

    out = capsys.readouterr().out.splitlines()
    (line,) = [line for line in out if "is damaged (" in line]
    aside = run_dir / "session_0" / "checkpoints" / f"damaged_{latest_step}"
    assert line.startswith(f"session 0  the checkpoint at {latest_step} env steps is damaged (its ")
    assert line.endswith(f" is now {aside}; {latest_step - before} env steps are lost; it resumes at {before}")
    assert aside.is_dir()
    assert checkpoint_steps(run_dir / "session_0")[-1] > latest_step

    line = "metrics.csv: line 3 is damaged and was left out; the file as it was is now metrics_damaged.csv"
    assert f"session 0  {line}" in out
    assert (run_dir / "session_0" / "metrics_damaged.csv").read_text() == garbled
    steps = [int(row["env_steps"]) for row in rows(run_dir / "session_0")]
    assert steps == sorted(set(steps)), "the log points beyond the sound checkpoint are logged again"
    kept = [int(row["env_steps"]) for row in sound_lines if int(row["env_steps"]) <= before]
    assert steps[: len(kept) - 1] == [kept[0], *kept[2:]]

    (message,) = {record.getMessage() for record in caplog.records}
    assert message.startswith(f"{run_dir}/config.json: damaged (JSONDecodeError: ")
    assert message.endswith(f"config_damaged.json, restored from {run_dir}/session_0/config.json")
    assert (run_dir / "config_damaged.json").read_bytes() == sound_config[:100]
    config = json.loads((run_dir / "config.json").read_text())["config"]
    assert config == json.loads(sound_config)["config"] | {"total_env_steps": 320}


def test_a_finished_session_with_a_damaged_last_checkpoint_is_trained_to_its_end_again(trained, tmp_path, capsys):
    run_dir = tmp_path / "run"
    shutil.copytree(trained, run_dir)
    session_dir, line = run_dir / "session_0", ["--run-dir", str(run_dir)]
    before, last = checkpoint_steps(session_dir)[-2:]
    train.main(line)
    assert "session 0  finished already" in capsys.readouterr().out
    damage(session_dir / "checkpoints" / str(last))
    train.main(line)
    out = capsys.readouterr().out
    assert f"the checkpoint at {last} env steps is damaged" in out
    assert f"session 0  resumed at {before} env steps" in out
    assert checkpoint_steps(session_dir)[-1] >= last
    train.main(line)
    assert "session 0  finished already" in capsys.readouterr().out


def test_whether_a_session_is_finished_is_asked_without_starting_jax(trained):
    code = (
        "import sys; from pathlib import Path; from jax._src import xla_bridge;"
        "from jaxrl_atari.runs.config_file import read_config;"
        "from jaxrl_atari.runs.description import is_finished;"
        "run = Path(sys.argv[1]); print(is_finished(read_config(run), run / 'session_0'));"
        "print(xla_bridge.backends_are_initialized())"
    )
    asked = subprocess.run([sys.executable, "-c", code, str(trained)], capture_output=True, text=True, check=True)
    assert asked.stdout.split() == ["True", "False"]


def test_the_config_of_a_run_is_restored_from_any_session(tmp_path, caplog):
    """Session 1 has the seed of the run plus 1."""
    config = dataclasses.replace(TINY, seed=5, sessions=2)
    write_description(tmp_path / "session_1", describe(dataclasses.replace(config, seed=6)))
    (tmp_path / "session_0").mkdir()
    assert read_config(tmp_path) == config
    assert read_config(tmp_path) == config, "now from the file"
    assert len(caplog.records) == 1
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "session_1" / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: damaged .* no session has a copy that can be used"):
        read_config(tmp_path)


def test_resume_without_a_sound_checkpoint_is_refused_and_changes_nothing(trained, tmp_path):
    shutil.copytree(trained / "session_0", tmp_path / "session_0")
    for step in checkpoint_steps(tmp_path / "session_0"):
        damage(tmp_path / "session_0" / "checkpoints" / str(step))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="no checkpoint is sound"):
        run_session(dataclasses.replace(TINY, total_env_steps=320), tmp_path / "session_0", resume=True)
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_processes_restore_the_checkpoint_that_the_leader_chose(trained, tmp_path, monkeypatch):
    shutil.copytree(trained / "session_0", tmp_path / "session_0")
    earlier, latest_step = checkpoint_steps(tmp_path / "session_0")[-2:]
    place, sent = jax.devices("cpu")[0], []

    def restore(leader):
        session_dir = tmp_path / "session_0"
        writer = CheckpointWriter(session_dir) if leader else None
        return resume.restore_session(
            TINY, session_dir, writer, lambda meta: abstract_arrays(TINY, meta["num_actions"], place)
        )

    monkeypatch.setattr(resume, "agree", lambda text: sent.append(text) or str(earlier))
    restored, notes = restore(leader=False)
    assert (restored.meta["env_steps"], notes, sent) == (earlier, [], [""])
    damage(tmp_path / "session_0" / "checkpoints" / str(latest_step))
    restored, notes = restore(leader=True)
    assert (restored.meta["env_steps"], len(notes), sent[1:]) == (earlier, 1, [str(earlier)])
    monkeypatch.setattr(resume, "agree", lambda text: "error 20: damaged")
    with pytest.raises(UserError, match=r"^20: damaged$"):
        restore(leader=False)
    damage(tmp_path / "session_0" / "checkpoints" / str(earlier))
    for step in checkpoint_steps(tmp_path / "session_0"):
        if step != earlier:
            shutil.rmtree(tmp_path / "session_0" / "checkpoints" / str(step))
    monkeypatch.setattr(resume, "agree", lambda text: sent.append(text) or text)
    with pytest.raises(UserError, match="no checkpoint is sound"):
        restore(leader=True)
    assert sent[-1].startswith("error "), "the others would wait for ever"


def test_a_damaged_config_is_restored_from_the_newest_copy(tmp_path):
    """Those of sessions that have finished are not rewritten when a resume changes the config."""
    for number, sessions in enumerate((2, 4)):
        path = tmp_path / f"session_{number}" / "config.json"
        path.parent.mkdir()
        write_json(path, describe(dataclasses.replace(TINY, sessions=sessions, seed=number)))
        os.utime(path, (number, number))
    (tmp_path / "config.json").write_text("{")
    assert read_config(tmp_path) == dataclasses.replace(TINY, sessions=4)


def test_log_points_of_a_session_that_starts_again_are_set_aside(tmp_path):
    run_session(TINY, tmp_path / "session_0")
    evaluations = tmp_path / "session_0" / "evaluations.csv"
    evaluations.write_text("env_steps,episodes,mean,std\n64,2,1.5,0.5\n")
    before = (tmp_path / "session_0" / "metrics.csv").read_bytes()
    shutil.rmtree(tmp_path / "session_0" / "checkpoints")
    often = dataclasses.replace(TINY, total_env_steps=2 * TINY.total_env_steps)
    unfinished = dataclasses.replace(often, log=dataclasses.replace(TINY.log, checkpoint_every_env_steps=1_000))
    for config in (TINY, often):  # it was finished, or has had a checkpoint
        with pytest.raises(UserError, match=r"log points up to \d+ env steps, but no checkpoint; put its checkpoints"):
            run_session(config, tmp_path / "session_0", resume=True)
    write_json(tmp_path / "session_0" / "config.json", describe(TINY))
    with pytest.raises(UserError, match="no checkpoint"):  # although it has a larger budget now
        run_session(unfinished, tmp_path / "session_0", resume=True)
    assert (tmp_path / "session_0" / "metrics.csv").read_bytes() == before
    (tmp_path / "session_0" / "config.json").unlink()
    lines = Lines()
    run_session(unfinished, tmp_path / "session_0", resume=True, writers=[lines])
    assert (tmp_path / "session_0" / "metrics_2.csv").read_bytes() == before
    assert evaluations.with_stem("evaluations_2").read_text().endswith("64,2,1.5,0.5\n")
    (message,) = [message for message in lines.messages if "no checkpoint to resume from" in message]
    assert message.endswith("starts at 0 env steps; what was logged before is in metrics_2.csv, evaluations_2.csv")
    assert int(rows(tmp_path / "session_0")[0]["updates"]) == 1


def test_an_interruption_takes_no_place_among_the_points_of_return_ma(tmp_path):
    """A last log point off the interval shows the newest mean, and later ones leave it out."""
    lines, progress = Lines(), Progress()
    log = SessionLog([lines], LogConfig(every_env_steps=600), progress, 0, tmp_path, lambda: None)
    for score in (1.0, 3.0, 8.0):
        progress.count(300, [(score, 1)], 2)
        log.after_update({"policy_loss": 1.0}, 1e-3, 0.0)
    log.last_point(1e-3)
    assert [(row["env_steps"], row["return_ma"]) for row in lines.rows] == [(600, 2.0), (900, 3.0)]
    assert list(progress.statistics.points) == [2.0]
