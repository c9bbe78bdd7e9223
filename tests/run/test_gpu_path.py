"""The way to a GPU, in processes with the variables of a user: what starts when, with which settings.

Simulated GPUs record how JAX starts on them. Tests marked `gpu` need real ones: `pytest -m gpu -n 0`.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from simulated_gpus import simulated, starts
from small_training import first_arrays
from user_commands import ROOT, python, user_environment

from jaxrl_atari.config import Config, NetworkConfig
from jaxrl_atari.hardware.gpus import visible_gpus
from jaxrl_atari.hardware.monitor import monitor
from jaxrl_atari.hardware.settings import DETERMINISTIC
from jaxrl_atari.networks import Observation, make_network

SHOWN = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
"""For tests on real GPUs: those that they may take, on a machine that others use too."""

PLACE = """
import json, os, sys
import jax
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.devices import place
from jaxrl_atari.errors import UserError
from jaxrl_atari.imports import import_inherited

import_inherited()
for options in map(json.loads, sys.argv[1:]):
    try:
        found = place(DevicesConfig(**options))
        print(*found.learner, *found.actors, found.evaluator, found.why_learner, sep="|")
    except UserError as error:
        print(type(error).__name__, error, sep="|")
opened = {os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")}
print(jax.default_backend(), any(name.startswith("/dev/nvidia") for name in opened))
"""


def place(*options, **variables):
    """Places sessions in a fresh process, one after the other; the words of each line that it prints."""
    result = python("-c", PLACE, *map(json.dumps, options), **variables)
    assert result.returncode == 0, result.stderr
    return [line.split("|") for line in result.stdout.splitlines()]


def test_jax_starts_on_the_gpus_of_the_session_alone_and_with_its_settings(tmp_path):
    record = tmp_path / "record"
    options = {"gpu": 1, "actor": 2, "memory_fraction": 0.3, "deterministic": True}
    own = "--xla_cpu_enable_fast_math=false"
    placed, *_ = place(options, **simulated(4, SIMULATED_RECORD=str(record), XLA_FLAGS=own))
    assert placed == ["cpu:2", "cpu:3", "cpu:0", "devices.gpu = 1"]
    assert starts(record)[0] == {
        "gpus": "1,2", "XLA_CLIENT_MEM_FRACTION": "0.3", "XLA_FLAGS": f"{own} {DETERMINISTIC}",
    }  # fmt: skip


def test_gpu_false_starts_no_gpu_and_a_gpu_that_fails_is_named(tmp_path):
    record = tmp_path / "record"
    placed, _ = place({"gpu": False}, **simulated(2, SIMULATED_RECORD=str(record)))
    assert placed == ["cpu:0", "cpu:0", "cpu:0", "devices.gpu = false"]
    assert starts(record) == []
    found, _ = place({"gpu": 0, "actor": 1}, **simulated(2, SIMULATED_ABSENT="1"))
    assert "JAX has started without GPU 1 (GPU-1)" in found[1]


def test_evaluate_starts_only_its_gpu_and_takes_memory_as_it_needs_it(trained, tmp_path):
    record, error = tmp_path / "record", "INTERNAL: a broken driver"
    variables = simulated(2, SIMULATED_RECORD=str(record), SIMULATED_ERROR=error)
    result = python("-m", "jaxrl_atari.evaluate", trained("plain"), "--gpu", 1, **variables)
    assert result.returncode == 2
    assert error in result.stderr
    assert starts(record) == [{"gpus": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}]


def test_xla_knows_the_flags_of_determinism(tmp_path):
    """An unknown flag ends the process; the known ones reach the compiler although JAX has been imported."""
    code = (
        "import jax; from jaxrl_atari.config import DevicesConfig; from jaxrl_atari.devices import place;"
        "place(DevicesConfig(gpu=False, deterministic=True)); jax.jit(lambda x: x + 1)(1.0)"
    )
    result = python("-c", code, XLA_FLAGS=f"--xla_dump_to={tmp_path}", JAX_ENABLE_COMPILATION_CACHE="false")
    assert result.returncode == 0, result.stderr
    (options,) = tmp_path.glob("*lambda*debug_options")
    assert "xla_gpu_deterministic_ops: true" in options.read_text()


CHECKS = """
from jaxrl_atari.config import *
from jaxrl_atari.algorithm import check_config
from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware.settings import has_started
for name, size in (("nature", 256), ("nature_lstm", 256), ("nature_lstm", 64)):
    network, devices = NetworkConfig(name=name), DevicesConfig(deterministic=True)
    try:
        check_config(Config(network=network, devices=devices, ppo=PPOConfig(minibatch_size=size)))
        print("right", has_started())
    except UserError as error:
        print(str(error).split()[0], has_started())
"""


def test_checks_of_a_config_start_nothing():
    """The flags of `devices.deterministic` must come before JAX starts."""
    result = python("-c", CHECKS)
    names = ("right", "right", "ppo.minibatch_size")
    assert result.stdout.splitlines() == [f"{name} False" for name in names], result.stderr


# --- On real GPUs: pytest -m gpu ---------------------------------------------------------------------------------

CONTEXT = 0.2  # GiB: less than any context


def used_gib():
    """Memory in use on each GPU of the machine, by all processes."""
    import pynvml

    pynvml.nvmlInit()
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    return np.array([pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles]) / 2**30


def needs_gpus(count):
    if len(visible_gpus().gpus) < count:
        pytest.skip(f"needs {count} GPUs; {visible_gpus().why_none or f'there are {len(visible_gpus().gpus)}'}")


@contextlib.contextmanager
def training(folder, *options, sessions):
    """A training all of whose sessions learn; memory that it has taken on each GPU, and what it has printed."""
    before, printed = used_gib(), ""
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxrl_atari.train", "--config", "configs/qbert.py", "--output-dir", str(folder),
         "--log.checkpoint-every-env-steps", "4096", *map(str, options)],
        env=user_environment(**SHOWN), cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        for line in process.stdout:
            printed += line
            if printed.count("compilation included") == sessions:
                break
        time.sleep(5)
        yield used_gib() - before, printed
    finally:
        process.terminate()
        process.communicate(timeout=120)


@pytest.mark.gpu
def test_real_gpu_option():
    needs_gpus(1)
    *placed, _ = place({}, {"gpu": True}, {"gpu": 0}, {"gpu": 99}, **SHOWN)
    assert [words[0] for words in placed] == ["cuda:0", "cuda:0", "cuda:0", "ConfigError"], placed
    assert place({"gpu": False}, **SHOWN)[-1] == ["cpu False"], "the driver was opened"


@pytest.mark.gpu
def test_real_memory_fraction():
    needs_gpus(1)
    code = (
        "from jaxrl_atari.devices import *; from jaxrl_atari.hardware.gpus import visible_gpus;"
        "device = place(DevicesConfig(gpu=0, memory_fraction=0.25)).home;"
        "print(device.memory_stats()['bytes_limit'] / visible_gpus().gpus[0].memory)"
    )
    assert float(python("-c", code, **SHOWN).stdout) == pytest.approx(0.25, abs=0.02)


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_real_sessions_fit_on_one_gpu(tmp_path):
    needs_gpus(1)
    with training(tmp_path, "--sessions", 4, "--trial.parallel", 4, "--devices.gpu", 0, sessions=4) as (taken, _):
        assert (taken > CONTEXT).sum() == 1, taken


@pytest.mark.gpu
def test_real_deterministic_training_gives_the_same_bits_twice(tmp_path):
    needs_gpus(1)

    def trained(name):
        options = ("--devices.gpu", 0, "--devices.deterministic", "--total-env-steps", 20_480, "--log.no-graphs")
        command = ("-m", "jaxrl_atari.train", "--config", "configs/qbert.py", "--run-dir", tmp_path / name)
        result = python(*command, *options, **SHOWN)
        assert result.returncode == 0, result.stdout + result.stderr
        (meta,) = (tmp_path / name).glob("session_0/checkpoints/2*/meta/metadata")
        return json.loads(Path(meta).read_text())

    one, again = trained("one"), trained("again")
    assert one["checksums"] == again["checksums"]
    assert one["statistics"] == again["statistics"]


@pytest.mark.gpu
def test_real_gpu_computes_what_a_cpu_computes():
    needs_gpus(1)
    devices = jax.devices("cpu")[0], jax.devices("gpu")[0]
    here, there = (first_arrays(Config(), 4, device)["train_state"].params for device in devices)
    assert jax.tree.all(jax.tree.map(np.array_equal, here, there))
    network = make_network(NetworkConfig(compute_dtype="float32"), 4, "gpu")
    stacks = np.random.default_rng(0).integers(0, 256, (16, 84, 84, 4), np.uint8)
    outputs = [jax.jit(network.apply)(params, Observation(stacks)) for params in (here, there)]
    for one, other in zip(*map(jax.tree.leaves, outputs), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3)


@pytest.mark.gpu
def test_real_gpu_is_monitored():
    needs_gpus(1)
    device = jax.devices("gpu")[-1]
    with monitor([device]) as read_now:
        matrix = jax.device_put(jax.numpy.ones((4096, 4096)), device)
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            (matrix @ matrix).block_until_ready()
        row = read_now()
    assert row["gpu_busy_percent"] > 20
    assert row["gpu_memory_gib"] > 0.06
    assert row["gpu_power_watts"] > 10
    assert 10 < row["gpu_temperature_c"] < 110
