"""The monitor on a stand-in for NVML, and on a real GPU if there is one."""

import math
import threading
import time
from types import SimpleNamespace

import jax
import pytest
from fake_cuda import _machine  # noqa: F401
from simulated_gpus import SimulatedGpus

from jaxrl_atari.hardware.gpu_interface import GpuReading
from jaxrl_atari.hardware.gpus import use_provider
from jaxrl_atari.hardware.monitor import GPU_COLUMNS, mean_of_known, monitor
from jaxrl_atari.hardware.nvidia import NvidiaGpus
from jaxrl_atari.runs.columns import COLUMNS


def gpu(index):
    """JAX's device for the GPU that CUDA shows as number `index`."""
    return SimpleNamespace(platform="gpu", local_hardware_id=index)


def read(devices):
    """The GPUs' columns."""
    with monitor(devices) as read_now:
        row = read_now()
    assert list(row) == [name for name, column in COLUMNS.items() if column.section == "system"]
    assert row["rss_gib"] > 0.01
    return [row[name] for name in GPU_COLUMNS]


def test_the_gpus_are_those_that_cuda_shows(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,MIG-slice")
    assert read([gpu(0)]) == [30, 3, 300, 33]
    # Busy is a mean, memory and power are sums, temperature is the hottest.
    assert read([gpu(1), gpu(0), gpu(1)]) == [20, 4, 400, 33]
    values = read([gpu(2)])
    assert values[1] == 0.5
    assert all(map(math.isnan, (values[0], *values[2:])))


def test_the_provider_says_which_gpu_a_device_is(machine):
    class Shifted(NvidiaGpus):
        def index(self, device):
            return device.local_hardware_id - 1

    expected = read([gpu(1)])
    assert read([gpu(2)]) != expected
    use_provider(Shifted())  # the fixture puts the former one back
    assert read([gpu(2)]) == expected


def test_the_provider_reads_its_gpus(simulate, monkeypatch):
    """Simulated GPUs are monitored without an NVIDIA driver."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    simulate(2)
    monkeypatch.setattr(SimulatedGpus, "read", lambda self, gpu: GpuReading(50 * int(gpu.uuid), 2, 100, math.nan))
    busy, memory, power, temperature = read([gpu(1), gpu(2)])  # device 0 is the CPU
    assert (busy, memory, power) == (25, 4, 200)
    assert math.isnan(temperature)


def test_a_reading_is_the_mean_of_the_samples_since_the_last_one(machine, monkeypatch):
    busy = [20, 30, 100]
    given = []

    def read_busy(handle):
        given.append(busy.pop(0) if busy else 50)
        return SimpleNamespace(gpu=given[-1])

    monkeypatch.setattr(machine, "nvmlDeviceGetUtilizationRates", read_busy)
    with monitor([gpu(1)]) as read_now:
        assert read_now()["gpu_busy_percent"] == 20  # sampled at the start
        deadline = time.monotonic() + 60
        while busy and time.monotonic() < deadline:
            time.sleep(0.01)  # the thread samples
        time.sleep(0.1)
        assert 50 < read_now()["gpu_busy_percent"] <= 65
        assert read_now()["gpu_busy_percent"] == given[-1]  # the newest sample


def test_a_reading_that_fails_is_left_out_of_the_mean(machine, monkeypatch):
    samples = [[20.0, math.nan], [math.nan, math.nan], [40.0, math.nan]]
    means = [mean_of_known(values) for values in zip(*samples, strict=True)]
    assert means[0] == 30
    assert math.isnan(means[1])
    busy = [20, None, 30]

    def read_busy(handle):
        value = busy.pop(0) if busy else 40
        if value is None:
            raise machine.NVMLError
        return SimpleNamespace(gpu=value)

    monkeypatch.setattr(machine, "nvmlDeviceGetUtilizationRates", read_busy)
    with monitor([gpu(1)]) as read_now:
        assert read_now()["gpu_busy_percent"] == 20
        deadline = time.monotonic() + 60
        while busy and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert 30 <= read_now()["gpu_busy_percent"] <= 40


def test_a_gpu_that_fails_leaves_the_values_of_the_others(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3,MIG-slice")  # NVML knows the memory alone of the slice
    busy, memory, power, temperature = read([gpu(0), gpu(1), gpu(2)])
    assert (busy, memory, temperature) == (20, 4.5, 33)
    assert math.isnan(power)  # a sum without one of its terms would be too small


def test_a_driver_that_breaks_stops_nothing(machine, monkeypatch):
    with monitor([gpu(1)]) as read_now:
        assert read_now()["gpu_busy_percent"] == 10
        monkeypatch.setenv("FAKE_STATE", "lost")
        row = read_now()
        deadline = time.monotonic() + 60
        while not math.isnan(row["gpu_busy_percent"]) and time.monotonic() < deadline:
            time.sleep(0.01)
            row = read_now()
    assert math.isnan(row["gpu_busy_percent"])
    assert row["rss_gib"] > 0.01


def test_a_driver_that_hangs_does_not_stop_training(machine, monkeypatch):
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(uuid):
        hangs.set()
        goes_on.wait(20)
        raise machine.NVMLError

    with monitor([gpu(1)]) as read_now:
        monkeypatch.setattr(machine, "nvmlDeviceGetHandleByUUID", hang)
        assert hangs.wait(60)
        read_now()
        began = time.monotonic()
        assert read_now()["gpu_busy_percent"] == 10  # the newest sample
        assert time.monotonic() - began < 10
        with pytest.MonkeyPatch.context() as clock:
            clock.setattr(time, "monotonic", lambda: began + 60)
            assert math.isnan(read_now()["gpu_busy_percent"])  # nobody has read the GPU for long
        goes_on.set()


def test_on_a_cpu_there_is_no_gpu_to_read(machine):
    assert all(map(math.isnan, read([SimpleNamespace(platform="cpu", local_hardware_id=0)])))


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


@pytest.mark.gpu
def test_real_gpu():
    devices = [device for device in jax.devices() if device.platform == "gpu"]
    if not devices:
        pytest.skip("JAX sees no GPU here")
    with monitor(devices[-1:]) as read_now:
        matrix = jax.device_put(jax.numpy.ones((4096, 4096)), devices[-1])
        until = time.monotonic() + 3.0
        while time.monotonic() < until:
            (matrix @ matrix).block_until_ready()
        row = read_now()
    assert row["gpu_busy_percent"] > 20
    assert row["gpu_memory_gib"] > 0.06
    assert row["gpu_power_watts"] > 10
    assert 10 < row["gpu_temperature_c"] < 110
