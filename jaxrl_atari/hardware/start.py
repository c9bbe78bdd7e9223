"""The start of JAX on the devices that a session has chosen: before, at and after it.

`devices.place` calls `limit_jax`, `start_gpus` and `settle_devices` in this order. Only `start_gpus` starts JAX's
back end.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import jax

from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.hardware.choice import DeviceChoice, choose_among, choose_devices
from jaxrl_atari.hardware.gpu_interface import Gpu, VisibleGpus
from jaxrl_atari.hardware.gpus import gpu_provider, gpus_by_index, limit_to_cpu, usable_gpus
from jaxrl_atari.hardware.jax_settings import (
    check_deterministic_kernels,
    has_started_on_gpu,
    put_back_settings,
    use_deterministic_kernels,
)
from jaxrl_atari.hardware.memory import NO_MEMORY, apply_memory_fraction, check_memory_fraction


def limit_jax(options: DevicesConfig) -> DeviceChoice:
    """Limits JAX to the devices that a session uses, so that no other GPU gets a context or an array.

    It also sets the memory fraction and the flags of `devices.deterministic`. A call first undoes what an earlier
    call has set. Two things cannot be undone: a limit to the CPU, and any setting once JAX has started on a GPU.

    Raises:
        ConfigError: this machine lacks the devices, or JAX has started on a GPU with other settings. Nothing has
            been changed then, except for CUDA_DEVICE_ORDER.
    """
    chosen = choose_devices(options, usable_gpus)
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
    else:
        limit_to_cpu(chosen.why_none)
    return chosen


class StartedGpus(NamedTuple):
    """What a start of JAX has led to, on the GPUs to which it was limited."""

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
        if full or NO_MEMORY.search(str(error)):
            return StartedGpus(full=full or tuple(used), why_none=_memory_is_lacking(error, visible, used, full))
        why_none = f"JAX cannot start on a GPU: {reason(error)}"
        limit_to_cpu(why_none)
        return StartedGpus(why_none=why_none)
    return StartedGpus(gpus, gpus_by_index(gpus))


def _memory_is_lacking(error: Exception, visible: Sequence[Gpu], used: Sequence[int], full: Sequence[int]) -> str:
    """The error that memory is lacking on GPUs that are `full`, or on at least one of those that are `used`."""
    named = ", ".join(f"GPU {index} ({visible[index].uuid})" for index in full or used)
    if full:
        why = f"other processes hold the memory of {named}"
    elif len(used) == 1:
        why = f"too little memory is free on {named}"
    else:
        why = f"too little memory is free on one of {named}"
    advice = "wait for other processes, lower their devices.memory_fraction, or choose another GPU"
    return f"JAX cannot start on a GPU ({str(error)[:160]}): {why}; {advice}"


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
    needed = chosen._replace(learner=()).used if options.distributed else chosen.used
    absent = [f"GPU {index} ({chosen.gpus[index].uuid})" for index in needed if index not in started.by_index]
    if absent:
        hint = "`python -m jaxrl_atari.devices` tests each GPU"
        raise UserError(f"JAX has started without {', '.join(absent)}; {hint}")
    return chosen
