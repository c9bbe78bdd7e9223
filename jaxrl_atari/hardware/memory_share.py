"""The fraction of a GPU's memory that JAX reserves in a process, set before JAX starts its back end."""

import os
from collections.abc import MutableMapping

import jax

from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import ConfigError
from jaxrl_atari.hardware.runtime import jax_has_started

FRACTION = "XLA_CLIENT_MEM_FRACTION"
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
BESIDE_THE_POOL = 0.8 * 2**30
"""Bytes of a process on a GPU beside the memory that JAX reserves: CUDA context, cuDNN and cuBLAS handles."""


def equal_share(processes: float, total: int = 0) -> float:
    """The fraction of a GPU's memory that each of `processes` processes may reserve.

    All reserve at most 90% of the memory, and leave `BESIDE_THE_POOL` for each.

    Args:
        total: memory of the GPU in bytes, 0 if it is not known.

    Raises:
        ConfigError: the GPU is too small for so many.
    """
    fraction = 0.9 / processes
    if total:
        fraction = min(fraction, (total - processes * BESIDE_THE_POOL) / (processes * total))
    if fraction < 0.01:
        raise ConfigError(
            "sessions on a GPU", processes, f"fewer: each takes 0.8 GiB of {total / 2**30:.0f} GiB beside the memory"
            " that JAX reserves", "lower trial.parallel",
        )  # fmt: skip
    return round(fraction, 4)


def memory_fraction(config: DevicesConfig, sharing: int = 1, total: int = 0) -> float | None:
    """The fraction for each of `sharing` processes on one GPU. None: JAX's own (75%), or the user's in the environment.

    Args:
        total: see `equal_share`.

    Raises:
        ConfigError: the processes together would take more memory than there is.
    """
    if config.memory_fraction is not None:
        if config.memory_fraction * sharing > 1.0:
            raise ConfigError(
                "devices.memory_fraction", config.memory_fraction,
                f"at most 1/{sharing}, as {sharing} processes share a GPU", "lower it, or trial.parallel",
            )  # fmt: skip
        return config.memory_fraction
    if sharing == 1 or os.environ.get(FRACTION) or os.environ.get(OLD_FRACTION):
        return None
    return equal_share(sharing, total)


def set_memory_fraction(environment: MutableMapping[str, str], fraction: float) -> None:
    """Sets the fraction in the environment of a process in which JAX has not started."""
    environment.pop(OLD_FRACTION, None)  # JAX refuses the two together
    environment[FRACTION] = str(fraction)


def do_not_preallocate() -> None:
    """Lets JAX take memory of a GPU only as it needs it, beside a training run. Call before JAX starts its back end."""
    os.environ.setdefault(PREALLOCATE, "false")


def apply_memory_fraction(config: DevicesConfig) -> None:
    """Sets the fraction of this process. Call before JAX starts its back end.

    Raises:
        ConfigError: JAX has already started on a GPU, with another fraction.
    """
    fraction = memory_fraction(config)
    if fraction is None or os.environ.get(FRACTION) == str(fraction):
        return
    if jax_has_started() and jax.default_backend() != "cpu":
        raise ConfigError(
            "devices.memory_fraction", fraction, "to be set before JAX starts",
            "train in a fresh process, or leave it out",
        )  # fmt: skip
    set_memory_fraction(os.environ, fraction)
