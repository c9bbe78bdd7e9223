"""Choice of devices: which ones a config asks for, and how sessions divide the GPUs.

The process that starts the sessions of a trial calls `divide_gpus`. Each process that trains calls
`choose_devices`, by way of `start.limit_jax`. Nothing here starts JAX's back end.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

from jaxrl_atari.config import DevicesConfig, GpuOption
from jaxrl_atari.errors import require, whole_number_variable
from jaxrl_atari.hardware.gpus import Gpu, VisibleGpus, visible_gpus

Device = TypeVar("Device")

ChosenDevice = int | Literal["cpu", "learner"]
"""Where something runs: the index of a visible GPU, the CPU, or the learner's devices."""


def gpu_index(option: bool | int | str) -> int | None:
    """The GPU that a `GpuOption` names by its index; None for `auto`, True and False (ints in Python)."""
    return option if isinstance(option, int) and not isinstance(option, bool) else None


class DeviceChoice(NamedTuple):
    """The devices that a config asks for. Indices count the visible GPUs of this process."""

    gpus: tuple[Gpu, ...]  # the visible GPUs; empty with `devices.gpu = false`, where NVML is not asked
    learner: tuple[int, ...]  # empty if the CPU learns
    actor: ChosenDevice
    evaluator: ChosenDevice
    why_learner: str  # why the learner has these devices

    @property
    def used(self) -> tuple[int, ...]:
        """The GPUs that learn, act or evaluate."""
        chosen = (*self.learner, self.actor, self.evaluator)
        return tuple(sorted({index for index in chosen if isinstance(index, int)}))


def choose_devices(options: DevicesConfig, started: Sequence[int] = ()) -> DeviceChoice:
    """The devices that a config asks for.

    Args:
        started: indices of the GPUs on which JAX has started in this process, which keeps to them. Empty for a
            process that has not started JAX.

    Raises:
        ConfigError: this machine or this process does not have these devices; or as `visible_gpus`.
    """
    if not options.may_use_gpus:
        return choose_among(options, VisibleGpus((), "devices.gpu = false"))
    return choose_among(options, visible_gpus(), started)


def choose_among(options: DevicesConfig, visible: VisibleGpus, started: Sequence[int] = ()) -> DeviceChoice:
    """The devices that a config asks for if these GPUs are visible; see `choose_devices`."""
    first = min(started, default=0)
    learner = choose_device(options.gpu, visible, first, "devices.gpu")
    why_learner = f"devices.gpu = {str(options.gpu).lower()}"
    if options.gpu == "auto" and not visible.gpus:
        why_learner += f", and there is no GPU: {visible.why_none}"
    return DeviceChoice(
        visible.gpus,
        _learner_gpus(options, visible, learner) if isinstance(learner, int) else (),
        choose_device(options.actor, visible, first, "devices.actor"),
        choose_device(options.evaluator, visible, first, "devices.evaluator"),
        why_learner,
    )


def choose_device(
    option: GpuOption | Literal["learner"], visible: VisibleGpus, first: int, field: str
) -> ChosenDevice:
    """The device that an option means.

    | option | device |
    |---|---|
    | "learner" | those of the learner |
    | "auto" | the GPU `first`, or the CPU if there is none |
    | True | the GPU `first`, or an error |
    | False | the CPU |
    | 0, 1, ... | exactly that GPU, or an error |

    Args:
        visible: the visible GPUs.
        first: index of the first one on which JAX has started, or may start.
        field: name of the option in the error.

    Raises:
        ConfigError: there is no such GPU; the message names the visible ones.
    """
    if option == "learner":
        return "learner"
    if option is False or (option == "auto" and not visible.gpus):
        return "cpu"
    index = gpu_index(option)
    if index is None:  # `auto` and True mean the first one
        index = first
    listed = ", ".join(f"{i}: {gpu.model}" for i, gpu in enumerate(visible.gpus)) or f"none; {visible.why_none}"
    expected = f"a visible GPU (visible: {listed})"
    require(0 <= index < len(visible.gpus), field, option, expected, "use auto or false to run on the CPU")
    return index


def _learner_gpus(options: DevicesConfig, visible: VisibleGpus, first: int) -> tuple[int, ...]:
    """The indices of the GPUs that learn in this process, where `devices.gpu` means the GPU `first`."""
    all_indices = range(len(visible.gpus))
    if options.distributed:  # all devices of all processes learn
        hint = "CUDA_VISIBLE_DEVICES chooses the GPUs of each process"
        require(
            gpu_index(options.gpu) is None, "devices.gpu", options.gpu, "no index with devices.distributed", hint
        )
        return tuple(all_indices)
    return first_devices(options, all_indices[first:], f"visible GPUs from GPU {first} on")


def first_devices(options: DevicesConfig, available: Sequence[Device], kind: str) -> tuple[Device, ...]:
    """The first `devices.data_parallel` of the available devices.

    Args:
        available: devices of JAX, or their indices.
        kind: names the available devices in the error.

    Raises:
        ConfigError: fewer devices are available.
    """
    count = len(available) if options.data_parallel == "all" else options.data_parallel
    expected = f"at most {len(available)}, the number of {kind}"
    require(count <= len(available), "devices.data_parallel", count, expected)
    return tuple(available[:count])


# --- Division among sessions -------------------------------------------------------------------------------------


def divide_gpus(options: DevicesConfig) -> tuple[list[tuple[int, ...]], str]:
    """Divides the visible GPUs into blocks, on which the sessions of a trial, suite or sweep train in turn.

    | the config | blocks |
    |---|---|
    | learns on the CPU | one, without a GPU |
    | names a GPU by its index, or learns in several processes | one: the GPUs that it uses |
    | otherwise | each has `devices.data_parallel` consecutive GPUs; the first starts at CUDA_OFFSET |

    Returns:
        The blocks, as indices of visible GPUs: `[()]` if the CPU learns. And why sessions get these devices.

    Raises:
        ConfigError: an option asks for devices that this machine does not have, or CUDA_OFFSET is invalid.
    """
    chosen = choose_devices(options)
    offset = whole_number_variable("CUDA_OFFSET") or 0
    if not chosen.learner:
        return [()], chosen.why_learner
    wanted = (options.gpu, options.actor, options.evaluator)
    if options.distributed or any(gpu_index(option) is not None for option in wanted):
        return [chosen.used], chosen.why_learner
    count, size = len(chosen.gpus), len(chosen.learner)
    # GPU 0 follows the last one. GPUs that are left over, before the first block, stay idle.
    firsts = range(offset, offset + count - count % size, size)
    blocks = [tuple((first + i) % count for i in range(size)) for first in firsts]
    return blocks, f"{count} visible, CUDA_OFFSET {offset}"
