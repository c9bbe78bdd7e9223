"""Options of a search, with its space, and search.json, which stores them.

The config file of a search defines `get_search()` in addition to `get_config()`. `get_search` returns a
`SearchConfig`, whose `space` maps dotted names of config fields to Optuna's distributions.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from optuna.distributions import (
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
    distribution_to_json,
    json_to_distribution,
)

from jaxrl_atari.config import Config, Limits, check_fields
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.runs.description import read_config
from jaxrl_atari.runs.files import read_result
from jaxrl_atari.runs.layout import SEARCH_FILE
from jaxrl_atari.trials.resources import ResourcesConfig

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
    trials: Annotated[int, Limits(1, 1_000_000)] = 16
    """Number of trials."""
    sampler: Literal["tpe", "random"] = "tpe"
    """`tpe`: Optuna's TPE sampler, which learns once ten trials have ended; `random`: independent samples."""
    seed: Annotated[int, Limits(0, 2**31 - 1)] = 0
    """Seed of the sampler. With `random`, the order in which trials run does not change the fields of trial i."""
    early_stopping: Literal["asha", "none"] = "asha"
    """`asha`: stops trials that are worse than others at the same env steps; `none`: stops no trial."""
    grace_env_steps: Annotated[int, Limits(1, 10**12)] = 500_000
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
        return dataclasses.asdict(self) | {"space": space_dict(self)}


def space_dict(search: SearchConfig) -> dict[str, Any]:
    """The space of a search as JSON values: name of a field -> class and arguments of its distribution."""
    return {name: json.loads(distribution_to_json(distribution)) for name, distribution in search.space.items()}


def read_search(search_dir: Path) -> tuple[Config, SearchConfig]:
    """Reads the config and the options of a search from its search.json.

    Raises:
        UserError: the directory has no search.json, or the file cannot be used, for example in this version.
    """
    config = read_config(search_dir, SEARCH_FILE)
    path = search_dir / SEARCH_FILE
    search = read_result(path, search=dict)["search"]
    try:
        space = {name: json_to_distribution(json.dumps(saved)) for name, saved in search["space"].items()}
        resources = ResourcesConfig(**search["resources"])
        options = search | {"space": space, "resources": resources}
        return config, SearchConfig(**options)
    except UserError as error:  # a value that its field does not accept
        raise UserError(f"{path}: {error}") from error
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        problem = f"cannot be used ({reason(error)})"
        raise UserError(f"{path}: {problem}; continue it with the version that made it") from error
