"""Monitor of the machine during a session: the GPUs through NVML, CPU and memory of the process through psutil."""

import contextlib
import math
import threading
from collections.abc import Callable, Sequence

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


class Monitor:
    """A thread that samples the GPUs once a second until the end of its `with` block.

    A value that cannot be read is NaN: failures never stop training.

    Args:
        devices: the JAX devices in use, whose back end has started.
        say: receives a line for the user if NVML cannot find a GPU.
    """

    def __init__(self, devices: Sequence[jax.Device], say: Callable[[str], None]):
        used = {device.local_hardware_id for device in devices if device.platform == "gpu"}  # as CUDA counts, and NVML
        shown = visible().gpus if used else ()
        self._gpus = [gpu.name for index, gpu in enumerate(shown) if index in used]
        if used and not self._gpus:
            say("monitor: NVML does not find the GPU; nothing of it is recorded")
        self._process, self._samples, self._end = psutil.Process(), [], threading.Event()
        self._process.cpu_percent()  # counts from here
        self._thread = threading.Thread(target=self._run, name="monitor", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(1.0):
            self.sample()

    def sample(self) -> None:
        """Samples the GPUs now: busy is the mean over them, memory and power the sum, temperature the maximum."""
        busy, memory, power, heat = np.array([read_gpu(name) for name in self._gpus] or [[math.nan] * 4]).T
        self._samples.append((busy.mean(), memory.sum(), power.sum(), heat.max()))

    def read(self) -> dict[str, float]:
        """`MONITOR_COLUMNS`: means since the last `read` for the GPUs and the CPU (100 is one core), and memory now."""
        if not self._samples:
            self.sample()
        samples, self._samples = self._samples, []
        host = self._process.cpu_percent(), self._process.memory_info().rss / GIB
        return dict(zip(MONITOR_COLUMNS, (*np.mean(samples, axis=0).tolist(), *host), strict=True))

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join(timeout=5.0)  # a driver may hang
