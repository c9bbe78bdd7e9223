"""NVIDIA's GPUs: NVML lists and reads them, CUDA computes on them. Only this module asks NVML.

NVML lists GPUs without a CUDA context and without using their memory. It numbers them as `nvidia-smi` does, and
CUDA is told to do the same (CUDA_DEVICE_ORDER).
"""

import contextlib
import importlib.metadata
import math
import os
from collections.abc import Callable, Collection
from functools import cache
from typing import Any

import jax
import pynvml

from jaxrl_atari.errors import require
from jaxrl_atari.hardware.gpu_interface import Gpu, GpuReading, VisibleGpus, obey_cuda_visible_devices
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
            _check_choice_in_jax()
            _number_gpus_as_nvml()
            gpus, errors = _readable_gpus()
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
                return VisibleGpus((), "there is no NVIDIA driver")
            return _driver_fails(error)
        if errors and not gpus:
            return _driver_fails(errors[0])
        visible = obey_mig(obey_cuda_visible_devices(gpus, _slice_of_uuid))._replace(failures=tuple(errors))
        if visible.gpus and not any("cuda" in name for name in _jax_plugins()):
            install = "pip install 'jaxrl_atari[cuda12]' (or cuda13, with driver 580 or newer)"
            why = f"JAX's CUDA plugin is not installed; {install}"
            return VisibleGpus((), why, visible.failures, lacks_plugin=True)
        return visible

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

    def read(self, gpu: Gpu) -> GpuReading:
        """See `GpuProvider`. NVML knows the memory alone of a MIG slice."""

        def value(ask: Callable[[Any], float]) -> float:
            try:
                return float(ask(nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)))
            except nvml.NVMLError:
                return math.nan

        return GpuReading(
            gpu_busy_percent=value(lambda handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            gpu_memory_gib=value(lambda handle: nvml.nvmlDeviceGetMemoryInfo(handle).used) / 2**30,
            gpu_power_watts=value(nvml.nvmlDeviceGetPowerUsage) / 1000,  # NVML has milliwatts
            gpu_temperature_c=value(
                lambda handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
        )

    def driver_version(self) -> str | None:
        """See `GpuProvider`."""
        with contextlib.suppress(nvml.NVMLError):
            _start_nvml()
            return nvml.nvmlSystemGetDriverVersion()
        return None

    def packages(self) -> dict[str, str]:
        """See `GpuProvider`. They are JAX's plugin, and NVIDIA's libraries such as cuDNN and cuBLAS."""
        # A broken package has no name.
        installed = {package.name or "": package.version for package in importlib.metadata.distributions()}
        prefixes = ("jax-cuda", "nvidia-")
        # nvidia-ml-py (NVML) computes nothing.
        names = sorted(name for name in installed if name.startswith(prefixes) and name != "nvidia-ml-py")
        return {name: installed[name] for name in names}

    def index(self, device: jax.Device) -> int:
        """See `GpuProvider`. `local_hardware_id` is CUDA's index, which also counts GPUs that JAX may not use."""
        return device.local_hardware_id


@cache
def _start_nvml() -> None:
    """Starts NVML in this process."""
    nvml.nvmlInit()


@cache  # asked once, because `limit` and `jax.distributed` set this option of JAX later
def _check_choice_in_jax() -> None:
    """Raises `ConfigError` if the user has chosen GPUs in JAX's config."""
    in_jax = jax_config.read("jax_cuda_visible_devices")
    hint = "choose GPUs with CUDA_VISIBLE_DEVICES or devices.gpu"
    require(in_jax == "all", "jax_cuda_visible_devices", in_jax, "all", hint)


def _number_gpus_as_nvml() -> None:
    """Makes CUDA number the GPUs as NVML does. By default, CUDA numbers the fastest GPU first.

    Raises:
        ConfigError: the user has chosen another order for CUDA.
    """
    order = os.environ.get("CUDA_DEVICE_ORDER") or "PCI_BUS_ID"
    hint = "unset it, and choose GPUs by the indices or UUIDs of nvidia-smi"
    require(order == "PCI_BUS_ID", "CUDA_DEVICE_ORDER", order, "PCI_BUS_ID", hint)
    environment_variables.set_for_process("CUDA_DEVICE_ORDER", order)


def _driver_fails(error: nvml.NVMLError | str) -> VisibleGpus:
    """The GPUs of a machine whose driver fails: none."""
    why = f"NVML failed: {error}"
    return VisibleGpus((), why, failures=(why,))


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


def obey_mig(visible: VisibleGpus) -> VisibleGpus:
    """What CUDA makes of GPUs of which some are in MIG mode, or are slices. It shows a process a single slice.

    | among the GPUs is | a session sees | several sessions in processes of their own see |
    |---|---|---|
    | a GPU in MIG mode | its first slice | the same |
    | a slice, which CUDA_VISIBLE_DEVICES names | the first of the GPUs and slices | one each |
    | neither | all | all |

    Args:
        visible: the GPUs and slices that CUDA_VISIBLE_DEVICES leaves.
    """
    slices = [each for gpu in visible.gpus for each in _slices_of(gpu)]
    if slices:
        return visible._replace(gpus=(slices[0],), one_per_process=True)
    return visible._replace(one_per_process=any(gpu.uuid.startswith("MIG-") for gpu in visible.gpus))


def _slices_of(gpu: Gpu) -> list[Gpu]:
    """The slices of a GPU in MIG mode; none of a GPU in another mode, or of a slice."""
    slices = []
    with contextlib.suppress(nvml.NVMLError):
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(nvml.NVMLError):  # there is no slice of this number
                slices.append(_gpu(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)))
    return slices


def _slice_of_uuid(name: str) -> Gpu | None:
    """The slice with this UUID; None for another name."""
    if name.startswith("MIG-"):
        with contextlib.suppress(nvml.NVMLError):  # there is no slice of that name
            return _gpu(nvml.nvmlDeviceGetHandleByUUID(name))
    return None


def _jax_plugins() -> list[str]:
    return [plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")]
