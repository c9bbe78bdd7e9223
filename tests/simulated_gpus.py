"""The stand-in for GPUs: JAX's CPU devices, which compute, in processes of tests and in those that they start.

CPU device 0 stays the CPU, and device i + 1 stands in for GPU i, which is 10 i percent busy, holds i GiB of 24,
and draws 100 i W at 30 + i degrees. The fixture `simulate` gives the test's own process such GPUs. A process that
imports this file (`--import tests/simulated_gpus.py`, or the variables of `simulated`) has SIMULATED_GPUS of them.

| variable | meaning |
|---|---|
| SIMULATED_ERROR | the error with which JAX fails to start on them |
| SIMULATED_ABSENT | those without which JAX starts, such as `0,2` |
| SIMULATED_FULL | those whose memory other processes hold |
| SIMULATED_RECORD | a file that gets the settings in force at each start of JAX on them |
"""

import contextlib
import json
import os
from itertools import groupby
from pathlib import Path

import jax

from jaxrl_atari.hardware.gpu_interface import Gpu, GpuReading, obey_cuda_visible_devices
from jaxrl_atari.hardware.gpus import use_provider
from jaxrl_atari.hardware.jax_settings import has_started, jax_config
from jaxrl_atari.imports import IMPORTS_VARIABLE

SETTINGS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_FLAGS")


def listed(variable):
    return os.environ.get(variable, "").split(",")


def read(index):
    """What GPU `index` does now. Tests replace it."""
    return GpuReading(10.0 * index, float(index), 100.0 * index, 30.0 + index)


class SimulatedGpus:
    """A `GpuProvider` with so many GPUs; CUDA_VISIBLE_DEVICES counts."""

    def __init__(self, count):
        self._gpus = [Gpu(f"GPU-{index}", "simulated GPU", 24 << 30) for index in range(count)]
        self._limit = "all"

    def visible_gpus(self):
        return obey_cuda_visible_devices(self._gpus)

    def forbid(self, why):
        """Nothing: in one process, a test without GPUs may come before one with some."""

    def limit(self, used):
        in_jax = jax_config.read("jax_cuda_visible_devices")
        self._limit = ",".join(map(str, used)) if len(used) < len(self.visible_gpus().gpus) else in_jax
        with contextlib.suppress(RuntimeError):  # JAX has started already and keeps its devices
            jax_config.update("jax_num_cpu_devices", len(self.visible_gpus().gpus) + 1)

    def start(self):
        if "SIMULATED_RECORD" in os.environ:
            settings = {name: os.environ[name] for name in SETTINGS if name in os.environ}
            settings |= {"gpus": self._limit, "in time": not has_started()}
            with open(os.environ["SIMULATED_RECORD"], "a") as file:
                file.write(json.dumps(settings) + "\n")
        if "SIMULATED_ERROR" in os.environ:
            raise RuntimeError(os.environ["SIMULATED_ERROR"])
        processes = groupby(jax.devices("cpu"), key=lambda device: device.process_index)
        count = len(self.visible_gpus().gpus)
        return [
            device
            for _, devices in processes
            for device in list(devices)[1 : count + 1]
            if device.process_index != jax.process_index()
            or str(self.index(device)) not in listed("SIMULATED_ABSENT")
        ]

    def started_gpus(self):
        return self.start() if has_started() and "SIMULATED_ERROR" not in os.environ else []

    def is_full(self, gpu):
        return gpu.uuid.removeprefix("GPU-") in listed("SIMULATED_FULL")

    def read(self, gpu):
        return read(int(gpu.uuid.removeprefix("GPU-")))

    def driver_version(self):
        return None

    def packages(self):
        return {}

    def index(self, device):
        return device.local_hardware_id - 1


def simulated(count, **variables):
    """The variables of a process with so many simulated GPUs."""
    imports = {"SIMULATED_GPUS": str(count), IMPORTS_VARIABLE: json.dumps([os.path.abspath(__file__)])}
    return imports | variables


def starts(path):
    """The settings of each start in a file that SIMULATED_RECORD names."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()] if Path(path).exists() else []


if "SIMULATED_GPUS" in os.environ:
    use_provider(SimulatedGpus(int(os.environ["SIMULATED_GPUS"])))
