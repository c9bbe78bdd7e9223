"""Choice of GPUs: which ones a config asks for, how sessions divide them, and how JAX starts on them.

The process that starts the sessions of a trial calls `divide_gpus`. Each process that trains then calls
`limit_jax`, which calls `choose_devices`, and after that `start_gpus`. `devices.place` does both, and `devices.py`
says what the verbs mean. Of the functions here, only `start_gpus` starts JAX's back end.
"""

import os
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeVar

import jax

from jaxrl_atari.checks import Limits, whole_number_variable
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import UserError, reason, require
from jaxrl_atari.hardware.gpus import (
    Gpu,
    VisibleGpus,
    forbid_gpu,
    gpu_provider,
    gpus_by_index,
    usable_gpus,
    visible_gpus,
)
from jaxrl_atari.hardware.jax_settings import (
    check_deterministic_kernels,
    has_started_on_gpu,
    jax_config,
    put_back_settings,
    use_deterministic_kernels,
)
from jaxrl_atari.hardware.memory import NO_MEMORY, apply_memory_fraction, check_memory_fraction
from jaxrl_atari.option_forms import GpuOption, gpu_index

Device = TypeVar("Device")

ChosenDevice = int | Literal["cpu", "learner"]
"""Where something runs: the index of a visible GPU, the CPU, or the learner's devices."""


def choose_device(option: GpuOption | Literal["learner"], visible: VisibleGpus, field: str) -> ChosenDevice:
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
    hint = "use auto or false to run on the CPU"
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
    why_none: str  # why `gpus` is empty
    learner: tuple[int, ...]  # empty if the CPU learns
    actor: ChosenDevice
    evaluator: ChosenDevice
    why_learner: str  # why the learner has these devices

    @property
    def used(self) -> tuple[int, ...]:
        """The GPUs that learn, act or evaluate."""
        chosen = (*self.learner, self.actor, self.evaluator)
        return tuple(sorted({index for index in chosen if isinstance(index, int)}))


def choose_devices(options: DevicesConfig, *, in_this_process: bool = False) -> DeviceChoice:
    """The devices that a config asks for.

    Args:
        in_this_process: if JAX has started on GPUs here, choose among these alone. Otherwise, choose for a process
            that has not started JAX.

    Raises:
        ConfigError: this machine or this process does not have these GPUs.
    """
    if options.gpu is False:  # NVML is not asked
        return choose_among(options, VisibleGpus(()))
    return choose_among(options, usable_gpus() if in_this_process else visible_gpus())


def choose_among(options: DevicesConfig, visible: VisibleGpus) -> DeviceChoice:
    """The devices that a config asks for, where these GPUs are visible; see `choose_devices`."""
    why_learner = f"devices.gpu = {str(options.gpu).lower()}"
    if options.gpu is False:
        visible = VisibleGpus((), why_learner)
    if visible.fault == "variables":
        raise UserError(visible.why_none)
    all_indices = range(len(visible.in_one_process))
    first = choose_device(options.gpu, visible, "devices.gpu")
    actor = choose_device(options.actor, visible, "devices.actor")
    evaluator = choose_device(options.evaluator, visible, "devices.evaluator")
    if options.distributed:  # `data_parallel` counts the devices of all processes
        hint = "CUDA_VISIBLE_DEVICES chooses the GPUs of each process"
        require(
            gpu_index(options.gpu) is None, "devices.gpu", options.gpu, "no index with devices.distributed", hint
        )
        learner = tuple(all_indices)
    elif isinstance(first, int):
        learner = first_devices(options, all_indices[first:], f"visible GPUs from GPU {first} on")
        expected = f"GPUs on which JAX has started, out of {list(visible.usable)}"
        have_started = set(learner) <= set(visible.usable)
        require(have_started, "devices.data_parallel", options.data_parallel, expected, "use a fresh process")
    else:
        # Checks the number. These devices are known only when JAX has started.
        why = visible.why_none if options.gpu is False else f"there is no GPU: {visible.why_none}"
        first_devices(options, range(_num_cpu_devices()), "JAX's CPU devices", why)
        learner = ()
    if options.gpu == "auto" and not learner:
        why_learner += f", and there is no GPU: {visible.why_none}"
    return DeviceChoice(visible.gpus, visible.why_none, learner, actor, evaluator, why_learner)


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
    offset = whole_number_variable("CUDA_OFFSET", Limits(0)) or 0
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


# --- JAX's back end ----------------------------------------------------------------------------------------------


def limit_jax(options: DevicesConfig) -> DeviceChoice:
    """Limits JAX to the devices that a session uses, so that no other GPU gets a context or an array.

    It also sets the memory fraction and the flags of `devices.deterministic`. A call first undoes what an earlier
    call has set. Two things cannot be undone: a limit to the CPU, and any setting once JAX has started on a GPU.

    Raises:
        ConfigError: this machine lacks the devices, or JAX has started on a GPU with other settings. Nothing has
            been changed then.
    """
    chosen = choose_devices(options, in_this_process=True)
    check_memory_fraction(options)
    if options.deterministic:
        check_deterministic_kernels()
    # Nothing is refused from here on.
    if not has_started_on_gpu():  # otherwise JAX keeps the settings of an earlier session
        put_back_settings()
    apply_memory_fraction(options)
    if options.deterministic:
        use_deterministic_kernels()
    if chosen.gpus:
        gpu_provider().limit(chosen.used)
    elif options.gpu is False:  # a later session of this process may ask for a GPU
        forbid_gpu(f"JAX has been limited to the CPU in this process ({chosen.why_none})")
    else:
        forbid_gpu(chosen.why_none)
    return chosen


class StartedGpus(NamedTuple):
    """The GPUs on which JAX has started."""

    gpus: tuple[jax.Device, ...] = ()  # of all processes
    by_index: Mapping[int, jax.Device] = MappingProxyType({})
    """Those of this process, by their indices among the visible GPUs."""
    full: tuple[int, ...] = ()
    """Indices of GPUs that lack memory, or of which at least one does. JAX has then started on none."""
    why_none: str = ""  # why JAX has started on none of those to which it is limited


def start_gpus(visible: Sequence[Gpu], used: Sequence[int]) -> StartedGpus:
    """Starts JAX on the GPUs to which it is limited.

    Args:
        visible: the visible GPUs.
        used: the indices of those to which JAX is limited.

    Returns:
        The GPUs, or why there is none. If memory is lacking, the reason has UUIDs besides indices, because each
        process numbers the GPUs that it sees. For any other reason, JAX can start only on the CPU from then on.
    """
    if not used:
        return StartedGpus()
    try:
        gpus = tuple(gpu_provider().start())
    except RuntimeError as error:
        # XLA can raise an error that does not name the memory, although it was the cause.
        full = tuple(index for index in used if gpu_provider().is_full(visible[index]))
        if not full and not NO_MEMORY.search(str(error)):
            why_none = f"JAX cannot start on a GPU: {reason(error)}"
            forbid_gpu(why_none)
            return StartedGpus(why_none=why_none)
        named = ", ".join(f"GPU {index} ({visible[index].uuid})" for index in full or used)
        why = f"other processes hold the memory of {named}"
        if not full:
            why = f"too little memory is free on {'one of ' if len(used) > 1 else ''}{named}"
        advice = "wait for other processes, lower their devices.memory_fraction, or choose another GPU"
        why_none = f"JAX cannot start on a GPU ({str(error)[:160]}): {why}; {advice}"
        return StartedGpus(full=full or tuple(used), why_none=why_none)
    return StartedGpus(gpus, gpus_by_index(gpus))


def settle_devices(options: DevicesConfig, chosen: DeviceChoice, started: StartedGpus) -> DeviceChoice:
    """The devices of a session that has chosen some, once it has started JAX.

    | JAX has started | devices |
    |---|---|
    | on all chosen GPUs, or the CPU was chosen | those that were chosen |
    | on no GPU, because memory is lacking | an error |
    | on no GPU, for another reason | those of a machine without a GPU; an error in one process of several |
    | without some of the chosen GPUs | an error |

    Args:
        options: those of `chosen`.
        started: how JAX has started on the chosen GPUs.

    Raises:
        ConfigError: an option demands a GPU, and JAX has started on none.
        UserError: any other error of the table.
    """
    if not chosen.used:
        return chosen
    if started.full:
        raise UserError(started.why_none)
    if not started.gpus and options.distributed:  # the others would learn on GPUs
        raise UserError(
            f"devices.distributed: {started.why_none}; fix it, or use --devices.gpu false in all processes"
        )
    if not started.gpus:
        return choose_among(options, VisibleGpus((), started.why_none))
    # JAX_LOCAL_DEVICE_IDS may keep one process of several from some GPUs, which then do not learn.
    needed = chosen._replace(learner=()) if options.distributed else chosen
    absent = [f"GPU {index} ({chosen.gpus[index].uuid})" for index in needed.used if index not in started.by_index]
    if absent:
        hint = "`python -m jaxrl_atari.devices` tests each GPU"
        raise UserError(f"JAX has started without {', '.join(absent)}; {hint}")
    return chosen
