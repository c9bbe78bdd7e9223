"""The stand-in for GPUs: JAX's CPU devices, which compute, in processes of tests and in those that they start.

CPU device 0 stays the CPU, and device i + 1 stands in for GPU i, which is 10 i percent busy, holds i GiB of 24,
and draws 100 i W at 30 + i degrees. The fixture `simulate` gives the test's own process such GPUs. A process that
imports this file (`--import tests/simulated_gpus.py`, or the variables of `simulated`) has SIMULATED_GPUS of them.

| variable | meaning |
|---|---|
| SIMULATED_ERROR | the error with which JAX fails to start on them |
| SIMULATED_ABSENT | those without which JAX starts, such as `0,2` |
| SIMULATED_FULL | those whose memory other processes hold |
| SIMULATED_LOST | those of which NVML knows the memory alone |
| SIMULATED_DENIED | those that this process has no permission to use |
| SIMULATED_NO_PLUGIN | set: JAX has no plugin for them |
| SIMULATED_NVML_ERROR | the error of NVML itself |
| SIMULATED_RECORD | a file that gets the settings in force at each start of JAX on them |
"""

import contextlib
import json
import os
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import jax

from jaxrl_atari.hardware import gpus
from jaxrl_atari.hardware.settings import has_started
from jaxrl_atari.imports import IMPORTS_VARIABLE

SETTINGS = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_FLAGS")


def is_listed(index, variable):
    return str(index) in os.environ.get(variable, "").split(",")


def busy(index):
    """How busy GPU `index` is. Tests replace it."""
    return 10 * index


class SimulatedNvml:
    """NVML on a machine with so many GPUs. The handle of a GPU is its index."""

    NVML_ERROR_NO_PERMISSION, NVML_ERROR_NOT_FOUND, NVML_TEMPERATURE_GPU = 4, 6, 0
    NVML_ERROR_DRIVER_NOT_LOADED, NVML_ERROR_LIBRARY_NOT_FOUND = 9, 12

    class NVMLError(Exception):
        @property
        def value(self):
            return self.args[0]

    def __init__(self, count):
        self._count = count

    def nvmlInit(self):
        if "SIMULATED_NVML_ERROR" in os.environ:
            raise self.NVMLError(int(os.environ["SIMULATED_NVML_ERROR"]))

    def nvmlSystemGetDriverVersion(self):
        return "580.1"

    def nvmlDeviceGetCount(self):
        return self._count

    def nvmlDeviceGetHandleByIndex(self, index):
        if is_listed(index, "SIMULATED_DENIED"):
            raise self.NVMLError(self.NVML_ERROR_NO_PERMISSION)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid not in map(self.nvmlDeviceGetUUID, range(self._count)):
            raise self.NVMLError(self.NVML_ERROR_NOT_FOUND)
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetUUID(self, handle):
        return f"GPU-{handle}"

    def nvmlDeviceGetName(self, handle):
        return "simulated GPU"

    def nvmlDeviceGetMemoryInfo(self, handle):
        free = 0 if is_listed(handle, "SIMULATED_FULL") else (24 - handle) << 30
        return SimpleNamespace(total=24 << 30, used=handle << 30, free=free)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return SimpleNamespace(gpu=busy(self._found(handle)))

    def nvmlDeviceGetPowerUsage(self, handle):
        return 100_000 * self._found(handle)

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return 30 + self._found(handle)

    def _found(self, handle):
        if is_listed(handle, "SIMULATED_LOST"):
            raise self.NVMLError(self.NVML_ERROR_NOT_FOUND)
        return handle


def gpu_index(device):
    return device.local_hardware_id - 1


def jax_gpus():
    """The CPU devices that stand in for the visible GPUs, of all processes."""
    count = len(gpus.visible_gpus().gpus)
    if "SIMULATED_RECORD" in os.environ and not has_started():
        settings = {name: os.environ[name] for name in SETTINGS if name in os.environ}
        settings["gpus"] = jax.config.read("jax_cuda_visible_devices")
        with open(os.environ["SIMULATED_RECORD"], "a") as file:
            file.write(json.dumps(settings) + "\n")
    if "SIMULATED_ERROR" in os.environ:
        raise RuntimeError(os.environ["SIMULATED_ERROR"])
    here = jax.process_index()
    processes = groupby(jax.devices("cpu"), key=lambda device: device.process_index)
    return [
        device
        for process, devices in processes
        for device in list(devices)[1 : count + 1]
        if process != here or not is_listed(gpu_index(device), "SIMULATED_ABSENT")
    ]


@contextlib.contextmanager
def simulated_machine(count):
    """Gives this process so many simulated GPUs."""
    replaced = {"nvml": SimulatedNvml(count), "jax_gpus": jax_gpus, "gpu_index": gpu_index,
                "has_cuda_plugin": lambda: "SIMULATED_NO_PLUGIN" not in os.environ}  # fmt: skip
    before = {name: getattr(gpus, name) for name in replaced}
    for name, value in replaced.items():
        setattr(gpus, name, value)
    yield
    for name, value in before.items():
        setattr(gpus, name, value)


def simulated(count, **variables):
    """The variables of a process with so many simulated GPUs."""
    imports = {"SIMULATED_GPUS": str(count), IMPORTS_VARIABLE: json.dumps([os.path.abspath(__file__)])}
    return imports | variables


def starts(path):
    """The settings of each start in a file that SIMULATED_RECORD names."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()] if Path(path).exists() else []


if "SIMULATED_GPUS" in os.environ:
    simulated_machine(int(os.environ["SIMULATED_GPUS"])).__enter__()
    jax.config.update("jax_num_cpu_devices", int(os.environ["SIMULATED_GPUS"]) + 1)
