"""Search space and search options, checked before a search starts.

A config file for `python -m jaxrl_atari.search` defines `get_search()` beside `get_config()`. It returns a
`SearchConfig`, whose `space` maps the dotted names of config fields to distributions.
"""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args, get_type_hints

import tyro

from jaxrl_atari.config import Config, config_from_dict
from jaxrl_atari.errors import ConfigError, Limits, check_fields, require


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`."""

    low: float
    high: float


class Uniform(Range):
    """Numbers from `low` to `high`, uniformly distributed."""


class LogUniform(Range):
    """Numbers from `low` > 0 to `high` whose logarithm is uniformly distributed."""


class Integer(Range):
    """Whole numbers from `low` to `high`, both included."""


@dataclass(frozen=True)
class Values:
    """A sequence of at least one value."""

    values: Sequence[Any]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(self.values))


class Choice(Values):
    """One of the values."""


class Grid(Values):
    """Every value in turn: trial i gets point i of the product of all grids, modulo the number of points."""


Distribution = Uniform | LogUniform | Integer | Choice | Grid
Space = Mapping[str, Distribution]
Fields = dict[str, Any]
"""The searched fields of a trial: dotted name -> value."""

SAME_FOR_ALL_TRIALS = {"name", "seed", "sessions", "output_dir", "devices", "trial", "evaluation", "log"}
"""Config fields and groups that a search cannot vary."""


@dataclass(frozen=True)
class ResourcesConfig:
    """Resources of each trial."""

    gpu: Annotated[float, Limits(0.0, 4_096.0)] = 1.0
    """GPUs of a trial: 0.5, 0.25, 0.125 for 2, 4, 8 trials on each GPU. With 0, or without a GPU, trials run on CPU."""
    cpu: Annotated[int, Limits(0, 4_096)] = 0
    """CPU cores of a trial. 0: an equal share where there are GPUs, 1 on a CPU."""

    def __post_init__(self) -> None:
        check_fields(self, "search.resources.")
        if self.gpu > 1 and self.gpu != int(self.gpu):
            raise ConfigError("search.resources.gpu", self.gpu, "a share from 0 to 1, or a whole number of GPUs")


@dataclass(frozen=True)
class SearchConfig:
    """Options of a search."""

    space: Annotated[Space, tyro.conf.Suppress] = field(default_factory=dict)
    """Dotted name of a config field -> its distribution."""
    trials: Annotated[int, Limits(1, 1_000_000)] = 16
    """Number of trials."""
    method: Literal["optuna", "random"] = "optuna"
    """`optuna`: its TPE sampler, which learns from earlier trials; `random`: independent samples."""
    seed: Annotated[int, Limits(0, 2**31 - 1)] = 0
    """Seed of the sampler. With `random`, trial i gets the same fields in whatever order trials run."""
    early_stopping: Literal["asha", "none"] = "asha"
    """`asha`: stop trials that are worse than others at the same env steps (one session each); `none`: stop none."""
    grace_env_steps: Annotated[int, Limits(1, 10**12)] = 500_000
    """Env steps of the first comparison; the next ones are at `reduction`, `reduction`², ... times that."""
    reduction: Annotated[int, Limits(2, 1_000_000)] = 3
    """Each comparison keeps the best 1 / reduction of the trials."""
    retries: Annotated[int, Limits(0, 1_000)] = 0
    """How often a trial that fails is restarted from its last checkpoint. A resume with a higher value continues failed
    trials, with as many restarts."""
    keep: Annotated[int, Limits(0, 1_000_000)] = 3
    """Number of finished and stopped trials, the best by score, that keep their checkpoints. Failed trials all do."""
    address: str = ""
    """Ray cluster to join: its address, or `auto` on a machine where `ray start` has run. Empty: this machine alone."""
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)

    def __post_init__(self) -> None:
        check_fields(self, "search.")

    def to_dict(self) -> dict[str, Any]:
        """Converts to nested dicts of JSON values."""
        space = {name: {type(d).__name__: dataclasses.asdict(d)} for name, d in self.space.items()}
        return {**dataclasses.asdict(dataclasses.replace(self, space={})), "space": space}


def search_from_dict(values: dict[str, Any]) -> SearchConfig:
    """The inverse of `SearchConfig.to_dict`."""
    kinds = {kind.__name__: kind for kind in get_args(Distribution)}
    space = {name: kinds[kind](**ends) for name, saved in values["space"].items() for kind, ends in saved.items()}
    return SearchConfig(**{**values, "space": space, "resources": ResourcesConfig(**values["resources"])})


def set_fields(config: Config, fields: Mapping[str, Any]) -> Config:
    """Returns `config` with fields replaced by dotted name, all at once, and validated."""
    values = config.to_dict()
    for name, value in fields.items():
        group, _, leaf = name.rpartition(".")
        (values[group] if group else values)[leaf] = value
    return config_from_dict(values)


def grid_point(space: Space, number: int) -> Fields:
    """The values of the grids for trial `number`; the last field changes fastest."""
    grids = {name: d.values for name, d in space.items() if isinstance(d, Grid)}
    points = list(itertools.product(*grids.values()))
    return dict(zip(grids, points[number % len(points)], strict=True))


# --- Checks ----------------------------------------------------------------------------------------------------------


def check_space(config: Config, search: SearchConfig) -> None:
    """Raises an error for a search that cannot be run.

    Raises:
        ConfigError: an unknown field, an empty range, values that the config does not accept alone or together, or a
            first comparison beyond the budget. The message names the field.
    """
    require(bool(search.space), "search.space", {}, "at least one field with a distribution")
    tested = {name: _check_field(name, distribution) for name, distribution in search.space.items()}
    corners = {
        name: (values[0], values[-1]) if isinstance(search.space[name], Range) else values
        for name, values in tested.items()
    }
    # Every value once, then the combinations of ends and choices, of which there may be too many.
    longest = max(map(len, tested.values()))
    rows = ([values[i % len(values)] for values in tested.values()] for i in range(longest))
    for combination in itertools.chain(rows, itertools.islice(itertools.product(*corners.values()), 10_000)):
        set_fields(config, dict(zip(tested, combination, strict=True)))
    points = math.prod(len(d.values) for d in search.space.values() if isinstance(d, Grid))
    expected = f"at least the {points} points of the grid"
    require(points <= search.trials, "search.trials", search.trials, expected, "raise it, or thin the grid")
    budget, grace = config.total_env_steps, search.grace_env_steps
    if search.early_stopping == "asha" and grace >= budget:
        advice = "lower it, or use --search.early-stopping none"
        raise ConfigError("search.grace_env_steps", grace, f"less than total_env_steps = {budget:,}", advice)
    require(not config.devices.distributed, "devices.distributed", True, "false in a search", "use search.address")
    option, devices, gpu = config.devices.gpu, config.devices.data_parallel, search.resources.gpu
    require(
        option == "auto" or isinstance(option, bool), "devices.gpu", option,
        "auto, true or false in a search, where Ray assigns the GPUs", "choose among them with CUDA_VISIBLE_DEVICES",
    )  # fmt: skip
    for name in ("actor", "evaluator"):
        index = getattr(config.devices, name)
        own = isinstance(index, str | bool) or index < max(gpu, 1)
        require(own, f"devices.{name}", index, f"a GPU of the trial, which has {gpu:g}", "raise search.resources.gpu")
    require(option is not True or gpu > 0, "search.resources.gpu", gpu, "above 0 with devices.gpu = true")
    if devices != "all" and devices > max(gpu, 1):
        raise ConfigError("search.resources.gpu", gpu, f"at least devices.data_parallel = {devices}")


def _check_field(name: str, distribution: Distribution) -> Sequence[Any]:
    """Checks one distribution; returns its values, or the ends of a range of fractions or of over 1,000 numbers."""
    hint = _field_type(name)

    def check(holds: bool, value: Any, expected: str, advice: str = "") -> None:
        require(holds, f"search.space {name}", value, expected, advice)

    if isinstance(distribution, Values):
        values = distribution.values
        check(len(values) > 0, values, "at least one value")
    elif isinstance(distribution, Range):
        values = low, high = distribution.low, distribution.high
        kind, whole = type(distribution).__name__, isinstance(distribution, Integer)
        numbers = all(type(end) is int or (type(end) is float and not whole) for end in values)
        check(numbers, values, f"two {'whole ' * whole}numbers for {kind}")
        check(low < high, values, f"{kind} from a lower to a higher number")
        check(low > 0 or not isinstance(distribution, LogUniform), values, "a range above 0 for LogUniform")
        fractions = float in (hint, *get_args(hint))
        check(whole or fractions, values, f"no {kind}: the field takes no fractions", "use Integer")
        if whole and high - low < 1_000:
            values = range(int(low), int(high) + 1)
    else:
        raise ConfigError(f"search.space {name}", distribution, "Uniform, LogUniform, Integer, Choice or Grid")
    return values


def _field_type(name: str) -> Any:
    """The type of a config field that a search can vary."""
    group, _, leaf = name.rpartition(".")
    cls = get_type_hints(Config).get(group) if group else Config
    hint = get_type_hints(cls).get(leaf) if dataclasses.is_dataclass(cls) else None
    if hint is None or dataclasses.is_dataclass(hint) or name.startswith("."):
        raise ConfigError("search.space", name, "a field of the config by its dotted name, such as ppo.gae_lambda")
    if {name, group} & SAME_FOR_ALL_TRIALS:
        raise ConfigError("search.space", name, "a field that may differ between trials", "set it in get_config()")
    return hint
