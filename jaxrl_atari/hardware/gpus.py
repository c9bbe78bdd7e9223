"""The GPUs that this process may use, found before JAX starts its back end.

NVML lists GPUs without a CUDA context and without using their memory. It numbers them as `nvidia-smi` does, and
CUDA is told to do the same (CUDA_DEVICE_ORDER). Tests replace NVML and CUDA with a `GpuProvider` of their own
(`use_provider`).
"""

import contextlib
import importlib.metadata
import os
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple, Protocol

import jax
import pynvml

from jaxrl_atari.errors import require
from jaxrl_atari.hardware.jax_settings import environment_variables, has_started_on_gpu, jax_config, jax_options

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
    fault: Literal["driver", "plugin", "variables"] | None = None
    """What keeps GPUs from being used: a failing driver, JAX's CUDA plugin, which is not installed, or wrong
    variables of CUDA, which `visible_gpus` reports as an error and the command `devices` as a problem."""
    failing: tuple[str, ...] = ()  # errors of GPUs that NVML lists and cannot read; they have no index
    started: tuple[int, ...] = ()
    """Indices of those on which JAX has started in this process. Empty: it may still start on any of `gpus`."""

    @property
    def in_one_process(self) -> tuple[Gpu, ...]:
        """Those that a session can use. By NVIDIA's MIG guide, CUDA shows a process a single slice.

        Sessions that see one slice each can use all of `gpus`.
        """
        has_slice = any(gpu.uuid.startswith("MIG-") for gpu in self.gpus)
        return self.gpus[:1] if has_slice else self.gpus

    @property
    def usable(self) -> tuple[int, ...]:
        """The indices of the GPUs on which JAX has started, or may start, in one process."""
        return self.started or tuple(range(len(self.in_one_process)))


# --- Providers ---------------------------------------------------------------------------------------------------


class GpuProvider(Protocol):
    """The GPUs of a machine, and how JAX starts on them."""

    def visible_gpus(self) -> VisibleGpus:
        """The GPUs that JAX could use in this process. Starts no back end."""
        ...

    def forbid(self, why: str) -> None:
        """Keeps JAX off the GPUs. From then on, `visible_gpus` returns none, with `why` as the reason."""
        ...

    def limit(self, used: Collection[int]) -> None:
        """Lets JAX start only on the visible GPUs with these indices."""
        ...

    def start(self) -> list[jax.Device]:
        """Starts JAX and returns the GPUs of all processes. Raises RuntimeError if JAX cannot start on them."""
        ...

    def started(self) -> list[jax.Device]:
        """What `start` has returned in this process; empty if JAX has not started on a GPU."""
        ...

    def is_full(self, gpu: Gpu) -> bool:
        """Whether other processes have left too little memory on a GPU for JAX to start."""
        ...

    def index(self, device: jax.Device) -> int:
        """The index, among the visible GPUs, of a device of this process that `start` has returned."""
        ...


class NvidiaGpus:
    """A `GpuProvider` of NVIDIA's GPUs: NVML lists them, CUDA computes on them."""

    def __init__(self) -> None:
        self._why_forbidden = ""

    def visible_gpus(self) -> VisibleGpus:
        """See `GpuProvider`. CUDA_VISIBLE_DEVICES may name GPUs by index or UUID."""
        if self._why_forbidden:
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
        self._why_forbidden = self._why_forbidden or why

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

    def started(self) -> list[jax.Device]:
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


_provider: GpuProvider = NvidiaGpus()


def use_provider(provider: GpuProvider) -> GpuProvider:
    """Makes this process take its GPUs from `provider`. Returns the provider used before. For tests."""
    global _provider
    before = _provider
    _provider = provider
    return before


def gpu_provider() -> GpuProvider:
    """The provider of this process's GPUs: `NvidiaGpus`, unless `use_provider` has set another one."""
    return _provider


def visible_gpus() -> VisibleGpus:
    """The GPUs that JAX could use in a process that has not started it.

    Raises:
        ConfigError: CUDA_DEVICE_ORDER is another order than NVML's, CUDA_VISIBLE_DEVICES names a GPU twice, or
            the user has set `jax_cuda_visible_devices` of JAX's config.
    """
    return gpu_provider().visible_gpus()


def usable_gpus() -> VisibleGpus:
    """As `visible_gpus`, but JAX, where it has started on a GPU in this process, keeps to those that it has."""
    visible = visible_gpus()
    if not visible.gpus:
        return visible
    return visible._replace(started=tuple(sorted(gpus_by_index(gpu_provider().started()))))


def gpus_by_index(gpus: Sequence[jax.Device]) -> dict[int, jax.Device]:
    """Those of JAX's GPUs that this process has, by their indices among the visible GPUs.

    An index may be missing: JAX may have started without one of the visible GPUs.
    """
    own = [gpu for gpu in gpus if gpu.process_index == jax.process_index()]
    return {gpu_provider().index(gpu): gpu for gpu in own}


def forbid_gpu(why: str = "this process needs none") -> None:
    """Keeps JAX off the GPUs, so that it takes none of their memory. Call it before JAX starts its back end.

    Once JAX has started on a GPU, it does nothing: other code of this process may use the GPU.
    """
    if has_started_on_gpu():
        return
    gpu_provider().forbid(why)
    jax_options.set_for_process("jax_platforms", "cpu")


def obey_cuda_visible_devices(
    gpus: Sequence[Gpu], find: Callable[[str], Gpu | None] = lambda name: None
) -> VisibleGpus:
    """The GPUs of a machine that CUDA_VISIBLE_DEVICES leaves.

    As in CUDA, the first unknown name ends the list. The start of a UUID is a name if one GPU alone has it.

    Args:
        gpus: all GPUs of the machine, in the order of their indices.
        find: looks up a name that is neither an index nor the start of a UUID in `gpus`; None if it is unknown.

    Raises:
        ConfigError: it names a GPU twice. CUDA would then show none.
    """
    if not gpus:
        return VisibleGpus((), "this machine has no GPU")
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if names is None:
        return VisibleGpus(tuple(gpus))
    left: list[Gpu] = []
    for name in map(str.strip, names.split(",")):
        numbered = gpus[int(name)] if name.isdecimal() and int(name) < len(gpus) else None
        named = [gpu for gpu in gpus if name and gpu.uuid.startswith(name)]
        found = numbered or (named[0] if len(named) == 1 else find(name))
        if found is None:
            break
        require(found not in left, "CUDA_VISIBLE_DEVICES", names, "each GPU at most once")
        left.append(found)
    return VisibleGpus(tuple(left), "" if left else f"CUDA_VISIBLE_DEVICES={names!r} leaves none")


# --- NVML --------------------------------------------------------------------------------------------------------


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
