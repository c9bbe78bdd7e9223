"""The monitor on simulated GPUs."""

import math
import threading
import time
from types import SimpleNamespace

import pytest
import simulated_gpus

from jaxrl_atari.hardware.monitor import monitor
from jaxrl_atari.runs.columns import SECTIONS


@pytest.fixture(autouse=True)
def _machine(simulate, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    simulate(4)


def gpu(index):
    """JAX's device for a GPU."""
    return SimpleNamespace(platform="gpu", local_hardware_id=index + 1)  # device 0 is the CPU


def values(row):
    """The GPUs' columns: busy, memory, power, temperature."""
    return [row[name] for name in row if name.startswith("gpu_")]


def read(*devices):
    with monitor(devices) as read_now:
        return values(read_now())


def wait_until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_columns_combine_the_gpus_that_cuda_shows(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert read(gpu(0)) == [30, 3, 300, 33]
    assert read(gpu(1), gpu(0), gpu(1)) == [20, 4, 400, 33]  # a mean, two sums, the hottest
    on_cpu = SimpleNamespace(platform="cpu", local_hardware_id=0)
    assert all(map(math.isnan, read(on_cpu)))
    with monitor([]) as read_now:
        row = read_now()
    assert list(row) == [*SECTIONS["system"]]
    assert row["rss_gib"] > 0.01


def test_a_gpu_that_fails_has_no_value(monkeypatch):
    monkeypatch.setenv("SIMULATED_LOST", "2")
    _, memory, power, _ = read(gpu(1), gpu(2), gpu(3))
    assert memory == 6
    assert math.isnan(power)  # a sum without one of its terms would be too small


def test_a_reading_is_the_mean_of_the_samples_since_the_last_one(monkeypatch):
    given = []

    def next_sample(index):
        given.append([20, 30, math.nan, 100][min(len(given), 3)])
        return given[-1]

    monkeypatch.setattr(simulated_gpus, "busy", next_sample)
    with monitor([gpu(0)]) as read_now:
        assert read_now()["gpu_busy_percent"] == 20  # sampled at the start
        wait_until(lambda: len(given) == 4)
        time.sleep(0.1)
        assert read_now()["gpu_busy_percent"] == 65  # NaN is left out
        assert read_now()["gpu_busy_percent"] == 100  # the newest sample


def test_a_driver_that_hangs_does_not_stop_training(monkeypatch):
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(index):
        hangs.set()
        goes_on.wait(20)
        return 0

    with monitor([gpu(1)]) as read_now:
        monkeypatch.setattr(simulated_gpus, "busy", hang)
        assert hangs.wait(60)
        began = time.monotonic()
        assert [read_now()["gpu_busy_percent"] for _ in range(2)] == [10, 10]  # the newest sample
        assert time.monotonic() - began < 10
        goes_on.set()


def test_cpu_time_is_per_core():
    began = time.monotonic()
    with monitor([]) as read_now:
        cpu, inner = time.process_time(), time.monotonic()
        while time.process_time() < cpu + 0.5:
            pass
        cpu, inner = time.process_time() - cpu, time.monotonic() - inner
        measured = read_now()["cpu_percent"]
    outer = time.monotonic() - began  # what was measured lies between the two
    assert 0.8 * 100 * cpu / outer <= measured <= 1.2 * 100 * cpu / inner
