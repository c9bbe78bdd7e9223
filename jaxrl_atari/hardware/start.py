"""The start of JAX on the devices that a session has chosen: `limit_jax` before it, `start_jax` at it."""

from collections.abc import Sequence

import jax

from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import UserError, reason, require
from jaxrl_atari.hardware.choice import DeviceChoice, choose_among, choose_devices
from jaxrl_atari.hardware.gpus import (
    VisibleGpus,
    is_full,
    limit_to_cpu,
    limit_to_gpus,
    own_gpus,
    started_gpus,
)
from jaxrl_atari.hardware.memory import NO_MEMORY, apply_memory_fraction, is_fraction_applied
from jaxrl_atari.hardware.settings import are_kernels_deterministic, use_deterministic_kernels


def limit_jax(options: DevicesConfig) -> DeviceChoice:
    """Limits JAX to the devices that a session uses, so that no other GPU gets a context or an array.

    It also sets the memory fraction and the flags of `devices.deterministic`.

    Raises:
        ConfigError: this machine lacks the devices, or JAX has started on a GPU with other settings. Nothing has
            been changed then, except for CUDA_DEVICE_ORDER.
    """
    started = started_gpus()
    chosen = choose_devices(options, started)
    for field, value, is_in_force in (
        ("devices.memory_fraction", options.memory_fraction, is_fraction_applied(options)),
        ("devices.deterministic", options.deterministic, are_kernels_deterministic()),
    ):
        in_time = not started or not value or is_in_force
        require(in_time, field, value, "to be set before JAX starts", "train in a fresh process, or leave it out")
    apply_memory_fraction(options)
    if options.deterministic:
        use_deterministic_kernels()
    if chosen.used:
        limit_to_gpus(chosen.used)
    else:
        limit_to_cpu()
    return chosen


def start_jax(options: DevicesConfig, chosen: DeviceChoice) -> tuple[DeviceChoice, dict[int, jax.Device]]:
    """Starts JAX on the devices to which `limit_jax` has limited it.

    | JAX has started | devices |
    |---|---|
    | on all chosen GPUs, or the CPU was chosen | those that were chosen |
    | on no GPU, because memory is lacking | an error |
    | on no GPU, for another reason | those of a machine without a GPU; an error in one process of several |
    | without some of the chosen GPUs | an error |

    Args:
        chosen: what `limit_jax` has returned for these options.

    Returns:
        The choice that stands, and the GPUs of this process by their indices.

    Raises:
        ConfigError: an option demands a GPU, and JAX has started on none.
        UserError: any other error of the table.
    """
    if not chosen.used:
        return chosen, {}
    try:
        by_index = own_gpus()
    except RuntimeError as error:
        why = f"JAX cannot start on {_names(chosen, chosen.used)}: {reason(error)}"
        # XLA may raise an error that does not name the memory, although that was the cause.
        full = [index for index in chosen.used if is_full(chosen.gpus[index])]
        if full or NO_MEMORY.search(why):
            advice = "wait for other processes, lower their devices.memory_fraction, or choose another GPU"
            lacking = _names(chosen, full or chosen.used)
            raise UserError(f"{why}; too little memory is free on {lacking}: {advice}") from error
        if options.distributed:  # the others would learn on GPUs
            hint = "fix it, or use --devices.gpu false in all processes"
            raise UserError(f"devices.distributed: {why}; {hint}") from error
        limit_to_cpu()  # JAX would try again
        return choose_among(options, VisibleGpus((), why)), {}
    # JAX_LOCAL_DEVICE_IDS may keep one process of several from some GPUs, which then do not learn.
    needed = chosen._replace(learner=()).used if options.distributed else chosen.used
    if absent := [index for index in needed if index not in by_index]:
        hint = "use a fresh process; there, `python -m jaxrl_atari.devices` tests each GPU"
        raise UserError(f"JAX has started without {_names(chosen, absent)}; {hint}")
    return chosen, by_index


def _names(chosen: DeviceChoice, indices: Sequence[int]) -> str:
    """GPUs by their indices, and by their UUIDs, because each process numbers the GPUs that it sees."""
    return ", ".join(f"GPU {index} ({chosen.gpus[index].uuid})" for index in indices)
