"""Two real processes that learn one session together, over gloo."""

import os
import subprocess
import sys

import distributed_child
import jax
import numpy as np
import pytest
from sample_runs import flip_bit, read_csv
from user_commands import ROOT, free_address

from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.devices import place
from jaxrl_atari.errors import ConfigError
from jaxrl_atari.evaluate.policy import load_policy
from jaxrl_atari.runs.checkpoints import Checkpoints


def start_together(commands, devices_here=1):
    """Runs the commands as the processes of one session; returns what each has printed."""
    coordinator = free_address()
    environment = {**os.environ, "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices_here}"}
    children = [
        subprocess.Popen(
            [sys.executable, *(coordinator if word == "COORDINATOR" else str(word) for word in command)],
            env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for command in commands
    ]  # fmt: skip
    try:
        printed = [child.communicate(timeout=240)[0] for child in children]
        assert [child.returncode for child in children] == [0] * len(children), printed
        return printed
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_two_processes_learn_what_one_learns(tmp_path):
    files = [tmp_path / f"{index}.npz" for index in range(2)]
    start_together([[distributed_child.__file__, file, index, "COORDINATOR"] for index, file in enumerate(files)])
    first, second = (dict(np.load(file)) for file in files)
    alone = distributed_child.learn(tmp_path / "session_0", DevicesConfig(gpu=False, data_parallel=2, check=True))
    assert first.keys() == second.keys() == alone.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
        assert np.sqrt(np.mean(np.square(first[name] - alone[name]))) < 1e-5  # Adam can have gone 6e-3


SMALL = [
    "--config", "configs/qbert.py", "--total-env-steps", 1024, "--env.num-envs", 4, "--env.max-frames", 200,
    "--ppo.rollout-length", 64, "--ppo.minibatch-size", 64, "--ppo.epochs", 1, "--log.every-env-steps", 256,
    "--log.no-graphs", "--log.no-tensorboard", "--devices.gpu", "false", "--devices.data-parallel", "all",
    "--network.compute-dtype", "float32",
]  # fmt: skip


def together(*arguments):
    """The command in two processes."""
    return start_together(
        [
            ["-m", "jaxrl_atari.train", *arguments, "--devices.distributed", "--devices.coordinator", "COORDINATOR",
             "--devices.num-processes", 2, "--devices.process-index", index]
            for index in range(2)
        ]
    )  # fmt: skip


@pytest.mark.slow
def test_two_processes_fall_back_together_from_a_damaged_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    together(*SMALL, "--run-dir", run_dir, "--log.checkpoint-every-env-steps", 256)
    checkpoints = run_dir / "session_0" / "checkpoints"
    before, last = Checkpoints(run_dir / "session_0").steps()[-2:]
    for path in (checkpoints / str(last) / "arrays").rglob("[0-9]*"):
        flip_bit(path)
    leader, follower = together("--resume", run_dir, "--total-env-steps", "1536")
    assert f"the checkpoint at {last:,} env steps is damaged (" in leader
    assert f"session 0  resumed at {before:,} env steps" in leader
    assert "damaged" not in follower, "only process 0 logs"
    assert (checkpoints / f"damaged_{last}").is_dir()
    assert Checkpoints(run_dir / "session_0").steps()[-1] > 1_400


@pytest.mark.slow
def test_the_command_in_two_processes(tmp_path):
    leader, follower = together(*SMALL, "--devices.actor", "auto", "--output-dir", tmp_path / "two")
    assert "final return_ma" in leader
    assert "session 0" not in follower, "only process 0 logs"
    start_together([["-m", "jaxrl_atari.train", *SMALL, "--output-dir", tmp_path / "one"]], devices_here=2)
    (two,), (one,) = (tmp_path / "two").iterdir(), (tmp_path / "one").iterdir()
    rows, expected = (read_csv(run_dir / "session_0" / "metrics.csv") for run_dir in (two, one))
    assert int(rows[-1]["episodes"]) >= 16, "the games of both processes"
    for name in ("env_steps", "episodes", "return_mean", "episode_length", "learning_rate"):
        assert [row[name] for row in rows] == [row[name] for row in expected], name

    # It goes on, in two processes or in one, and a process of its own can play what was learned.
    together("--resume", two, "--total-env-steps", "1536")
    assert read_csv(two / "session_0" / "metrics.csv")[: len(rows)] == rows
    start_together([["-m", "jaxrl_atari.train", "--resume", two, "--total-env-steps", "2048",
                     "--devices.no-distributed", "--devices.data-parallel", 1]])  # fmt: skip
    written = read_csv(two / "session_0" / "metrics.csv")
    steps = [int(row["env_steps"]) for row in written]
    assert steps == sorted(set(steps))
    assert Checkpoints(two / "session_0").steps()[-1] == int(written[-1]["env_steps"])
    assert load_policy(two).env_steps > 0


def test_each_process_needs_a_device(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"devices.data_parallel = 1.*all, or enough for the 2 processes"):
        place(DevicesConfig(gpu=False))
