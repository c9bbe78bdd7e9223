"""`PPOConfig` as a pytree, and the options of an update as numbers.

The leaves are the options that are marked `TRACED`: a compiled update takes them as data, so that a new value
compiles nothing. All other options are static. `config.py` itself imports no JAX.
"""

from typing import get_type_hints

import jax
import numpy as np

from jaxrl_atari.config import TRACED, PPOConfig

_HINTS = get_type_hints(PPOConfig, include_extras=True)

TRACED_OPTIONS = tuple(name for name, hint in _HINTS.items() if TRACED in getattr(hint, "__metadata__", ()))
"""The leaves of a `PPOConfig`, such as `learning_rate`."""

STATIC_OPTIONS = tuple(name for name in _HINTS if name not in TRACED_OPTIONS)
"""The other options, such as `epochs`: each value has a compiled update of its own.

Those of the optimiser are static, except for its rate: an optimiser may branch on them when it is made.
"""

jax.tree_util.register_dataclass(PPOConfig, TRACED_OPTIONS, STATIC_OPTIONS)


def as_numbers(options: PPOConfig) -> PPOConfig:
    """The same options with NumPy float32 scalars as traced ones; None stays None."""
    return jax.tree.map(np.float32, options)
