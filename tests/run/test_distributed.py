"""Two real processes that learn one session together, over gloo."""

import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from fake_cuda import python
from sample_runs import flip_bit, read_csv
from simulated_gpus import simulated
from user_commands import ROOT, free_address, one_error_line, user_environment

from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.devices import place
from jaxrl_atari.errors import ConfigError
from jaxrl_atari.evaluate.policy import load_policy
from jaxrl_atari.runs.checkpoints import Checkpoints

SMALL = [
    "-m", "jaxrl_atari.train", "--config", "configs/qbert.py", "--total-env-steps", 1024, "--env.num-envs", 4,
    "--env.max-frames", 200, "--ppo.rollout-length", 64, "--ppo.minibatch-size", 64, "--ppo.epochs", 1,
    "--log.every-env-steps", 256, "--log.no-graphs", "--log.no-tensorboard", "--devices.gpu", "false",
    "--devices.data-parallel", "all", "--network.compute-dtype", "float32", "--devices.check",
]  # fmt: skip


def start(arguments, **variables):
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=user_environment(**variables), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def options(coordinator, index, count=2):
    return ["--devices.distributed", "--devices.coordinator", coordinator, "--devices.num-processes", count,
            "--devices.process-index", index]  # fmt: skip


def together(*arguments, **variables):
    """The command in two processes; returns what each has printed."""
    coordinator = free_address()
    children = [start([*arguments, *options(coordinator, index)], **variables) for index in range(2)]
    try:
        printed = [child.communicate(timeout=280)[0] for child in children]
        assert [child.returncode for child in children] == [0, 0], printed
        return printed
    finally:
        for child in children:
            child.kill()
            child.wait()


@pytest.mark.long
def test_two_processes_learn_what_one_learns(tmp_path):
    two, one = tmp_path / "two", tmp_path / "one"
    leader, follower = together(*SMALL, "--devices.actor", "auto", "--run-dir", two)
    assert "waiting for all 2 processes at 127.0.0.1:" in leader
    assert "waiting for all 2 processes at 127.0.0.1:" in follower
    assert "env_steps 1,0" in leader
    note = "new games at each resume, and no log of actions for `verify`: games are not recorded with"
    assert f"note: {note} devices.distributed" in leader
    assert "session 0" not in follower, "only process 0 logs"
    alone = python(*SMALL, "--run-dir", one, XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert alone.returncode == 0, alone.stderr
    rows, expected = (read_csv(run_dir / "session_0" / "metrics.csv") for run_dir in (two, one))
    assert int(rows[-1]["episodes"]) >= 16, "the games of both processes"
    for name in ("env_steps", "episodes", "return_mean", "episode_length", "learning_rate"):
        assert [row[name] for row in rows] == [row[name] for row in expected], name
    learned = [jax.tree.leaves(load_policy(run_dir, "latest").params) for run_dir in (two, one)]
    for here, there in zip(*learned, strict=True):
        assert np.sqrt(np.mean(np.square(here - there))) < 1e-5  # Adam can have gone 4e-3


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_go_on_together_or_alone_and_fall_back_from_a_damaged_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    together(*SMALL, "--run-dir", run_dir, "--log.checkpoint-every-env-steps", 256)
    checkpoints = Checkpoints(run_dir / "session_0")
    before, last = checkpoints.env_steps()[-2:]
    for path in (run_dir / "session_0" / "checkpoints" / str(last) / "arrays").rglob("[0-9]*"):
        flip_bit(path)
    resume = ("-m", "jaxrl_atari.train", "--resume", run_dir, "--total-env-steps")
    leader, follower = together(*resume, 1536)
    assert f"checkpoints/{last}: damaged: " in leader
    assert f"resumed at {before:,} env steps" in leader
    assert "damaged" not in follower, "only process 0 logs"
    alone = python(*resume, 2048, "--devices.no-distributed", "--devices.data-parallel", 1)
    assert alone.returncode == 0, alone.stderr
    steps = [int(row["env_steps"]) for row in read_csv(run_dir / "session_0" / "metrics.csv")]
    assert steps == sorted(set(steps))
    assert checkpoints.env_steps()[-1] == steps[-1] > 1_900


CANNOT_CONTINUE = """
import sys
from jaxrl_atari import cli, groups, train

def restore_games(*_):
    raise LookupError("a bug")

if sys.argv[-1] == "1":  # in one of the processes
    groups.restore_games = restore_games
cli.run(train.main)
"""


@pytest.mark.slow
def test_two_processes_continue_the_games_of_one_process_or_neither_does(tmp_path):
    run_dir, copied = tmp_path / "run", tmp_path / "copied"
    alone = python(*SMALL, "--run-dir", run_dir)
    assert alone.returncode == 0, alone.stderr
    shutil.copytree(run_dir, copied)
    resume = ("--total-env-steps", 1536, "--resume")
    leader, _ = together("-m", "jaxrl_atari.train", *resume, run_dir)
    assert "new games are started" not in leader
    leader, follower = together("-c", CANNOT_CONTINUE, *resume, copied)
    assert "session 0  new games are started (LookupError: a bug)" in leader
    assert "Traceback" not in leader
    assert "LookupError: a bug" in follower


def refused(children):
    """What processes print that all end with an error of the user's."""
    try:
        printed = [child.communicate(timeout=120)[0] for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert {child.returncode for child in children} == {2}, printed
    return printed


def test_followers_are_told_why_the_leader_cannot_use_the_run_directory(tmp_path):
    (tmp_path / "notes.txt").touch()
    coordinator = free_address()
    children = [start([*SMALL, "--run-dir", tmp_path, *options(coordinator, index)]) for index in range(2)]
    for output in refused(children):
        assert f"error: {tmp_path}: holds notes.txt, and no run; choose another folder" in output


@pytest.mark.parametrize("index", [0, 1])
def test_a_signal_ends_the_wait_for_a_process_that_never_comes(index, tmp_path):
    coordinator = free_address()
    process = start([*SMALL, "--output-dir", tmp_path / "data", *options(coordinator, index, 3)])
    printed = ""
    while "waiting" not in printed:
        printed = process.stdout.readline()
        assert printed
    assert printed == f"waiting for all 3 processes at {coordinator}\n"
    signalled = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0].startswith("interrupted\n")  # then JAX logs that it ends
    assert process.returncode == 130
    assert time.monotonic() - signalled < 20
    assert not (tmp_path / "data").exists()


WITH_INSTRUCTION_SETS = """
import os
from jaxrl_atari import cli, train
from jaxrl_atari.hardware import cpu

here = cpu.read_cpu()._replace(instruction_sets=tuple(os.environ["SETS"].split()))
cpu.read_cpu = lambda: here
cli.run(train.main)
"""


def test_processes_whose_cpus_would_compute_differently_are_refused(tmp_path):
    coordinator = free_address()
    words = ["-c", WITH_INSTRUCTION_SETS, *SMALL[2:], "--output-dir", tmp_path]
    children = [
        start([*words, *options(coordinator, index)], SETS=sets)
        for index, sets in enumerate(("AVX2", "AVX2 BF16"))
    ]
    expected = (
        "error: devices.distributed = True: expected devices of one class to learn in all processes; they are"
        " bfloat16 cpu and cpu; use GPUs alone, or CPUs that agree in AVX512-BF16 and AMX"
    )
    for output in refused(children):
        assert expected in output
    assert not list(tmp_path.iterdir())


def test_processes_with_other_numbers_of_devices_are_refused(tmp_path):
    coordinator = free_address()
    children = [
        start(
            [*SMALL, "--output-dir", tmp_path, *options(coordinator, index)],
            XLA_FLAGS=f"--xla_force_host_platform_device_count={2 - index}",
        )
        for index in range(2)
    ]
    expected = "error: devices.distributed = True: expected as many devices in each process; they have 2 and 1; "
    for output in refused(children):
        assert expected in output
    assert not list(tmp_path.iterdir())


IN_A_CALLBACK = """
import gc, os, signal
from jaxrl_atari import cli, train
from jaxrl_atari.hardware import distributed

def in_a_callback(phase, info):  # Python swallows what it raises
    gc.callbacks.remove(in_a_callback)
    os.kill(os.getpid(), signal.SIGTERM)

def say(line):
    gc.callbacks.append(in_a_callback)
    gc.collect()

distributed.say = say
cli.run(train.main)
"""


def test_a_signal_during_a_callback_ends_the_wait_too(tmp_path):
    words = [*SMALL[2:], "--output-dir", tmp_path / "data", *options(free_address(), 1, 3)]
    process = start(["-c", IN_A_CALLBACK, *words])
    try:
        printed = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    assert process.returncode == 130, printed


@pytest.mark.parametrize(
    ("coordinator", "index", "message"),
    [
        ("localhost", 0, "devices.coordinator = 'localhost': expected HOST:PORT of process 0"),
        ("localhost:99999", 1, "'localhost:99999': expected HOST:PORT of process 0, with a PORT from 1 to 65535"),
        ("localhost:0", 0, "expected HOST:PORT of process 0, with a PORT from 1 to 65535"),
        ("TAKEN", 0, "expected a free port of this machine; [Errno 98] Address already in use"),
        ("localhost:9", 2, "devices.process_index = 2: expected less than devices.num_processes = 2"),
    ],
)
def test_a_coordinator_that_cannot_be(coordinator, index, message, tmp_path):
    with socket.create_server(("", 0)) as taken:
        coordinator = coordinator.replace("TAKEN", f"localhost:{taken.getsockname()[1]}")
        result = python(*SMALL, "--output-dir", tmp_path / "data", *options(coordinator, index))
    assert result.returncode == 2
    error = one_error_line(result.stderr)
    assert message in error
    assert "it needs" not in error  # all three options are given
    assert not (tmp_path / "data").exists()


def test_gpus_of_a_process_that_are_no_indices_are_refused(tmp_path):
    arguments = [*SMALL, "--output-dir", tmp_path / "data", *options("localhost:9", 1)]
    result = python(*arguments, JAX_LOCAL_DEVICE_IDS="0,one")
    assert result.returncode == 2
    expected = "JAX_LOCAL_DEVICE_IDS = '0,one': expected indices of visible GPUs, such as 0,1"
    assert expected in one_error_line(result.stderr)


TOGETHER = """
from sys import argv
from jaxrl_atari.devices import *
from jaxrl_atari.hardware.distributed import *
from jaxrl_atari.imports.named import import_inherited
import_inherited()
devices = DevicesConfig(
    data_parallel="all", distributed=True, coordinator=argv[1], num_processes=2, process_index=int(argv[2])
)
join_processes(devices)
items = gather_items([(2**24 + 1, 0.1, argv[2])] * (2 + 3 * int(argv[2])))
placement = place(devices)
ids = [device.id for device in (*placement.learner, *placement.actors, placement.evaluator)]
text = agree(argv[2] * 9_000)  # longer than one page
print("placed", is_leader(), text[0], len(text), sum_over_processes(4), items, *ids, flush=True)
"""


def test_two_processes_on_one_host_have_gpus_of_their_own():
    coordinator = free_address()
    children = [
        start(["-c", TOGETHER, coordinator, i], **simulated(2), CUDA_VISIBLE_DEVICES=str(i)) for i in range(2)
    ]
    try:
        printed = "".join(child.communicate(timeout=240)[0] for child in children)
    finally:
        for child in children:
            child.kill()
            child.wait()
    lines = [line for line in printed.splitlines() if line.startswith("placed")]  # Gloo prints as well
    items = [[16_777_217, 0.1, "0"]] * 2 + [[16_777_217, 0.1, "1"]] * 5  # float32 has neither number
    # JAX numbers the CPU devices of process 1 from 2048 on; the first one of each process is the CPU.
    assert lines == [
        f"placed True 0 9000 8 {items} 1 2049 1 0",
        f"placed False 0 9000 8 {items} 1 2049 2049 2048",
    ], printed


def test_each_process_needs_a_device(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"devices.data_parallel = 1.*all, or enough for the 2 processes"):
        place(DevicesConfig(gpu=False))
