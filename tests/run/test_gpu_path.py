"""The way to a GPU, in processes with the variables of a user: what starts when, with which settings, what lies
where.

On a fake machine (`fake_cuda.py`) JAX records that it starts and fails; simulated GPUs compute. Tests marked `gpu`
need real GPUs.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from fake_cuda import SHOWN, FakeMachine, python
from simulated_gpus import simulated
from small_training import first_arrays
from user_commands import ROOT, free_address, user_environment

from jaxrl_atari.config import Config, DevicesConfig, NetworkConfig
from jaxrl_atari.devices import pick_device, place
from jaxrl_atari.errors import ConfigError
from jaxrl_atari.hardware import cpu
from jaxrl_atari.hardware.cpu import Cpu
from jaxrl_atari.hardware.device_class import device_class
from jaxrl_atari.hardware.distributed import join_processes
from jaxrl_atari.hardware.gpus import visible_gpus
from jaxrl_atari.hardware.jax_settings import DETERMINISTIC
from jaxrl_atari.hardware.memory import FRACTION_VARIABLE, OLD_FRACTION_VARIABLE
from jaxrl_atari.hardware.start import limit_jax
from jaxrl_atari.network_forms import make_network
from jaxrl_atari.network_interface import Observation

TINY = [
    "-m", "jaxrl_atari.train", "--config", "configs/qbert.py", "--total-env-steps", 64, "--env.num-envs", 4,
    "--ppo.rollout-length", 8, "--ppo.minibatch-size", 32, "--ppo.epochs", 1, "--log.no-graphs",
    "--log.no-tensorboard",
]  # fmt: skip


# --- What starts -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_gpu_false_touches_no_gpu(tmp_path):
    machine = FakeMachine(tmp_path)
    result = machine.python(*TINY, "--output-dir", tmp_path, "--devices.gpu", "false")
    assert "device: cpu:0 (devices.gpu = false)" in result.stdout, result.stderr
    assert result.returncode == 0
    assert machine.started == []
    assert not machine.nvml_was_asked


def test_a_flag_that_a_later_one_overrides_is_not_believed():
    flags = f"{DETERMINISTIC} {DETERMINISTIC.replace('true', 'false')}"
    code = (
        "import os; from jaxrl_atari.hardware.jax_settings import use_deterministic_kernels;"
        "use_deterministic_kernels(); print(os.environ['XLA_FLAGS'])"
    )
    assert python("-c", code, XLA_FLAGS=flags).stdout == f"{flags} {DETERMINISTIC}\n"


@pytest.mark.long
def test_auto_runs_on_the_cpu_where_cuda_cannot_start(tmp_path):
    """The flags of `devices.deterministic` are there before CUDA starts, with the user's own."""
    machine, own = FakeMachine(tmp_path), "--xla_cpu_enable_fast_math=false"
    result = machine.python(*TINY, "--output-dir", tmp_path, "--devices.deterministic", XLA_FLAGS=own)
    assert result.returncode == 0, result.stderr
    assert "device: cpu:0 (devices.gpu = auto, and there is no GPU: JAX cannot start on a GPU:" in result.stdout
    assert "Traceback" not in result.stderr
    assert machine.started == [{"jax_cuda_visible_devices": "all", "XLA_FLAGS": f"{own} {DETERMINISTIC}"}]


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (
            {"FAKE_CUDA_ERROR": "INTERNAL: failed call to cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY"},
            "too little memory is free on GPU 0 (GPU-0)",
        ),
        # XLA logs each device's error, and raises one that does not name it.
        ({"FAKE_TAKEN_GIB": "23.9"}, "other processes hold the memory of GPU 0 (GPU-0)"),
    ],
)
def test_a_gpu_without_free_memory_is_no_reason_to_train_on_the_cpu(how, why, tmp_path):
    result = FakeMachine(tmp_path).python(*TINY, "--output-dir", tmp_path, **how)
    assert result.returncode == 2
    advice = "wait for other processes, lower their devices.memory_fraction, or choose another GPU"
    assert f"{why}; {advice}" in result.stderr
    assert "devices.gpu" not in result.stderr  # `evaluate` has `--gpu`, and processes of `distributed` no index
    assert "Traceback" not in result.stderr


@pytest.mark.long
def test_sessions_side_by_side_start_cuda_with_their_shares_and_their_parent_does_not(tmp_path):
    machine = FakeMachine(tmp_path)
    result = machine.python(*TINY, "--output-dir", tmp_path, "--sessions", 2, "--trial.parallel", 2)
    assert "session 1  on GPU 0, 45% of its memory" in result.stdout, result.stderr
    assert [settings[FRACTION_VARIABLE] for settings in machine.started] == ["0.45", "0.45"]


@pytest.mark.slow
def test_sessions_side_by_side_start_cuda_without_the_settings_of_an_earlier_session(tmp_path):
    """They are those of the user, whatever a session of the same process has set for itself."""
    machine = FakeMachine(tmp_path)
    code = (
        "import os, sys; from jaxrl_atari import train; from jaxrl_atari.devices import *;"
        "from jaxrl_atari.hardware.start import limit_jax\n"
        "if __name__ == '__main__':\n"
        "    limit_jax(DevicesConfig(memory_fraction=0.9, deterministic=True)); train.main(sys.argv[1:])"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    options = [*TINY[2:], "--output-dir", tmp_path, "--sessions", 2, "--trial.parallel", 2]
    result = machine.python(script, *options, XLA_FLAGS="--xla_cpu_enable_fast_math=false")
    assert len(machine.started) == 2, result.stderr
    for settings in machine.started:
        assert settings[FRACTION_VARIABLE] == "0.45"
        assert settings["XLA_FLAGS"] == "--xla_cpu_enable_fast_math=false"


def test_a_session_from_python_starts_only_its_gpus(tmp_path):
    machine = FakeMachine(tmp_path, gpus=3)
    code = (
        "import sys; from jaxrl_atari.config import *; from jaxrl_atari.session import run_session;"
        "from pathlib import Path; devices = DevicesConfig(gpu=1, actor=2, memory_fraction=0.3);"
        "run_session(Config(devices=devices), Path(sys.argv[1]) / 'session_0')"
    )
    assert "devices.gpu = 1: expected a visible GPU" in machine.python("-c", code, tmp_path).stderr
    assert machine.started == [{"jax_cuda_visible_devices": "1,2", FRACTION_VARIABLE: "0.3"}]


def test_evaluate_starts_only_its_gpu_and_takes_memory_as_it_needs_it(tmp_path):
    machine = FakeMachine(tmp_path, gpus=2)
    result = machine.python("-m", "jaxrl_atari.evaluate", ROOT / "agents" / "crazy_climber", "--gpu", 1)
    assert "gpu = 1: expected" in result.stderr
    assert machine.started == [{"jax_cuda_visible_devices": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}]


def test_a_process_of_several_starts_the_gpus_that_jax_local_device_ids_names(tmp_path):
    machine = FakeMachine(tmp_path, gpus=4)
    code = (
        "import sys; from jaxrl_atari.devices import *; from jaxrl_atari.hardware.distributed import "
        "join_processes;"
        "devices = DevicesConfig(gpu=True, distributed=True, coordinator=sys.argv[1], num_processes=1,"
        "process_index=0, memory_fraction=0.25); join_processes(devices); place(devices)"
    )
    result = machine.python("-c", code, free_address(), JAX_LOCAL_DEVICE_IDS="2,3")
    assert machine.started == [{"jax_cuda_visible_devices": "2,3", FRACTION_VARIABLE: "0.25"}], result.stderr


def test_a_process_of_several_starts_all_its_gpus_whatever_the_cluster_says(tmp_path):
    """From a cluster alone, JAX would take one GPU: the one whose index is the local rank."""
    machine = FakeMachine(tmp_path, gpus=4)
    address = free_address()
    cluster = {"OMPI_MCA_orte_hnp_uri": f"1.0;tcp://{address}", "OMPI_COMM_WORLD_SIZE": "1"}
    ranks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    code = (
        "import sys; from jaxrl_atari.devices import *; from jaxrl_atari.hardware.distributed import "
        "join_processes;"
        "devices = DevicesConfig(gpu=True, distributed=True, coordinator=sys.argv[1], num_processes=1,"
        "process_index=0); join_processes(devices); place(devices)"
    )
    variables = {"CUDA_VISIBLE_DEVICES": "1,3", "JAX_LOCAL_DEVICE_IDS": ""}  # empty: as if it were unset
    result = machine.python("-c", code, address, **variables, **cluster, **ranks)
    (started,) = machine.started
    assert started["jax_cuda_visible_devices"] == "0,1", result.stderr


def test_processes_cannot_join_once_jax_has_started():
    devices = DevicesConfig(gpu=False, distributed=True)
    message = r"devices.distributed = True: expected to be set once in a process, before JAX starts; train in a fr"
    with pytest.raises(ConfigError, match=message):
        join_processes(devices)


def test_a_process_of_several_does_not_train_on_the_cpu_alone(tmp_path):
    code = (
        "import sys; from jaxrl_atari.devices import *; from jaxrl_atari.hardware.distributed import "
        "join_processes;"
        "devices = DevicesConfig(distributed=True, coordinator=sys.argv[1], num_processes=1,"
        "process_index=0); join_processes(devices); place(devices)"
    )
    result = FakeMachine(tmp_path).python("-c", code, free_address())
    assert "UserError: devices.distributed: JAX cannot start on a GPU" in result.stderr


def test_questions_start_nothing(tmp_path):
    machine = FakeMachine(tmp_path)
    code = (
        "import jax, numpy as np; from jaxrl_atari.hardware.distributed import *;"
        "from jaxrl_atari.hardware.start import limit_jax; limit_jax(DevicesConfig(gpu=0));"
        "print(is_leader(), sum_over_processes(3), agree('x'), len(gather_items([3, 5])),"
        "jax.config.jax_platforms); jax.config.update('jax_num_cpu_devices', 3)"  # refused once JAX has started
    )
    result = machine.python("-c", code, JAX_PLATFORMS="cuda")
    # The CPU, where the first parameters are computed, is added to JAX_PLATFORMS.
    assert result.stdout.split() == ["True", "3", "x", "2", "cuda,cpu"], result.stderr
    assert result.returncode == 0


@pytest.mark.parametrize(
    ("name", "minibatch_size", "refused"),
    [
        ("nature", 256, []),
        ("nature_lstm", 256, []),
        ("nature_lstm", 64, ["ppo.minibatch_size"]),
        ("impala", 256, ["devices.deterministic"]),
    ],
)
def test_checks_of_a_config_start_nothing(name, minibatch_size, refused, tmp_path):
    """The flags of `devices.deterministic` must come before JAX starts."""
    machine = FakeMachine(tmp_path)
    code = (
        "import sys; from jaxrl_atari.hardware.jax_settings import has_started; from jaxrl_atari.config import *;"
        "from jaxrl_atari.config_checks import check_names_and_minibatches;"
        "from jaxrl_atari.errors import UserError;"
        "config = Config(network=NetworkConfig(name=sys.argv[1]), devices=DevicesConfig(deterministic=True),"
        "ppo=PPOConfig(minibatch_size=int(sys.argv[2])))\n"
        "try: check_names_and_minibatches(config)\n"
        "except UserError as error: print(error)\n"
        "print(has_started())"
    )
    result = machine.python("-c", code, name, minibatch_size)
    assert [line.split()[0] for line in result.stdout.splitlines()] == [*refused, "False"], result.stderr
    assert machine.started == []


def test_xla_knows_the_flags_of_determinism(tmp_path):
    """An unknown flag ends the process; the known ones reach the compiler although JAX has been imported."""
    code = (
        "import jax; from jaxrl_atari.devices import *; limit_jax(DevicesConfig(gpu=False, deterministic=True));"
        "jax.jit(lambda x: x + 1)(1.0)"
    )
    result = python("-c", code, XLA_FLAGS=f"--xla_dump_to={tmp_path}", JAX_ENABLE_COMPILATION_CACHE="false")
    assert result.returncode == 0, result.stderr
    (options,) = tmp_path.glob("*lambda*debug_options")
    assert "xla_gpu_deterministic_ops: true" in options.read_text()


def test_what_needs_a_fresh_process(simulate, monkeypatch):
    simulate(9)
    with pytest.raises(ConfigError, match=r"devices.gpu = 8: expected one of \[0.*6\], on which JAX has started"):
        pick_device(8)  # the tests have eight CPU devices
    with pytest.raises(ConfigError, match=r"devices.actor = 8: expected one of \[0.*6\], on which JAX"):
        place(DevicesConfig(actor=8))


@pytest.mark.parametrize(
    "options", [{"deterministic": True}, {"memory_fraction": 0.5}, {"memory_fraction": 0.3, "deterministic": True}]
)
def test_a_setting_that_comes_too_late_is_refused_and_changes_nothing(options, simulate, monkeypatch):
    simulate(2)
    # As JAX starts with JAX_PLATFORMS=cpu,cuda: its default device is the CPU.
    monkeypatch.setattr(jax.extend.backend, "backends", lambda: dict.fromkeys(["cpu", "cuda"]))
    monkeypatch.setenv(FRACTION_VARIABLE, "0.3")
    monkeypatch.setenv(OLD_FRACTION_VARIABLE, "0.3")
    monkeypatch.delenv("XLA_FLAGS", raising=False)

    def settings():
        return dict(os.environ), dict(jax.config.values)

    before = settings()
    with pytest.raises(ConfigError, match=r"expected to be set before JAX starts; train in a fresh process"):
        limit_jax(DevicesConfig(**options))
    assert settings() == before


# --- Where arrays are --------------------------------------------------------------------------------------------

SESSION = """
import sys
from pathlib import Path
import jax
from jaxrl_atari.config import *
from jaxrl_atari.imports.named import import_inherited
from jaxrl_atari.session import run_session

import_inherited()

class Look:
    def write(self, row):
        print("arrays on", *sorted({device.id for x in jax.live_arrays() for device in x.devices()}))

    def __getattr__(self, name):
        return lambda *given: None

for steps in (64, 128):  # a new run, and a resumed one
    config = Config(
        env=EnvConfig(num_envs=4, max_frames=64), ppo=PPOConfig(rollout_length=8, minibatch_size=32, epochs=1),
        devices=DevicesConfig(gpu=1, actor=2, evaluator=3, check=True),
        log=LogConfig(every_env_steps=1, graphs=False, tensorboard=False),
        evaluation=EvaluationConfig(every_env_steps=32, episodes=1, num_envs=1), total_env_steps=steps,
    )
    run_session(config, Path(sys.argv[1]), resume=steps > 64, writers=[Look()])
"""


@pytest.mark.slow
def test_no_array_stays_on_a_device_that_the_session_does_not_use(tmp_path):
    # Device 0 is JAX's default device, as GPU 0 would be: only what belongs nowhere else would be made there.
    result = python("-c", SESSION, tmp_path / "session_0", **simulated(5))
    assert result.returncode == 0, result.stdout + result.stderr
    lines = {line for line in result.stdout.splitlines() if line.startswith("arrays on")}
    assert lines <= {"arrays on 2 3", "arrays on 2 3 4"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_session_on_two_simulated_gpus(tmp_path):
    result = python(*TINY, "--output-dir", tmp_path, "--devices.data-parallel", 2, **simulated(2))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "device: cpu:1, cpu:2 (devices.gpu = auto)" in result.stdout


# --- Numbers -----------------------------------------------------------------------------------------------------


def test_gpus_compute_in_float32_unless_the_config_says_bfloat16():
    gpu = device_class(SimpleNamespace(platform="gpu"))
    assert make_network(NetworkConfig(), 4, gpu).dtype == jnp.float32
    assert make_network(NetworkConfig(compute_dtype="bfloat16"), 4, gpu).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("sets", "expected"), [(("AVX2",), "cpu"), (("AVX2", "BF16"), "bfloat16 cpu"), (("BF16", "AMX"), "amx cpu")]
)
def test_the_class_of_a_cpu_is_what_it_multiplies(sets, expected, monkeypatch):
    monkeypatch.setattr(cpu, "read_cpu", lambda: Cpu("a CPU", sets, 2))
    assert device_class(jax.devices("cpu")[0]) == expected


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
def training(folder, *options, sessions=1, memory=used_gib, **variables):
    """A training all of whose sessions learn; memory that it has taken on each GPU, and what it has printed."""
    before, printed = memory(), ""
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxrl_atari.train", "--config", "configs/qbert.py", "--output-dir", str(folder),
         "--log.checkpoint-every-env-steps", "4096", *map(str, options)],
        env=user_environment(**SHOWN, **variables), cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        for line in process.stdout:
            printed += line
            if printed.count("compilation included") == sessions:
                break
        time.sleep(5)
        yield memory() - before, printed
    finally:
        process.terminate()
        process.communicate(timeout=120)


@pytest.mark.gpu
def test_real_gpu_false_takes_no_memory(tmp_path):
    needs_gpus(1)
    with training(tmp_path, "--devices.gpu", "false") as (taken, printed):
        assert "device: cpu:0 (devices.gpu = false)" in printed
        assert (taken < CONTEXT).all(), taken


@pytest.mark.gpu
def test_real_gpu_1_leaves_gpu_0_alone(tmp_path):
    needs_gpus(2)
    with training(tmp_path, "--devices.gpu", "1", "--devices.memory-fraction", "0.2") as (taken, _):
        assert (taken > CONTEXT).sum() == 1, taken
        assert taken.argmax() == 1 or "CUDA_VISIBLE_DEVICES" in os.environ


REAL_OR_NOT = pytest.mark.parametrize(
    "real", [pytest.param(False, marks=pytest.mark.long), pytest.param(True, marks=pytest.mark.gpu)],
    ids=["simulated", "real"],
)  # fmt: skip
"""For tests that CI also runs without a GPU, so that they are right when there is one."""


@REAL_OR_NOT
@pytest.mark.timeout(600)
def test_sessions_fit_on_one_gpu(tmp_path, real):
    if real:
        needs_gpus(1)
        count, small, where = 4, (), {}
    else:
        count, where = 2, {"memory": lambda: np.zeros(1), **simulated(1)}
        small = ("--env.num-envs", 4, "--ppo.rollout-length", 8, "--ppo.minibatch-size", 32, "--ppo.epochs", 1)
    options = ("--sessions", count, "--trial.parallel", count, "--devices.gpu", 0, *small)
    with training(tmp_path, *options, sessions=count, **where) as (taken, printed):
        assert printed.count("of its memory") == count
        assert (taken > CONTEXT).sum() == (1 if real else 0), taken
        until = time.monotonic() + 120
        learned = set()
        while len(learned) < count and time.monotonic() < until:
            time.sleep(1)
            learned = {path.parents[2] for path in tmp_path.glob("*/session_*/checkpoints/[0-9]*/meta")}
        assert len(learned) == count


@pytest.mark.gpu
def test_real_deterministic_training_gives_the_same_bits_twice(tmp_path):
    needs_gpus(1)

    def trained(name):
        options = ("--devices.gpu", 0, "--devices.deterministic", "--total-env-steps", 20_480, "--log.no-graphs")
        command = ("-m", "jaxrl_atari.train", "--config", "configs/qbert.py", "--run-dir", tmp_path / name)
        result = python(*command, *options, **SHOWN)
        assert result.returncode == 0, result.stdout + result.stderr
        (meta,) = (tmp_path / name).glob("session_0/checkpoints/2*/meta/metadata")
        return json.loads(meta.read_text())

    one, again = trained("one"), trained("again")
    assert one["checksums"] == again["checksums"]
    assert one["statistics"] == again["statistics"]


@pytest.mark.gpu
def test_real_processes_on_one_host_have_gpus_of_their_own(tmp_path):
    needs_gpus(2)
    options = ["--devices.data-parallel", "all", "--devices.distributed", "--devices.num-processes", 2,
               "--devices.coordinator", free_address(), "--devices.process-index"]  # fmt: skip
    follower = subprocess.Popen(
        [sys.executable, "-m", "jaxrl_atari.train", *map(str, [*options, 1])],
        env=user_environment(**SHOWN, JAX_LOCAL_DEVICE_IDS="1"), cwd=ROOT,
    )  # fmt: skip
    try:
        with training(tmp_path, *options, 0, JAX_LOCAL_DEVICE_IDS="0") as (taken, _):
            assert (taken > CONTEXT).sum() == 2, taken
    finally:
        follower.kill()
        follower.communicate()


@REAL_OR_NOT
def test_float32_heads_and_first_parameters(real):
    if real:
        needs_gpus(1)
    devices = jax.devices("cpu")[0], jax.devices("gpu")[0] if real else jax.devices("cpu")[1]
    here, there = (first_arrays(Config(), 4, device).train_state.params for device in devices)
    assert jax.tree.all(jax.tree.map(np.array_equal, here, there))
    network = make_network(NetworkConfig(compute_dtype="float32"), 4, "gpu")
    stacks = np.random.default_rng(0).integers(0, 256, (16, 84, 84, 4), np.uint8)
    outputs = [jax.jit(network.apply)(params, Observation(stacks)) for params in (here, there)]
    for one, other in zip(*map(jax.tree.leaves, outputs), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3)
