"""Hyperparameter search: many trials with early stopping on few GPUs (Optuna).

A trial of a search is a trial as in `trials/`: one config in one run directory. Its command is a job for the
launchers there. Optuna's class `Trial` is its entry in the study. In reading order:

| module | content |
|---|---|
| command | the command: parses the options, runs the trials that are left, shows the results |
| space | `SearchConfig`: the options of a search, with its space; search.json |
| study | Optuna's study: its sampler and pruner, a trial from its start to its end, the files of results |
"""
