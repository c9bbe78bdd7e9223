"""The fraction of a GPU's memory that JAX reserves in a process, set before JAX starts its back end."""

import os
from collections.abc import MutableMapping

import jax
from jax._src import xla_bridge  # JAX has no public way to ask whether its back end has started

from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import ConfigError

FRACTION = "XLA_CLIENT_MEM_FRACTION"
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def memory_fraction(config: DevicesConfig, sharing: int = 1) -> float | None:
    """The fraction for each of `sharing` processes on one GPU. None: JAX's own (75%), or the user's in the environment.

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
    return round(0.9 / sharing, 4)


def set_memory_fraction(environment: MutableMapping[str, str], fraction: float) -> None:
    """Sets the fraction in the environment of a process in which JAX has not started."""
    environment.pop(OLD_FRACTION, None)  # JAX refuses the two together
    environment[FRACTION] = str(fraction)


def apply_memory_fraction(config: DevicesConfig) -> None:
    """Sets the fraction of this process. Call before JAX starts its back end.

    Raises:
        ConfigError: JAX has already started on a GPU, with another fraction.
    """
    fraction = memory_fraction(config)
    if fraction is None or os.environ.get(FRACTION) == str(fraction):
        return
    if xla_bridge.backends_are_initialized() and jax.default_backend() != "cpu":
        raise ConfigError(
            "devices.memory_fraction", fraction, "to be set before JAX starts",
            "train in a fresh process, or leave it out",
        )  # fmt: skip
    set_memory_fraction(os.environ, fraction)
