"""Choice of GPUs: which ones a config asks for, how sessions divide them, and how JAX starts on them.

The process that starts the sessions of a trial calls `divide_gpus`. Each process that trains then calls
`limit_jax`, which calls `choose_devices`, and after that `start_gpus`. `devices.place` does both, and `devices.py`
says what the verbs mean. Of the functions here, only `start_gpus` starts JAX's back end.
"""

import os
import re
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeVar

import jax

from jaxrl_atari.checks import Limits, whole_number_variable
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import UserError, reason, require
from jaxrl_atari.hardware.gpus import Gpu, VisibleGpus, forbid_gpu, gpu_provider, visible_gpus
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
    | "auto" | the first visible GPU, or the CPU if there is none |
    | True | the first visible GPU, or an error |
    | False | the CPU |
    | 0, 1, ... | exactly that GPU, or an error |

    Args:
        visible: the visible GPUs.
        field: name of the option in the error.

    Raises:
        ConfigError: there is no such GPU; the message names the visible ones.
    """
    if option == "learner":
        return "learner"
    if option is False or (option == "auto" and not visible.gpus):
        return "cpu"
    index = gpu_index(option) or 0  # `auto` and True mean the first one
    models = [gpu.model for gpu in visible.in_one_process]
    listed = ", ".join(f"{i}: {model}" for i, model in enumerate(models)) or f"none; {visible.why_none}"
    hint = "use auto or false to run on the CPU"
    require(0 <= index < len(models), field, option, f"a visible GPU (visible: {listed})", hint)
    return index


def first_devices(devices: DevicesConfig, available: Sequence[Device], kind: str) -> tuple[Device, ...]:
    """The first `devices.data_parallel` of the available devices.

    Args:
        available: devices of JAX, or their indices.
        kind: names the available devices in the error.

    Raises:
        ConfigError: fewer devices are available.
    """
    count = len(available) if devices.data_parallel == "all" else devices.data_parallel
    require(count <= len(available), "devices.data_parallel", count, f"at most {len(available)} ({kind})")
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


def choose_devices(devices: DevicesConfig) -> DeviceChoice:
    """The devices that a config asks for.

    Raises:
        ConfigError: this machine does not have these GPUs.
    """
    why_learner = f"devices.gpu = {str(devices.gpu).lower()}"
    visible = VisibleGpus((), why_learner) if devices.gpu is False else visible_gpus()
    all_indices = range(len(visible.in_one_process))
    first = choose_device(devices.gpu, visible, "devices.gpu")
    actor = choose_device(devices.actor, visible, "devices.actor")
    evaluator = choose_device(devices.evaluator, visible, "devices.evaluator")
    if devices.distributed:  # `data_parallel` counts the devices of all processes
        hint = "CUDA_VISIBLE_DEVICES chooses the GPUs of each process"
        require(
            gpu_index(devices.gpu) is None, "devices.gpu", devices.gpu, "no index with devices.distributed", hint
        )
        learner = tuple(all_indices)
    elif isinstance(first, int):
        learner = first_devices(devices, all_indices[first:], f"the GPUs from {first} on")
    else:
        # Checks the number. These devices are known only when JAX has started.
        first_devices(devices, range(_num_cpu_devices()), f"the CPU devices of JAX ({visible.why_none})")
        learner = ()
    if devices.gpu == "auto" and not learner:
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


def divide_gpus(devices: DevicesConfig) -> GpuBlocks:
    """Divides the visible GPUs into blocks.

    | the config | blocks |
    |---|---|
    | learns on the CPU | one, without a GPU |
    | names a GPU by its index, or learns in several processes | one: the GPUs that it uses |
    | otherwise | each has `devices.data_parallel` consecutive GPUs; the first starts at CUDA_OFFSET |

    Raises:
        ConfigError: an option asks for devices that this machine does not have, or CUDA_OFFSET is invalid.
    """
    chosen = choose_devices(devices)
    offset = whole_number_variable("CUDA_OFFSET", Limits(0)) or 0
    if not chosen.learner:
        return GpuBlocks([()], chosen.why_learner)
    options = (devices.gpu, devices.actor, devices.evaluator)
    if devices.distributed or any(gpu_index(option) is not None for option in options):
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


def limit_jax(devices: DevicesConfig) -> DeviceChoice:
    """Limits JAX to the devices that a session uses, so that no other GPU gets a context or an array.

    It also sets the memory fraction and the flags of `devices.deterministic`. Until JAX has started on a GPU, each
    call first puts back what an earlier call has set, except a limit to the CPU, which stays. Once JAX has
    started, it keeps its devices and their settings.

    Raises:
        ConfigError: this machine lacks the devices, or JAX has started on a GPU with other settings. Nothing has
            been changed then.
    """
    chosen = choose_devices(devices)
    check_memory_fraction(devices)
    if devices.deterministic:
        check_deterministic_kernels()
    # Nothing is refused from here on.
    if not has_started_on_gpu():  # otherwise JAX keeps the settings of an earlier session
        put_back_settings()
    apply_memory_fraction(devices)
    if devices.deterministic:
        use_deterministic_kernels()
    if chosen.gpus:
        gpu_provider().limit(chosen.used)
    elif devices.gpu is False:  # a later session of this process may ask for a GPU
        forbid_gpu(f"JAX has been limited to the CPU in this process ({chosen.why_none})")
    else:
        forbid_gpu(chosen.why_none)
    return chosen


def start_gpus(chosen: DeviceChoice) -> list[jax.Device]:
    """Starts JAX and returns the GPUs of all processes. Without a GPU on which JAX can start, the list is empty.

    Args:
        chosen: what `limit_jax` has returned.

    Raises:
        UserError: a GPU has too little free memory for JAX to start. The message has UUIDs besides indices,
            because each process numbers the GPUs that it sees.
    """
    if not chosen.gpus:
        return []
    try:
        return gpu_provider().start()
    except RuntimeError as error:
        # XLA can raise an error that does not name the memory, although it was the cause.
        full = [index for index in chosen.used if gpu_provider().is_full(chosen.gpus[index])]
        if full or NO_MEMORY.search(str(error)):
            named = ", ".join(f"GPU {index} ({chosen.gpus[index].uuid})" for index in full or chosen.used)
            why = f"other processes hold the memory of {named}"
            if not full:
                why = f"too little memory is free on {'one of ' if len(chosen.used) > 1 else ''}{named}"
            raise UserError(
                f"JAX cannot start on a GPU ({str(error)[:160]}): {why}; wait for other processes, lower their"
                " devices.memory_fraction, or choose another GPU"
            ) from error
        forbid_gpu(f"JAX cannot start on a GPU: {reason(error)}")
        return []
