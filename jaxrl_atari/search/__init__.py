"""Hyperparameter search: many trials with early stopping on few GPUs (Ray and Optuna).

A trial of a search is a trial as in `trials/`: one config in one run directory. It is a task of a Ray cluster (see
`trials/ray_tasks.py`). Optuna's class `Trial` is its entry in the study.

The config file of a search imports its names from here. A name is loaded when it is imported or used; without the
extra `search`, that raises `UserError`. The modules in reading order:

    command.py      the command: parses and checks the options, runs the trials that are left, shows the results
    options.py      SearchConfig: the options of a search, with its space; search.json
    check.py        check_search: refuses a search that cannot be run
    study.py        Optuna's study: the fields, states and scores of the trials
    trial.py        train_trial: trains a trial, in its process
    results.py      the table of the trials, and the config of the best one
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from jaxrl_atari.errors import UserError

if TYPE_CHECKING:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    from jaxrl_atari.search.options import SearchConfig
    from jaxrl_atari.trials.resources import ResourcesConfig

_HOMES = {
    "CategoricalDistribution": "optuna.distributions",
    "FloatDistribution": "optuna.distributions",
    "IntDistribution": "optuna.distributions",
    "ResourcesConfig": "jaxrl_atari.trials.resources",
    "SearchConfig": "jaxrl_atari.search.options",
}
"""Name -> the module that defines it."""

__all__ = ["CategoricalDistribution", "FloatDistribution", "IntDistribution", "ResourcesConfig", "SearchConfig"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    require_extra()
    return getattr(import_module(_HOMES[name]), name)


def require_extra() -> None:
    """Raises `UserError` unless Optuna and Ray are installed."""
    missing = [module for module in ("optuna", "ray") if find_spec(module) is None]
    if missing:
        need = "search mode needs Optuna and Ray: pip install 'jaxrl_atari[search]'"
        raise UserError(f"not installed: {', '.join(missing)}; {need}")
