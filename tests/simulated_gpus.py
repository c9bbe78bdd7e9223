"""JAX's CPU devices in place of GPUs, which compute: `SimulatedGpus` for this process, `simulated` for others.

A process that imports this file (`--import tests/simulated_gpus.py`, or the variable that `simulated` sets) has
SIMULATED_GPUS of them. CPU device 0 stays the CPU, and device i + 1 stands in for GPU i.
"""

import contextlib
import json
import math
import os
from itertools import groupby

import jax

from jaxrl_atari.hardware.gpu_interface import Gpu, GpuReading, obey_cuda_visible_devices
from jaxrl_atari.hardware.gpus import use_provider
from jaxrl_atari.hardware.jax_settings import has_started, jax_config
from jaxrl_atari.imports.children import IMPORTS_VARIABLE


class SimulatedGpus:
    """A `GpuProvider` with so many GPUs; CUDA_VISIBLE_DEVICES counts."""

    def __init__(self, count):
        self._gpus = [Gpu(str(index), "simulated GPU", 0) for index in range(count)]

    def visible_gpus(self):
        return obey_cuda_visible_devices(self._gpus)

    def forbid(self, why):
        """Nothing: in one process, a test without GPUs may come before one with some."""

    def limit(self, used):
        with contextlib.suppress(RuntimeError):  # JAX has started already and keeps its devices
            jax_config.update("jax_num_cpu_devices", len(self.visible_gpus().gpus) + 1)

    def start(self):
        processes = groupby(jax.devices("cpu"), key=lambda device: device.process_index)
        count = len(self.visible_gpus().gpus)
        return [device for _, devices in processes for device in list(devices)[1 : count + 1]]

    def started_gpus(self):
        return self.start() if has_started() else []

    def is_full(self, gpu):
        return False

    def read(self, gpu):
        return GpuReading(*[math.nan] * 4)

    def driver_version(self):
        return None

    def packages(self):
        return {}

    def index(self, device):
        return device.local_hardware_id - 1


def simulated(count):
    """The variables of a process with so many simulated GPUs."""
    return {"SIMULATED_GPUS": str(count), IMPORTS_VARIABLE: json.dumps([os.path.abspath(__file__)])}


if "SIMULATED_GPUS" in os.environ:
    use_provider(SimulatedGpus(int(os.environ["SIMULATED_GPUS"])))
