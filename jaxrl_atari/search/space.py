"""Options of a search, with its space, and search.json, which stores them.

The config file of a search imports Optuna's distributions from here. Without the extra `search`, the import raises
`UserError`.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jaxrl_atari.algorithm import check_config
from jaxrl_atari.config import Config, Limits, PositiveInt, can_vary, check_fields, set_fields
from jaxrl_atari.errors import require, require_package
from jaxrl_atari.runs.description import read_config
from jaxrl_atari.runs.files import read_result
from jaxrl_atari.runs.layout import SEARCH_FILE
from jaxrl_atari.trials.slots import ResourcesConfig

require_package("optuna", "search")

from optuna.distributions import (  # noqa: E402
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
    json_to_distribution,
)

__all__ = ["CategoricalDistribution", "FloatDistribution", "IntDistribution", "ResourcesConfig", "SearchConfig"]

Distribution = FloatDistribution | IntDistribution | CategoricalDistribution

NO_OPTION = tyro.constructors.PrimitiveConstructorSpec(
    nargs="*",
    metavar="",
    instance_from_str=lambda words: {},
    is_instance=lambda value: True,
    str_from_instance=lambda value: [],
)
"""Stops tyro from deriving options from the distributions."""


@dataclass(frozen=True)
class SearchConfig:
    """Options of a search."""

    space: Annotated[Mapping[str, Distribution], tyro.conf.Suppress, NO_OPTION] = field(default_factory=dict)
    """Dotted name of a config field -> its distribution."""
    trials: PositiveInt = 16
    """Number of trials."""
    sampler: Literal["tpe", "random"] = "tpe"
    """`tpe`: Optuna's TPE sampler, which learns once ten trials have ended; `random`: independent samples."""
    seed: Annotated[int, Limits(0, 2**31 - 1)] = 0
    """Seed of the sampler. With `random`, the order in which trials run does not change the fields of trial i."""
    early_stopping: Literal["asha", "none"] = "asha"
    """`asha`: stops trials that are worse than others at the same env steps; `none`: stops no trial."""
    grace_env_steps: PositiveInt = 500_000
    """Env steps of the first comparison. Others follow at `reduction`, `reduction`², ... times as many."""
    reduction: Annotated[int, Limits(2, 1_000_000)] = 3
    """Each comparison keeps the best 1 / reduction of the trials."""
    address: str = ""
    """Address of a Ray cluster, or `auto` on a machine where `ray start` has run. Empty: this machine alone."""
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)

    def __post_init__(self) -> None:
        check_fields(self, "search.")

    def to_dict(self) -> dict[str, Any]:
        """These options as nested dicts of JSON values."""
        space = {name: json.loads(distribution_to_json(each)) for name, each in self.space.items()}
        return dataclasses.asdict(self) | {"space": space}


def read_search(search_dir: Path) -> tuple[Config, SearchConfig]:
    """Reads the config and the options of a search from its search.json.

    Raises:
        UserError: the directory has no search.json, or the file cannot be used.
    """
    config = read_config(search_dir, SEARCH_FILE)
    saved = read_result(search_dir / SEARCH_FILE, search=dict)["search"]
    space = {name: json_to_distribution(json.dumps(each)) for name, each in saved["space"].items()}
    options = saved | {"space": space, "resources": ResourcesConfig(**saved["resources"])}
    return config, SearchConfig(**options)


def check_search(config: Config, search: SearchConfig) -> None:
    """Checks that a search can be run.

    Raises:
        ConfigError: in one of these cases:

            - The space is empty, has a field that a search cannot vary, or has a value that is no distribution.
            - The config refuses a choice or an end of a range, beside the first values of the other fields.
            - ASHA's first comparison is beyond the budget.
            - A network, algorithm or coefficient does not exist, or a minibatch size does not suit the network.
    """
    expected = "fields of the config, such as ppo.gae_lambda, each with a distribution of Optuna"
    hint = "configs/search_qbert.py is an example of a --config"
    require(search.space, "search.space", {}, expected, hint)
    require(not config.devices.distributed, "devices.distributed", True, "false in a search")
    tried: dict[str, tuple[Any, ...]] = {}
    for name, each in search.space.items():
        require(can_vary(name) and isinstance(each, Distribution), "search.space", name, expected, hint)
        tried[name] = each.choices if isinstance(each, CategoricalDistribution) else (each.low, each.high)
    first = {name: values[0] for name, values in tried.items()}
    for name, values in tried.items():
        for value in values:
            check_config(set_fields(config, first | {name: value}))
    if search.early_stopping == "asha":
        expected = f"less than total_env_steps = {config.total_env_steps:,}"
        grace = search.grace_env_steps
        hint = "or use --search.early-stopping none"
        require(grace < config.total_env_steps, "search.grace_env_steps", grace, expected, hint)
