"""The way to a GPU, in processes with the variables of a user: what starts when, with which settings, what lies where.

A stand-in for CUDA (`fake_cuda.py`) records that JAX starts it; simulated GPUs compute. Tests marked `gpu` need real
GPUs.
"""

import contextlib
import ctypes
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import conftest
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_cuda import SHOWN, FakeCuda, Library, python
from fake_pools import NoisePool
from user_commands import ROOT, free_address, user_environment

from jaxrl_atari import learner, rollout
from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, NetworkConfig, PPOConfig, TrialConfig
from jaxrl_atari.devices import Placement
from jaxrl_atari.envs.protocols import PROTOCOLS
from jaxrl_atari.errors import ConfigError, UserError
from jaxrl_atari.evaluate.play import play
from jaxrl_atari.fast.forms import Network, compute_dtype, make_network
from jaxrl_atari.fast.frames import PLAIN
from jaxrl_atari.hardware import distributed, gpus, jax_gpus
from jaxrl_atari.hardware.cpu import Cpu
from jaxrl_atari.hardware.distributed import gather_rows
from jaxrl_atari.hardware.gpus import Gpu, Visible, network_platform
from jaxrl_atari.hardware.memory import out_of_memory_advice
from jaxrl_atari.hardware.memory_share import BESIDE_THE_POOL, FRACTION, equal_share, memory_fraction
from jaxrl_atari.hardware.runtime import DETERMINISTIC
from jaxrl_atari.rollout import EnvGroup, act, act_packed, collect, make_groups, pack
from jaxrl_atari.runs.checkpoint_writer import CheckpointWriter
from jaxrl_atari.runs.columns import COMPILED
from jaxrl_atari.search.worker import memory_share
from jaxrl_atari.session import prepare
from jaxrl_atari.suite import trial
from jaxrl_atari.suite.processes import Task, run_processes

TINY = [
    "--config", "configs/qbert.py", "--total-env-steps", 64, "--env.num-envs", 4, "--ppo.rollout-length", 8,
    "--ppo.minibatch-size", 32, "--ppo.epochs", 1, "--log.no-graphs", "--log.no-tensorboard",
]  # fmt: skip

# The command, up to the point at which a session has its devices.
UNTIL_PLACED = """
import sys
import jax
from jaxrl_atari import cli, session, train

def placed(config, number, placement, *rest):
    print("placed:", *placement.learner, len(jax.devices("cpu")), placement.reason)
    raise SystemExit(0)

session.Session = placed
cli.run(lambda: train.main(sys.argv[1:]))
"""


# --- 1. What starts --------------------------------------------------------------------------------------------------


def test_gpu_false_does_not_start_cuda(tmp_path):
    cuda = FakeCuda(tmp_path / "cuda")
    result = cuda.python("-c", UNTIL_PLACED, *TINY, "--output-dir", tmp_path, "--devices.gpu", "false")
    assert "placed: cpu:0 1 devices.gpu = false" in result.stdout, result.stderr
    assert cuda.started == []
    assert not cuda.driver_was_called


def test_deterministic_kernels_are_chosen_before_cuda_starts(tmp_path):
    """A user's own flags are kept, all but this one."""
    cuda = FakeCuda(tmp_path / "cuda")
    own = "--xla_gpu_deterministic_ops=false --xla_cpu_enable_fast_math=false"
    cuda.python("-c", UNTIL_PLACED, *TINY, "--output-dir", tmp_path, "--devices.deterministic", XLA_FLAGS=own)
    (settings,) = cuda.started
    assert settings["XLA_FLAGS"].split() == [DETERMINISTIC, "--xla_cpu_enable_fast_math=false"]


@pytest.mark.parametrize("in_file", [False, True])
def test_xla_knows_the_flags_of_determinism(in_file, tmp_path):
    """An unknown flag ends the process; the known ones reach the compiler although JAX has been imported.

    XLA_FLAGS may name a file of flags.
    """
    code = (
        "import jax, sys; from jaxrl_atari.config import DevicesConfig;"
        "from jaxrl_atari.hardware.jax_gpus import limit_jax;"
        "limit_jax(DevicesConfig(gpu=False, deterministic=True)); limit_jax(DevicesConfig(deterministic=True));"
        "jax.jit(lambda x: x + 1)(1.0)"
    )
    dump = f"--xla_dump_to={tmp_path}"
    if in_file:
        (tmp_path / "flags").write_text(f"{dump}\n# a comment\n")
        dump = str(tmp_path / "flags")
    result = python("-c", code, XLA_FLAGS=dump, JAX_ENABLE_COMPILATION_CACHE="false")
    assert result.returncode == 0, result.stderr
    (options,) = tmp_path.glob("*lambda*debug_options")
    assert "xla_gpu_deterministic_ops: true" in options.read_text()


def test_determinism_needs_a_fresh_process_on_a_gpu_and_another_network_than_impala(monkeypatch, request):
    before = jax.config.jax_persistent_cache_enable_xla_caches
    request.addfinalizer(lambda: jax.config.update("jax_persistent_cache_enable_xla_caches", before))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    deterministic = DevicesConfig(deterministic=True)
    jax_gpus.limit_jax(deterministic)  # JAX has started on a CPU, which needs no flags
    assert "XLA_FLAGS" not in os.environ
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(ConfigError, match=r"devices.deterministic = True: expected to be set before JAX starts"):
        jax_gpus.limit_jax(deterministic)
    with pytest.raises(ConfigError, match=r"devices.deterministic = True: expected false with network.name = impala"):
        Config(network=NetworkConfig(name="impala"), devices=deterministic)


@pytest.mark.parametrize("distributed", [False, True])
def test_jax_platforms_that_name_gpus_alone_keep_the_cpu(distributed, monkeypatch):
    """The CPU computes the first parameters. In a distributed run, JAX starts before a session asks for its devices."""
    settings = {"jax_platforms": "cuda"}
    stand_in = SimpleNamespace(jax_platforms="cuda", update=settings.__setitem__, read=lambda name: "all")
    monkeypatch.setattr(jax_gpus, "jax", SimpleNamespace(config=stand_in))
    monkeypatch.setattr(jax_gpus, "jax_has_started", lambda: False)
    monkeypatch.setattr(gpus, "visible", lambda: Visible((Gpu("0", "H100", 80 << 30),), ""))
    monkeypatch.setattr(jax_gpus, "apply_memory_fraction", lambda config: None)
    jax_gpus.limit_jax(DevicesConfig(distributed=distributed))
    assert settings["jax_platforms"] == "cuda,cpu"


def test_auto_runs_on_the_cpu_where_cuda_cannot_start(tmp_path):
    cuda = FakeCuda(tmp_path / "cuda")
    result = cuda.python("-c", UNTIL_PLACED, *TINY, "--output-dir", tmp_path)
    assert "placed: cpu:0 1 devices.gpu = auto, and there is no GPU: JAX cannot start on a GPU:" in result.stdout
    assert "no supported devices found for platform CUDA" in result.stdout
    assert "Traceback" not in result.stderr
    (settings,) = cuda.started
    assert "XLA_FLAGS" not in settings


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", ['raise OSError("{}")', 'import logging; logging.getLogger("jax_plugins.xla_cuda12").warning("{}")']
)
def test_auto_runs_on_the_cpu_where_the_plugin_cannot_be_loaded(tmp_path, how):
    reason = "libcudart.so.12: cannot open shared object file"
    cuda = FakeCuda(tmp_path / "cuda", initialize=how.format(reason))
    result = cuda.python("-c", UNTIL_PLACED, *TINY, "--output-dir", tmp_path)
    assert f"there is no GPU: JAX cannot start on a GPU: {reason}" in result.stdout
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_gpu_without_free_memory_is_no_reason_to_train_on_the_cpu(tmp_path):
    cuda = FakeCuda(
        tmp_path / "cuda", error="INTERNAL: failed call to cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY"
    )
    result = cuda.python("-c", UNTIL_PLACED, *TINY, "--output-dir", tmp_path)
    assert result.returncode == 2
    assert "other processes hold its memory; wait for them, lower their devices.memory_fraction" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_gpu_without_the_plugin_is_not_used_and_the_install_command_is_named(tmp_path):
    """The plugin that this environment may have is hidden."""
    cuda = FakeCuda(tmp_path / "cuda")
    code = "from jaxrl_atari.hardware import gpus; gpus._has_plugin = lambda: False; print(*gpus.visible())"
    problem = "the driver shows 1, but JAX's CUDA plugin is not installed; pip install 'jaxrl_atari[cuda12]'"
    assert cuda.python("-c", code).stdout == f"() {problem}\n"


def test_questions_about_processes_and_a_missing_gpu_start_nothing(tmp_path):
    cuda = FakeCuda(tmp_path / "cuda", gpus=0)
    code = (
        "import numpy as np; from jax._src import xla_bridge; from jaxrl_atari.devices import *;"
        "from jaxrl_atari.hardware.distributed import agree, gather_rows, is_leader, sum_over_processes;"
        "from jaxrl_atari.runs.checkpoint_writer import CheckpointWriter;"
        f"from jaxrl_atari.runs.arrays import single_process; CheckpointWriter({str(tmp_path)!r}).close();"
        "print(is_leader(), sum_over_processes(3), agree('x'), len(gather_rows(np.zeros((2, 3)))),"
        "single_process().active_processes, xla_bridge.backends_are_initialized());"
        "print(*pick_device('auto'), jax.config.jax_platforms)"
    )
    result = cuda.python("-c", code)
    assert result.stdout.splitlines() == [
        "True 3 x 2 None False",
        "cpu:0 devices.gpu = auto, and there is no GPU: the NVIDIA driver shows no GPU cpu",
    ], result.stderr
    assert cuda.started == []


def test_the_parent_of_sessions_starts_no_back_end(tmp_path):
    cuda = FakeCuda(tmp_path / "cuda", gpus=2)
    code = (
        "import pathlib, sys; from jax._src import xla_bridge; from jaxrl_atari.config import *;"
        "from jaxrl_atari.suite import trial; trial.run_processes = lambda tasks, *numbers: print(len(tasks)) or {};"
        "make = lambda gpu: Config(output_dir=sys.argv[1], sessions=2,"
        "trial=TrialConfig(parallel=2), devices=DevicesConfig(gpu=gpu));"
        "run = lambda gpu: trial.run_trial(make(gpu), trial.make_run_dir(make(gpu)));"
        "run(False); print(pathlib.Path(sys.argv[2]).exists());"
        "run('auto'); print(pathlib.Path(sys.argv[2]).exists(), xla_bridge.backends_are_initialized())"
    )
    result = cuda.python("-c", code, tmp_path / "data", cuda.folder / "cuInit")
    printed = [line for line in result.stdout.splitlines() if not line.startswith("session")]
    assert printed == ["2", "False", "2", "True False"], result.stderr  # gpu: false does not even call cuInit
    assert cuda.started == []


TRIAL_OF_A_SEARCH = """
import sys
from pathlib import Path
import jax
from jaxrl_atari import session
from jaxrl_atari.config import Config
from jaxrl_atari.search import SearchConfig, Uniform
from jaxrl_atari.report.search_records import Record, write_record
from jaxrl_atari.search.files import write_search
from jaxrl_atari.search.worker import run_search_trial

def placed(config, number, placement, *rest):
    print("placed:", *placement.learner, placement.reason)
    raise SystemExit(0)

session.Session = placed
folder = Path(sys.argv[1])
write_search(folder, Config(), SearchConfig(space={"ppo.gamma": Uniform(0.9, 0.99)}))
write_record(folder, Record(0, {"ppo.gamma": 0.95}))
run_search_trial({"search_dir": folder, "number": 0, "fields": {"ppo.gamma": 0.95}, "gpu": 0, "cpu": 1})
"""


def test_a_cpu_trial_of_a_search_leaves_the_gpus_alone(tmp_path):
    cuda = FakeCuda(tmp_path / "cuda")
    (tmp_path / "search/trial_0").mkdir(parents=True)
    result = cuda.python("-c", TRIAL_OF_A_SEARCH, tmp_path / "search")
    output = tmp_path / "search/trial_0/output.txt"
    assert "placed: cpu:0 devices.gpu = false" in output.read_text(), result.stderr
    assert cuda.started == []
    assert not cuda.driver_was_called


def test_hub_forbids_the_gpus(tmp_path):
    cuda = FakeCuda(tmp_path / "cuda")
    code = (
        "import jax; from jaxrl_atari import hub;"
        "hub.collect = lambda *_: print('seen:', jax.devices()); hub.main(['push', 'run', 'user/repo'])"
    )
    assert "seen: [CpuDevice(id=0)]" in cuda.python("-c", code).stdout
    assert cuda.started == []


@pytest.mark.slow
def test_without_a_gpu_cuda_is_forbidden(tmp_path):
    cuda = FakeCuda(tmp_path / "cuda", gpus=0)
    result = cuda.python("-c", UNTIL_PLACED, *TINY, "--output-dir", tmp_path)
    assert "there is no GPU: the NVIDIA driver shows no GPU" in result.stdout, result.stderr
    assert cuda.started == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_session_on_two_simulated_gpus(tmp_path):
    train = ("-m", "jaxrl_atari.train", *TINY, "--output-dir", tmp_path)
    result = python(*train, "--devices.data-parallel", 2, **{gpus.SIMULATED: "2"})
    assert result.returncode == 0, result.stdout + result.stderr
    assert "device: cpu:1, cpu:2 (devices.gpu = auto" in result.stdout


@pytest.mark.slow
def test_commands_beside_a_training_leave_the_gpus_alone(tmp_path):
    cuda = FakeCuda(tmp_path / "cuda", gpus=2)
    result = cuda.python("-m", "jaxrl_atari.train", *TINY, "--output-dir", tmp_path / "data", "--devices.gpu", "false")
    assert result.returncode == 0, result.stderr
    (run,) = (tmp_path / "data").iterdir()
    push = (
        "import sys; from pathlib import Path; from jaxrl_atari import hub;"
        "hub.forbid_gpu(); print(*hub.collect(Path(sys.argv[1]), 'a/b', 'best'))"
    )
    assert "session_0/checkpoints/64/" in cuda.python("-c", push, run).stdout
    assert cuda.python("-m", "jaxrl_atari.plots", run).returncode == 0
    assert cuda.started == []
    assert "--gpu = 1" in cuda.python("-m", "jaxrl_atari.evaluate", run, "--gpu", "1").stderr
    assert cuda.started == [{"jax_cuda_visible_devices": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}]


# --- 2. What a session sees, and where its arrays are ----------------------------------------------------------------


def test_a_session_from_python_starts_only_its_gpus(tmp_path):
    cuda = FakeCuda(tmp_path / "cuda", gpus=3)
    code = (
        "from pathlib import Path; from jaxrl_atari.config import *; from jaxrl_atari.session import run_session;"
        "devices = DevicesConfig(gpu=1, actor=2, memory_fraction=0.3);"
        f"run_session(Config(devices=devices), Path({str(tmp_path / 'session_0')!r}))"
    )
    assert "devices.gpu = 1: expected a visible GPU" in cuda.python("-c", code).stderr
    assert cuda.started == [{"jax_cuda_visible_devices": "1,2", FRACTION: "0.3"}]


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        (("evaluate", "data/none", "--gpu", "1"), {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}),
        pytest.param(
            ("benchmark", *TINY[:2], "--parts", "update", "--repeats", "0", "--devices.gpu", "1"),
            {},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_commands_start_only_their_gpu(command, settings, tmp_path):
    cuda = FakeCuda(tmp_path / "cuda", gpus=2)
    module, *arguments = command
    assert "gpu = 1: expected" in cuda.python("-m", f"jaxrl_atari.{module}", *arguments).stderr
    assert cuda.started == [{"jax_cuda_visible_devices": "1"} | settings]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (0,)),
        ({"gpu": False}, ()),
        ({"gpu": False, "evaluator": 2}, (2,)),
        ({"gpu": True, "actor": 3}, (0, 3)),
        ({"gpu": 1, "data_parallel": 2}, (1, 2)),
        ({"gpu": 1, "data_parallel": "all"}, (1, 2, 3)),
        ({"gpu": 2, "actor": "auto"}, (0, 2)),
        ({"distributed": True}, (0, 1, 2, 3)),
    ],
)
def test_the_gpus_that_a_session_uses(options, expected):
    assert jax_gpus._used_gpus(DevicesConfig(**options), 4) == expected


def test_another_gpu_needs_a_fresh_process():
    code = (
        "import sys; from jaxrl_atari.config import DevicesConfig; from jaxrl_atari.devices import *;"
        "from jaxrl_atari.hardware.jax_gpus import limit_jax;"
        "limit_jax(DevicesConfig(gpu=2)); print(place(DevicesConfig(gpu=2)).learner, len(jax.devices('cpu')));"
        "place(DevicesConfig(gpu=1))"
    )
    result = python("-c", code, **{gpus.SIMULATED: "3"})
    assert "(CpuDevice(id=1),) 2" in result.stdout, result.stderr
    assert "devices.gpu = 1: expected GPU 2, to which JAX was limited when it started" in result.stderr


SESSION = """
import sys
from collections import Counter
from pathlib import Path
import jax
from jaxrl_atari.config import *
from jaxrl_atari.session import prepare, train

folder, resume = Path(sys.argv[1]), sys.argv[2] == "resume"
config = Config(
    env=EnvConfig(num_envs=4, max_frames=64), ppo=PPOConfig(rollout_length=8, minibatch_size=32, epochs=1),
    devices=DevicesConfig(gpu=1, actor=2, evaluator=3, check=True), log=LogConfig(graphs=False, tensorboard=False),
    evaluation=EvaluationConfig(every_env_steps=32, episodes=1, num_envs=1),
    total_env_steps=128 if resume else 64,
)
with prepare(config, folder, resume=resume) as run:
    for _ in train(run):
        if run.evaluator is not None:
            run.evaluator.settle()
        print("arrays on", *sorted({device.id for x in jax.live_arrays() for device in x.devices()}))
    run.finish()
"""


@pytest.mark.slow
def test_no_array_stays_on_a_device_that_the_session_does_not_use(tmp_path):
    # Device 0 is JAX's default device, as GPU 0 would be: only what belongs nowhere else would be made there.
    for start in ("new", "resume"):
        result = python("-c", SESSION, tmp_path / "session_0", start, **{gpus.SIMULATED: "5"})
        assert result.returncode == 0, result.stdout + result.stderr
        lines = [line for line in result.stdout.splitlines() if line.startswith("arrays on")]
        assert len(lines) == 2
        assert set(lines) <= {"arrays on 1 2", "arrays on 1 2 3"}


def test_first_arrays_are_computed_on_the_cpu(monkeypatch):
    cpu, home, other = jax.devices("cpu")[0], *jax.devices("cpu")[3:5]
    computed_on = set()

    def device_put(tree, device):
        computed_on.update(device for x in jax.tree.leaves(tree) for device in x.devices())
        return jax.tree.map(lambda x: jnp.copy(x), tree)

    monkeypatch.setattr(learner, "_first_state", lambda *given: jax.random.normal(given[-1], (2,)))
    monkeypatch.setattr(learner.jax, "device_put", device_put)
    with jax.default_device(other):
        learner.first_arrays(Config(), 4, 0, home)
    assert computed_on == {cpu}


def test_the_frames_of_an_actor_are_made_on_its_device():
    device = jax.devices("cpu")[3]
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        group = EnvGroup(NoisePool(2, seed=0), LINEAR, 2, device, PROTOCOLS["v5"])
    assert {d for x in jax.tree.leaves(group._state) for d in x.devices()} == {device}


def test_the_keys_of_a_session_are_made_on_its_device(tmp_path, monkeypatch):
    monkeypatch.setenv(gpus.SIMULATED, "4")
    config = small_config(tmp_path, devices=DevicesConfig(gpu=2))
    with prepare(config, tmp_path / "session_0", quiet=True) as run:
        with jax.transfer_guard_device_to_device("disallow_explicit"):
            keys = run.keys(7)
        assert {d for key in keys for d in key.devices()} == set(run.placement.learner) == {jax.devices()[3]}


def test_an_evaluation_computes_on_its_device_alone():
    device, seen = jax.devices("cpu")[3], set()

    def choose(stacks, key, greedy):
        seen.update(stacks.devices() | key.devices() | jnp.zeros(()).devices())
        return np.zeros(2, np.int32)

    policy = SimpleNamespace(device=device, act=choose)
    thread = threading.Thread(target=lambda: list(itertools.islice(play(policy, NoisePool(2, seed=0), 0, False), 9)))
    thread.start()
    thread.join()
    assert seen == {device}


def test_restored_keys_go_straight_to_their_device(tmp_path):
    device = jax.devices("cpu")[3]
    with contextlib.closing(CheckpointWriter(tmp_path)) as checkpoints:
        checkpoints.save(1, {"key": jax.random.key(7)}, {}, 0.0)
        checkpoints.wait()
        target = {"key": jax.device_put(jax.random.key(0), device)}
        with jax.transfer_guard_device_to_device("disallow_explicit"):
            key = checkpoints.restore(1, target)["key"]
    assert key.devices() == {device}
    assert jax.random.key_data(key).tolist() == jax.random.key_data(jax.random.key(7)).tolist()


# --- 3. Several processes --------------------------------------------------------------------------------------------


def test_settings_come_before_the_processes_meet():
    code = (
        "import os, jax; from jaxrl_atari.config import DevicesConfig;"
        "from jaxrl_atari.hardware.distributed import join_processes;"
        "show = lambda *a: print(jax.config.jax_platforms, os.environ.get('XLA_CLIENT_MEM_FRACTION'));"
        "jax.distributed.initialize = show;"
        "join_processes(DevicesConfig(gpu=False, distributed=True, memory_fraction=0.25))"
    )
    assert python("-c", code).stdout.split() == ["cpu", "0.25"]


def test_a_process_starts_the_gpus_that_jax_local_device_ids_names(tmp_path):
    cuda = FakeCuda(tmp_path / "cuda", gpus=4)
    code = (
        "import sys; from jaxrl_atari.config import DevicesConfig;"
        "from jaxrl_atari.devices import place; from jaxrl_atari.hardware.distributed import join_processes;"
        "config = DevicesConfig(gpu=True, distributed=True, coordinator=sys.argv[1], num_processes=1, process_index=0,"
        "memory_fraction=0.25); join_processes(config); place(config)"
    )
    result = cuda.python("-c", code, free_address(), JAX_LOCAL_DEVICE_IDS="2,3")
    assert cuda.started == [{"jax_cuda_visible_devices": "2,3", FRACTION: "0.25"}], result.stderr


def test_gathered_rows_are_padded_to_powers_of_two(monkeypatch):
    sizes = set()

    def gather(rows):  # of two processes; the other one has the first rows alone
        if np.ndim(rows):
            sizes.add(len(rows))
            return np.stack([rows, rows])
        return np.stack([rows, rows // 2])

    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "process_allgather", gather)
    for count in range(9):
        rows = np.arange(3.0 * count).reshape(count, 3)
        np.testing.assert_array_equal(gather_rows(rows), np.concatenate([rows, rows[: count // 2]]))
    assert sizes == {1, 2, 4, 8}


TOGETHER = """
import sys
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.devices import place
from jaxrl_atari.hardware.distributed import agree, is_leader, join_processes

config = DevicesConfig(
    data_parallel="all", distributed=True, coordinator=sys.argv[1], num_processes=2, process_index=int(sys.argv[2])
)
join_processes(config)
placement = place(config)
ids = [device.id for device in (*placement.learner, *placement.actors, placement.evaluator)]
print("placed", is_leader(), agree("x"), *ids, flush=True)
"""


@pytest.mark.slow
def test_two_processes_on_one_host_have_gpus_of_their_own():
    coordinator = free_address()
    children = [
        subprocess.Popen(
            [sys.executable, "-c", TOGETHER, coordinator, str(index)],
            env=user_environment(**{gpus.SIMULATED: "2", "CUDA_VISIBLE_DEVICES": str(index)}),
            cwd=ROOT, text=True, stdout=subprocess.PIPE,
        )
        for index in range(2)
    ]  # fmt: skip
    try:
        lines = [line for child in children for line in child.communicate(timeout=240)[0].splitlines()]
    finally:
        for child in children:
            child.kill()
            child.wait()
    printed = [line for line in lines if line.startswith("placed")]  # Gloo prints as well, whenever it is connected
    # JAX numbers the CPU devices of process 1 from 2048 on; the first one of each process is the CPU.
    assert printed == ["placed True x 1 2049 1 0", "placed False x 1 2049 2049 2048"]


# --- 4. Memory -------------------------------------------------------------------------------------------------------


def test_equal_shares_leave_room_for_contexts_and_handles(monkeypatch):
    gib = 2**30
    assert equal_share(1) == 0.9
    assert equal_share(2, 80 * gib) == 0.45
    assert equal_share(4, 24 * gib) == 0.2167  # (24 - 4 * 0.8) / (4 * 24)
    for total in (16, 24, 40, 80):
        for n in (1, 2, 4, 8):
            assert n * (equal_share(n, total * gib) * total + 0.79) <= total or n == 1
    with pytest.raises(
        ConfigError,
        match=r"sessions on a GPU = 20: expected fewer: each takes 0.8 GiB of 16 GiB .*lower trial.parallel",
    ):
        equal_share(20, 16 * gib)
    assert memory_fraction(DevicesConfig(), sharing=4, total=24 * gib) == equal_share(4, 24 * gib)
    monkeypatch.setattr("jaxrl_atari.search.worker.visible", lambda: Visible((Gpu("0", "RTX 4090", 24 * gib),)))
    assert memory_share(0.25) == equal_share(4, 24 * gib)


@pytest.mark.parametrize(
    "message",
    [
        "INTERNAL: Failed to create cuBLAS handle: the resource allocation failed",
        "FAILED_PRECONDITION: DNN library initialization failed. Look at the errors above for more details.",
        "INTERNAL: Could not create cudnn handle: CUDNN_STATUS_NOT_INITIALIZED",
        "INTERNAL: CUDNN_STATUS_INTERNAL_ERROR",
        "INTERNAL: failed call to cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    ],
)
def test_handles_and_contexts_without_memory_end_in_advice(message, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    advice = r"lower ppo.minibatch_size .*raise devices.memory_fraction .*, or lower it or trial.parallel if others do"
    with pytest.raises(UserError, match=advice), out_of_memory_advice(Config()):
        raise jax.errors.JaxRuntimeError(message)


# --- 5. Numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "float32"), ((8, 0), "bfloat16"), ((10, 0), "bfloat16")])
def test_bfloat16_is_the_choice_for_gpus_that_have_it(capability, expected, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(["a GPU"] * 2, capabilities={0: (9, 0), 1: capability}))
    devices = [SimpleNamespace(platform="gpu", local_hardware_id=number) for number in range(2)]
    assert network_platform(*devices) == network_platform(devices[1]), "the older one decides"
    platform = network_platform(devices[1])
    assert compute_dtype(NetworkConfig(), platform) == expected
    assert compute_dtype(NetworkConfig(compute_dtype="bfloat16"), platform) == jnp.bfloat16


@pytest.mark.parametrize(
    ("sets", "expected"),
    [
        (None, "cpu"),
        (("AVX2", "AVX-512"), "cpu"),
        (("AVX2", "AVX-512", "BF16"), "bfloat16 cpu"),
        (("AVX2", "AVX-512", "BF16", "AMX"), "amx cpu"),
    ],
)
def test_the_platform_of_a_cpu_is_what_it_multiplies(sets, expected, monkeypatch):
    monkeypatch.setattr(gpus, "read_cpu", lambda: Cpu("a CPU", sets, 2, None, True))
    assert network_platform(jax.devices("cpu")[0]) == expected


# --- 6. Speed --------------------------------------------------------------------------------------------------------


def equal(one, other):
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: (np.asarray(x) == np.asarray(y)).all(), one, other)))


def linear(params, stacks):
    means = stacks.astype(jnp.float32).mean((1, 2))
    return means @ params, means[:, 0]


LINEAR = Network(linear, PLAIN, lambda params: params, jnp.dtype("float32"))


def test_packed_frames_give_the_same_rollouts(monkeypatch):
    params, given = np.eye(4, dtype=np.float32), []
    monkeypatch.setattr(rollout, "act", lambda *a: given.append(a[3:]) or act(*a))
    monkeypatch.setattr(rollout, "act_packed", lambda *a: given.append(a[3:]) or act_packed(*a))

    def played(packs):
        group = EnvGroup(NoisePool(3, seed=2), LINEAR, 6, jax.devices("cpu")[0], PROTOCOLS["v5"])
        assert not group._packs
        group._packs = packs
        return [collect([[group]], [params], jax.random.key(i)).rollouts for i in range(2)]

    assert equal(played(True), played(False))
    copies = [len(arrays) for arrays in given if isinstance(arrays[0], np.ndarray)]
    assert copies == [1] * 14 + [2] * 14  # for each step
    frame, first = np.arange(2 * 84 * 84, dtype=np.uint8).reshape(2, 84, 84), np.array([True, False])
    assert pack(frame, first).dtype == np.uint8
    assert pack(frame, first)[:, -1].tolist() == [1, 0]
    monkeypatch.setattr(jax, "default_device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(jax, "device_put", lambda tree, device: tree)
    assert EnvGroup(NoisePool(1, seed=0), LINEAR, 2, SimpleNamespace(platform="gpu"), PROTOCOLS["v5"])._packs


def test_devices_act_in_lockstep_and_their_groups_take_turns(monkeypatch):
    calls, clock = [], SimpleNamespace(now=1.0)
    monkeypatch.setattr(rollout, "time", SimpleNamespace(time=lambda: clock.now, perf_counter=lambda: clock.now))

    class Pool(NoisePool):
        def recv(self):
            clock.now += 10
            return super().recv()

    class Group(EnvGroup):
        def choose(self, params):
            calls.append("choose")
            clock.now += 1
            super().choose(params)

        def send(self):
            calls.append("send")
            super().send()

    on = jax.devices("cpu")[1:4]
    shards = [
        [Group(Pool(2, seed=2 * i + j), LINEAR, 2, device, PROTOCOLS["v5"], 4 * i + 2 * j) for j in range(2)]
        for i, device in enumerate(on)
    ]
    params = [jax.device_put(np.eye(4, dtype=np.float32), device) for device in on]
    collected = collect(shards, params, jax.random.key(0))
    assert calls == [*["choose"] * 3, *["send"] * 3] * 4 + ["choose"] * 6
    # 12 times 10 s of waiting; of 18 choices of 1 s, 6 come before the emulators had all their first actions.
    assert (collected.emulator_seconds, collected.policy_seconds) == (120, 12)


def test_groups_follow_the_platform_that_acts(monkeypatch):
    asked = []
    monkeypatch.setattr(rollout, "num_groups", lambda env, count, platform: asked.append(platform) or 3)
    learner, actor = SimpleNamespace(platform="gpu", process_index=0), SimpleNamespace(platform="cpu")
    with pytest.raises(ConfigError, match="a multiple of 1 devices x 3 groups"):
        make_groups(Config(env=EnvConfig(num_envs=16)), Placement((learner,), (actor,), actor, ""), 0)
    assert asked == ["cpu"]
    # The actor stores frames as the learner's network takes them.
    monkeypatch.setattr(rollout, "network_platform", lambda device, *others: device.platform)
    monkeypatch.setattr(rollout, "make_pool", lambda *_, **__: NoisePool(2, seed=0))
    monkeypatch.setattr(rollout, "EnvGroup", lambda pool, network, *_: network.layout)
    placement = Placement((learner,), (actor,), actor, "")
    learner.process_index = actor.process_index = 0
    assert make_groups(Config(env=EnvConfig(num_envs=6)), placement, 0) == [[PLAIN] * 3]


def small_config(folder, **fields):
    ppo = PPOConfig(rollout_length=8, minibatch_size=16)
    return Config(output_dir=str(folder), env=EnvConfig(num_envs=4), ppo=ppo, total_env_steps=64, **fields)


def test_sessions_side_by_side_share_cores_and_memory(tmp_path, monkeypatch):
    tasks = []
    seen = Visible(tuple(Gpu(str(i), "RTX 4090", 24 << 30) for i in range(2)))
    monkeypatch.setattr(trial, "visible", lambda: seen)
    monkeypatch.setattr("jaxrl_atari.hardware.rotation.visible", lambda: seen)
    monkeypatch.setattr(trial, "usable_cores", lambda: 10)
    monkeypatch.setattr(trial, "run_processes", lambda started, *numbers: tasks.extend(started) or {})
    trial.run_trial(small_config(tmp_path, sessions=8, trial=TrialConfig(parallel=8)), tmp_path)
    assert {json.loads(task.first_line)["config"]["env"]["num_threads"] for task in tasks} == {1}
    assert {task.environment[FRACTION] for task in tasks} == {"0.2167"}
    tasks.clear()
    trial.run_trial(small_config(tmp_path, sessions=2), tmp_path)
    assert [json.loads(task.first_line)["config"]["env"]["num_threads"] for task in tasks] == [5, 5]
    assert all(task.warms_cache for task in tasks)


def test_the_first_session_compiles_for_the_others(tmp_path):
    """They wait for it to have compiled, but not for its end: it ends once the second has begun."""
    compiled, begun = tmp_path / "compiled", tmp_path / "begun"
    first = f"""
import pathlib, time
time.sleep(0.3)
pathlib.Path({str(compiled)!r}).touch()
print('first rollout, {COMPILED}', flush=True)
end = time.monotonic() + 30
while not pathlib.Path({str(begun)!r}).exists():
    assert time.monotonic() < end
    time.sleep(0.02)
"""
    second = f"import pathlib; assert pathlib.Path({str(compiled)!r}).exists(); pathlib.Path({str(begun)!r}).touch()"
    third = "pass"
    for name, code in (("one", first), ("two", second), ("three", third)):
        (tmp_path / f"{name}.py").write_text(code)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    tasks = [Task(name, (name,), environment, (), warms_cache=True) for name in ("one", "two", "three")]
    assert run_processes(tasks, parallel=3) == {}
    # One that fails before it has compiled does not hold up the others.
    (tmp_path / "one.py").write_text("raise SystemExit('failed')")
    assert run_processes(tasks, parallel=3) == {"one": ("failed", 1)}


# --- 7. Tests on a machine with GPUs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "wants"),
    [("", False), ("not slow", False), ("not gpu", False), ("gpu", True), ("gpu and slow", True)],
)
def test_tests_run_on_the_cpu_unless_gpu_tests_are_asked_for(expression, wants, monkeypatch):
    settings = {}
    for name in ("JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(conftest.Path, "exists", lambda path: True)
    monkeypatch.setattr(conftest.jax.config, "update", settings.__setitem__)
    monkeypatch.setattr(conftest.os, "environ", dict(os.environ))
    config = SimpleNamespace(option=SimpleNamespace(markexpr=expression, numprocesses=2))
    conftest.pytest_cmdline_main(config)
    conftest.pytest_configure(config)
    assert settings.get("jax_platforms") == conftest.os.environ.get("JAX_PLATFORMS") == (None if wants else "cpu")
    assert config.option.numprocesses == (0 if wants else 2)
    # Tests that compute in this process leave memory to those that start others.
    assert conftest.os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") == ("false" if wants else None)


def test_processes_of_tests_inherit_no_variable_of_the_tests():
    assert "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", "")
    assert len(jax.devices("cpu")) == 8


# --- 8. Pages --------------------------------------------------------------------------------------------------------


def test_the_shares_on_the_page_are_those_of_the_code():
    page = (ROOT / "docs/gpu-training.md").read_text(encoding="utf-8")
    header, rows = re.search(r"^\| sessions on a GPU \|(.*)\n\|[-|]+\n((?:\|.*\n)+)", page, re.M).groups()
    sizes = [int(size) for size in re.findall(r"(\d+) GiB", header)]
    assert sizes == [24, 40, 80]
    counts = []
    for row in rows.splitlines():
        count, *cells = row.strip("|").split("|")
        counts.append(int(count.split()[0]))
        for total, cell in zip(sizes, cells, strict=True):
            share = memory_fraction(DevicesConfig(), counts[-1], total << 30) or 0.75  # JAX's default
            assert cell.strip() == f"{share:g} ({share * total:.1f} GiB)"
    assert counts == [1, 2, 4, 8]
    assert "min(0.9 / n, (total - n * 0.8 GiB) / (n * total))" in page
    assert BESIDE_THE_POOL == 0.8 * 2**30


GPU_COMMANDS = re.search(
    r"On a machine with a GPU.*?```\n(.*?)```", (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8"), re.S
)[1].replace("\\\n", " ").splitlines()  # fmt: skip

SHORT = """
from jaxrl_atari.config import *

def get_config():
    return Config(
        total_env_steps=256, env=EnvConfig(max_frames=64), ppo=PPOConfig(rollout_length=2, minibatch_size=32, epochs=1),
        log=LogConfig(graphs=False, tensorboard=False),
    )
"""


def test_the_gpu_tests_come_first_on_the_page():
    assert shlex.split(GPU_COMMANDS[0]) == ["pytest", "-m", "gpu", "-n", "0"]
    assert len(GPU_COMMANDS) > 5


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", GPU_COMMANDS[1:], ids=lambda command: command[len("python -m jaxrl_atari.") :])
def test_the_commands_of_the_page_run_on_simulated_gpus(command, tmp_path):
    """Shortened: a small config, one repeat."""
    (tmp_path / "short.py").write_text(SHORT)
    _, *words = shlex.split(command)
    words = [str(tmp_path / "short.py") if word == "configs/qbert.py" else word for word in words]
    for option, value in (("--trace", tmp_path / "trace"), ("--total-env-steps", 256), ("--ppo.minibatch-size", 64)):
        if option in words:
            words[words.index(option) + 1] = str(value)
    if "jaxrl_atari.benchmark" in words:
        words += ["--repeats", "1", "--seconds", "0.1"]
    if "jaxrl_atari.train" in words:
        words += ["--output-dir", str(tmp_path)]
    result = python(*words, timeout=900, **{gpus.SIMULATED: "2"})
    assert result.returncode == 0, result.stdout + result.stderr
    if "jaxrl_atari.benchmark" in words and "--trace" not in words:
        found = json.loads(result.stdout.splitlines()[-1])
        sides = found.get("sides") or {"": {"runs": [found["process"]]}}
        devices = [side["runs"][0]["devices"] for side in sides.values()]
        assert devices == [["cpu:0 (cpu)"] if name == "cpu" else ["cpu:1 (cpu)"] for name in sides]


# --- On real GPUs: pytest -m gpu -------------------------------------------------------------------------------------

CONTEXT = 0.2  # GiB: less than any context


def used_gib():
    """Memory in use on each GPU of the machine, by all processes."""
    import pynvml

    pynvml.nvmlInit()
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    return np.array([pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles]) / 2**30


def needs_gpus(count):
    if len(gpus.visible().gpus) < count:
        pytest.skip(f"needs {count} GPUs; {gpus.visible().problem or f'there are {len(gpus.visible().gpus)}'}")


def start(folder, *options, **variables):
    """Starts a training that lasts until it is killed."""
    return subprocess.Popen(
        [sys.executable, "-m", "jaxrl_atari.train", "--config", "configs/qbert.py", "--output-dir", str(folder),
         "--log.checkpoint-every-env-steps", "4096", *map(str, options)],
        env=user_environment(**SHOWN, **variables), cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def train(folder, *options, **variables):
    """Starts a training; returns it once it prints that everything is compiled."""
    process, printed = start(folder, *options, **variables), ""
    for line in process.stdout:
        printed += line
        if COMPILED in line:
            return process, printed
    raise AssertionError(printed)


@contextlib.contextmanager
def training(folder, *options, **variables):
    """Memory that a training has taken on each GPU, once it runs."""
    before = used_gib()
    process, printed = train(folder, *options, **variables)
    try:
        time.sleep(5)  # all sessions run
        yield used_gib() - before, printed
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
    # CUDA counts GPUs by speed, unless this is set as NVML does.
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    with training(tmp_path, "--devices.gpu", "1", "--devices.memory-fraction", "0.2", **order) as (taken, _):
        assert (taken > CONTEXT).sum() == 1, taken
        assert taken.argmax() == 1 or "CUDA_VISIBLE_DEVICES" in os.environ


@pytest.mark.gpu
def test_real_sessions_fit_on_one_gpu(tmp_path):
    needs_gpus(1)
    options = ("--sessions", 4, "--trial.parallel", 4, "--devices.gpu", "0")
    with training(tmp_path, *options) as (taken, printed):
        time.sleep(60)
        assert printed.count("of its memory") == 4
        assert (taken > CONTEXT).sum() == 1, taken
        assert taken.max() < gpus.visible().gpus[0].memory / 2**30
        assert len({path.parents[2] for path in tmp_path.glob("*/session_*/checkpoints/[0-9]*/meta")}) == 4


@pytest.mark.gpu
def test_real_deterministic_training_gives_the_same_bits_twice(tmp_path):
    needs_gpus(1)

    def trained(name):
        result = python(
            "-m", "jaxrl_atari.train", "--config", "configs/qbert.py", "--run-dir", tmp_path / name, "--devices.gpu", 0,
            "--devices.deterministic", "--total-env-steps", 20_480, "--log.no-graphs", "--log.no-tensorboard",
            **SHOWN,
        )  # fmt: skip
        assert result.returncode == 0, result.stdout + result.stderr
        steps = (tmp_path / name / "session_0" / "checkpoints").iterdir()
        last = max((step for step in steps if step.name.isdecimal()), key=lambda step: int(step.name))
        return json.loads((last / "meta" / "metadata").read_text())

    one, again = trained("one"), trained("again")
    assert one["updates"] == 10
    assert one["checksums"] == again["checksums"]
    assert one["statistics"] == again["statistics"]


@pytest.mark.gpu
@pytest.mark.parametrize("gpu", [0, 1])
def test_real_evaluation_beside_a_training(gpu, tmp_path):
    needs_gpus(gpu + 1)
    with training(tmp_path, "--devices.gpu", "0") as (trained, _), ThreadPoolExecutor(1) as thread:
        (run,) = tmp_path.iterdir()
        while not list(run.glob("session_0/checkpoints/[0-9]*/meta")):
            time.sleep(1)
        before = most = used_gib()
        arguments = (run, "--checkpoint", "latest", "--gpu", gpu, "--episodes", 4)
        evaluation = thread.submit(python, "-m", "jaxrl_atari.evaluate", *arguments, **SHOWN)
        while not evaluation.done():
            most = np.maximum(most, used_gib())
            time.sleep(0.1)
        assert evaluation.result().returncode == 0, evaluation.result().stderr
        file = next(iter(run.glob("session_0/evaluation_*.json")))
        assert json.loads(file.read_text())["episodes"] == 4
        taken = most - before
        assert (taken > CONTEXT).sum() == 1, taken
        assert (taken.argmax() == trained.argmax()) == (gpu == 0)
        assert taken.max() < 0.25 * gpus.visible().gpus[gpu].memory / 2**30  # not JAX's 75%


@pytest.mark.gpu
def test_real_processes_on_one_host_have_gpus_of_their_own(tmp_path):
    needs_gpus(2)
    options = ["--devices.data-parallel", "all", "--devices.distributed", "--devices.num-processes", 2,
               "--devices.coordinator", free_address(), "--devices.process-index"]  # fmt: skip
    follower = start(tmp_path, *options, 1, JAX_LOCAL_DEVICE_IDS="1")
    try:
        with training(tmp_path, *options, 0, JAX_LOCAL_DEVICE_IDS="0") as (taken, _):
            assert (taken > CONTEXT).sum() == 2, taken
    finally:
        follower.kill()
        follower.communicate()


@pytest.mark.gpu
def test_real_float32_heads_and_first_parameters(tmp_path):
    needs_gpus(1)
    device = jax.devices("gpu")[0]
    here, there = (learner.first_arrays(Config(), 4, 0, d) for d in (jax.devices("cpu")[0], device))
    assert equal(here["train_state"].params, there["train_state"].params)
    network = make_network(NetworkConfig(compute_dtype="float32"), 4, "gpu")
    stacks = np.random.default_rng(0).integers(0, 256, (16, 84, 84, 4), np.uint8)
    outputs = [jax.jit(network.apply)(arrays["train_state"].params, stacks) for arrays in (here, there)]
    for one, other in zip(*outputs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-3)
