"""The `gpu` option, the GPUs that the CUDA driver shows, rotation, memory fractions, and the report."""

import ctypes
import os
import subprocess
import sys

import jax
import pytest
from fake_cuda import SHOWN, Library

from jaxrl_atari.config import Config, DevicesConfig, EnvConfig
from jaxrl_atari.devices import pick_device, place
from jaxrl_atari.errors import ConfigError, UserError
from jaxrl_atari.hardware import gpus, report
from jaxrl_atari.hardware.cuda_driver import CudaDriver, DriverError
from jaxrl_atari.hardware.gpus import driver_gpus, simulated_gpus
from jaxrl_atari.hardware.memory_share import FRACTION, OLD_FRACTION, apply_memory_fraction, memory_fraction
from jaxrl_atari.hardware.rotation import place_session, rotate

VARIABLES = (gpus.SIMULATED, "CUDA_VISIBLE_DEVICES", "CUDA_OFFSET", FRACTION, OLD_FRACTION)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def python(*arguments, **environment):
    """Runs Python with these environment variables added."""
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, timeout=120
    )


# --- The CUDA driver -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "shown", "expected"),
    [
        (None, 2, ["0", "1"]),
        ("3,1", 2, ["3", "1"]),
        ("GPU-8f2c, GPU-77aa", 2, ["GPU-8f2c", "GPU-77aa"]),
        ("1,99,2", 1, ["1"]),  # CUDA stops at the first unknown name
    ],
)
def test_gpus_are_named_as_cuda_visible_devices_names_them(names, shown, expected, monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(["H200"] * shown))
    found = driver_gpus(names)
    assert [gpu.name for gpu in found.gpus] == expected
    assert {(gpu.model, gpu.memory) for gpu in found.gpus} == {("H200", 80 << 30)}
    assert found.problem == ""


def test_the_reason_for_no_gpu(monkeypatch):
    for names, error, problem in (
        ("", 100, "CUDA_VISIBLE_DEVICES='' leaves none"),
        ("-1", 0, "CUDA_VISIBLE_DEVICES='-1' leaves none"),
        (None, 100, "the NVIDIA driver shows no GPU"),
        (None, 803, "cuInit gave 803 (its library and kernel module"),
        ("0", 803, "cuInit gave 803 (its library and kernel module"),
    ):
        monkeypatch.setattr(ctypes, "CDLL", lambda name, error=error: Library([], error))
        assert problem in driver_gpus(names).problem

    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert "no NVIDIA driver" in driver_gpus("0").problem


def test_uuids_come_from_the_driver(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library(["H200"] * 2))
    assert CudaDriver().uuid(1) == "01020304-0506-0708-090a-0b0c0d0e0f10"
    monkeypatch.delattr(Library, "cuDeviceGetUuid_v2")
    with pytest.raises(DriverError, match="too old and has no cuDeviceGetUuid_v2; update it"):
        CudaDriver().uuid(0)


@pytest.mark.parametrize(
    ("names", "expected"),
    [(None, "012"), ("2,0", "20"), ("", ""), ("-1", ""), ("1,7,0", "1"), ("0,0", ""), ("-1,0", "")],
)
def test_simulated_gpus_follow_cuda_visible_devices(names, expected):
    assert "".join(gpu.name for gpu in simulated_gpus(3, names).gpus) == expected


# --- The gpu option --------------------------------------------------------------------------------------------------

PICK = """
import sys
from jaxrl_atari.cli.values import parse_gpu
from jaxrl_atari.devices import pick_device
for text in sys.argv[1:]:
    try:
        print(*pick_device(parse_gpu(text)), sep='|')
    except Exception as error:
        print(type(error).__name__, error, sep='|')
"""


def test_gpu_option_with_two_gpus():
    result = python("-c", PICK, "auto", "true", "0", "1", "2", JAXRL_ATARI_SIMULATED_GPUS="2")
    auto, true, zero, one, two = (line.split("|") for line in result.stdout.splitlines())
    # Device 0 stands for the CPU, 1 and 2 for the GPUs.
    assert (auto[0], true[0], zero[0], one[0]) == ("cpu:1", "cpu:1", "cpu:1", "cpu:2"), result.stderr
    assert auto[1] == "devices.gpu = auto, and there is a GPU, simulated by a CPU device"
    assert zero[1] == "devices.gpu = 0, simulated by a CPU device"
    assert two[0] == "ConfigError"
    assert "devices.gpu = 2: expected a visible GPU (visible: 0: cpu, 1: cpu)" in two[1]


def test_gpu_option_without_a_gpu(monkeypatch):
    monkeypatch.setenv(gpus.SIMULATED, "2")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    device, reason = pick_device("auto")
    assert device.platform == "cpu"
    assert reason == "devices.gpu = auto, and there is no GPU: CUDA_VISIBLE_DEVICES='-1' leaves none"
    refusal = r"visible: none; CUDA_VISIBLE_DEVICES='-1' leaves none.*use auto or false"
    for gpu in (True, 0):
        with pytest.raises(ConfigError, match=refusal):
            pick_device(gpu)


def test_an_actor_is_a_device_of_its_own_process(monkeypatch):
    """Of several processes, JAX lists the CPUs of all, those of process 0 first."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    own = jax.devices("cpu")[3]
    monkeypatch.setattr(jax, "local_devices", lambda backend: [own])
    for option in ("auto", False):
        assert place(DevicesConfig(gpu=False, actor=option)).actors == (own,)


@pytest.mark.gpu
def test_gpu_option_on_a_real_gpu():
    if not gpus.visible().gpus:
        pytest.skip(f"no GPU: {gpus.visible().problem}")
    code = PICK.replace("print(*pick_device(parse_gpu(text))", "print(pick_device(parse_gpu(text))[0].platform")
    assert code != PICK
    result = python("-c", code, "auto", "true", "0", "99", **SHOWN)
    lines = [line.split("|")[0] for line in result.stdout.splitlines()]
    assert lines == ["gpu", "gpu", "gpu", "ConfigError"], result.stdout + result.stderr


FALSE = """
import os, jax
from jaxrl_atari.devices import pick_device
print(pick_device(False)[0].platform, jax.default_backend())
opened = {os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")}
print(any(name.startswith("/dev/nvidia") for name in opened))
"""


@pytest.mark.gpu
def test_gpu_false_does_not_touch_a_real_gpu():
    if not gpus.visible().gpus:
        pytest.skip(f"no GPU: {gpus.visible().problem}")
    assert python("-c", FALSE, **SHOWN).stdout.split() == ["cpu", "cpu", "False"]


# --- Rotation --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("visible", "per_session", "offset", "expected"),
    [
        (2, 1, 0, [(0,), (1,), (0,), (1,)]),
        (2, 1, 1, [(1,), (0,), (1,), (0,)]),
        (3, 1, 7, [(1,), (2,), (0,), (1,)]),
        (4, 2, 0, [(0, 1), (2, 3), (0, 1), (2, 3)]),
        (4, 2, 1, [(1, 2), (3, 0), (1, 2), (3, 0)]),
        (5, 2, 0, [(0, 1), (2, 3), (0, 1), (2, 3)]),
        (1, 1, 3, [(0,)] * 4),
    ],
)
def test_rotate(visible, per_session, offset, expected):
    assert [rotate(number, visible, per_session, offset) for number in range(4)] == expected


def places(sessions=4, **devices):
    # 16 environments and minibatches of 256 divide among up to 16 devices.
    config = Config(sessions=sessions, env=EnvConfig(), devices=DevicesConfig(**devices))
    return [place_session(config, session).gpus for session in range(sessions)]


def test_sessions_cycle_through_the_gpus(monkeypatch):
    monkeypatch.setenv(gpus.SIMULATED, "4")
    assert places() == [(0,), (1,), (2,), (3,)]
    assert places(data_parallel=2) == [(0, 1), (2, 3), (0, 1), (2, 3)]
    assert places(data_parallel="all") == [(0, 1, 2, 3)] * 4
    assert places(gpu=2) == [(2,)] * 4  # an index does not rotate
    assert places(gpu=0, actor=1) == places(evaluator=1) == [(0, 1, 2, 3)] * 4
    assert places(gpu=False) == [()] * 4
    monkeypatch.setenv("CUDA_OFFSET", "3")
    assert places(gpu=True) == [(3,), (0,), (1,), (2,)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert places() == [(1,), (0,), (1,), (0,)]


def test_impossible_places_are_rejected(monkeypatch):
    monkeypatch.setenv(gpus.SIMULATED, "2")
    with pytest.raises(ConfigError, match=r"devices.gpu = 2: expected a visible GPU \(visible: 0: simulated GPU, 1:"):
        places(gpu=2)
    with pytest.raises(ConfigError, match=r"devices.data_parallel = 4: expected at most 2"):
        places(data_parallel=4)
    for wrong in ("one", "-1", "1.5"):
        monkeypatch.setenv("CUDA_OFFSET", wrong)
        with pytest.raises(ConfigError, match=f"CUDA_OFFSET = '{wrong}': expected a whole number from 0 on"):
            places()
    monkeypatch.setenv(gpus.SIMULATED, "two")
    with pytest.raises(UserError, match="JAXRL_ATARI_SIMULATED_GPUS = 'two'"):
        places()


# --- Memory fractions ------------------------------------------------------------------------------------------------


def test_memory_fractions(monkeypatch):
    assert memory_fraction(DevicesConfig()) is None
    assert [memory_fraction(DevicesConfig(), sharing=n) for n in (2, 3)] == [0.45, 0.3]
    assert memory_fraction(DevicesConfig(memory_fraction=0.4), sharing=2) == 0.4
    with pytest.raises(ConfigError, match=r"devices.memory_fraction = 0.6: expected at most 1/2, as 2 processes"):
        memory_fraction(DevicesConfig(memory_fraction=0.6), sharing=2)
    with pytest.raises(ConfigError, match=r"devices.memory_fraction = 1.5: expected a number from 0.01 to 1"):
        DevicesConfig(memory_fraction=1.5)
    monkeypatch.setenv(OLD_FRACTION, "0.3")
    assert memory_fraction(DevicesConfig(), sharing=2) is None  # the user's own fraction stays in force
    apply_memory_fraction(DevicesConfig(memory_fraction=0.5))
    assert (os.environ[FRACTION], os.environ.get(OLD_FRACTION)) == ("0.5", None)
    del os.environ[FRACTION]


@pytest.mark.gpu
def test_memory_fraction_on_a_real_gpu():
    if not gpus.visible().gpus:
        pytest.skip(f"no GPU: {gpus.visible().problem}")
    code = (
        "from jaxrl_atari.config import DevicesConfig; from jaxrl_atari.hardware import gpus, memory_share; import jax;"
        "memory_share.apply_memory_fraction(DevicesConfig(memory_fraction=0.25));"
        "print(jax.devices('gpu')[0].memory_stats()['bytes_limit'] / gpus.visible().gpus[0].memory)"
    )
    assert float(python("-c", code, **SHOWN).stdout) == pytest.approx(0.25, abs=0.02)


# --- The report ------------------------------------------------------------------------------------------------------


def test_report_of_the_devices(tmp_path):
    config = tmp_path / "c.py"
    config.write_text("from jaxrl_atari.config import Config\ndef get_config():\n    return Config()\n")
    options = ("--config", str(config), "--env.num-envs", "128")
    result = python("-m", "jaxrl_atari.devices", *options, CUDA_OFFSET="1", JAXRL_ATARI_SIMULATED_GPUS="2")
    assert result.returncode == 0, result.stderr
    assert f"jax {jax.__version__}" in result.stdout
    assert result.stdout.count("matrix product: right, ") == 3  # two GPUs and the CPU
    for line in ("devices.gpu = auto  cpu:1", "devices.gpu = true  cpu:1", "devices.gpu = 1     cpu:2"):
        assert line in result.stdout
    assert "run on GPU 1, 0, 1, 0, " in result.stdout
    assert "what reduces it: env.num_envs, then ppo.minibatch_size" in result.stdout
    assert "no problem found" in result.stdout


def test_report_of_problems(monkeypatch, capsys):
    settings = {"CUDA_VISIBLE_DEVICES": "", "CUDA_OFFSET": "x", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    for name, value in ({gpus.SIMULATED: "2"} | settings).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as end:
        report.main(pick_device, [])
    assert end.value.code == 1
    printed = capsys.readouterr().out
    assert "problem: CUDA_VISIBLE_DEVICES='' leaves none" in printed
    assert "problem: CUDA_OFFSET = 'x': expected a whole number" in printed


@pytest.mark.parametrize(
    ("seen", "status"),
    [
        (gpus.Visible((), "the NVIDIA driver shows no GPU"), 0),
        (gpus.Visible((), "the NVIDIA driver failed: cuInit gave 999 (unknown error)"), 1),
        (gpus.Visible((gpus.Gpu("0", "H200", 0),)), 1),  # and JAX has none
    ],
)
def test_a_machine_without_a_gpu_is_sound_and_one_whose_gpu_does_not_start_is_not(monkeypatch, seen, status):
    monkeypatch.setattr(gpus, "visible", lambda: seen)
    monkeypatch.setattr(report, "visible_gpus", list)
    assert bool(report.lines(lambda gpu: (jax.devices("cpu")[0], "the reason"))[2]) == status


def test_devices_of_a_session(monkeypatch):
    cpu = jax.devices("cpu")  # JAX has started: device 0 stands for the CPU, 1 to 4 for the GPUs
    monkeypatch.setenv(gpus.SIMULATED, "4")
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
