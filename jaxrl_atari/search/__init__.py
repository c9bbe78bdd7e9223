"""Hyperparameter search: many trials with early stopping on few GPUs (Optuna).

A trial of a search is a trial as in `trials/`: one config in one run directory. Its command is a job for the
launchers there. Optuna's class `Trial` is its entry in the study. In reading order:

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

from jaxrl_atari.errors import require_package


def require_extra() -> None:
    """Raises `UserError` unless Optuna is installed."""
    require_package("optuna", "search")
