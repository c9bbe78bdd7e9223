"""Monitoring during a session: the GPUs through NVML, the process's CPU and memory through psutil."""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
import psutil

from jaxrl_atari.hardware.gpus import gpu_provider, nvml, visible_gpus

GIB = 2**30
GPU_COLUMNS = {
    "gpu_busy_percent": (lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu, np.mean),
    "gpu_memory_gib": (lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / GIB, np.sum),
    "gpu_power_watts": (lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000, np.sum),
    "gpu_temperature_c": (lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU), np.max),
}
"""Name of a column -> how NVML reads it for one GPU, and how the values of several GPUs are combined."""


def read_gpus(names: Sequence[str]) -> list[float]:
    """The values of `GPU_COLUMNS` over the GPUs and MIG slices with these UUIDs; NaN where NVML fails."""
    values = []
    for read, join in GPU_COLUMNS.values():
        value = math.nan
        with contextlib.suppress(nvml.NVMLError):
            value = float(join([read(nvml.nvmlDeviceGetHandleByUUID(name)) for name in names]))
        values.append(value)
    return values


def mean_of_known(values: Sequence[float]) -> float:
    """The mean of the values that are not NaN; NaN if there is none."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


@contextlib.contextmanager
def monitor(devices: Sequence[jax.Device]) -> Iterator[Callable[[], dict[str, float]]]:
    """Samples the GPUs once a second, in a thread, until the end of the `with` block.

    The block gets a function. Each call of the function returns these columns, which runs/columns.py defines:

    - the columns of `GPU_COLUMNS`: means of the samples since the last call
    - `cpu_percent`: CPU use of this process since the last call; 100 is one core
    - `rss_gib`: memory of this process now

    A reading of a GPU that fails is left out of the mean. If all fail, the mean is NaN. No failure stops training.

    Args:
        devices: the JAX devices in use, whose back end has started.
    """
    provider = gpu_provider()
    used = {provider.index(device) for device in devices if device.platform == "gpu"}
    names = [gpu.name for index, gpu in enumerate(visible_gpus().gpus) if index in used] if used else []
    process = psutil.Process()
    samples = []
    end = threading.Event()
    process.cpu_percent()  # counts from here

    def sample() -> None:
        samples.append(read_gpus(names) if names else [math.nan] * len(GPU_COLUMNS))

    def run() -> None:
        while not end.wait(1.0):
            sample()

    def read() -> dict[str, float]:
        if not samples:
            sample()
        gpus = {
            name: mean_of_known(values)
            for name, values in zip(GPU_COLUMNS, zip(*samples, strict=True), strict=True)
        }
        samples.clear()
        return gpus | {"cpu_percent": process.cpu_percent(), "rss_gib": process.memory_info().rss / GIB}

    thread = threading.Thread(target=run, name="monitor", daemon=True)
    thread.start()
    try:
        yield read
    finally:
        end.set()
        thread.join(timeout=5.0)  # a driver may hang
