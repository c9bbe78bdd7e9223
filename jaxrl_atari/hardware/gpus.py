"""The GPUs that this process may use, found before JAX starts its back end.

NVML shows them without a CUDA context and without any of their memory. It counts as `nvidia-smi` does, and CUDA is
told to count likewise. For tests, JAXRL_ATARI_SIMULATED_GPUS=N makes CPU devices of JAX stand in for N GPUs.
"""

import contextlib
import importlib.metadata
import os
from functools import cache
from typing import Any, NamedTuple

import jax
import pynvml

from jaxrl_atari.hardware.runtime import jax_config, read_cpu

nvml: Any = pynvml  # its type annotations are incomplete
SIMULATED = "JAXRL_ATARI_SIMULATED_GPUS"
NVML_FAILED = "NVML failed"
forbidden_because = ""  # set by `forbid_gpu`


class Gpu(NamedTuple):
    """A GPU that this process may use."""

    name: str  # in CUDA_VISIBLE_DEVICES: the UUID of a GPU or MIG slice, the index of a simulated GPU
    model: str
    memory: int  # bytes; 0: unknown


class Visible(NamedTuple):
    """The GPUs that this process may use, in the order of their indices, and the reason if there are none."""

    gpus: tuple[Gpu, ...]
    problem: str = ""


def visible() -> Visible:
    """The GPUs that JAX could use in this process: those that CUDA_VISIBLE_DEVICES leaves, by index or UUID."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    platforms = jax_config.jax_platforms
    real = simulated_count() is None
    if real and forbidden_because:
        return Visible((), forbidden_because)
    if real and platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return Visible((), f"JAX may use only the platform {platforms} (JAX_PLATFORMS)")
    try:
        gpus = _gpus_of_machine()
        if names is not None:
            gpus = _named(names, gpus)
    except nvml.NVMLError as error:
        missing = error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return Visible((), "there is no NVIDIA driver" if missing else f"{NVML_FAILED}: {error}")
    if not gpus:
        return Visible(
            (), "this machine has no GPU" if names is None else f"CUDA_VISIBLE_DEVICES={names!r} leaves none"
        )
    if real and not any("cuda" in plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")):
        return Visible((), "JAX's CUDA plugin is not installed; pip install 'jaxrl_atari[cuda12]'")
    return Visible(tuple(gpus))


def simulated_count() -> int | None:
    """The value of JAXRL_ATARI_SIMULATED_GPUS, None if it is not set."""
    text = os.environ.get(SIMULATED)
    return int(text) if text else None


@cache
def _start_nvml() -> None:
    nvml.nvmlInit()
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # CUDA counts the fastest GPU first, unless told otherwise


def _gpus_of_machine() -> list[Gpu]:
    if (count := simulated_count()) is not None:
        return [Gpu(str(index), "simulated GPU", 0) for index in range(count)]
    _start_nvml()
    return [_gpu(nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(nvml.nvmlDeviceGetCount())]


def _gpu(handle: Any) -> Gpu:
    memory = 0
    with contextlib.suppress(nvml.NVMLError):  # a GPU that shares the memory of its CPU reports none
        memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
    return Gpu(nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle), memory)


def _named(names: str, gpus: list[Gpu]) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES names. As in CUDA, the first unknown name ends the list."""
    chosen = []
    for name in map(str.strip, names.split(",")):
        found = [gpu for i, gpu in enumerate(gpus) if name == str(i) or gpu.name.startswith(name or "-")]
        if name.startswith("MIG-"):
            found = [_gpu(nvml.nvmlDeviceGetHandleByUUID(name))]
        if not found:
            break
        chosen.append(found[0])
    return chosen


def forbid_gpu(reason: str = "this process needs none") -> None:
    """Keeps JAX off the GPUs: no back end starts there and no memory is taken. Call before JAX starts its back end."""
    global forbidden_because
    forbidden_because = forbidden_because or reason
    jax_config.update("jax_platforms", "cpu")


def driver_version() -> str | None:
    """Version of the NVIDIA driver, None without one."""
    with contextlib.suppress(nvml.NVMLError):
        _start_nvml()
        return nvml.nvmlSystemGetDriverVersion()
    return None


def network_platform(*devices: jax.Device) -> str:
    """The platform for which `make_network` makes a network: how it computes bfloat16 decides arithmetic and chunks.

    "amx cpu" (it has AVX512-BF16 and AMX), "bfloat16 cpu" (AVX512-BF16 alone) or "cpu"; "gpu" (it has bfloat16 units)
    or "old gpu" (before Ampere). If several devices compute one network together, one old GPU decides.
    """
    gpus = [device for device in devices if device.platform == "gpu"]
    if any(float(getattr(gpu, "compute_capability", 8)) < 8 for gpu in gpus):  # another process's GPU may have none
        return "old gpu"
    sets = read_cpu().instruction_sets
    platform = devices[0].platform
    if platform != "cpu" or "BF16" not in sets:
        return platform
    return "amx cpu" if "AMX" in sets else "bfloat16 cpu"
