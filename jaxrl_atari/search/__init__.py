"""Hyperparameter search: many trials with early stopping on few GPUs (Ray Tune and Optuna).

A config file for a search imports what it needs from here; the distributions are Optuna's.
"""

from jaxrl_atari.errors import UserError

try:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
except ImportError as error:
    raise UserError("search mode needs Optuna and Ray: pip install 'jaxrl_atari[search]'") from error

from jaxrl_atari.search.options import SearchConfig
from jaxrl_atari.suite.ray_cluster import ResourcesConfig

__all__ = ["CategoricalDistribution", "FloatDistribution", "IntDistribution", "ResourcesConfig", "SearchConfig"]
