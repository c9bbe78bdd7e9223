"""The options `ppo.*` in force: those of a config, as the functions of an algorithm get them.

A config may leave an option to the game or to the algorithm. `resolved_options` gives it its value.

This module makes `PPOConfig` a pytree, so `jit` takes options as an argument: their leaves are the options that
`traced_options.py` lists, and each combination of the others is compiled anew.
"""

from dataclasses import replace

import jax
import numpy as np

from jaxrl_atari.algorithm import Algorithm, find_algorithm
from jaxrl_atari.config import Config, PPOConfig
from jaxrl_atari.errors import require
from jaxrl_atari.traced_options import STATIC_OPTIONS, TRACED_OPTIONS

jax.tree_util.register_dataclass(PPOConfig, TRACED_OPTIONS, STATIC_OPTIONS)


def resolved_options(config: Config) -> PPOConfig:
    """The options `ppo.*` in force: lambda and each coefficient of the algorithm are numbers.

    Raises:
        ConfigError: no algorithm has the name, or it has no coefficient of a name in `ppo.coefficients`.
    """
    defaults = find_algorithm(config.algorithm).coefficients
    chosen = config.ppo.coefficients
    for name, value in chosen.items():
        expected = f"a coefficient of algorithm = {config.algorithm}, which has {', '.join(defaults) or 'none'}"
        hint = "--ppo.coefficients '{}' chooses none"
        require(name in defaults, f"ppo.coefficients.{name}", value, expected, hint)
    coefficients = {name: float(chosen.get(name, default)) for name, default in defaults.items()}
    return replace(config.ppo, gae_lambda=config.resolved_gae_lambda, coefficients=coefficients)


def check_options(options: PPOConfig, algorithm: Algorithm) -> None:
    """Raises `ConfigError` unless the options are the ones in force for this algorithm (`resolved_options`)."""
    hint = "give an update resolved_options(config) in place of config.ppo"
    require(options.gae_lambda is not None, "ppo.gae_lambda", None, "a number in an update", hint)
    given, declared = sorted(options.coefficients), sorted(algorithm.coefficients)
    expected = f"the coefficients of the algorithm, {declared}"
    require(given == declared, "ppo.coefficients", given, expected, hint)


def as_numbers(options: PPOConfig) -> PPOConfig:
    """The same options, in which the traced ones are NumPy float32 scalars. None stays None."""
    return jax.tree.map(np.float32, options)
