"""Where sessions train: the GPUs in turn, shares of a machine, and which sessions share compiled programs."""

import pytest

from jaxrl_atari.config import Config, DevicesConfig, TrialConfig
from jaxrl_atari.hardware.cpu import THREADS_VARIABLE, process_threads
from jaxrl_atari.hardware.memory import FRACTION_VARIABLE
from jaxrl_atari.trials.slots import plan_slots


@pytest.mark.parametrize(
    ("fields", "parallel", "environments"),
    [
        ({"sessions": 3}, 2, [{"CUDA_VISIBLE_DEVICES": "GPU-3"}, {"CUDA_VISIBLE_DEVICES": "GPU-1"}]),
        (
            {"sessions": 6, "trial": TrialConfig(parallel=4)},
            4,
            [
                {"CUDA_VISIBLE_DEVICES": "GPU-3", FRACTION_VARIABLE: "0.45"},
                {"CUDA_VISIBLE_DEVICES": "GPU-1", FRACTION_VARIABLE: "0.45"},
            ],
        ),
        ({"sessions": 1}, 1, [{}]),  # in this process, which limits JAX to the first GPU
        ({"devices": DevicesConfig(gpu=1)}, 1, [{}]),
        ({"devices": DevicesConfig(data_parallel="all")}, 1, [{}]),
        ({"devices": DevicesConfig(gpu=False), "trial": TrialConfig(parallel=2)}, 2, [{}]),
    ],
)
def test_sessions_take_the_gpus_in_turn(fields, parallel, environments, simulate, monkeypatch):
    simulate(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    config = Config(**{"sessions": 2} | fields)
    slots, at_a_time = plan_slots(config, config.sessions, config.sessions)
    assert at_a_time == parallel
    shown = [{name: slot.variables[name] for name in slot.variables if "THREADS" not in name} for slot in slots]
    assert shown == environments


@pytest.mark.parametrize(("chosen", "threads"), [(None, 4), ("5", 5)])
def test_sessions_side_by_side_share_the_emulator_threads_unless_the_user_has_chosen(chosen, threads, monkeypatch):
    monkeypatch.setattr("jaxrl_atari.trials.slots.emulator_cores", lambda: 8)
    monkeypatch.delenv(THREADS_VARIABLE, raising=False)
    if chosen is not None:
        monkeypatch.setenv(THREADS_VARIABLE, chosen)
    config = Config(sessions=2, devices=DevicesConfig(gpu=False), trial=TrialConfig(parallel=2))
    for name, value in plan_slots(config, 2, 2).slots[0].variables.items():
        monkeypatch.setenv(name, value)
    assert process_threads() == threads
