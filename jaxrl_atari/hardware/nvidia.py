"""NVIDIA's GPUs: NVML lists them, CUDA computes on them.

NVML lists GPUs without a CUDA context and without using their memory. It numbers them as `nvidia-smi` does, and
CUDA is told to do the same (CUDA_DEVICE_ORDER).
"""

import contextlib
import importlib.metadata
import os
from collections.abc import Collection
from functools import cache
from typing import Any

import jax
import pynvml

from jaxrl_atari.errors import require
from jaxrl_atari.hardware.gpu_interface import Gpu, VisibleGpus, obey_cuda_visible_devices
from jaxrl_atari.hardware.jax_settings import (
    environment_variables,
    has_started_on_gpu,
    jax_config,
    jax_options,
)

nvml: Any = pynvml  # its type annotations are incomplete

MEMORY_TO_START = 0.5 * 2**30
"""Free memory of a GPU in bytes, below which CUDA may not start: about that of a context."""


class NvidiaGpus:
    """The `GpuProvider` of a machine with NVIDIA's GPUs, or without a GPU."""

    def __init__(self) -> None:
        self._why_forbidden: str | None = None  # None: JAX may start on a GPU

    def visible_gpus(self) -> VisibleGpus:
        """See `GpuProvider`. CUDA_VISIBLE_DEVICES may name GPUs by index or UUID."""
        if self._why_forbidden is not None:
            return VisibleGpus((), self._why_forbidden)
        platforms = jax_config.jax_platforms
        if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
            return VisibleGpus((), f"JAX may use only the platform {platforms} (JAX_PLATFORMS)")
        try:
            _start_nvml()
            _number_gpus_as_nvml()
            gpus, errors = _readable_gpus()
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
                return VisibleGpus((), "there is no NVIDIA driver")
            return VisibleGpus((), f"NVML failed: {error}", "driver")
        if errors and not gpus:
            return VisibleGpus((), f"NVML failed: {errors[0]}", "driver")
        found = obey_cuda_visible_devices(gpus, _mig_slice)._replace(failing=tuple(errors))
        slices = [each for gpu in found.gpus for each in _mig_slices(gpu)]
        if slices:  # by NVIDIA's MIG guide, CUDA shows the first slice alone, and hides the other GPUs
            found = found._replace(gpus=(slices[0],))
        if found.gpus and not any("cuda" in name for name in _jax_plugins()):
            install = "pip install 'jaxrl_atari[cuda12]' (or cuda13, with driver 580 or newer)"
            return VisibleGpus((), f"JAX's CUDA plugin is not installed; {install}", "plugin", found.failing)
        return found

    def forbid(self, why: str) -> None:
        """See `GpuProvider`. The first reason stays."""
        if self._why_forbidden is None:
            self._why_forbidden = why

    def limit(self, used: Collection[int]) -> None:
        """See `GpuProvider`.

        If all visible GPUs are used, `jax_cuda_visible_devices` is left as it is: `all`, or what `jax.distributed`
        has set.
        """
        if len(used) < len(self.visible_gpus().gpus):
            jax_options.set_for_session("jax_cuda_visible_devices", ",".join(map(str, sorted(used))))
        platforms = jax_config.jax_platforms
        if platforms and "cpu" not in platforms:  # where the first parameters are computed
            jax_options.set_for_process("jax_platforms", f"{platforms},cpu")

    def start(self) -> list[jax.Device]:
        """See `GpuProvider`."""
        return jax.devices("gpu")

    def started_gpus(self) -> list[jax.Device]:
        """See `GpuProvider`."""
        if has_started_on_gpu():
            with contextlib.suppress(RuntimeError):  # JAX has started on another kind of accelerator
                return jax.devices("gpu")
        return []

    def is_full(self, gpu: Gpu) -> bool:
        """See `GpuProvider`. A GPU whose free memory NVML does not tell is not full."""
        try:
            free = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)).free
        except nvml.NVMLError:
            return False
        return free < MEMORY_TO_START

    def index(self, device: jax.Device) -> int:
        """See `GpuProvider`. `local_hardware_id` is CUDA's index, which also counts GPUs that JAX may not use."""
        return device.local_hardware_id


@cache
def _start_nvml() -> None:
    """Starts NVML in this process."""
    nvml.nvmlInit()


@cache
def _number_gpus_as_nvml() -> None:
    """Makes CUDA number the GPUs as NVML does. By default, CUDA numbers the fastest GPU first.

    Raises:
        ConfigError: the user has chosen another order for CUDA, or GPUs in JAX's config.
    """
    in_jax = jax_config.read("jax_cuda_visible_devices")  # later, `limit` and `jax.distributed` set it
    hint = "choose GPUs with CUDA_VISIBLE_DEVICES or devices.gpu"
    require(in_jax == "all", "jax_cuda_visible_devices", in_jax, "all", hint)
    order = os.environ.get("CUDA_DEVICE_ORDER") or "PCI_BUS_ID"
    hint = "unset it, and choose GPUs by the indices or UUIDs of nvidia-smi"
    require(order == "PCI_BUS_ID", "CUDA_DEVICE_ORDER", order, "PCI_BUS_ID", hint)
    environment_variables.set_for_process("CUDA_DEVICE_ORDER", order)


def _readable_gpus() -> tuple[list[Gpu], list[str]]:
    """The GPUs of this machine that NVML can read, in the order of their indices, and the errors of the others.

    A GPU without permission, in a container or in a job on a cluster, is no error where another one is permitted.
    The indices leave it out, as those of CUDA do.
    """
    gpus, denied, errors = [], [], []
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


def _mig_slices(gpu: Gpu) -> list[Gpu]:
    """The slices of a GPU in MIG mode; none of a GPU in another mode, or of a slice."""
    slices = []
    with contextlib.suppress(nvml.NVMLError):
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(nvml.NVMLError):  # there is no slice of this number
                slices.append(_gpu(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)))
    return slices


def _mig_slice(name: str) -> Gpu | None:
    """The slice with this UUID; None for another name."""
    if name.startswith("MIG-"):
        with contextlib.suppress(nvml.NVMLError):  # there is no slice of that name
            return _gpu(nvml.nvmlDeviceGetHandleByUUID(name))
    return None


def _jax_plugins() -> list[str]:
    return [plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")]


def gpu_packages() -> dict[str, str]:
    """The versions of the installed packages with which JAX computes on GPUs, by their names, which are sorted.

    They are JAX's plugin, and NVIDIA's libraries such as cuDNN and cuBLAS. nvidia-ml-py (NVML) computes nothing.
    """
    # A broken package has no name.
    installed = {package.name or "": package.version for package in importlib.metadata.distributions()}
    prefixes = ("jax-cuda", "nvidia-")
    names = sorted(name for name in installed if name.startswith(prefixes) and name != "nvidia-ml-py")
    return {name: installed[name] for name in names}


def driver_version() -> str | None:
    """Version of the NVIDIA driver; None without a driver."""
    with contextlib.suppress(nvml.NVMLError):
        _start_nvml()
        return nvml.nvmlSystemGetDriverVersion()
    return None
