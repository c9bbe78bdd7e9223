"""Choice of GPUs: which ones a config asks for, and how sessions divide them.

The process that starts the sessions of a trial calls `divide_gpus`. Each process that trains calls
`choose_devices`, by way of `start.limit_jax`. `devices.py` says what the verbs mean. Nothing here starts JAX's
back end.
"""

import os
import re
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, TypeVar

from jaxrl_atari.config import DevicesConfig, GpuOption
from jaxrl_atari.errors import require, whole_number_variable
from jaxrl_atari.hardware.gpu_interface import Gpu, VisibleGpus
from jaxrl_atari.hardware.gpus import visible_gpus
from jaxrl_atari.hardware.jax_settings import jax_config

Device = TypeVar("Device")

ChosenDevice = int | Literal["cpu", "learner"]
"""Where something runs: the index of a visible GPU, the CPU, or the learner's devices."""


def gpu_index(option: bool | int | str) -> int | None:
    """The GPU that a `GpuOption` names by its index; None for `auto`, True and False (ints in Python)."""
    return option if isinstance(option, int) and not isinstance(option, bool) else None


TO_USE_THE_CPU = "use auto or false to run on the CPU"


def choose_device(
    option: GpuOption | Literal["learner"], visible: VisibleGpus, field: str, hint: str = TO_USE_THE_CPU
) -> ChosenDevice:
    """The device that an option means.

    | option | device |
    |---|---|
    | "learner" | those of the learner |
    | "auto" | the first usable GPU, or the CPU if there is none |
    | True | the first usable GPU, or an error |
    | False | the CPU |
    | 0, 1, ... | exactly that GPU, or an error |

    Visible GPUs are usable, except those without which JAX has started in this process.

    Args:
        visible: the visible GPUs, and those on which JAX has started.
        field: name of the option in the error.
        hint: what to do if the GPU is not visible, for the error.

    Raises:
        ConfigError: there is no such GPU; the message names the visible ones, or those on which JAX has started.
    """
    if option == "learner":
        return "learner"
    if option is False or (option == "auto" and not visible.gpus):
        return "cpu"
    index = gpu_index(option)
    if index is None:  # `auto` and True mean the first one
        index = next(iter(visible.usable), 0)
    models = [gpu.model for gpu in visible.in_one_process]
    listed = ", ".join(f"{i}: {model}" for i, model in enumerate(models)) or f"none; {visible.why_none}"
    require(0 <= index < len(models), field, option, f"a visible GPU (visible: {listed})", hint)
    expected = f"one of {list(visible.usable)}, on which JAX has started"
    require(index in visible.usable, field, option, expected, "use a fresh process")
    return index


def first_devices(
    options: DevicesConfig, available: Sequence[Device], kind: str, hint: str = ""
) -> tuple[Device, ...]:
    """The first `devices.data_parallel` of the available devices.

    Args:
        available: devices of JAX, or their indices.
        kind: names the available devices in the error.
        hint: why there are no others, for the error.

    Raises:
        ConfigError: fewer devices are available.
    """
    count = len(available) if options.data_parallel == "all" else options.data_parallel
    expected = f"at most {len(available)}, the number of {kind}"
    require(count <= len(available), "devices.data_parallel", count, expected, hint)
    return tuple(available[:count])


class DeviceChoice(NamedTuple):
    """The devices that a config asks for. Indices count the visible GPUs of this process."""

    gpus: tuple[Gpu, ...]  # the visible GPUs; empty with `devices.gpu = false`, where NVML is not asked
    why_none: str  # why `gpus` is empty, which keeps JAX off the GPUs in this process from then on
    learner: tuple[int, ...]  # empty if the CPU learns
    actor: ChosenDevice
    evaluator: ChosenDevice
    why_learner: str  # why the learner has these devices

    @property
    def used(self) -> tuple[int, ...]:
        """The GPUs that learn, act or evaluate."""
        chosen = (*self.learner, self.actor, self.evaluator)
        return tuple(sorted({index for index in chosen if isinstance(index, int)}))


def choose_devices(options: DevicesConfig, find: Callable[[], VisibleGpus] = visible_gpus) -> DeviceChoice:
    """The devices that a config asks for.

    Args:
        find: returns the GPUs that there are to choose among; it is not called with `devices.gpu = false`. The
            default is for a process that has not started JAX; `usable_gpus` is for this process.

    Raises:
        ConfigError: this machine or this process does not have these devices; or an error of `find`.
    """
    return choose_among(options, find()) if options.may_use_gpus else _choose_cpu(options)


def _choose_cpu(options: DevicesConfig) -> DeviceChoice:
    """The devices of a session with `devices.gpu = false`: the CPU learns, acts and evaluates."""
    why = "devices.gpu = false"
    no_gpu = VisibleGpus((), why)
    hint = "a CPU that learns also acts and evaluates; choose the GPU that learns with devices.gpu"
    actor = choose_device(options.actor, no_gpu, "devices.actor", hint)
    evaluator = choose_device(options.evaluator, no_gpu, "devices.evaluator", hint)
    _check_number_of_cpus(options, why)
    # Later sessions of this process may ask for a GPU, and read this reason.
    why_none = f"JAX has been limited to the CPU in this process ({why})"
    return DeviceChoice((), why_none, (), actor, evaluator, why)


def choose_among(options: DevicesConfig, visible: VisibleGpus) -> DeviceChoice:
    """The devices that a config asks for if these GPUs are visible. Not for `devices.gpu = false`."""
    first = choose_device(options.gpu, visible, "devices.gpu")
    actor = choose_device(options.actor, visible, "devices.actor")
    evaluator = choose_device(options.evaluator, visible, "devices.evaluator")
    why_learner = f"devices.gpu = {str(options.gpu).lower()}"
    learner = ()
    if isinstance(first, int):
        learner = _learner_gpus(options, visible, first)
    else:
        why_learner += f", and there is no GPU: {visible.why_none}"
        _check_number_of_cpus(options, f"there is no GPU: {visible.why_none}")
    return DeviceChoice(visible.gpus, visible.why_none, learner, actor, evaluator, why_learner)


def _learner_gpus(options: DevicesConfig, visible: VisibleGpus, first: int) -> tuple[int, ...]:
    """The indices of the GPUs that learn in this process, where `devices.gpu` means the GPU `first`."""
    all_indices = range(len(visible.in_one_process))
    if options.distributed:  # `data_parallel` counts the devices of all processes
        has_no_index = gpu_index(options.gpu) is None
        hint = "CUDA_VISIBLE_DEVICES chooses the GPUs of each process"
        require(has_no_index, "devices.gpu", options.gpu, "no index with devices.distributed", hint)
        return tuple(all_indices)
    learner = first_devices(options, all_indices[first:], f"visible GPUs from GPU {first} on")
    have_started = set(learner) <= set(visible.usable)
    expected = f"GPUs on which JAX has started, out of {list(visible.usable)}"
    require(have_started, "devices.data_parallel", options.data_parallel, expected, "use a fresh process")
    return learner


def _check_number_of_cpus(options: DevicesConfig, why: str) -> None:
    """Checks that JAX has enough CPU devices for a learner on the CPU. They are known only when JAX has started.

    Args:
        why: why the CPU learns, for the error.

    Raises:
        ConfigError: it has too few.
    """
    if not options.distributed:  # `data_parallel` counts the devices of all processes
        first_devices(options, range(_num_cpu_devices()), "JAX's CPU devices", why)


def _num_cpu_devices() -> int:
    """The number of CPU devices with which JAX starts: one, unless its config or XLA_FLAGS ask for more."""
    asked = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    return max(1, jax_config.jax_num_cpu_devices, *map(int, asked))


# --- Division among sessions -------------------------------------------------------------------------------------


class GpuBlocks(NamedTuple):
    """The GPUs of a machine in blocks, on which the sessions of a trial, suite or sweep train in turn."""

    blocks: list[tuple[int, ...]]  # at least one, each with indices of visible GPUs; `[()]` if the CPU learns
    why: str  # why sessions get these devices


def divide_gpus(options: DevicesConfig) -> GpuBlocks:
    """Divides the visible GPUs into blocks.

    | the config | blocks |
    |---|---|
    | learns on the CPU | one, without a GPU |
    | names a GPU by its index, or learns in several processes | one: the GPUs that it uses |
    | otherwise | each has `devices.data_parallel` consecutive GPUs; the first starts at CUDA_OFFSET |

    Raises:
        ConfigError: an option asks for devices that this machine does not have, or CUDA_OFFSET is invalid.
    """
    chosen = choose_devices(options)
    offset = whole_number_variable("CUDA_OFFSET") or 0
    if not chosen.learner:
        return GpuBlocks([()], chosen.why_learner)
    wanted = (options.gpu, options.actor, options.evaluator)
    if options.distributed or any(gpu_index(option) is not None for option in wanted):
        return GpuBlocks([chosen.used], chosen.why_learner)
    count = len(chosen.gpus)
    blocks = consecutive_blocks(count, len(chosen.learner), offset)
    return GpuBlocks(blocks, f"{count} visible, CUDA_OFFSET {offset}")


def consecutive_blocks(count: int, size: int, offset: int) -> list[tuple[int, ...]]:
    """Blocks of consecutive GPUs, as indices into `count` visible ones. GPU 0 follows the last one.

    No two blocks share a GPU. If `count` is not a multiple of `size`, the GPUs before the first block stay idle.

    Args:
        size: GPUs in a block.
        offset: the first block starts at this GPU, modulo `count`.
    """
    firsts = range(offset, offset + count - count % size, size)
    return [tuple((first + i) % count for i in range(size)) for first in firsts]
