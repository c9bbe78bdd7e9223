"""The checks of a search and of its space, before its directory is made."""

from optuna.distributions import CategoricalDistribution

from jaxrl_atari.algorithm import check_names_and_minibatches
from jaxrl_atari.config import Config, set_fields
from jaxrl_atari.errors import require
from jaxrl_atari.search.options import Distribution, SearchConfig
from jaxrl_atari.trials.varied_fields import can_vary


def check_search(config: Config, search: SearchConfig) -> None:
    """Checks that a search can be run.

    Raises:
        ConfigError: in one of these cases:

            - The space is empty, has a field that a search cannot vary, or has a value that is no distribution.
            - The config refuses a choice or an end of a range, beside the first values of the other fields.
            - The trials have several sessions, which ASHA cannot compare.
            - ASHA's first comparison is beyond the budget.
            - A network, algorithm or coefficient does not exist, or a minibatch size does not suit the network.
    """
    unusable = [
        name
        for name, distribution in search.space.items()
        if not isinstance(name, str) or not can_vary(name, config) or not isinstance(distribution, Distribution)
    ]
    require(
        search.space and not unusable,
        "search.space",
        ", ".join(map(str, unusable)),
        expected="fields of the config by their dotted names, such as ppo.gae_lambda, that may differ between "
        "trials, each with a distribution of Optuna",
        hint="configs/search_qbert.py is an example of a --config",
    )
    tried = {
        name: each.choices if isinstance(each, CategoricalDistribution) else (each.low, each.high)
        for name, each in search.space.items()
    }
    first = {name: values[0] for name, values in tried.items()}
    first["seed"] = config.seed + config.sessions  # with which `NAME_best.py` trains the best trial again
    for name, values in tried.items():
        for value in values:
            check_names_and_minibatches(set_fields(config, first | {name: value}))
    if search.early_stopping == "asha":
        hint = "or use --search.early-stopping none"
        require(config.sessions == 1, "sessions", config.sessions, "1 where ASHA compares trials", hint)
        require(
            search.grace_env_steps < config.total_env_steps,
            "search.grace_env_steps",
            search.grace_env_steps,
            expected=f"less than total_env_steps = {config.total_env_steps:,}",
            hint=hint,
        )
