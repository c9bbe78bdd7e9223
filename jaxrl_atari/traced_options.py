"""The options of an update that a compiled program takes as data, and the ones that it is compiled for.

`algorithm_options.py` tells JAX about them. This module itself imports no JAX.
"""

from typing import get_type_hints

from jaxrl_atari.config import TRACED, PPOConfig

_HINTS = get_type_hints(PPOConfig, include_extras=True)

TRACED_OPTIONS = tuple(name for name, hint in _HINTS.items() if TRACED in getattr(hint, "__metadata__", ()))
"""The options that are marked `TRACED` in `config.py`, such as `learning_rate`: a new value compiles nothing."""

STATIC_OPTIONS = tuple(name for name in _HINTS if name not in TRACED_OPTIONS)
"""The other options, such as `epochs`: each value has a compiled update of its own.

The options of the optimiser are static, except for its rate, because an optimiser may branch on them when it is
made.
"""
