"""The GPUs that NVML shows, the `gpu` option, placement, rotation, memory fractions, and the report."""

import os

import jax
import jax.extend
import pytest
from fake_cuda import SHOWN, FakeMachine, _machine, python  # noqa: F401
from simulated_gpus import SimulatedGpus, simulated

from jaxrl_atari import device_report
from jaxrl_atari.config import Config, DevicesConfig
from jaxrl_atari.config_dicts import set_fields
from jaxrl_atari.devices import pick_device, place
from jaxrl_atari.errors import ConfigError, UserError
from jaxrl_atari.hardware import gpus, nvidia
from jaxrl_atari.hardware.choice import choose_among, choose_devices, consecutive_blocks, divide_gpus
from jaxrl_atari.hardware.gpu_interface import Gpu, VisibleGpus
from jaxrl_atari.hardware.gpus import visible_gpus
from jaxrl_atari.hardware.memory import memory_fraction
from jaxrl_atari.hardware.start import StartedGpus, limit_jax, settle_devices
from jaxrl_atari.trials.slots import plan_slots

GIB = 2**30


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_OFFSET", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)


# --- What this process may use -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (None, ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]),
        ("3,1", ["GPU-3", "GPU-1"]),
        ("GPU-2, GPU-0", ["GPU-2", "GPU-0"]),
        ("1,99,2", ["GPU-1"]),  # as in CUDA, the first unknown name ends the list
        ("MIG-slice", ["MIG-slice"]),
        ("0,GPU-,2", ["GPU-0"]),  # the start of several UUIDs names none
        ("", []),
        ("-1", []),
        (",0", []),
        ("\u0663", []),  # a 3 in Arabic script, which CUDA does not read
    ],
)
def test_cuda_visible_devices_chooses(names, expected, machine, monkeypatch):
    if names is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    found = visible_gpus()
    assert [gpu.uuid for gpu in found.gpus] == expected
    assert {(gpu.model, gpu.memory) for gpu in found.gpus} <= {("H100", 24 * GIB)}
    assert found.why_none == ("" if expected else f"CUDA_VISIBLE_DEVICES={names!r} leaves none")
    assert not found.failures
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"  # CUDA counts as NVML does


@pytest.mark.parametrize(
    ("variables", "why_none", "fails"),
    [
        ({"FAKE_NVML_ERROR": "12"}, "there is no NVIDIA driver", False),
        ({"FAKE_NVML_ERROR": "9"}, "there is no NVIDIA driver", False),
        ({"FAKE_NVML_ERROR": "18"}, "NVML failed: 18", True),
        ({"FAKE_GPUS": "0"}, "this machine has no GPU", False),
        ({"FAKE_FAILING": "0:15,1:4,2:15,3:15"}, "NVML failed: GPU 0: 15", True),
    ],
)
def test_the_reason_for_no_gpu(variables, why_none, fails, machine, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert visible_gpus() == VisibleGpus((), why_none, failures=(why_none,) if fails else ())


def test_a_gpu_that_fails_does_not_hide_the_others(machine, monkeypatch):
    monkeypatch.setenv("FAKE_FAILING", "0:15,2:4")  # lost; not permitted, as in a container
    found = visible_gpus()
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-1", "GPU-3"]
    assert found == VisibleGpus(found.gpus, failures=("GPU 0: 15",))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,MIG-gone,0")  # an unknown name ends the list
    assert [gpu.uuid for gpu in visible_gpus().gpus] == ["GPU-3"]


@pytest.mark.parametrize(("names", "expected"), [(None, "MIG-slice"), ("1", "MIG-slice"), ("0", "GPU-0")])
def test_a_gpu_in_mig_mode_is_its_first_slice_and_hides_the_others(names, expected, machine, monkeypatch):
    monkeypatch.setenv("FAKE_MIG", "1")
    if names is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    assert [gpu.uuid for gpu in visible_gpus().gpus] == [expected]


def test_a_session_uses_one_slice_of_several_and_sessions_take_them_in_turn(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-slice,MIG-other")
    assert choose_devices(DevicesConfig(data_parallel="all")).learner == (0,)
    assert divide_gpus(DevicesConfig()).blocks == [(0,), (1,)]
    with pytest.raises(ConfigError, match=r"devices.gpu = 1: expected a visible GPU \(visible: 0: H100\)"):
        choose_devices(DevicesConfig(gpu=1))
    with pytest.raises(ConfigError, match=r"devices.data_parallel = 2: expected at most 1"):
        choose_devices(DevicesConfig(data_parallel=2))
    slots = plan_slots(Config(), sessions=2).slots
    assert [slot.variables["CUDA_VISIBLE_DEVICES"] for slot in slots] == ["MIG-slice", "MIG-other"]


def test_without_jaxs_plugin_the_install_command_is_named(machine, monkeypatch):
    monkeypatch.setattr(nvidia.importlib.metadata, "entry_points", lambda group: [])
    install = "pip install 'jaxrl_atari[cuda12]' (or cuda13, with driver 580 or newer)"
    assert visible_gpus() == VisibleGpus((), f"JAX's CUDA plugin is not installed; {install}", lacks_plugin=True)


@pytest.mark.parametrize("names", ["0,0", "1,GPU-1", "2,0,2"])
def test_a_gpu_that_is_named_twice_is_refused(names, machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)  # CUDA would show none
    with pytest.raises(ConfigError, match=f"CUDA_VISIBLE_DEVICES = '{names}': expected each GPU at most once"):
        visible_gpus()


def test_another_order_of_cuda_is_refused(machine, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    with pytest.raises(ConfigError, match=r"CUDA_DEVICE_ORDER = 'FASTEST_FIRST': expected PCI_BUS_ID; unset it"):
        choose_devices(DevicesConfig())
    assert choose_devices(DevicesConfig(gpu=False)).gpus == ()


def test_a_choice_of_gpus_in_jaxs_config_is_refused_but_not_our_own(machine):
    jax.config.update("jax_cuda_visible_devices", "1")
    with pytest.raises(
        ConfigError, match=r"jax_cuda_visible_devices = '1': expected all; choose GPUs with CUDA_V"
    ):
        limit_jax(DevicesConfig())
    jax.config.update("jax_cuda_visible_devices", "all")
    for gpu in (2, 3):
        limit_jax(DevicesConfig(gpu=gpu))
        assert jax.config.read("jax_cuda_visible_devices") == str(gpu)


def test_a_session_that_does_not_start_leaves_nothing_to_the_next_one(machine, monkeypatch):
    """A session is refused after `limit_jax`, for example because other processes hold the memory of its GPU."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.4")
    before, caches = dict(os.environ), jax.config.jax_persistent_cache_enable_xla_caches
    limit_jax(DevicesConfig(gpu=0, memory_fraction=0.3, deterministic=True))
    assert jax.config.jax_persistent_cache_enable_xla_caches == "none"
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.3"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ  # JAX refuses the two together
    limit_jax(DevicesConfig(data_parallel="all"))
    assert jax.config.read("jax_cuda_visible_devices") == "all"
    assert jax.config.jax_persistent_cache_enable_xla_caches == caches
    assert dict(os.environ) == before | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def test_what_the_user_sets_after_a_session_stays(machine, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=A")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.2")  # so that the end of the test removes it
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    limit_jax(DevicesConfig(gpu=0, memory_fraction=0.3, deterministic=True))
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=B")
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.5")
    limit_jax(DevicesConfig(gpu=0))
    assert os.environ["XLA_FLAGS"] == "--xla_dump_to=B"
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.5"


def test_sessions_side_by_side_do_not_inherit_what_an_earlier_session_has_set(machine, monkeypatch):
    for name in ("XLA_FLAGS", "XLA_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")  # so that the end of the test removes it
        monkeypatch.delenv(name)
    caches = jax.config.jax_persistent_cache_enable_xla_caches
    limit_jax(DevicesConfig(gpu=0, memory_fraction=0.9, deterministic=True))
    jax.config.update("jax_persistent_cache_enable_xla_caches", caches)  # changes no number
    config = set_fields(Config(), {"devices.gpu": 0, "trial.parallel": 2})
    (slot,) = plan_slots(config, sessions=2).slots
    assert slot.variables["XLA_CLIENT_MEM_FRACTION"] == "0.45"
    # This process keeps them: they say how JAX has started here.
    monkeypatch.setattr(jax.extend.backend, "backends", lambda: dict.fromkeys(["cpu", "cuda"]))
    limit_jax(DevicesConfig(gpu=0, memory_fraction=0.9, deterministic=True))
    jax.config.update("jax_persistent_cache_enable_xla_caches", caches)


def test_the_gpus_of_a_distributed_process_stay_its_own_after_another_session(machine):
    limit_jax(DevicesConfig(gpu=0))  # a session that does not start
    limit_jax(DevicesConfig(data_parallel="all"))  # as `join_processes` does, before it joins them
    jax.config.update("jax_cuda_visible_devices", "2,3")  # as `jax.distributed.initialize` does
    limit_jax(DevicesConfig(data_parallel="all"))
    assert jax.config.read("jax_cuda_visible_devices") == "2,3"


def test_a_session_after_one_that_has_limited_jax_to_the_cpu(machine):
    limit_jax(DevicesConfig(gpu=False))
    why = r"visible: none; JAX has been limited to the CPU in this process \(devices.gpu = false\)"
    with pytest.raises(ConfigError, match=why):
        choose_devices(DevicesConfig(gpu=True))


def test_a_session_on_the_cpu_leaves_the_gpu_to_the_next_one_once_jax_has_started_on_it(machine, monkeypatch):
    monkeypatch.setattr(jax.extend.backend, "backends", lambda: dict.fromkeys(["cpu", "cuda"]))
    assert pick_device(False).platform == "cpu"
    assert choose_devices(DevicesConfig()).learner == (0,)
    assert choose_devices(DevicesConfig(gpu=3)).learner == (3,)


def test_simulated_gpus_follow_cuda_visible_devices(simulate, monkeypatch):
    simulate(3)
    for names, expected in (("2,0", "20"), ("", ""), ("-1", ""), ("1,7,0", "1")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        assert "".join(gpu.uuid for gpu in visible_gpus().gpus) == expected


# --- The gpu option and the devices of a session -----------------------------------------------------------------

PICK = """
import sys
from jaxrl_atari.devices import pick_device, place
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.imports.named import import_inherited
from jaxrl_atari.option_forms import parse_choice
import_inherited()
place(DevicesConfig(data_parallel="all"))  # starts JAX on all GPUs
for text in sys.argv[1:]:
    try:
        found = pick_device(parse_choice(text), "--gpu")
        print(found.platform, found, place(DevicesConfig(gpu=parse_choice(text))).why_learner, sep="|")
    except Exception as error:
        print(type(error).__name__, error, sep="|")
"""


def test_gpu_option_with_two_gpus():
    result = python("-c", PICK, "auto", "true", "0", "1", "2", "false", **simulated(2))
    auto, true, zero, one, two, false = (line.split("|") for line in result.stdout.splitlines())
    # CPU device 0 is the CPU, 1 and 2 stand in for the GPUs.
    assert [auto[1], true[1], zero[1], one[1], false[1]] == ["cpu:1", "cpu:1", "cpu:1", "cpu:2", "cpu:0"], (
        result.stderr
    )
    assert (auto[2], zero[2], false[2]) == ("devices.gpu = auto", "devices.gpu = 0", "devices.gpu = false")
    assert two[0] == "ConfigError"
    assert (
        "--gpu = 2: expected a visible GPU (visible: 0: simulated GPU, 1: simulated GPU); use auto or false"
        in two[1]
    )


def test_gpu_option_without_a_gpu(simulate, monkeypatch):
    simulate(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    found = place(DevicesConfig())
    assert found.home.platform == "cpu"
    assert found.why_learner == "devices.gpu = auto, and there is no GPU: CUDA_VISIBLE_DEVICES='-1' leaves none"
    for gpu in (True, 0):
        with pytest.raises(
            ConfigError, match=r"visible: none; CUDA_VISIBLE_DEVICES='-1' leaves none.*use auto or false"
        ):
            pick_device(gpu)


@pytest.mark.parametrize("gpu", [-1, 1.5, "first"])
def test_an_impossible_gpu_is_refused_under_the_name_that_the_user_wrote(gpu):
    with pytest.raises(
        ConfigError, match=rf"^--gpu = {gpu!r}: expected true or false or a whole number from 0 to"
    ):
        pick_device(gpu, "--gpu")


def test_devices_of_a_session(simulate):
    cpu = jax.devices("cpu")  # JAX has started: device 0 is the CPU, 1 to 4 stand in for the GPUs
    simulate(4)
    placement = place(DevicesConfig(gpu=1, data_parallel=2, actor=3))
    assert placement.learner == (cpu[2], cpu[3])  # from the chosen one on
    assert placement.actors == (cpu[4], cpu[4])
    assert placement.evaluator == cpu[0]
    placement = place(DevicesConfig(gpu=2, evaluator=0))
    assert (placement.learner, placement.actors, placement.evaluator) == ((cpu[3],), (cpu[3],), cpu[1])
    assert place(DevicesConfig(gpu=2, evaluator="learner")).evaluator == cpu[3]
    assert place(DevicesConfig(gpu=1, data_parallel="all")).learner == tuple(cpu[2:5])
    with pytest.raises(ConfigError, match=r"devices.data_parallel = 4: expected at most 3"):
        place(DevicesConfig(gpu=1, data_parallel=4))
    with pytest.raises(ConfigError, match=r"devices.gpu = -1: expected true or false or a whole number"):
        place(DevicesConfig(gpu=-1))
    with pytest.raises(
        ConfigError,
        match=r"devices.actor = 0: expected a visible GPU \(visible: none; devices.gpu = false\); a CPU that lea",
    ):
        place(DevicesConfig(gpu=False, actor=0))


class KeptGpus(SimulatedGpus):
    """As on a real machine, JAX keeps to the GPUs on which the first session has started it."""

    def __init__(self, count):
        super().__init__(count)
        self._limit, self._kept = (), None

    def limit(self, used):
        self._limit = tuple(used)

    def start(self):
        self._kept = self._limit if self._kept is None else self._kept
        return [gpu for index, gpu in enumerate(super().start()) if index in self._kept]

    def started_gpus(self):
        return [] if self._kept is None else self.start()


@pytest.fixture
def keep():
    before = []
    yield lambda count: before.append(gpus.use_provider(KeptGpus(count)))
    gpus.use_provider(before[0])


def test_auto_means_a_gpu_on_which_this_process_has_started_jax(keep):
    keep(4)
    cpu = jax.devices("cpu")
    assert place(DevicesConfig(gpu=1, actor=3)).actors == (cpu[4],)
    for gpu in ("auto", True, 1):
        assert place(DevicesConfig(gpu=gpu)).learner == (cpu[2],)
    assert pick_device("auto", "--gpu") == cpu[2]
    assert place(DevicesConfig(gpu=3, evaluator="auto")).evaluator == cpu[2]
    with pytest.raises(
        ConfigError, match=r"^--gpu = 0: expected one of \[1, 3\], on which JAX has started; use a f"
    ):
        pick_device(0, "--gpu")
    with pytest.raises(ConfigError, match=r"^devices.data_parallel = 2: expected GPUs on which JAX has started, "):
        place(DevicesConfig(data_parallel=2))
    assert divide_gpus(DevicesConfig()).blocks == [(0,), (1,), (2,), (3,)]  # for processes of their own
    assert pick_device(False) == cpu[0]


TWO = VisibleGpus((Gpu("GPU-a", "H100", 0), Gpu("GPU-b", "H100", 0)))
NONE = VisibleGpus((), "no driver")
FULL = StartedGpus(full=(0,), why_none="GPU 0 is full")
BROKEN = StartedGpus(why_none="CUDA is broken")


def started_on(*indices):
    """JAX on these GPUs; a string takes the place of a device of JAX."""
    devices = {index: f"cuda:{index}" for index in indices}
    return StartedGpus(tuple(devices.values()), devices)


@pytest.mark.parametrize(
    ("visible", "started", "auto", "true", "zero", "one"),
    [
        (TWO, started_on(0, 1), 0, 0, 0, 1),
        (TWO, FULL, "GPU 0 is full", "GPU 0 is full", "GPU 0 is full", "GPU 0 is full"),
        (TWO, BROKEN, "cpu", "none; CUDA is broken", "none; CUDA is broken", "none; CUDA is broken"),
        (TWO, started_on(1), "without GPU 0 (GPU-a)", "without GPU 0 (GPU-a)", "without GPU 0 (GPU-a)", 1),
        (TWO._replace(started=(1,)), started_on(1), 1, 1, "one of [1], on which JAX has started", 1),
        (NONE, StartedGpus(), "cpu", "none; no driver", "none; no driver", "none; no driver"),
    ],
)
def test_where_a_session_learns(visible, started, auto, true, zero, one):
    for gpu, expected in (("auto", auto), (True, true), (0, zero), (1, one), (False, "cpu")):
        assert str(expected) in learner_or_error(DevicesConfig(gpu=gpu), visible, started)


def learner_or_error(options, visible, started):
    try:
        (device,) = settle_devices(options, choose_devices(options, lambda: visible), started).learner or ("cpu",)
    except UserError as error:
        return str(error)
    return str(device)


def test_one_process_of_several_does_not_fall_back_to_the_cpu():
    options = DevicesConfig(distributed=True)
    chosen = choose_among(options, TWO)
    with pytest.raises(
        UserError, match=r"devices.distributed: CUDA is broken; fix it, or use --devices.gpu false"
    ):
        settle_devices(options, chosen, BROKEN)
    assert settle_devices(options, chosen, started_on(1)) == chosen  # JAX_LOCAL_DEVICE_IDS=1


@pytest.mark.gpu
def test_gpu_option_on_a_real_gpu():
    if not visible_gpus().gpus:
        pytest.skip(f"no GPU: {visible_gpus().why_none}")
    result = python("-c", PICK, "auto", "true", "0", "99", **SHOWN)
    first = [line.split("|")[0] for line in result.stdout.splitlines()]
    assert first == ["gpu", "gpu", "gpu", "ConfigError"], result.stdout + result.stderr


FALSE = """
import os, jax
from jaxrl_atari.devices import pick_device
print(pick_device(False).platform, jax.default_backend())
opened = {os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")}
print(any(name.startswith("/dev/nvidia") for name in opened))
"""


@pytest.mark.gpu
def test_gpu_false_does_not_touch_a_real_gpu():
    if not visible_gpus().gpus:
        pytest.skip(f"no GPU: {visible_gpus().why_none}")
    assert python("-c", FALSE, **SHOWN).stdout.split() == ["cpu", "cpu", "False"]


# --- Rotation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "per_session", "offset", "expected"),
    [
        (2, 1, 1, [(1,), (0,)]),
        (3, 1, 7, [(1,), (2,), (0,)]),
        (4, 2, 1, [(1, 2), (3, 0)]),
        (3, 2, 1, [(1, 2)]),
        (5, 2, 0, [(0, 1), (2, 3)]),
        (5, 2, 1, [(1, 2), (3, 4)]),
        (5, 2, 4, [(4, 0), (1, 2)]),
        (8, 3, 6, [(6, 7, 0), (1, 2, 3)]),
        (1, 1, 3, [(0,)]),
    ],
)
def test_consecutive_blocks(visible, per_session, offset, expected):
    assert consecutive_blocks(visible, per_session, offset) == expected


def places(**devices):
    return divide_gpus(DevicesConfig(**devices)).blocks


def test_sessions_cycle_through_the_gpus(simulate, monkeypatch):
    simulate(4)
    assert places() == [(0,), (1,), (2,), (3,)]
    assert places(data_parallel=2) == [(0, 1), (2, 3)]
    assert places(data_parallel="all") == places(distributed=True) == [(0, 1, 2, 3)]
    assert places(gpu=2) == [(2,)]  # an index does not rotate
    assert places(gpu=0, actor=3) == places(evaluator=3) == [(0, 3)]
    assert places(gpu=False) == [()]
    monkeypatch.setenv("CUDA_OFFSET", "3")
    assert places(gpu=True) == [(3,), (0,), (1,), (2,)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert places() == [(1,), (0,)]


def test_impossible_places_are_rejected(simulate, monkeypatch):
    simulate(2)
    with pytest.raises(ConfigError, match=r"devices.gpu = 2: expected a visible GPU"):
        places(gpu=2)
    with pytest.raises(ConfigError, match=r"devices.data_parallel = 4: expected at most 2"):
        places(data_parallel=4)
    for wrong in ("one", "-1", "1.5"):
        monkeypatch.setenv("CUDA_OFFSET", wrong)
        with pytest.raises(ConfigError, match=f"CUDA_OFFSET = '{wrong}': expected a whole number from 0 on"):
            places()


@pytest.mark.parametrize(
    ("options", "learner", "actor", "evaluator"),
    [
        ({}, (0,), "learner", "cpu"),
        ({"gpu": False}, (), "learner", "cpu"),
        ({"gpu": True, "actor": 3}, (0,), 3, "cpu"),
        ({"gpu": 1, "data_parallel": "all", "evaluator": "auto"}, (1, 2, 3), "learner", 0),
        ({"distributed": True, "evaluator": "learner"}, (0, 1, 2, 3), "learner", "learner"),
    ],
)
def test_the_gpus_that_a_config_uses(options, learner, actor, evaluator, machine):
    assert choose_devices(DevicesConfig(**options))[2:5] == (learner, actor, evaluator)
    assert ("nvmlInit" in machine.calls) == (options.get("gpu") is not False)


# --- Memory fractions --------------------------------------------------------------------------------------------


def test_memory_fractions(monkeypatch):
    assert memory_fraction(DevicesConfig()) is None
    assert [memory_fraction(DevicesConfig(), sharing=n) for n in (2, 3)] == [0.45, 0.3]
    assert memory_fraction(DevicesConfig(memory_fraction=0.4), sharing=2) == 0.4
    with pytest.raises(
        ConfigError, match=r"devices.memory_fraction = 0.6: .* as 2 .*; lower it, or lower trial.parallel"
    ):
        memory_fraction(DevicesConfig(memory_fraction=0.6), sharing=2)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.3")
    assert memory_fraction(DevicesConfig(), sharing=2) is None  # the user's own fraction stays in force


def test_equal_shares_leave_room_for_contexts_and_handles():
    def share(sharing, total):
        return memory_fraction(DevicesConfig(), sharing, total)

    assert share(2, 80 * GIB) == 0.45
    assert share(4, 24 * GIB) == 0.2167
    for total in (16, 24, 40, 80):
        for n in (2, 4, 8):
            assert n * (share(n, total * GIB) * total + 0.79) <= total
    with pytest.raises(ConfigError, match=r"sessions on a GPU = 20: expected fewer: each takes 0.8 GiB of 16 GiB"):
        share(20, 16 * GIB)
    with pytest.raises(ConfigError, match=r"each takes 0.8 GiB of the GPU's memory in addition"):
        share(91, 0)


@pytest.mark.gpu
def test_memory_fraction_on_a_real_gpu():
    if not visible_gpus().gpus:
        pytest.skip(f"no GPU: {visible_gpus().why_none}")
    code = (
        "from jaxrl_atari.devices import *; from jaxrl_atari.hardware.gpus import visible_gpus;"
        "device = place(DevicesConfig(gpu=0, memory_fraction=0.25)).home;"
        "print(device.memory_stats()['bytes_limit'] / visible_gpus().gpus[0].memory)"
    )
    assert float(python("-c", code, **SHOWN).stdout) == pytest.approx(0.25, abs=0.02)


# --- The report --------------------------------------------------------------------------------------------------


OUT_OF_MEMORY = {"FAKE_CUDA_ERROR": "CUDA_ERROR_OUT_OF_MEMORY"}
AN_ERROR = "an error: JAX cannot start on GPU {}"


def report(run, *options, **variables):
    return run("-m", "jaxrl_atari.devices", *options, **variables)


@pytest.mark.long
def test_report_of_the_devices():
    options = ("--config", "configs/qbert.py", "--env.num-envs", "128", "--devices.gpu", "1")
    result = report(python, *options, **simulated(2))
    assert result.returncode == 0, result.stderr
    assert f"jax {jax.__version__}" in result.stdout.splitlines()
    assert result.stdout.count("matrix product right") == 3  # two GPUs and the CPU
    for line in ("devices.gpu = auto  -> cpu:1", "devices.gpu = true  -> cpu:1", "devices.gpu = 1     -> cpu:2"):
        assert line in result.stdout
    assert "memory of a learner device" in result.stdout
    assert "what reduces it: env.num_envs" in result.stdout
    assert "no problem found" in result.stdout
    sizes = [
        float(line.split()[-2].replace(",", "")) for line in result.stdout.splitlines() if line.endswith(" MiB")
    ]
    assert sum(sizes[:-1]) == pytest.approx(sizes[-1], abs=0.2)
    # 1,687,719 parameters (more with 18 actions), Adam's two moments, and each frame of the rollout once.
    assert 3 * 6.44 + 128 * 128 * 84 * 84 / 2**20 < sizes[0] < 150


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({"FAKE_NVML_ERROR": "18"}, "NVML failed: 18"),
        ({}, "JAX cannot start on a GPU: "),
        ({"FAKE_FAILING": "1:15"}, "GPU 1: 15"),
    ],
)
def test_report_of_problems(variables, problem, tmp_path):
    result = report(FakeMachine(tmp_path, gpus=2).python, **variables)
    assert result.returncode == 1, result.stderr
    assert sum(line.startswith(f"problem: {problem}") for line in result.stdout.splitlines()) == 1
    assert "no problem found" not in result.stdout


@pytest.mark.parametrize(
    ("full", "problem", "auto"),
    [
        ([], "JAX has started without GPU 0", "cpu:0"),  # a session limits JAX to GPU 0, and falls back
        (["0"], "GPU 0: other processes hold its memory", AN_ERROR.format(0)),
    ],
)
def test_the_report_names_the_gpu_that_jax_lacks(full, problem, auto, simulate, monkeypatch, capsys):
    used = set()

    def start(self):
        if {str(index) for index in used} & set(full):
            raise RuntimeError("INTERNAL: no supported devices found for platform CUDA")
        return jax.devices("cpu")[2:3]  # GPU 1 of two

    monkeypatch.setattr(SimulatedGpus, "limit", lambda self, indices: (used.clear(), used.update(indices)))
    monkeypatch.setattr(SimulatedGpus, "start", start)
    monkeypatch.setattr(SimulatedGpus, "is_full", lambda self, gpu: gpu.uuid in full)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    simulate(2)
    with pytest.raises(device_report.DeviceProblems, match=r"^1 problem found, listed above$"):
        device_report.main([])
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("problem: ")] == [f"problem: {problem}"]
    an_error = AN_ERROR.format(0)
    for choice in (
        f"auto  -> {auto}",
        f"true  -> {an_error}",
        "false -> cpu:0",
        f"0     -> {an_error}",
        "1     -> cpu:2",
    ):
        assert f"devices.gpu = {choice}" in lines
    assert place(DevicesConfig(gpu=1)).home == jax.devices("cpu")[2]  # as the report says
    monkeypatch.setattr(device_report, "memory_report", lambda config, device, learners: f"memory of {device}")
    for gpu, memory in (
        ("1", "memory of cpu:2"),
        ("0", "memory of a learner device: unknown, because JAX has not"),
    ):
        with pytest.raises(device_report.DeviceProblems):
            device_report.main(["--devices.gpu", gpu])
        assert f"\n{memory}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("visible", "variables", "problem", "auto", "index"),
    [
        ("0,1", {}, "JAX cannot start on a GPU: ", "cpu:0", AN_ERROR),
        ("0,1", {"FAKE_TAKEN_GIB": "23.9"}, "GPU 0: other processes hold its memory", AN_ERROR, AN_ERROR),
        ("1", OUT_OF_MEMORY, "JAX cannot start on a GPU (", AN_ERROR, AN_ERROR),
        ("0,1", OUT_OF_MEMORY, "JAX cannot start on a GPU (", "unknown", "unknown"),  # one may have enough
    ],
)
def test_the_report_says_what_a_session_does_where_jax_cannot_start(
    visible, variables, problem, auto, index, tmp_path
):
    run = FakeMachine(tmp_path, gpus=2).python
    result = report(run, "--config", "configs/qbert.py", CUDA_VISIBLE_DEVICES=visible, **variables)
    assert result.returncode == 1, result.stderr
    assert sum(line.startswith(f"problem: {problem}") for line in result.stdout.splitlines()) == 1
    indices = [f"{number}     -> {index.format(number)}" for number in range(len(visible.split(",")))]
    for choice in (f"auto  -> {auto.format(0)}", f"true  -> {index.format(0)}", "false -> cpu:0", *indices):
        assert f"devices.gpu = {choice}\n" in result.stdout
    in_doubt = "too little memory is free on one of GPU 0 (GPU-0), GPU 1 (GPU-1); wait for other processes, "
    assert (in_doubt in result.stdout) == (index == "unknown")
    assert "matrix product right" in result.stdout  # of the CPU


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [
        ("CUDA_DEVICE_ORDER", "FASTEST_FIRST", "PCI_BUS_ID"),
        ("CUDA_VISIBLE_DEVICES", "0,0", "each GPU at most once"),
    ],
)
def test_wrong_variables_of_cuda_are_a_problem_that_the_report_lists(variable, value, expected, tmp_path):
    """A session on the CPU ignores them; any other one, and a report on it, ends with an error."""
    run, error = FakeMachine(tmp_path, gpus=2).python, f"{variable} = '{value}': expected {expected}"
    result = report(run, **{variable: value})
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {error}")
    for line in (f"jax {jax.__version__}", f"devices.gpu = auto  -> an error: {error}", f"problem: {error}"):
        assert f"\n{line}" in result.stdout
    assert "matrix product right" in result.stdout  # of the CPU
    result = report(run, "--devices.gpu", "false", **{variable: value})
    assert (result.returncode, result.stderr) == (1, "error: 1 problem found, listed above\n")
    assert f"\nproblem: {error}" in result.stdout


def test_a_missing_plugin_is_listed_and_no_failure(machine, monkeypatch, capsys):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(nvidia, "_jax_plugins", list)
    device_report.main([])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("problem: JAX's CUDA plugin is not installed")
    (demanded,) = (line for line in lines if line.startswith("devices.gpu = true"))
    assert demanded.startswith("devices.gpu = true  -> an error: JAX's CUDA plugin is not installed")


def test_an_impossible_split_does_not_hide_the_problems(machine, monkeypatch, capsys):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(nvidia, "_jax_plugins", list)
    with pytest.raises(ConfigError, match=r"devices.data_parallel = 8: expected a divisor of env.num_envs = 20"):
        device_report.main(["--devices.data-parallel", "all", "--env.num-envs", "20"])
    printed = capsys.readouterr().out
    assert "problem: JAX's CUDA plugin is not installed" in printed
    assert "no problem found" not in printed


def test_the_memory_of_several_processes_is_that_of_one_device_of_all(simulate, monkeypatch, capsys):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    simulate(2)
    options = [
        "--config",
        "configs/qbert.py",
        "--env.num-envs",
        "64",
        "--ppo.rollout-length",
        "16",
        "--ppo.epochs",
        "1",
    ]
    distributed = [*options, "--devices.distributed", "--devices.data-parallel", "all"]
    device_report.main([*distributed, "--devices.num-processes", "2"])
    frames = 20 * (64 // 4) * 84 * 84  # of 16 + 4 steps, on one of 2 x 2 GPUs
    printed = capsys.readouterr().out
    assert f"the next rollout               {frames / 2**20:10,.1f} MiB" in printed
    assert "memory of a learner device, if it also acts, by" in printed
    device_report.main(distributed)
    assert "memory of a learner device: unknown without devices.num_processes" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"devices.data_parallel = 6: expected a divisor of env.num_envs = 64"):
        device_report.main([*distributed, "--devices.num-processes", "3"])


def test_the_report_uses_the_memory_fraction_of_the_config(tmp_path):
    machine = FakeMachine(tmp_path)
    report(machine.python, "--devices.memory-fraction", "0.25")
    assert {start["XLA_CLIENT_MEM_FRACTION"] for start in machine.started} == {"0.25"}


def test_the_report_comes_before_the_error_about_a_gpu_that_is_demanded(tmp_path):
    result = report(FakeMachine(tmp_path, gpus=2).python, "--devices.gpu", "true", FAKE_NVML_ERROR="18")
    assert result.returncode == 2, result.stderr
    assert "problem: NVML failed: 18" in result.stdout
    assert "no problem found" not in result.stdout
    assert result.stderr.splitlines()[-1].startswith("error: devices.gpu = True: expected ")


def test_a_gpu_that_this_machine_lacks_is_not_called_no_problem(simulate, monkeypatch, capsys):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    simulate(1)
    with pytest.raises(ConfigError, match=r"devices\.gpu = 3: expected a visible GPU"):
        device_report.main(["--devices.gpu", "3"])
    assert "no problem found" not in capsys.readouterr().out


def test_a_machine_without_a_gpu_has_no_problem(tmp_path):
    result = report(FakeMachine(tmp_path).python, FAKE_NVML_ERROR="12")
    assert result.returncode == 0, result.stderr
    assert "\nno GPU: there is no NVIDIA driver\n" in result.stdout
    assert "problem:" not in result.stdout
    assert result.stdout.splitlines()[-1] == "no problem found"
