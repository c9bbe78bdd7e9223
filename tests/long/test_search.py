"""A search and a suite on Ray: stopped, killed and continued."""

import contextlib
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from sample_runs import read_csv
from simulated_gpus import simulated
from user_commands import ROOT, still_running

pytest.importorskip("ray", reason="search mode needs Ray: pip install 'jaxrl_atari[search]'")
pytest.importorskip("optuna", reason="search mode needs Optuna: pip install 'jaxrl_atari[search]'")


from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.config import Config
from jaxrl_atari.errors import Stopped
from jaxrl_atari.runs.files import read_json, write_json
from jaxrl_atari.runs.layout import checkpoint_env_steps
from jaxrl_atari.search.space import (
    FloatDistribution,
    SearchConfig,
)
from jaxrl_atari.search.study import open_study
from jaxrl_atari.search.trial import StudyWriter, train_trial
from jaxrl_atari.trials.resources import MachineShare

# Ray forks to start its processes, and these run other programs at once: JAX's warning is not for them.
pytestmark = pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")

SPACE = {
    "ppo.gae_lambda": FloatDistribution(0.7, 0.98),
    "ppo.learning_rate": FloatDistribution(1e-4, 5e-4, log=True),
}


def new_search(folder, config=None, **options):
    """A search directory with its trials, none of which has started; returns its options."""
    search = SearchConfig(**{"space": SPACE, "trials": 6, "grace_env_steps": 1000, "seed": 3} | options)
    config = config or Config(name="small", total_env_steps=9000)
    write_json(folder / "search.json", {"config": config.to_dict(), "search": search.to_dict()})
    study = open_study(folder, search)
    for _ in range(search.trials):
        study.enqueue_trial({})
    return search


def test_a_trial_that_was_stopped_has_the_log_points_of_one_that_was_not(tmp_path, monkeypatch):
    """It is stopped in an update with a log point, and after the resume in one without."""
    (tmp_path / "tiny.py").write_text(TINY)
    config = dataclasses.replace(load_config(tmp_path / "tiny.py"), sessions=1, total_env_steps=500)
    stop_at = math.inf  # env steps
    requested = threading.Event()

    def progress(writer, env_steps, row):  # called after an update, before its log point
        if env_steps >= stop_at:
            requested.set()

    def reported(folder, *stops):
        nonlocal stop_at
        (tmp_path / folder / "trial_0").mkdir(parents=True)
        search = new_search(tmp_path / folder, config, early_stopping="none")
        for stop_at in (*stops, math.inf):
            requested.clear()
            with contextlib.nullcontext() if stop_at == math.inf else pytest.raises(Stopped):
                train_trial(tmp_path / folder / "trial_0", MachineShare(0, 1), stop_requested=requested.is_set)
        return open_study(tmp_path / folder, search).trials[0].intermediate_values

    monkeypatch.setattr(StudyWriter, "progress", progress)
    points = reported("uninterrupted")
    middle = sorted(points)[len(points) // 2]
    assert reported("stopped", middle, middle + 1) == points
    assert len(points) > 3


TINY = """
from jaxrl_atari.config import Config, EnvConfig, LogConfig, PPOConfig
from jaxrl_atari.search.space import FloatDistribution, ResourcesConfig, SearchConfig

def get_config():
    return Config(
        name="tiny", total_env_steps=2_500, sessions=2, env=EnvConfig(game="Qbert", num_envs=2, max_frames=400),
        ppo=PPOConfig(rollout_length=8, epochs=1, minibatch_size=16),
        log=LogConfig(every_env_steps=64, checkpoint_every_env_steps=256, tensorboard=False),
    )

def get_search():
    return SearchConfig(
        space={"ppo.gae_lambda": FloatDistribution(0.7, 0.98)}, trials=2, early_stopping="none",
        resources=ResourcesConfig(gpu=0.5),
    )
"""
PROMPT = {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}  # Ray's 15 starves the trials on a busy machine


def start(*words, **environment):
    """A command in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, *map(str, words)], cwd=ROOT, env=os.environ | PROMPT | environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip


def log_points(directory):
    """Session directory -> env steps of its last log point, 0 before the first."""
    return {path.parent: int(float(rows[-1]["env_steps"])) if (rows := read_csv(path)) else 0
            for path in directory.glob("*/session_*/metrics.csv")}  # fmt: skip


def wait_for_progress(process, directory, sessions=2):
    """Waits until `sessions` sessions have new log points; returns all processes."""
    before, end = log_points(directory), time.monotonic() + 300
    while sum(steps > before.get(path, 0) for path, steps in log_points(directory).items()) < sessions:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.1)
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.timeout(900)
def test_a_search_is_interrupted_killed_and_continued(tmp_path):
    """Two trials at a time on a simulated GPU, each of two sessions."""
    (tmp_path / "tiny.py").write_text(TINY)
    search_dir, gpu = tmp_path / "search", simulated(1)
    line = ["-m", "jaxrl_atari.search", "--config", tmp_path / "tiny.py", "--run-dir", search_dir]
    for number in (signal.SIGINT, signal.SIGTERM):  # as a terminal and `timeout` send them: to the process group
        process = start(*line, **gpu)
        family = wait_for_progress(process, search_dir)
        os.killpg(process.pid, number)
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 130, output
        assert f"stopped; go on with python -m jaxrl_atari.search --resume {search_dir}" in output
        assert not still_running(family, seconds=1)
        stopped = log_points(search_dir)
        assert {path: checkpoint_env_steps(path)[-1] for path in stopped} == stopped

    process = start(*line, **gpu)
    family = wait_for_progress(process, search_dir)
    process.kill()
    process.communicate()
    assert not still_running(family, seconds=60)

    process = start(*line, "--search.trials", 3, **gpu)
    family = wait_for_progress(process, search_dir, 1)
    next(child for child in family if "ray::trial_" in " ".join(child.cmdline())).kill()
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    assert "failed: its process was killed" in output
    process = start(*line, "--search.trials", 3, **gpu)  # what has failed runs again
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    rows = read_csv(search_dir / "trials.csv")
    assert [row["status"] for row in rows] == ["finished"] * 3
    assert all(2_450 < int(row["env_steps"]) < 2_550 for row in rows)
    for path, env_steps in stopped.items():
        assert f"resumed at {env_steps:,} env steps" in (path.parent / "output.txt").read_text()
    best = search_dir / f"trial_{rows[0]['trial']}"
    assert json.loads((best / "config.json").read_text())["config"]["devices"]["memory_fraction"] == 0.45
    assert (search_dir / "report.html").exists()
    assert load_config(search_dir / "tiny_best.py").sessions == 2


CLUSTER = """
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1)
print("address", cluster.address, flush=True)
input()
cluster.shutdown()
"""


@pytest.mark.timeout(900)
def test_a_suite_on_a_cluster_of_two_nodes(tmp_path):
    """It is killed, stopped and continued; a file takes the place of a session directory. The nodes share a
    folder."""
    (tmp_path / "tiny.py").write_text(TINY)
    nodes, suite_dir = start("-c", CLUSTER), tmp_path / "suite"
    line = [
        "-m",
        "jaxrl_atari.suite",
        "--config",
        tmp_path / "tiny.py",
        "--run-dir",
        suite_dir,
        "--games",
        "Pong",
        "Qbert",
    ]
    try:
        address = next(line.split()[1] for line in nodes.stdout if line.startswith("address"))
        process = start(*line, "--address", address)
        wait_for_progress(process, suite_dir)
        process.kill()
        process.communicate()
        killed = {
            path: checkpoint_env_steps(path)[-1] for path in log_points(suite_dir) if checkpoint_env_steps(path)
        }
        time.sleep(2)
        assert not (suite_dir / "Qbert/session_1").exists()
        process = start(*line, "--address", address)
        wait_for_progress(process, suite_dir)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=100)
        assert process.returncode == 130, output
        assert f"stopped; go on with python -m jaxrl_atari.suite --resume {suite_dir}" in output
        stopped = log_points(suite_dir)
        assert {path: checkpoint_env_steps(path)[-1] for path in stopped} == stopped
        assert not (suite_dir / "ray").exists()
        (suite_dir / "Qbert").mkdir(exist_ok=True)
        (suite_dir / "Qbert/session_1").write_text("in the way")
        process = start(*line, "--address", address)
        output, _ = process.communicate(timeout=400)
        assert process.returncode == 1, output
        assert "1 of 4 sessions failed (game Qbert session 1: " in output
        assert {path.relative_to(suite_dir).as_posix() for path in log_points(suite_dir)} == {
            "Pong/session_0", "Pong/session_1", "Qbert/session_0",
        }  # fmt: skip
        statuses = {row["game"]: row["status"] for row in read_csv(suite_dir / "results.csv")}
        assert statuses["Pong"] == "complete"
        described = read_json(suite_dir / "Pong/config.json")
        assert described["config"]["env"]["num_threads"] == 1, "the config of the session, and not of the command"
        assert described["resumed"]
        assert not any(entry["changed"] for entry in described["resumed"])
        sweep = [
            "--run-dir",
            tmp_path / "sweep",
            "--games",
            "Pong",
            "--vary",
            "ppo.gamma=0.9,0.99",
            "--sessions",
            "1",
        ]
        process = start(*line[:4], *sweep, "--total-env-steps", "512", "--address", address)
        output, _ = process.communicate(timeout=400)
        assert process.returncode == 0, output
        rows = read_csv(tmp_path / "sweep" / "results.csv")
        assert [(row["ppo.gamma"], row["status"]) for row in rows] == [("0.9", "complete"), ("0.99", "complete")]
        for path, env_steps in killed.items():
            assert f"resumed at {env_steps:,} env steps" in (path / "output.txt").read_text()
    finally:
        nodes.communicate("")
