"""Monitoring during a session: the GPUs through NVML, the process's CPU and memory through psutil."""

import contextlib
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import jax
import numpy as np
import psutil

from jaxrl_atari.hardware import gpus

GIB = 2**30


GPU_COLUMNS: dict[str, Callable[[Sequence[float]], float]] = {
    "gpu_busy_percent": np.mean,
    "gpu_memory_gib": np.sum,
    "gpu_power_watts": np.sum,
    "gpu_temperature_c": np.max,
}
"""Column of `read_gpu` -> how the values of several GPUs are combined: NaN if one of them is."""


def sample_gpus(used: Sequence[gpus.Gpu]) -> dict[str, float]:
    """One sample of `GPU_COLUMNS`, over several GPUs; NaN without a GPU."""
    readings = [gpus.read_gpu(gpu) for gpu in used]
    return {
        name: float(combine([reading[name] for reading in readings])) if used else math.nan
        for name, combine in GPU_COLUMNS.items()
    }


@contextlib.contextmanager
def monitor(devices: Sequence[jax.Device]) -> Iterator[Callable[[], dict[str, float]]]:
    """Samples GPUs once a second, in a thread, until the end of the `with` block.

    The block gets a function. Each call of the function returns these columns, which runs/columns.py defines:

    - the columns of `GPU_COLUMNS`: means of the samples since the last call, or else the newest sample
    - `cpu_percent`: CPU use of this process since the last call; 100 is one core
    - `rss_gib`: memory of this process now

    A sample without a value, because the driver fails, is left out of the mean. If all are, the mean is NaN. No
    failure of the driver stops the block: its function does not call the driver, which may hang.

    Args:
        devices: the JAX devices that learn or act, of this process, whose back end has started.
    """
    indices = {gpus.gpu_index(device) for device in devices if device.platform == "gpu"}
    used = [gpu for index, gpu in enumerate(gpus.visible_gpus().gpus) if index in indices] if indices else []
    process = psutil.Process()
    samples = deque([sample_gpus(used)])
    recent: list[dict[str, float]] = []
    end = threading.Event()
    process.cpu_percent()  # counts from here

    def run() -> None:
        while not end.wait(1.0):
            samples.append(sample_gpus(used))

    def read() -> dict[str, float]:
        nonlocal recent
        recent = [samples.popleft() for _ in range(len(samples))] or recent[-1:]
        means = {}
        for name in GPU_COLUMNS:
            known = [sample[name] for sample in recent if not math.isnan(sample[name])]
            means[name] = float(np.mean(known)) if known else math.nan
        return means | {"cpu_percent": process.cpu_percent(), "rss_gib": process.memory_info().rss / GIB}

    if not used:
        yield read
        return
    thread = threading.Thread(target=run, name="monitor", daemon=True)
    thread.start()
    try:
        yield read
    finally:
        end.set()
        thread.join(timeout=5.0)  # a driver may hang
