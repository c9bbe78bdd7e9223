"""Monitor of the machine during a session: the GPUs through NVML, CPU and memory of the process through psutil."""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
import psutil

from jaxrl_atari.hardware.gpus import nvml, visible

GIB = 2**30
MONITOR_COLUMNS = (
    "gpu_busy_percent",
    "gpu_memory_gib",
    "gpu_power_watts",
    "gpu_temperature_c",
    "cpu_percent",
    "rss_gib",
)
"""The names of the measured values. runs/columns.py defines them."""


def read_gpu(name: str) -> list[float]:
    """The first four of `MONITOR_COLUMNS` now, for the GPU or MIG slice with a UUID; NaN: NVML does not tell it."""
    readings: list[Callable] = [
        lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
        lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / GIB,
        lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000,
        lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    ]
    values = [math.nan] * len(readings)
    for i, read in enumerate(readings):
        with contextlib.suppress(nvml.NVMLError):
            values[i] = read(nvml.nvmlDeviceGetHandleByUUID(name))
    return values


@contextlib.contextmanager
def monitor(devices: Sequence[jax.Device], say: Callable[[str], None]) -> Iterator[Callable[[], dict[str, float]]]:
    """Samples the GPUs once a second, in a thread, until the end of the `with` block.

    Gives a function that returns `MONITOR_COLUMNS`: means since its last call for the GPUs and the CPU (100 is one
    core), and memory now. A value that cannot be read is NaN: failures never stop training.

    Args:
        devices: the JAX devices in use, whose back end has started.
        say: receives a line for the user if NVML cannot find a GPU.
    """
    used = {device.local_hardware_id for device in devices if device.platform == "gpu"}  # as CUDA counts, and NVML
    names = [gpu.name for index, gpu in enumerate(visible().gpus) if index in used] if used else []
    if used and not names:
        say("monitor: NVML does not find the GPU; nothing of it is recorded")
    process, samples, end = psutil.Process(), [], threading.Event()
    process.cpu_percent()  # counts from here

    def sample() -> None:
        busy, memory, power, heat = np.array([read_gpu(name) for name in names] or [[math.nan] * 4]).T
        samples.append((busy.mean(), memory.sum(), power.sum(), heat.max()))

    def run() -> None:
        while not end.wait(1.0):
            sample()

    def read() -> dict[str, float]:
        if not samples:
            sample()
        values = np.mean(samples, axis=0).tolist()
        samples.clear()
        host = process.cpu_percent(), process.memory_info().rss / GIB
        return dict(zip(MONITOR_COLUMNS, (*values, *host), strict=True))

    thread = threading.Thread(target=run, name="monitor", daemon=True)
    thread.start()
    try:
        yield read
    finally:
        end.set()
        thread.join(timeout=5.0)  # a driver may hang
