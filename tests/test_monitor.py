"""The monitor on a stand-in for NVML, and on a real GPU if there is one."""

import math
import multiprocessing
import threading
import time
from types import SimpleNamespace

import jax
import psutil
import pytest

from jaxrl_atari.hardware import monitor as module
from jaxrl_atari.hardware.monitor import (
    GIB,
    GPU_COLUMNS,
    MONITOR_COLUMNS,
    GpuReader,
    GpuUnknown,
    HostReader,
    Monitor,
)
from jaxrl_atari.runs.columns import COLUMNS

# The machine has four GPUs. CUDA_VISIBLE_DEVICES shows this process "2,0" in this order, and a slice of GPU 3.
UUID_OF = ["uuid-2", "uuid-0", "slice-of-3"].__getitem__


class FakeNvml:
    """GPU i: 10 i percent busy, i GiB used, 100 i watts, 30 + i degrees."""

    class NVMLError(Exception):
        pass

    NVML_TEMPERATURE_GPU = 0

    def __init__(self):
        self.started = 0
        self.broken = False
        self.busy = [0, 10, 20, 30]

    def nvmlInit(self):
        self.started += 1

    def nvmlShutdown(self):
        self.started -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid):
        handles = {f"GPU-uuid-{i}": i for i in range(4)} | {"MIG-slice-of-3": "slice"}
        if uuid not in handles:
            raise self.NVMLError("Not Found")
        return handles[uuid]

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        assert handle == "slice"
        return 3

    def _check(self, handle):
        if self.broken:
            raise self.NVMLError("GPU is lost")
        return handle

    def nvmlDeviceGetUtilizationRates(self, handle):
        if self._check(handle) == "slice":
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(gpu=self.busy[handle])

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(used=(0.5 if self._check(handle) == "slice" else handle) * GIB)

    def nvmlDeviceGetPowerUsage(self, handle):
        return 100_000 * self._check(handle)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        assert sensor == self.NVML_TEMPERATURE_GPU
        return 30 + self._check(handle)


def gpu(ordinal):
    return SimpleNamespace(platform="gpu", local_hardware_id=ordinal, process_index=0)


CPU = SimpleNamespace(platform="cpu", local_hardware_id=0, process_index=0)


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setattr(module, "nvml", fake)
    monkeypatch.setattr(module, "cuda_uuid", UUID_OF)
    return fake


def make_monitor(devices, said):
    """A monitor that takes no samples by itself."""
    return Monitor(devices, said.append, seconds=3600.0)


def test_the_gpu_is_the_one_that_cuda_shows(nvml):
    read = GpuReader([gpu(0)]).read()
    assert list(read) == list(GPU_COLUMNS)
    assert read == {"gpu_busy_percent": 20, "gpu_memory_gib": 2, "gpu_power_watts": 200, "gpu_temperature_c": 32}


def test_several_gpus_and_the_same_one_twice(nvml, monkeypatch):
    monkeypatch.setattr(module, "cuda_uuid", ["uuid-2", "uuid-3"].__getitem__)
    read = GpuReader([gpu(1), gpu(0), gpu(1), CPU]).read()
    # GPUs 2 and 3: busy is a mean, memory and power are sums, temperature is the hottest.
    assert read == {"gpu_busy_percent": 25, "gpu_memory_gib": 5, "gpu_power_watts": 500, "gpu_temperature_c": 33}


def test_only_the_gpus_of_this_process_are_asked_for(nvml, monkeypatch):
    def uuid_of(ordinal):
        assert ordinal == 0  # the other process's device 1 may be on another machine
        return UUID_OF(ordinal)

    monkeypatch.setattr(module, "cuda_uuid", uuid_of)
    elsewhere = SimpleNamespace(platform="gpu", local_hardware_id=1, process_index=1)
    read = GpuReader([elsewhere, gpu(0)]).read()
    assert read["gpu_memory_gib"] == 2
    with pytest.raises(GpuUnknown, match="no GPU in use"):
        GpuReader([elsewhere])


def test_mig_slice_has_its_own_memory_and_its_boards_power(nvml):
    read = GpuReader([gpu(2)]).read()
    assert math.isnan(read.pop("gpu_busy_percent"))
    assert read == {"gpu_memory_gib": 0.5, "gpu_power_watts": 300, "gpu_temperature_c": 33}


def test_read_is_the_mean_since_the_last_read(nvml):
    said = []
    with make_monitor([gpu(0)], said) as monitor:
        nvml.busy[2] = 80
        assert monitor.read()["gpu_busy_percent"] == 80  # takes the first sample itself
        for busy in (10, 20, 90):
            nvml.busy[2] = busy
            monitor.sample()
        assert monitor.read()["gpu_busy_percent"] == 40
        assert monitor.read()["gpu_busy_percent"] == 90  # no new samples: the newest one
        nvml.busy[2] = 0
        monitor.sample()
        row = monitor.read()
        assert row["gpu_busy_percent"] == 0
    assert list(row) == list(MONITOR_COLUMNS)
    assert row["rss_gib"] > 0.01
    assert said == []
    assert nvml.started == 0


def test_columns_are_those_of_the_log_points():
    assert [name for name, column in COLUMNS.items() if column.group == "system"] == list(MONITOR_COLUMNS)


def test_without_a_gpu_one_line_reports_it_and_the_host_is_recorded(nvml):
    said = []
    with make_monitor([CPU], said) as monitor:
        monitor.sample()
        monitor.sample()
        row = monitor.read()
    assert said == ["monitor: no GPU in use; only the CPU and memory of this process are recorded"]
    assert all(math.isnan(row[name]) for name in GPU_COLUMNS)
    assert row["rss_gib"] > 0.01
    assert nvml.started == 0


def test_a_broken_driver_does_not_stop_training(nvml):
    said = []
    with make_monitor([gpu(0)], said) as monitor:
        monitor.sample()
        nvml.broken = True
        monitor.sample()
        monitor.sample()
        assert said == []  # the thread itself prints nothing
        assert monitor.read()["gpu_busy_percent"] == 20
        monitor.read()
    assert said == ["monitor: NVML: GPU is lost; only the CPU and memory of this process are recorded"]
    assert nvml.started == 0


@pytest.mark.parametrize("ordinal", [None, 7])
def test_a_gpu_without_an_identity(ordinal, nvml):
    said = []
    with make_monitor([gpu(ordinal)], said) as monitor:
        monitor.sample()
    assert len(said) == 1
    assert nvml.started == 0


def test_real_nvml_without_driver_records_the_host():
    if any(device.platform == "gpu" for device in jax.devices()):
        pytest.skip("this machine has a GPU")
    said = []
    with Monitor([gpu(0)], said.append, seconds=3600.0) as monitor:
        monitor.sample()
        assert monitor.read()["rss_gib"] > 0.01
    assert len(said) == 1
    assert said[0].startswith("monitor: ")


def test_the_thread_samples(monkeypatch):
    sampled = threading.Event()
    monkeypatch.setattr(Monitor, "sample", lambda monitor: sampled.set())
    with Monitor([CPU], lambda text: None, seconds=0.01):
        assert sampled.wait(timeout=60)


def test_cpu_time_is_per_core():
    began = time.monotonic()
    host = HostReader()
    cpu, inner = time.process_time(), time.monotonic()
    while time.process_time() < cpu + 0.5:
        pass
    cpu, inner = time.process_time() - cpu, time.monotonic() - inner
    measured = host.read()["cpu_percent"]
    outer = time.monotonic() - began  # what was measured lies between the two
    assert 0.8 * 100 * cpu / outer <= measured <= 1.2 * 100 * cpu / inner


def test_children_are_counted():
    host = HostReader()
    alone = host.read()["rss_gib"]
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    child.start()
    try:
        deadline = time.monotonic() + 20.0
        while (together := host.read()["rss_gib"]) < alone + 0.004 and time.monotonic() < deadline:
            time.sleep(0.05)
    finally:
        child.terminate()
        child.join()
    assert together > alone + 0.004  # a bare Python takes some 10 MiB
    after = host.read()["rss_gib"]
    assert after < together


def test_hidden_processes_do_not_end_training(monkeypatch):
    """As in a /proc that is mounted with `hidepid`."""

    def refuse(process, recursive=False):
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil.Process, "children", refuse)
    assert HostReader().read()["rss_gib"] > 0


@pytest.mark.gpu
def test_real_gpu():
    devices = [device for device in jax.devices() if device.platform == "gpu"]
    if not devices:
        pytest.skip("JAX sees no GPU here")
    import pynvml

    said = []
    with Monitor(devices[-1:], said.append, seconds=3600.0) as monitor:
        matrix = jax.device_put(jax.numpy.ones((4096, 4096)), devices[-1])
        until = time.monotonic() + 2.0
        while time.monotonic() < until:
            (matrix @ matrix).block_until_ready()
        monitor.sample()
        row = monitor.read()
        # The board on which NVML sees this process is the one that was read.
        ((handle, _),) = monitor._gpu._handles
        assert pynvml.nvmlDeviceGetName(handle) == devices[-1].device_kind
    assert said == []
    assert row["gpu_busy_percent"] > 20
    assert row["gpu_memory_gib"] > 0.06
    assert row["gpu_power_watts"] > 10
    assert 10 < row["gpu_temperature_c"] < 110
