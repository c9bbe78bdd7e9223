"""JAX's back end: the GPUs on which it may start, and those that it has."""

import contextlib

import jax

from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware import gpus
from jaxrl_atari.hardware.memory import apply_memory_fraction, is_out_of_memory
from jaxrl_atari.hardware.rotation import Use, check_devices
from jaxrl_atari.hardware.runtime import jax_config, use_deterministic_kernels


def limit_jax(devices: DevicesConfig, field: str = "devices.gpu") -> Use:
    """Limits JAX to the devices that a session uses: the other GPUs get no context and no array.

    Also sets the memory fraction and the flags of `devices.deterministic`. Call before JAX starts its back end;
    afterwards JAX keeps the devices that it has.

    Raises:
        ConfigError: see `check_devices`; or JAX has started on a GPU with other settings.
    """
    use = check_devices(devices, field)
    apply_memory_fraction(devices)
    if devices.deterministic:
        use_deterministic_kernels()
    if not use.gpus:
        forbid_gpu(use.problem)
    elif gpus.simulated_count() is not None:
        with contextlib.suppress(RuntimeError):  # JAX has started: it has the devices it has
            jax_config.update("jax_num_cpu_devices", len(use.gpus) + 1)
    else:
        used = {*use.learner, use.actor, use.evaluator} - {None}
        if len(used) < len(use.gpus):
            jax_config.update("jax_cuda_visible_devices", ",".join(map(str, sorted(used))))
        platforms = jax_config.jax_platforms
        if platforms and "cpu" not in platforms:  # where the first parameters are computed
            jax_config.update("jax_platforms", f"{platforms},cpu")
    return use


def forbid_gpu(reason: str = "this process needs none") -> None:
    """Keeps JAX off the GPUs: no back end starts there and no memory is taken. Call before JAX starts its back end."""
    gpus.forbidden_because = gpus.forbidden_because or reason
    jax_config.update("jax_platforms", "cpu")


def start_gpus() -> list[jax.Device]:
    """Starts JAX. Returns its GPUs, of all processes; none if it is kept off them or cannot start there.

    Raises:
        UserError: a GPU has too little free memory for JAX to start.
    """
    shown = len(gpus.visible().gpus)
    if shown == 0:
        return []
    if gpus.simulated_count() is not None:  # the first CPU device of each process stays the CPU
        return [device for device in jax.devices("cpu") if 0 < device.local_hardware_id <= shown]
    try:
        return jax.devices("gpu")
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if is_out_of_memory(text):
            raise UserError(
                f"JAX cannot start on the GPU ({text[:160]}): other processes hold its memory; wait for them, lower"
                " their devices.memory_fraction, or choose another GPU with devices.gpu"
            ) from error
        forbid_gpu(f"JAX cannot start on a GPU: {text}")
        return []
