"""Hyperparameter search: many trials with early stopping on few GPUs (Ray and Optuna).

A trial of a search is a trial as in `trials/`: one config in one run directory. It is a task of a Ray cluster (see
`trials/ray_tasks.py`). Optuna's class `Trial` is its entry in the study. In reading order:

| module | content |
|---|---|
| command | the command: parses the options, runs the trials that are left, shows the results |
| space | the names that the config file of a search imports |
| options | `SearchConfig`: the options of a search, with its space; search.json |
| check | `check_search`: refuses a search that cannot be run |
| study | Optuna's study: the fields, states and scores of the trials |
| trial | `train_trial`: trains a trial, in its process |
| results | the table of the trials, and the config of the best one |
"""

from importlib.util import find_spec

from jaxrl_atari.errors import UserError


def require_extra() -> None:
    """Raises `UserError` unless Optuna and Ray are installed."""
    missing = [module for module in ("optuna", "ray") if find_spec(module) is None]
    if missing:
        need = "search mode needs Optuna and Ray: pip install 'jaxrl_atari[search]'"
        raise UserError(f"not installed: {', '.join(missing)}; {need}")
