"""JAX's settings: its config and environment variables, what changes numbers, and whether JAX has started."""

import os
from typing import Any, NamedTuple

import jax
import jax.extend

from jaxrl_atari.errors import require
from jaxrl_atari.hardware import cpu

jax_config: Any = jax.config  # the type checker does not know its attributes

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
"""XLA's flag for the same bits in every run on a GPU: no atomic additions, no kernel chosen by timing."""

NUMERIC = {
    "jax_enable_x64": False,
    "jax_default_matmul_precision": None,
    "jax_numpy_dtype_promotion": "standard",
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
    "jax_disable_jit": False,
}
"""Settings of JAX that change numbers -> JAX's defaults."""


class ChangedVariable(NamedTuple):
    """The values of an environment variable that `set_variable` has changed. None where it is not set."""

    before: str | None
    ours: str | None


_changed: dict[str, ChangedVariable] = {}
"""The variables that are changed now, by name."""


def set_variable(name: str, value: str | None) -> None:
    """Sets an environment variable for a session; None removes it. `restore_variables` undoes it."""
    current = os.environ.get(name)
    changed = _changed.get(name)
    before = changed.before if changed and changed.ours == current else current
    _changed[name] = ChangedVariable(before, value)
    write_variable(name, value)


def values_before() -> dict[str, str | None]:
    """The values that variables had before `set_variable` changed them: those for another process.

    Variables that somebody else has changed since then are left out.
    """
    return {name: changed.before for name, changed in _changed.items() if os.environ.get(name) == changed.ours}


def restore_variables() -> None:
    """Gives variables their `values_before`. JAX must not have started: the variables say how it has started."""
    for name, value in values_before().items():
        write_variable(name, value)
    _changed.clear()


def write_variable(name: str, value: str | None) -> None:
    """Sets an environment variable; None removes it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def has_started() -> bool:
    """Whether JAX has started its back end in this process.

    JAX has no public way to ask, but once it has started, it refuses to change the number of CPU devices.
    """
    count = jax_config.jax_num_cpu_devices
    try:
        jax_config.update("jax_num_cpu_devices", count + 1)
    except RuntimeError:
        return True
    jax_config.update("jax_num_cpu_devices", count)
    return False


def has_started_on_gpu() -> bool:
    """Whether JAX has started on a GPU in this process. It then keeps its GPUs and their settings."""
    return has_started() and set(jax.extend.backend.backends()) != {"cpu"}


def require_not_started(field: str, value: Any) -> None:
    """Raises `ConfigError` if JAX has started on a GPU, which is too late for the option `field`."""
    hint = "train in a fresh process, or leave it out"
    require(not has_started_on_gpu(), field, value, "to be set before JAX starts", hint)


def check_deterministic_kernels() -> None:
    """Raises `ConfigError` if JAX has started on a GPU without `DETERMINISTIC`."""
    if DETERMINISTIC not in os.environ.get("XLA_FLAGS", ""):
        require_not_started("devices.deterministic", True)


def use_deterministic_kernels() -> None:
    """Adds `DETERMINISTIC` to XLA_FLAGS. Call `check_deterministic_kernels` first."""
    # XLA reads its autotuning cache before it obeys the flag, and the keys of that cache do not include the flag.
    jax_config.update("jax_persistent_cache_enable_xla_caches", "none")
    flags = os.environ.get("XLA_FLAGS", "")
    if DETERMINISTIC not in flags:
        set_variable("XLA_FLAGS", f"{flags} {DETERMINISTIC}")  # if a flag appears twice, the last one wins


def numeric_settings() -> dict[str, Any]:
    """The settings that change numbers and differ from their defaults, and the number of XLA's threads."""
    settings = {name: getattr(jax_config, name) for name in NUMERIC}
    settings |= {name: os.environ.get(name) for name in ("XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")}
    changed = {name: value for name, value in settings.items() if value != NUMERIC.get(name)}
    return {"xla_threads": cpu.xla_threads(), **changed}
