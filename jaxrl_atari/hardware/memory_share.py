"""The fraction of a GPU's memory that JAX reserves in a process."""

import math
import os

from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import require
from jaxrl_atari.hardware.runtime import require_not_started

FRACTION = "XLA_CLIENT_MEM_FRACTION"
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
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
    fraction = min(0.9 / processes, 1 / processes - BESIDE_THE_POOL / (total or math.inf))
    expected = f"fewer: each takes 0.8 GiB of {total / 2**30:.0f} GiB beside the memory that JAX reserves"
    require(fraction >= 0.01, "sessions on a GPU", processes, expected, "lower trial.parallel")
    return round(fraction, 4)


def memory_fraction(config: DevicesConfig, sharing: int = 1, total: int = 0) -> float | None:
    """The fraction for each of `sharing` processes on one GPU. None: JAX's own (75%), or the user's in the environment.

    Args:
        total: see `equal_share`.

    Raises:
        ConfigError: the processes together would take more memory than there is.
    """
    if (fraction := config.memory_fraction) is None:
        own = sharing == 1 or {FRACTION, OLD_FRACTION} & os.environ.keys()
        return None if own else equal_share(sharing, total)
    expected = f"at most 1/{sharing}, as {sharing} processes share a GPU"
    require(fraction * sharing <= 1, "devices.memory_fraction", fraction, expected, "lower it, or trial.parallel")
    return fraction


def apply_memory_fraction(config: DevicesConfig) -> None:
    """Sets the fraction of this process. Raises `ConfigError` if JAX has started on a GPU, with another fraction."""
    fraction = memory_fraction(config)
    if fraction is not None and os.environ.get(FRACTION) != str(fraction):
        require_not_started("devices.memory_fraction", fraction)
        os.environ.pop(OLD_FRACTION, None)  # JAX refuses the two together
        os.environ[FRACTION] = str(fraction)


def do_not_preallocate() -> None:
    """Lets JAX take memory of a GPU only as it needs it, beside a training run. Call before JAX starts its back end."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
