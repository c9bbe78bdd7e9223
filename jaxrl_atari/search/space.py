"""The names that the config file of a search imports: `SearchConfig`, its resources, and Optuna's distributions.

Without the extra `search`, the import raises `UserError`.
"""

from jaxrl_atari.search import require_extra

require_extra()

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution  # noqa: E402

from jaxrl_atari.search.options import SearchConfig  # noqa: E402
from jaxrl_atari.trials.resources import ResourcesConfig  # noqa: E402

__all__ = ["CategoricalDistribution", "FloatDistribution", "IntDistribution", "ResourcesConfig", "SearchConfig"]
