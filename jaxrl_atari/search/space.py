"""What a search varies: distributions of config fields, checked before anything starts.

A config file for `python -m jaxrl_atari.search` has, beside `get_config()`, a `get_search()` that returns a
`SearchConfig`, whose `space` gives each searched field, by its dotted name, a distribution.
"""

import dataclasses
import itertools
import json
import math
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from jaxrl_atari.config import Config
from jaxrl_atari.config_fields import require_choice, require_int
from jaxrl_atari.config_files import call_config_file, config_from_dict
from jaxrl_atari.errors import ConfigError, UserError


@dataclass(frozen=True)
class Range:
    """From `low` to `high`."""

    low: float
    high: float


class Uniform(Range):
    """Numbers from `low` to `high`, each as likely."""


class LogUniform(Range):
    """Numbers from `low` > 0 to `high` whose logarithm is uniform: for quantities that are compared by their ratio."""


class Integer(Range):
    """Whole numbers from `low` to `high`, both included."""


@dataclass(frozen=True)
class Values:
    """Some of these, at least one."""

    values: Sequence[Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))


class Choice(Values):
    """One of these values."""


class Grid(Values):
    """All of these values in turn: trial i takes point i of the product of all grids, modulo its size."""


Distribution = Uniform | LogUniform | Integer | Choice | Grid
Space = Mapping[str, Distribution]
Fields = dict[str, Any]
"""A trial's searched fields: dotted name -> value."""

SET_BY_SEARCH = {"name", "seed", "sessions", "output_dir", "devices", "trial", "evaluation", "log"}
"""Fields, and groups of fields, that are the same for all trials of a search."""


@dataclass(frozen=True)
class ResourcesConfig:
    """What each trial gets."""

    gpu: float = 1.0
    """GPUs of a trial: 0.5, 0.25, 0.125 for 2, 4, 8 trials a GPU. With no GPU there, or 0, trials run on the CPU."""
    cpu: int = 0
    """CPU cores of a trial. 0: where there are GPUs an equal share, on a CPU 1."""

    def __post_init__(self) -> None:
        if not (0 <= self.gpu <= 1 or self.gpu == int(self.gpu)):
            raise ConfigError("search.resources.gpu", self.gpu, "a share from 0 to 1, or a whole number of GPUs")
        require_int("search.resources.cpu", self.cpu, 0, 4_096)


@dataclass(frozen=True)
class SearchConfig:
    """A search: what is varied, how often, and what each trial may use."""

    space: Annotated[Space, tyro.conf.Suppress] = field(default_factory=dict)
    """Dotted name of a config field -> its distribution."""
    trials: int = 16
    """Trials in all."""
    method: Literal["optuna", "random"] = "optuna"
    """`optuna`: its Parzen estimator (TPE), which learns from the trials before; `random`: independent draws."""
    seed: int = 0
    """Of the draws. With `random`, trial i draws the same fields however the search goes."""
    early_stopping: Literal["asha", "none"] = "asha"
    """`asha`: trials worse than the others at the same env steps end early, one session a trial; `none`: none does."""
    grace_env_steps: int = 500_000
    """Env steps that every trial gets; compared here first, and at each multiple by `reduction`."""
    reduction: int = 3
    """At each comparison the best 1 / reduction go on."""
    keep: int = 3
    """Trials, the best by score, that keep their models; those of the others are removed."""
    address: str = ""
    """Ray cluster to join: its address, or `auto` where `ray start` has run. Empty: this machine alone."""
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)

    def __post_init__(self) -> None:
        require_int("search.trials", self.trials, 1, 1_000_000)
        require_int("search.seed", self.seed, 0, 2**31 - 1)
        require_int("search.grace_env_steps", self.grace_env_steps, 1, 10**12)
        require_int("search.reduction", self.reduction, 2, 1_000_000)
        require_int("search.keep", self.keep, 0, 1_000_000)
        require_choice("search.method", self.method, ("optuna", "random"))
        require_choice("search.early_stopping", self.early_stopping, ("asha", "none"))

    def to_dict(self) -> dict[str, Any]:
        """This search as nested dicts of JSON values."""
        space = {name: {type(d).__name__: dataclasses.asdict(d)} for name, d in self.space.items()}
        return {**dataclasses.asdict(dataclasses.replace(self, space={})), "space": space}


def search_from_dict(values: dict[str, Any]) -> SearchConfig:
    """The inverse of `SearchConfig.to_dict`."""
    kinds = {kind.__name__: kind for kind in typing.get_args(Distribution)}
    space = {
        name: kinds[kind](**arguments)
        for name, described in values["space"].items()
        for kind, arguments in described.items()
    }
    return SearchConfig(**{**values, "space": space, "resources": ResourcesConfig(**values["resources"])})


def load_search_file(path: str | Path) -> tuple[Config, SearchConfig]:
    """Runs a Python config file and returns what its `get_config()` and `get_search()` return.

    Raises:
        UserError: the file cannot be used, or has no `get_search()` that returns a `SearchConfig`.
    """
    config, search = call_config_file(path, get_config=Config, get_search=SearchConfig)
    return config, search


def read_search(search_dir: Path) -> tuple[Config, SearchConfig]:
    """Config and search of a search directory.

    Raises:
        UserError: it is no search directory.
    """
    path = Path(search_dir) / "search.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return config_from_dict(values["config"]), search_from_dict(values["search"])
    except FileNotFoundError as error:
        raise UserError(f"{search_dir}: not a search directory (it has no {path.name})") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged ({type(error).__name__}: {error})") from error


def set_fields(config: Config, fields: Mapping[str, Any]) -> Config:
    """`config` with fields replaced by dotted name, all at once; validated as any config is."""
    groups: dict[str, dict[str, Any]] = {}
    top: dict[str, Any] = {}
    for name, value in fields.items():
        group, _, leaf = name.rpartition(".")
        (groups.setdefault(group, {}) if group else top)[leaf] = value
    for group, values in groups.items():
        top[group] = dataclasses.replace(getattr(config, group), **values)
    return dataclasses.replace(config, **top)


# --- Checks ----------------------------------------------------------------------------------------------------------


def check_space(config: Config, search: SearchConfig) -> None:
    """Refuses a search that cannot be run.

    Raises:
        ConfigError: an unknown field, a range that is empty or leaves what the field may be, values that do not fit
            together, or comparisons of ASHA beyond the budget. The message names the field.
    """
    if not search.space:
        raise ConfigError("search.space", {}, "at least one field with a distribution")
    ends = {name: _check_field(name, distribution) for name, distribution in search.space.items()}
    for combination in itertools.islice(itertools.product(*ends.values()), 10_000):
        set_fields(config, dict(zip(ends, combination, strict=True)))
    points = math.prod(len(d.values) for d in search.space.values() if isinstance(d, Grid))
    if points > search.trials:
        raise ConfigError(
            "search.trials", search.trials, f"at least the {points} points of the grid", "raise it, or thin the grid"
        )
    budget = config.total_env_steps
    if search.early_stopping == "asha" and search.grace_env_steps >= budget:
        raise ConfigError(
            "search.grace_env_steps", search.grace_env_steps, f"less than total_env_steps = {budget:,}",
            "lower it, or use --search.early-stopping none",
        )  # fmt: skip
    data_parallel = config.devices.data_parallel
    if data_parallel != "all" and data_parallel > max(search.resources.gpu, 1):
        raise ConfigError(
            "search.resources.gpu", search.resources.gpu, f"at least devices.data_parallel = {data_parallel}"
        )


def _check_field(name: str, distribution: Distribution) -> list[Any]:
    """The ends of a field's range, or all its values, which are of the field's type."""
    field_type = _field_type(name)
    if isinstance(distribution, Values):
        values = list(distribution.values)
        if not values:
            raise ConfigError(f"search.space {name}", values, "at least one value")
    elif isinstance(distribution, Range):
        low, high = values = [distribution.low, distribution.high]
        kind = type(distribution).__name__
        whole = isinstance(distribution, Integer)
        if not all(_is_whole(end) if whole else _is_number(end) for end in values):
            raise ConfigError(f"search.space {name}", values, f"two {'whole ' * whole}numbers for {kind}")
        if low >= high:
            raise ConfigError(f"search.space {name}", values, f"{kind} from a lower to a higher number")
        if isinstance(distribution, LogUniform) and low <= 0:
            raise ConfigError(f"search.space {name}", values, "a range above 0 for LogUniform")
        if not whole and float not in field_type:
            raise ConfigError(f"search.space {name}", values, f"no {kind}: the field takes no fractions", "use Integer")
    else:
        raise ConfigError(f"search.space {name}", distribution, "Uniform, LogUniform, Integer, Choice or Grid")
    for value in values:
        if not _fits(value, field_type):
            raise ConfigError(f"search.space {name}", value, "a value of the field's type")
    return values


def _field_type(name: str) -> tuple[Any, ...]:
    """The types and literals that a field of the config may have."""
    group, _, leaf = name.rpartition(".")
    cls: Any = Config
    if group:
        cls = typing.get_type_hints(Config).get(group)
    known = typing.get_type_hints(cls) if dataclasses.is_dataclass(cls) else {}
    if leaf not in known or dataclasses.is_dataclass(known[leaf]):
        raise ConfigError("search.space", name, "a field of the config by its dotted name, such as ppo.gae_lambda")
    if {name, group} & SET_BY_SEARCH:
        raise ConfigError("search.space", name, "a field that may differ between trials", "set it in get_config()")
    hint = known[leaf]
    members = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return tuple(x for m in members for x in (typing.get_args(m) if typing.get_origin(m) is Literal else (m,)))


def _fits(value: Any, field_type: tuple[Any, ...]) -> bool:
    if value is None:
        return type(None) in field_type
    if isinstance(value, str):
        return str in field_type or value in field_type
    return type(value) in field_type or (_is_whole(value) and float in field_type)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


# --- Draws -----------------------------------------------------------------------------------------------------------


def grid_point(space: Space, number: int) -> Fields:
    """The grids' values for trial `number`; the last field changes fastest."""
    grids = {name: d.values for name, d in space.items() if isinstance(d, Grid)}
    points = list(itertools.product(*grids.values()))
    return dict(zip(grids, points[number % len(points)], strict=True))


def draw(space: Space, seed: int, number: int) -> Fields:
    """Trial `number`'s fields at random; they depend on space, seed and number alone."""
    rng = np.random.default_rng([seed, number])
    grid = grid_point(space, number)
    return {name: grid[name] if name in grid else _draw_one(d, rng) for name, d in space.items()}


def _draw_one(distribution: Distribution, rng: np.random.Generator) -> Any:
    match distribution:
        case Uniform(low, high):
            return float(rng.uniform(low, high))
        case LogUniform(low, high):
            return float(min(max(math.exp(rng.uniform(math.log(low), math.log(high))), low), high))
        case Integer(low, high):
            return int(rng.integers(int(low), int(high), endpoint=True))
        case Choice(values):
            return values[int(rng.integers(len(values)))]
    raise TypeError(f"{distribution!r} is not drawn")
