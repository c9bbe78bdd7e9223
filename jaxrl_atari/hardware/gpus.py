"""The GPUs that this process may use, found before JAX starts its back end.

NVML shows them without a CUDA context and without any of their memory. It counts as `nvidia-smi` does, and CUDA is
told to count likewise. Tests replace NVML and CUDA by a `Provider` of their own (`use_provider`).
"""

import contextlib
import importlib.metadata
import os
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol

import jax
import pynvml

from jaxrl_atari.hardware.runtime import jax_config, read_cpu
from jaxrl_atari.imports import import_inherited

nvml: Any = pynvml  # its type annotations are incomplete


class Gpu(NamedTuple):
    """A GPU that this process may use."""

    name: str  # in CUDA_VISIBLE_DEVICES: the UUID of a GPU or MIG slice
    model: str
    memory: int  # bytes; 0: unknown


class Visible(NamedTuple):
    """The GPUs that this process may use, in the order of their indices, and the reason if there are none."""

    gpus: tuple[Gpu, ...]
    problem: str = ""
    fault: Literal["none", "unused", "failed"] = "none"
    """`failed`: a driver or a device; `unused`: a GPU is there, and the software for it is not installed."""


# --- Where GPUs come from ----------------------------------------------------------------------------------------


class Provider(Protocol):
    """The GPUs of this machine and the way in which JAX starts on them."""

    def visible(self) -> Visible:
        """The GPUs that JAX could use in this process. Starts no back end."""
        ...

    def forbid(self, reason: str) -> None:
        """Keeps JAX off the GPUs. `visible` gives the reason from then on."""
        ...

    def limit(self, used: Collection[int]) -> None:
        """Lets JAX start on these GPUs alone, given by their indices in `visible`."""
        ...

    def start(self) -> list[jax.Device]:
        """Starts JAX. Returns its GPUs, of all processes. Raises RuntimeError if it cannot start on them."""
        ...

    def index(self, device: jax.Device) -> int:
        """The index in `visible` of a device that `start` returned and that belongs to this process."""
        ...


class Nvidia:
    """NVIDIA's GPUs: NVML shows them, CUDA computes on them. A `Provider`."""

    def __init__(self) -> None:
        self._forbidden_because = ""

    def visible(self) -> Visible:
        """Those that CUDA_VISIBLE_DEVICES leaves, by index or UUID."""
        if self._forbidden_because:
            return Visible((), self._forbidden_because)
        platforms = jax_config.jax_platforms
        if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
            return Visible((), f"JAX may use only the platform {platforms} (JAX_PLATFORMS)")
        try:
            _start_nvml()
            handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
            found = left_visible([_gpu(handle) for handle in handles], _mig_slice)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_LIBRARY_NOT_FOUND, nvml.NVML_ERROR_DRIVER_NOT_LOADED):
                return Visible((), "there is no NVIDIA driver")
            return Visible((), f"NVML failed: {error}", "failed")
        if found.gpus and not any("cuda" in name for name in _jax_plugins()):
            return Visible((), "JAX's CUDA plugin is not installed; pip install 'jaxrl_atari[cuda12]'", "unused")
        return found

    def forbid(self, reason: str) -> None:
        """See `Provider`. The first reason stays."""
        self._forbidden_because = self._forbidden_because or reason

    def limit(self, used: Collection[int]) -> None:
        """See `Provider`."""
        if len(used) < len(self.visible().gpus):
            jax_config.update("jax_cuda_visible_devices", ",".join(map(str, sorted(used))))
        platforms = jax_config.jax_platforms
        if platforms and "cpu" not in platforms:  # where the first parameters are computed
            jax_config.update("jax_platforms", f"{platforms},cpu")

    def start(self) -> list[jax.Device]:
        """See `Provider`."""
        return jax.devices("gpu")

    def index(self, device: jax.Device) -> int:
        """See `Provider`. JAX counts GPUs as CUDA does, even those that it was kept from."""
        return device.local_hardware_id


_provider: Provider = Nvidia()


def use_provider(provider: Provider) -> Provider:
    """Makes this process take its GPUs from `provider`. Returns the one that was in use. For tests."""
    global _provider
    before = _provider
    _provider = provider
    return before


def gpu_provider() -> Provider:
    """Where this process takes its GPUs from: NVIDIA's driver, unless `use_provider` has set another one."""
    import_inherited()  # a file of the tests, which calls `use_provider` in the processes that a command starts
    return _provider


def visible() -> Visible:
    """The GPUs that JAX could use in this process."""
    return gpu_provider().visible()


def forbid_gpu(reason: str = "this process needs none") -> None:
    """Keeps JAX off the GPUs: no back end starts there and no memory is taken. Call before JAX starts its back
    end."""
    gpu_provider().forbid(reason)
    jax_config.update("jax_platforms", "cpu")


def left_visible(gpus: Sequence[Gpu], find: Callable[[str], Gpu | None] = lambda name: None) -> Visible:
    """The GPUs of a machine that CUDA_VISIBLE_DEVICES leaves. As in CUDA, the first unknown name ends the list.

    Args:
        gpus: all of the machine, in the order of their indices.
        find: gives the GPU for a name that is neither an index nor the start of a name of `gpus`, or None.
    """
    if not gpus:
        return Visible((), "this machine has no GPU")
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return Visible(tuple(gpus))
    chosen = []
    for name in map(str.strip, names.split(",")):
        numbered = gpus[int(name)] if name.isdecimal() and int(name) < len(gpus) else None
        named = next((gpu for gpu in gpus if name and gpu.name.startswith(name)), None)
        found = numbered or named or find(name)
        if found is None:
            break
        chosen.append(found)
    return Visible(tuple(chosen), "" if chosen else f"CUDA_VISIBLE_DEVICES={names!r} leaves none")


@cache
def _start_nvml() -> None:
    nvml.nvmlInit()
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # CUDA counts the fastest GPU first, unless told otherwise


def _gpu(handle: Any) -> Gpu:
    memory = 0
    with contextlib.suppress(nvml.NVMLError):  # a GPU that shares the memory of its CPU reports none
        memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
    return Gpu(nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle), memory)


def _mig_slice(name: str) -> Gpu | None:
    return _gpu(nvml.nvmlDeviceGetHandleByUUID(name)) if name.startswith("MIG-") else None


def _jax_plugins() -> list[str]:
    return [plugin.name for plugin in importlib.metadata.entry_points(group="jax_plugins")]


# --- What GPUs are -----------------------------------------------------------------------------------------------


def driver_version() -> str | None:
    """Version of the NVIDIA driver, None without one."""
    with contextlib.suppress(nvml.NVMLError):
        _start_nvml()
        return nvml.nvmlSystemGetDriverVersion()
    return None


def network_platform(*devices: jax.Device) -> str:
    """The platform for which `make_network` makes a network: how it computes bfloat16 decides arithmetic and
    chunks.

    "amx cpu" (it has AVX512-BF16 and AMX), "bfloat16 cpu" (AVX512-BF16 alone) or "cpu"; "gpu" (it has bfloat16
    units) or "old gpu" (before Ampere). If several devices compute one network together, one old GPU decides.
    """
    gpus = [device for device in devices if device.platform == "gpu"]
    # Another process's GPU may have none.
    if any(float(getattr(gpu, "compute_capability", 8)) < 8 for gpu in gpus):
        return "old gpu"
    sets = read_cpu().instruction_sets
    platform = devices[0].platform
    if platform != "cpu" or "BF16" not in sets:
        return platform
    return "amx cpu" if "AMX" in sets else "bfloat16 cpu"
