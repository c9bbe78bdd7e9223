"""NVIDIA's GPUs: which of them this process may use, their memory, and what they do now.

NVML lists GPUs without a CUDA context and without using their memory. It numbers them as `nvidia-smi` does, and
CUDA is told to do the same (CUDA_DEVICE_ORDER). Only this module asks NVML, and JAX for its GPUs.

Tests replace `nvml`, `jax_gpus`, `gpu_index` and `has_cuda_plugin`: other modules call them as `gpus.jax_gpus()`.
"""

import contextlib
import importlib.metadata
import math
import os
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import pynvml

from jaxrl_atari.errors import require
from jaxrl_atari.hardware.settings import has_started, jax_config

nvml: Any = pynvml  # its type annotations are incomplete

MEMORY_TO_START = 0.5 * 2**30
"""Free memory of a GPU in bytes, below which CUDA may not start: about that of a context."""


class Gpu(NamedTuple):
    """A GPU that this process may use."""

    uuid: str  # of the GPU or MIG slice, as in CUDA_VISIBLE_DEVICES
    model: str
    memory: int  # in bytes; 0 if unknown


class VisibleGpus(NamedTuple):
    """The GPUs that this process may use, in the order of their indices."""

    gpus: tuple[Gpu, ...]
    why_none: str = ""  # why `gpus` is empty
    failures: tuple[str, ...] = ()  # what keeps this process from GPUs that are there, which have no index


def visible_gpus() -> VisibleGpus:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves of those of this machine. Starts no back end of JAX.

    Raises:
        ConfigError: CUDA_DEVICE_ORDER is another order than NVML's, or CUDA_VISIBLE_DEVICES names a GPU twice.
    """
    platforms = jax_config.jax_platforms
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return VisibleGpus((), f"JAX may use only the platform {platforms} (jax_platforms)")
    try:
        nvml.nvmlInit()
        order = os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
        require(order == "PCI_BUS_ID", "CUDA_DEVICE_ORDER", order, "PCI_BUS_ID, the order of nvidia-smi")
        gpus, failures = _gpus_of_machine()
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
            return VisibleGpus((), "there is no NVIDIA driver")
        return VisibleGpus((), f"NVML failed: {error}", (f"NVML failed: {error}",))
    if not gpus:
        return VisibleGpus((), "; ".join(failures) or "this machine has no GPU", tuple(failures))
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    left = gpus if names is None else _named_gpus(gpus, names)
    if not left:
        return VisibleGpus((), f"CUDA_VISIBLE_DEVICES={names!r} leaves none", tuple(failures))
    if not has_cuda_plugin():
        install = "pip install 'jaxrl_atari[cuda12]' (or cuda13, with driver 580 or newer)"
        why_none = f"JAX's CUDA plugin is not installed; {install}"
        return VisibleGpus((), why_none, (*failures, why_none))
    return VisibleGpus(tuple(left), failures=tuple(failures))


def _gpus_of_machine() -> tuple[list[Gpu], list[str]]:
    """The GPUs that NVML can read, in the order of their indices, and the errors of the others.

    A GPU without permission, in a container or in a job on a cluster, is no error where another one is permitted.
    The indices of CUDA leave it out, too.
    """
    gpus, errors, denied = [], [], []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            gpus.append(_gpu(nvml.nvmlDeviceGetHandleByIndex(index)))
        except nvml.NVMLError as error:
            is_denied = error.value == nvml.NVML_ERROR_NO_PERMISSION
            (denied if is_denied else errors).append(f"GPU {index}: {error}")
    return gpus, errors if gpus else errors + denied


def _gpu(handle: Any) -> Gpu:
    memory = 0
    with contextlib.suppress(nvml.NVMLError):  # a GPU that shares its CPU's memory reports none
        memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
    return Gpu(nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle), memory)


def _named_gpus(gpus: list[Gpu], names: str) -> list[Gpu]:
    """The GPUs that CUDA_VISIBLE_DEVICES names: by index, by UUID or the start of one, or MIG slices by UUID.

    As in CUDA, the first unknown name ends the list.
    """
    found: list[Gpu] = []
    for name in map(str.strip, names.split(",")):
        starting_so = [gpu for gpu in gpus if name and gpu.uuid.startswith(name)]
        if name.isascii() and name.isdecimal() and int(name) < len(gpus):
            gpu = gpus[int(name)]
        elif len(starting_so) == 1:
            gpu = starting_so[0]
        else:
            try:
                gpu = _gpu(nvml.nvmlDeviceGetHandleByUUID(name))
            except nvml.NVMLError:
                break
        require(gpu not in found, "CUDA_VISIBLE_DEVICES", names, "each GPU at most once")  # CUDA would show none
        found.append(gpu)
    return found


def has_cuda_plugin() -> bool:
    """Whether JAX's plugin for CUDA is installed."""
    return any("cuda" in plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins"))


def jax_gpus() -> list[jax.Device]:
    """The GPUs of all processes. Starts JAX; raises RuntimeError if it cannot start on a GPU."""
    return jax.devices("gpu")


def gpu_index(device: jax.Device) -> int:
    """The index, among the visible GPUs, of one of `jax_gpus` that this process has.

    It is CUDA's index, which also counts GPUs to which JAX is not limited.
    """
    return device.local_hardware_id


def own_gpus() -> dict[int, jax.Device]:
    """The GPUs of this process by their indices. One may be missing: JAX may have started without it.

    Starts JAX; raises RuntimeError if it cannot start on a GPU.
    """
    return {gpu_index(gpu): gpu for gpu in jax_gpus() if gpu.process_index == jax.process_index()}


def started_gpus() -> tuple[int, ...]:
    """The indices of the GPUs on which JAX has started in this process, to which it keeps; empty before."""
    if has_started():
        with contextlib.suppress(RuntimeError):  # it has started on the CPU alone
            return tuple(sorted(own_gpus()))
    return ()


def limit_to_gpus(used: Collection[int]) -> None:
    """Lets JAX start only on the visible GPUs with these indices. Call it before JAX starts."""
    if not jax.distributed.is_initialized():  # which has limited it
        jax_config.update("jax_cuda_visible_devices", ",".join(map(str, sorted(used))))
    platforms = jax_config.jax_platforms
    if platforms and "cpu" not in platforms:  # where the first parameters are computed
        jax_config.update("jax_platforms", f"{platforms},cpu")


def limit_to_cpu() -> None:
    """Keeps JAX off the GPUs, so that it takes none of their memory. Once JAX has started, it does nothing."""
    if not has_started():
        jax_config.update("jax_platforms", "cpu")


def is_full(gpu: Gpu) -> bool:
    """Whether other processes have left too little memory on a GPU for JAX to start."""
    try:
        return nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)).free < MEMORY_TO_START
    except nvml.NVMLError:  # NVML does not tell
        return False


def read_gpu(gpu: Gpu) -> dict[str, float]:
    """What a GPU does now, by columns of a log point; NaN where the driver reports nothing. The driver may hang.

    The memory is that of all processes. Of a MIG slice, NVML knows the memory alone.
    """

    def value(ask: Callable[[Any], float]) -> float:
        try:
            return float(ask(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)))
        except nvml.NVMLError:
            return math.nan

    return {
        "gpu_busy_percent": value(lambda handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
        "gpu_memory_gib": value(lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).used) / 2**30,
        "gpu_power_watts": value(nvml.nvmlDeviceGetPowerUsage) / 1000,  # NVML has milliwatts
        "gpu_temperature_c": value(
            lambda handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
        ),
    }


def driver_version() -> str | None:
    """Version of the driver; None without a driver."""
    with contextlib.suppress(nvml.NVMLError):
        nvml.nvmlInit()
        return nvml.nvmlSystemGetDriverVersion()
    return None


def gpu_packages() -> dict[str, str]:
    """The versions of JAX's plugin and of NVIDIA's libraries, such as cuDNN and cuBLAS, by their names, sorted."""
    # A broken package has no name.
    installed = {package.name or "": package.version for package in importlib.metadata.distributions()}
    # nvidia-ml-py (NVML) computes nothing.
    names = [name for name in installed if name.startswith(("jax-cuda", "nvidia-")) and name != "nvidia-ml-py"]
    return {name: installed[name] for name in sorted(names)}
