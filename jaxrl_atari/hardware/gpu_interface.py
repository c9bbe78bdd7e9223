"""GPUs as this package sees them, and the interface to a machine's GPUs, their driver and their libraries.

`NvidiaGpus` is the `GpuProvider` of a real machine. Tests have others (`gpus.use_provider`).
"""

import os
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple, Protocol

import jax

from jaxrl_atari.errors import require


class Gpu(NamedTuple):
    """A GPU that this process may use."""

    uuid: str  # of the GPU or MIG slice, as in CUDA_VISIBLE_DEVICES
    model: str
    memory: int  # in bytes; 0 if unknown


class GpuReading(NamedTuple):
    """What a GPU does now. The fields are columns of a log point; NaN where the driver reports nothing."""

    gpu_busy_percent: float
    gpu_memory_gib: float  # of all processes
    gpu_power_watts: float
    gpu_temperature_c: float


class VisibleGpus(NamedTuple):
    """The GPUs that this process may use, in the order of their indices."""

    gpus: tuple[Gpu, ...]
    why_none: str = ""  # why `gpus` is empty
    failures: tuple[str, ...] = ()
    """Errors of the driver, and of GPUs that it lists and cannot read. These GPUs have no index."""
    lacks_plugin: bool = False  # whether `gpus` is empty because JAX has no plugin for those that are there
    one_per_process: bool = False
    """Whether a process can use the first one only. Several processes that see one each can use them all."""
    started: tuple[int, ...] = ()
    """Indices of those on which JAX has started in this process. It keeps to them. Empty before it starts."""

    @property
    def in_one_process(self) -> tuple[Gpu, ...]:
        """Those that a session can use."""
        return self.gpus[:1] if self.one_per_process else self.gpus

    @property
    def usable(self) -> tuple[int, ...]:
        """The indices of the GPUs on which JAX has started, or may start, in one process."""
        return self.started or tuple(range(len(self.in_one_process)))


class GpuProvider(Protocol):
    """The GPUs of a machine, their driver and libraries, and how JAX starts on them.

    Whatever this package asks of them goes through these methods.
    """

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

    def started_gpus(self) -> list[jax.Device]:
        """What `start` has returned in this process; empty if JAX has not started on a GPU."""
        ...

    def is_full(self, gpu: Gpu) -> bool:
        """Whether other processes have left too little memory on a GPU for JAX to start."""
        ...

    def read(self, gpu: Gpu) -> GpuReading:
        """What a GPU does now. Raises no error; a driver may hang."""
        ...

    def driver_version(self) -> str | None:
        """Version of the driver; None without a driver."""
        ...

    def packages(self) -> dict[str, str]:
        """The versions of the installed packages with which JAX computes on the GPUs, by their names, sorted."""
        ...

    def index(self, device: jax.Device) -> int:
        """The index, among the visible GPUs, of a device of this process that `start` has returned."""
        ...


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
        is_index = name.isascii() and name.isdecimal() and int(name) < len(gpus)
        numbered = gpus[int(name)] if is_index else None
        named = [gpu for gpu in gpus if name and gpu.uuid.startswith(name)]
        found = numbered or (named[0] if len(named) == 1 else find(name))
        if found is None:
            break
        require(found not in left, "CUDA_VISIBLE_DEVICES", names, "each GPU at most once")
        left.append(found)
    return VisibleGpus(tuple(left), "" if left else f"CUDA_VISIBLE_DEVICES={names!r} leaves none")
