"""The visible GPUs, the `gpu` option, placement, rotation, memory fractions, and the report."""

import os
import re

import jax
import pytest

from jaxrl_atari.cli import device_report
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.devices import pick_device, place
from jaxrl_atari.errors import ConfigError, UserError
from jaxrl_atari.hardware.choice import divide_gpus
from jaxrl_atari.hardware.gpus import visible_gpus
from jaxrl_atari.hardware.memory import memory_fraction

GIB = 2**30


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_OFFSET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # `devices` sets it for its process


# --- What this process may use -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (None, [0, 1, 2, 3]),
        ("3,1", [3, 1]),
        ("GPU-2, GPU-0", [2, 0]),
        ("1,99,2", [1]),  # as in CUDA, the first unknown name ends the list
        ("0,GPU-,2", [0]),  # the start of several UUIDs names none
        ("", []),
        ("-1", []),
    ],
)
def test_cuda_visible_devices_chooses(names, expected, simulate, monkeypatch):
    simulate(4)
    if names is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    found = visible_gpus()
    assert [gpu.uuid for gpu in found.gpus] == [f"GPU-{index}" for index in expected]
    assert found.why_none == ("" if expected else f"CUDA_VISIBLE_DEVICES={names!r} leaves none")


# --- The gpu option and the devices of a session -----------------------------------------------------------------


@pytest.fixture
def gpus(simulate):
    """Four GPUs, as JAX's devices. JAX has started: device 0 is the CPU."""
    simulate(4)
    return jax.devices("cpu")[1:5]


def test_the_gpu_option(gpus):
    for gpu, expected in (("auto", gpus[0]), (True, gpus[0]), (0, gpus[0]), (1, gpus[1]), (3, gpus[3])):
        assert pick_device(gpu) == expected
        assert place(DevicesConfig(gpu=gpu)).why_learner == f"devices.gpu = {str(gpu).lower()}"
    assert pick_device(False) == jax.devices("cpu")[0]


def test_indices_count_the_visible_gpus(gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    assert blocks() == [(0,), (1,)]
    with pytest.raises(ConfigError, match=r"devices.gpu = 2: .*visible: 0: simulated GPU, 1: simulated GPU\)"):
        place(DevicesConfig(gpu=2))


def test_a_gpu_without_permission_has_no_index(gpus, monkeypatch):
    monkeypatch.setenv("SIMULATED_DENIED", "0,2")
    found = visible_gpus()
    assert [gpu.uuid for gpu in found.gpus] == ["GPU-1", "GPU-3"]
    assert not found.failures


def test_the_gpu_option_without_a_gpu(gpus, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    found = place(DevicesConfig())
    assert found.home == jax.devices("cpu")[0]
    assert "CUDA_VISIBLE_DEVICES='-1' leaves none" in found.why_learner
    for gpu in (True, 0):
        with pytest.raises(ConfigError, match=r"visible: none; CUDA_VISIBLE_DEVICES='-1' leaves none"):
            place(DevicesConfig(gpu=gpu))


def test_where_a_session_learns_acts_and_evaluates(gpus):
    cpu = jax.devices("cpu")[0]
    for options, learner, actor, evaluator in (
        ({}, [0], 0, cpu),
        ({"gpu": 2, "evaluator": 0}, [2], 2, 0),
        ({"gpu": 2, "actor": False}, [2], cpu, cpu),
        ({"gpu": 1, "data_parallel": 2, "actor": 3}, [1, 2], 3, cpu),
        ({"gpu": 1, "data_parallel": "all", "evaluator": "auto"}, [1, 2, 3], None, 0),
        ({"gpu": False}, [cpu], cpu, cpu),
    ):

        def device(where):
            return gpus[where] if type(where) is int else where

        found = place(DevicesConfig(**options))
        assert found.learner == tuple(map(device, learner)), options
        assert found.evaluator == device(evaluator), options
        assert found.actors == (found.learner if actor is None else (device(actor),) * len(learner)), options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": -1}, "devices.gpu = -1: expected true or false or a whole number"),
        ({"gpu": False, "actor": 0}, "devices.actor = 0: expected a visible GPU"),
        ({"gpu": 1, "data_parallel": 4}, "devices.data_parallel = 4: expected at most 3"),
        ({"gpu": False, "data_parallel": 9}, "devices.data_parallel = 9: expected at most 8"),
    ],
)
def test_what_this_machine_cannot_do_is_refused(options, message, gpus):
    with pytest.raises(ConfigError, match=f"^{message}"):
        place(DevicesConfig(**options))


def test_a_gpu_on_which_jax_cannot_start(gpus, monkeypatch):
    """`auto` falls back to the CPU, except where memory is lacking: the user has a GPU, and may wait for it."""
    monkeypatch.setenv("SIMULATED_ERROR", "INTERNAL: no supported devices")
    found = place(DevicesConfig())
    assert found.home == jax.devices("cpu")[0]
    assert "INTERNAL: no supported devices" in found.why_learner
    for gpu in (True, 1):
        with pytest.raises(ConfigError, match="INTERNAL: no supported devices"):
            place(DevicesConfig(gpu=gpu))
    with pytest.raises(UserError, match="INTERNAL: no supported devices"):  # the other processes learn on GPUs
        place(DevicesConfig(distributed=True))
    monkeypatch.setenv("SIMULATED_FULL", "0")
    for gpu in ("auto", True, 0):
        with pytest.raises(UserError, match=r"GPU 0 \(GPU-0\)"):
            place(DevicesConfig(gpu=gpu))
    monkeypatch.setenv("SIMULATED_FULL", "")
    monkeypatch.setenv("SIMULATED_ERROR", "INTERNAL: cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(UserError, match=r"memory.*GPU 0 \(GPU-0\)"):
        place(DevicesConfig())


def test_a_process_keeps_the_gpus_on_which_jax_has_started(gpus, monkeypatch):
    monkeypatch.setenv("SIMULATED_ABSENT", "0,2")  # a first session has started JAX on the others
    for gpu in ("auto", True, 1):
        assert pick_device(gpu) == gpus[1]
    assert place(DevicesConfig(gpu=3, evaluator="auto")).evaluator == gpus[1]
    for options in ({"gpu": 0}, {"gpu": 1, "actor": 2}, {"gpu": 1, "data_parallel": 2}):
        with pytest.raises(UserError, match=r"JAX has started without GPU .*use a fresh process"):
            place(DevicesConfig(**options))
    assert blocks() == [(0,), (1,), (2,), (3,)]  # for processes of their own


@pytest.mark.parametrize("options", [{"deterministic": True}, {"memory_fraction": 0.5}])
def test_a_setting_that_comes_too_late_is_refused_and_changes_nothing(options, gpus, monkeypatch):
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.3")
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    before = dict(os.environ), dict(jax.config.values)
    with pytest.raises(ConfigError, match=r"expected to be set before JAX starts; train in a fresh process"):
        place(DevicesConfig(**options))
    assert (dict(os.environ), dict(jax.config.values)) == before
    place(DevicesConfig(memory_fraction=0.3))  # in force already


# --- Rotation ----------------------------------------------------------------------------------------------------


def blocks(**devices):
    return divide_gpus(DevicesConfig(**devices))[0]


def test_sessions_cycle_through_the_gpus(gpus, monkeypatch):
    assert blocks() == [(0,), (1,), (2,), (3,)]
    assert blocks(data_parallel=2) == [(0, 1), (2, 3)]
    assert blocks(data_parallel="all") == blocks(distributed=True) == [(0, 1, 2, 3)]
    assert blocks(gpu=2) == [(2,)]  # an index does not rotate
    assert blocks(gpu=0, actor=3) == blocks(evaluator=3) == [(0, 3)]
    assert blocks(gpu=False) == [()]
    monkeypatch.setenv("CUDA_OFFSET", "3")
    assert blocks(gpu=True) == [(3,), (0,), (1,), (2,)]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert blocks() == [(1,), (0,)]
    for wrong in ("one", "-1"):
        monkeypatch.setenv("CUDA_OFFSET", wrong)
        with pytest.raises(ConfigError, match=f"CUDA_OFFSET = '{wrong}': expected a whole number from 0"):
            blocks()


# --- Memory fractions --------------------------------------------------------------------------------------------


def test_memory_fractions(monkeypatch):
    assert memory_fraction(DevicesConfig()) is None
    assert [memory_fraction(DevicesConfig(), sharing=n) for n in (2, 3)] == [0.45, 0.3]
    assert memory_fraction(DevicesConfig(memory_fraction=0.4), sharing=2) == 0.4
    with pytest.raises(ConfigError, match=r"devices.memory_fraction = 0.6: expected at most 1/2"):
        memory_fraction(DevicesConfig(memory_fraction=0.6), sharing=2)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.3")
    assert memory_fraction(DevicesConfig(), sharing=2) is None  # the user's own fraction stays in force


def test_equal_shares_leave_room_for_contexts_and_handles():
    for total in (16, 24, 40, 80):
        for n in (2, 4, 8):
            share = memory_fraction(DevicesConfig(), n, total * GIB)
            assert n * (share * total + 0.79) <= total
    for n, total in ((20, 16), (91, 0)):
        with pytest.raises(ConfigError, match=f"sessions on a GPU = {n}: expected fewer"):
            memory_fraction(DevicesConfig(), n, total * GIB)


# --- The report --------------------------------------------------------------------------------------------------


def report(capsys, *options):
    """Lines of the report, and the error that follows it."""
    error = None
    try:
        device_report.main(list(options))
    except UserError as caught:
        error = caught
    return capsys.readouterr().out.splitlines(), error


def test_the_report_of_a_machine_that_works(gpus, capsys):
    lines, error = report(capsys)
    assert error is None
    assert lines[-1] == "no problem found"
    assert f"jax {jax.__version__}" in lines
    assert sum("matrix product right" in line for line in lines) == 5  # four GPUs and the CPU
    for choice in ("auto  -> cpu:1", "true  -> cpu:1", "false -> cpu:0", "0     -> cpu:1", "3     -> cpu:4"):
        assert f"devices.gpu = {choice}" in lines


@pytest.mark.parametrize(
    ("variables", "problem", "auto"),
    [
        (
            {"SIMULATED_ERROR": "INTERNAL: a broken driver"},
            "JAX cannot start on a GPU: .*a broken driver",
            "cpu:0",
        ),
        ({"SIMULATED_FULL": "0,1,2,3"}, "GPU 0: other processes hold its memory", "an error"),
        ({"SIMULATED_ABSENT": "2"}, "JAX has started without GPU 2", "cpu:1"),
        ({"SIMULATED_DENIED": "0,1,2,3"}, "GPU 0: 4", "cpu:0"),
        ({"SIMULATED_NVML_ERROR": "18"}, "NVML failed: 18", "cpu:0"),
        ({"SIMULATED_NO_PLUGIN": "1"}, "JAX's CUDA plugin is not installed; pip install", "cpu:0"),
    ],
)
def test_the_report_says_what_is_wrong_in_one_line(variables, problem, auto, gpus, capsys, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    lines, error = report(capsys)
    assert len([line for line in lines if re.match(f"problem: {problem}", line)]) == 1
    assert any(line.startswith(f"devices.gpu = auto  -> {auto}") for line in lines), lines
    assert any("matrix product right" in line for line in lines)  # of the CPU
    assert error.exit_status == 1
    assert "no problem found" not in lines


def test_the_report_refuses_a_variable_that_chooses_no_gpus(gpus, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,0")
    _, error = report(capsys)
    assert str(error).startswith("CUDA_VISIBLE_DEVICES = '0,0': expected each GPU at most once")
    assert error.exit_status == 2


@pytest.mark.parametrize(
    ("nvml_error", "why"), [(None, "this machine has no GPU"), ("9", "there is no NVIDIA driver")]
)
def test_a_machine_without_a_gpu_has_no_problem_until_one_is_demanded(
    nvml_error, why, simulate, capsys, monkeypatch
):
    simulate(0)
    if nvml_error:
        monkeypatch.setenv("SIMULATED_NVML_ERROR", nvml_error)
    lines, error = report(capsys)
    assert error is None
    assert f"no GPU: {why}" in lines
    assert lines[-1] == "no problem found"
    lines, error = report(capsys, "--devices.gpu", "true")
    assert error.exit_status == 2
    assert "no problem found" not in lines
