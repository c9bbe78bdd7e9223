"""JAX's settings: which of them change numbers, deterministic kernels, and whether JAX has started."""

import os
from typing import Any

import jax

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


def are_kernels_deterministic() -> bool:
    """Whether XLA_FLAGS says so."""
    return DETERMINISTIC in os.environ.get("XLA_FLAGS", "").split()


def use_deterministic_kernels() -> None:
    """Adds `DETERMINISTIC` to XLA_FLAGS. Call it before JAX starts."""
    # XLA reads its autotuning cache before it obeys the flag, and the keys of that cache do not include the flag.
    jax_config.update("jax_persistent_cache_enable_xla_caches", "none")
    if not are_kernels_deterministic():
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC}".strip()


def numeric_settings() -> dict[str, Any]:
    """The settings that change numbers and differ from their defaults, and the number of XLA's threads."""
    settings = {name: getattr(jax_config, name) for name in NUMERIC}
    settings |= {name: os.environ.get(name) for name in ("XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")}
    changed = {name: value for name, value in settings.items() if value != NUMERIC.get(name)}
    return {"xla_threads": cpu.xla_threads(), **changed}
