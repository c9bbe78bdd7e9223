"""A search on this machine and one on Ray, and a suite on Ray: stopped, killed and continued."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
from sample_runs import read_csv
from simulated_gpus import simulated
from user_commands import ROOT, still_running

pytest.importorskip("optuna", reason="search mode needs Optuna: pip install 'jaxrl_atari[search]'")

from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.runs.layout import checkpoint_env_steps

on_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray: pip install 'jaxrl_atari[cluster]'"
)


CONFIG = """
from jaxrl_atari.config import *
from jaxrl_atari.search.space import FloatDistribution, ResourcesConfig, SearchConfig

def get_config():
    return Config(
        name="tiny", total_env_steps=3_000, sessions=2, env=EnvConfig(game="Breakout", num_envs=4, max_frames=128),
        ppo=PPOConfig(rollout_length=16, epochs=1, minibatch_size=32),
        log=LogConfig(every_env_steps=64, checkpoint_every_env_steps=256, tensorboard=False),
    )

def get_search():
    return SearchConfig(
        space={"ppo.gae_lambda": FloatDistribution(0.7, 0.98)}, trials=2, early_stopping="none",
        resources=ResourcesConfig(gpu=0.5),
    )
"""
PROMPT = {"RAY_worker_niceness": "0", "RAY_AUTH_MODE": "disabled"}  # Ray's 15 starves jobs on a busy machine


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


def stop(process, directory, command, number=signal.SIGTERM):
    """Stops a command, as a terminal or `timeout` does, by a signal to its process group."""
    os.killpg(process.pid, number)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 130, output
    assert f"stopped; go on with python -m jaxrl_atari.{command} --resume {directory}" in output
    stopped = log_points(directory)
    assert {path: checkpoint_env_steps(path)[-1] for path in stopped} == stopped
    return stopped


def finish(process):
    output, _ = process.communicate(timeout=500)
    assert process.returncode == 0, output
    return output


@pytest.mark.timeout(900)
def test_a_search_is_interrupted_killed_and_continued(tmp_path):
    """Two trials at a time on a simulated GPU, each of two sessions."""
    (tmp_path / "tiny.py").write_text(CONFIG)
    search_dir, gpu = tmp_path / "search", simulated(1)
    line = ["-m", "jaxrl_atari.search", "--config", tmp_path / "tiny.py", "--run-dir", search_dir]
    process = start(*line, **gpu)
    family = wait_for_progress(process, search_dir)
    stopped = stop(process, search_dir, "search", signal.SIGINT)
    assert not still_running(family, seconds=1)

    process = start(*line, **gpu)
    family = wait_for_progress(process, search_dir)
    process.kill()
    process.communicate()
    assert not still_running(family, seconds=60)

    process = start(*line, "--search.trials", 3, **gpu)
    family = wait_for_progress(process, search_dir, 1)
    next(child for child in family if "--trial" in child.cmdline()).kill()
    output = finish(process)
    assert "failed: ended by signal 9 (Killed); does the machine have too little memory?" in output
    output += finish(start(*line, "--search.trials", 3, **gpu))  # what has failed runs again
    rows = read_csv(search_dir / "trials.csv")
    assert [row["status"] for row in rows] == ["finished"] * 3
    assert all(2_900 < int(row["env_steps"]) < 3_100 for row in rows)
    for path, env_steps in stopped.items():
        assert env_steps > 0
        assert "resumed at " in (path.parent / "output.txt").read_text()
    assert "resumed at " in output
    for number in range(3):
        assert f"trial_{number}  session 1  " in (search_dir / f"trial_{number}/output.txt").read_text()
    assert (search_dir / "report.html").exists()
    assert load_config(search_dir / "tiny_best.py").sessions == 2


@pytest.mark.parametrize(("command", "words"), [("search", ()), ("suite", ("--games", "Pong"))])
def test_what_is_refused_altogether_leaves_no_folder(command, words, tmp_path):
    """There is one CPU device."""
    (tmp_path / "tiny.py").write_text(CONFIG)
    options = ["--devices.gpu", "false", "--devices.data-parallel", 2, *words]
    process = start(
        "-m", f"jaxrl_atari.{command}", "--config", tmp_path / "tiny.py", "--run-dir", tmp_path / "run", *options
    )
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 2, output
    assert re.search(r"^error: no (trial|session) could begin: devices\.data_parallel = 2: ", output, re.M), output
    assert not (tmp_path / "run").exists()


CLUSTER = """
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
cluster.add_node(num_cpus=1)
print("address", cluster.address, flush=True)
input()
cluster.shutdown()
"""


@on_ray
@pytest.mark.timeout(900)
def test_a_suite_and_a_search_on_a_cluster_of_two_nodes(tmp_path):
    """The suite is killed, stopped and continued; a file takes the place of a session."""
    (tmp_path / "tiny.py").write_text(CONFIG)
    nodes, suite_dir = start("-c", CLUSTER), tmp_path / "suite"
    config = ["--config", tmp_path / "tiny.py"]
    line = ["-m", "jaxrl_atari.suite", *config, "--run-dir", suite_dir, "--games", "Pong", "Qbert", "--address"]
    try:
        address = next(line.split()[1] for line in nodes.stdout if line.startswith("address"))
        process = start(*line, address)
        wait_for_progress(process, suite_dir)
        process.kill()
        process.communicate()
        left = [each for each in psutil.process_iter(["cmdline"]) if str(suite_dir) in str(each.info["cmdline"])]
        assert not still_running(left, seconds=60)  # the sessions in the workers of Ray
        process = start(*line, address)
        wait_for_progress(process, suite_dir)
        stopped = stop(process, suite_dir, "suite")
        (suite_dir / "Qbert").mkdir(exist_ok=True)
        (suite_dir / "Qbert/session_1").write_text("in the way")
        process = start(*line, address)
        output, _ = process.communicate(timeout=400)
        assert process.returncode == 1, output
        assert re.search(r"1 of [234] sessions failed \(game Qbert +session 1: ", output), output
        statuses = {row["game"]: row["status"] for row in read_csv(suite_dir / "results.csv")}
        assert statuses["Pong"] == "complete"
        for path, env_steps in stopped.items():
            assert f"resumed at {env_steps:,} env steps" in (path / "output.txt").read_text()
        search = ["-m", "jaxrl_atari.search", *config, "--run-dir", tmp_path / "search", "--total-env-steps", 512]
        finish(start(*search, "--search.trials", 1, "--search.address", address))
        assert [row["status"] for row in read_csv(tmp_path / "search/trials.csv")] == ["finished"]
        assert (tmp_path / "search/trial_0/output.txt").read_text()
    finally:
        nodes.communicate("")
