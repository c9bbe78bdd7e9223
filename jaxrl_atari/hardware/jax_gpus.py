"""JAX's back end: which GPUs it may start on, and which it sees."""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Literal

import jax

from jaxrl_atari.config import DevicesConfig, GpuOption
from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware import gpus
from jaxrl_atari.hardware.memory import is_out_of_memory
from jaxrl_atari.hardware.memory_share import apply_memory_fraction
from jaxrl_atari.hardware.runtime import jax_has_started, use_deterministic_kernels

limited_to: tuple[int, ...] | None = None
"""Indices of the GPUs, if `limit_jax` has limited JAX to some."""


def limit_jax(config: DevicesConfig) -> None:
    """Limits JAX to the devices that a session uses: the other GPUs get no context and no array.

    Also sets the memory fraction and the flags of `devices.deterministic`. Call before JAX starts its back end;
    afterwards JAX keeps the devices that it has.
    """
    global limited_to
    apply_memory_fraction(config)
    if config.deterministic:
        use_deterministic_kernels()
    if jax_has_started():
        return
    _keep_cpu()
    if config.gpu is False and gpus.simulated_count() is None:
        forbid_gpu("devices.gpu = false")  # without a call of the CUDA driver
        return
    shown, problem = gpus.visible()
    used = _used_gpus(config, len(shown))
    if used and used[-1] >= len(shown):
        return  # `devices.place` refuses it
    if gpus.simulated_count() is not None:
        limited_to = used
        jax.config.update("jax_num_cpu_devices", len(used) + 1)
    elif not used:
        forbid_gpu(problem)
    elif len(used) < len(shown) and jax.config.read("jax_cuda_visible_devices") == "all":
        # Not CUDA_VISIBLE_DEVICES, which the CUDA driver has already read in this process.
        limited_to = used
        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, used)))


def _used_gpus(config: DevicesConfig, count: int) -> tuple[int, ...]:
    """Indices of the GPUs that a session uses of `count` visible ones; an index may be beyond them."""
    if config.distributed:  # learner devices are counted over all processes
        return () if config.gpu is False else tuple(range(count))
    first = _index(config.gpu, count)
    used = {_index(config.actor, count), _index(config.evaluator, count), first}
    if first is not None:
        used |= set(range(first, count if config.data_parallel == "all" else first + config.data_parallel))
    return tuple(sorted(index for index in used if index is not None))


def _index(option: GpuOption | Literal["learner"], count: int) -> int | None:
    """The index that an option means, None for no GPU of its own."""
    if option == "learner" or option is False or (option == "auto" and count == 0):
        return None
    return 0 if option == "auto" or option is True else option


def forbid_gpu(reason: str = "") -> None:
    """Keeps JAX off the GPUs: no back end starts there and no memory is taken. Call before JAX starts its back end."""
    gpus.forbidden_because = gpus.forbidden_because or reason
    jax.config.update("jax_platforms", "cpu")


def _keep_cpu() -> None:
    """Adds the CPU, where the first parameters are computed, to a JAX_PLATFORMS that names GPUs alone."""
    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    if platforms and "cpu" not in platforms.split(",") and not jax_has_started():
        jax.config.update("jax_platforms", f"{platforms},cpu")


def visible_gpus() -> list[jax.Device]:
    """The GPUs that JAX sees (those that CUDA_VISIBLE_DEVICES leaves), by index. Starts JAX's back end."""
    return list(gpus_by_index()[0].values())


def gpus_by_index() -> tuple[dict[int, jax.Device], str]:
    """Index -> GPU, over all processes; where there are none, why.

    Raises:
        UserError: a GPU has too little free memory for JAX to start.
    """
    shown, problem = gpus.visible()
    if gpus.simulated_count() is not None:
        return _by_index(_simulated_gpus(len(shown))), problem
    if not shown:
        forbid_gpu(problem)
        return {}, gpus.forbidden_because
    _keep_cpu()
    with _plugin_failures() as failures:
        try:
            return _by_index(jax.devices("gpu")), ""
        except RuntimeError as error:  # raised if JAX has no such back end, or if it cannot be started
            causes = [*failures, " ".join(str(error).split())]  # a plugin may warn and work all the same
            if text := next(filter(is_out_of_memory, causes), None):
                raise UserError(
                    f"JAX cannot start on the GPU ({text[:160]}): other processes hold its memory; wait for them, lower"
                    " their devices.memory_fraction, or choose another GPU with devices.gpu"
                ) from error
            forbid_gpu(f"JAX cannot start on a GPU: {' '.join(causes)}")
            return {}, gpus.forbidden_because


def _by_index(devices: Sequence[jax.Device]) -> dict[int, jax.Device]:
    indices = limited_to if limited_to and len(limited_to) == len(devices) else range(len(devices))
    return dict(zip(indices, devices, strict=True))


@contextlib.contextmanager
def _plugin_failures() -> Iterator[list[str]]:
    """Collects why JAX could not load a plugin. JAX would log a traceback; the CUDA plugin warns, and is not there."""
    logger, failures = logging.getLogger("jax._src.xla_bridge"), []
    plugins, warnings = logging.getLogger("jax_plugins"), logging.StreamHandler()
    warnings.addFilter(lambda record: not failures.append(" ".join(record.getMessage().split())))

    def keep(record: logging.LogRecord) -> bool:
        if record.exc_info:
            failures.append(" ".join(f"{record.exc_info[1]}".split()))
        return not record.exc_info

    logger.addFilter(keep)
    plugins.addHandler(warnings)  # it also prints them: the plugin may work all the same
    try:
        yield failures
    finally:
        logger.removeFilter(keep)
        plugins.removeHandler(warnings)


def _simulated_gpus(count: int) -> list[jax.Device]:
    """CPU devices that stand in for GPUs: all but the first one of each process, which stays the CPU."""
    if count == 0:
        return []
    count = count if limited_to is None else len(limited_to)
    with contextlib.suppress(RuntimeError):  # the back end has started: it has the devices it has
        jax.config.update("jax_num_cpu_devices", count + 1)
    if (here := len(jax.local_devices(backend="cpu"))) <= count:
        raise UserError(f"{gpus.SIMULATED}: JAX started with {here} CPU devices; {count + 1} are needed")
    devices = jax.devices("cpu")
    processes = sorted({device.process_index for device in devices})
    return [device for p in processes for device in [d for d in devices if d.process_index == p][1 : count + 1]]
