"""Monitoring during a session: the GPUs through NVML, the process's CPU and memory through psutil."""

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
import psutil

from jaxrl_atari.hardware.gpus import gpu_provider, visible_gpus
from jaxrl_atari.hardware.nvidia import nvml

GIB = 2**30


def mean_of_known(values: Sequence[float]) -> float:
    """The mean of the values that are not NaN; NaN if there is none."""
    known = [value for value in values if not math.isnan(value)]
    return float(np.mean(known)) if known else math.nan


def highest_known(values: Sequence[float]) -> float:
    """The highest of the values that are not NaN; NaN if there is none."""
    return max((value for value in values if not math.isnan(value)), default=math.nan)


GPU_COLUMNS: dict[str, tuple[Callable[[Any], float], Callable[[Sequence[float]], float]]] = {
    "gpu_busy_percent": (lambda gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu, mean_of_known),
    "gpu_memory_gib": (lambda gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used / GIB, sum),
    "gpu_power_watts": (lambda gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000, sum),
    "gpu_temperature_c": (
        lambda gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        highest_known,
    ),
}
"""Name of a column -> how NVML reads it for one GPU, and how the values of several GPUs are combined.

A value that NVML fails to read is NaN. A sum over several GPUs is then NaN too: it would be too small.
"""


def read_gpus(uuids: Sequence[str]) -> list[float]:
    """One sample of `GPU_COLUMNS`, over the GPUs and MIG slices with these UUIDs."""
    return [combine([read_gpu(uuid, read) for uuid in uuids]) for read, combine in GPU_COLUMNS.values()]


def read_gpu(uuid: str, read: Callable[[Any], float]) -> float:
    """What `read` returns for the GPU or MIG slice with this UUID; NaN if NVML fails."""
    try:
        return float(read(nvml.nvmlDeviceGetHandleByUUID(uuid)))
    except nvml.NVMLError:
        return math.nan


@contextlib.contextmanager
def monitor(devices: Sequence[jax.Device]) -> Iterator[Callable[[], dict[str, float]]]:
    """Samples GPUs once a second, in a thread, until the end of the `with` block.

    The block gets a function. Each call of the function returns these columns, which runs/columns.py defines:

    - the columns of `GPU_COLUMNS`: means of the samples since the last call, or else the newest sample, if it is
      not older than 10 seconds
    - `cpu_percent`: CPU use of this process since the last call; 100 is one core
    - `rss_gib`: memory of this process now

    A sample without a value, because NVML fails, is left out of the mean. If all are, the mean is NaN. No failure
    of NVML stops the block: its function does not call NVML, which may hang.

    Args:
        devices: the JAX devices that learn or act, of this process, whose back end has started.
    """
    provider = gpu_provider()
    used = {provider.index(device) for device in devices if device.platform == "gpu"}
    uuids = [gpu.uuid for index, gpu in enumerate(visible_gpus().gpus) if index in used] if used else []
    process = psutil.Process()
    unknown = [math.nan] * len(GPU_COLUMNS)
    samples = deque([read_gpus(uuids) if uuids else unknown])
    recent: list[list[float]] = []
    sampled_at = time.monotonic()
    end = threading.Event()
    process.cpu_percent()  # counts from here

    def run() -> None:
        nonlocal sampled_at
        while not end.wait(1.0):
            samples.append(read_gpus(uuids))
            sampled_at = time.monotonic()

    def read() -> dict[str, float]:
        nonlocal recent
        newest = recent[-1:] if time.monotonic() - sampled_at < 10 else [unknown]
        recent = [samples.popleft() for _ in range(len(samples))] or newest
        gpus = {
            name: mean_of_known(values)
            for name, values in zip(GPU_COLUMNS, zip(*recent, strict=True), strict=True)
        }
        return gpus | {"cpu_percent": process.cpu_percent(), "rss_gib": process.memory_info().rss / GIB}

    if not uuids:
        yield read
        return
    thread = threading.Thread(target=run, name="monitor", daemon=True)
    thread.start()
    try:
        yield read
    finally:
        end.set()
        thread.join(timeout=5.0)  # a driver may hang
