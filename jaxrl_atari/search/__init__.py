"""Hyperparameter search: many trials with early stopping on few GPUs (Ray Tune and Optuna).

The config file of a search imports its names from here. The distributions are Optuna's.
"""

import sys

from jaxrl_atari.output import say

try:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
except ModuleNotFoundError as error:
    say(f"error: {error}; search mode needs Optuna and Ray: pip install 'jaxrl_atari[search]'", sys.stderr)
    raise SystemExit(2) from error  # `python -m` imports this file before the command can report an error

from jaxrl_atari.search.options import SearchConfig
from jaxrl_atari.trials.ray_cluster import ResourcesConfig

__all__ = ["CategoricalDistribution", "FloatDistribution", "IntDistribution", "ResourcesConfig", "SearchConfig"]
