"""The study of a search: Optuna's record of its trials, which `runs/journal.py` keeps in a file, and its results.

The study has the fields, the log points, the state and the score of each trial. The states are Optuna's:

| state | meaning |
|---|---|
| WAITING | not started |
| RUNNING | started and not ended; it may have been interrupted, or have failed with an error |
| PRUNED | stopped by ASHA |
| COMPLETE | its budget is spent |
| FAIL | its budget is spent, and no game has ended |

Optuna never reopens a trial that has ended. A trial that failed with an error therefore stays RUNNING, so that it
can run again. The attribute `failure` of a trial has the reason of its error or of its state FAIL.
"""

from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import NopPruner, SuccessiveHalvingPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState

from jaxrl_atari.cli.config_files import config_source
from jaxrl_atari.config import Config, set_fields
from jaxrl_atari.report.tables import Table, cell_text
from jaxrl_atari.report.text import LONG_BUDGET
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.journal import STUDY_NAME, open_journal, read_study
from jaxrl_atari.runs.layout import SEARCH_TABLE_FILE
from jaxrl_atari.search.space import SearchConfig

FAILURE = "failure"
"""Attribute of a trial in the study: why it failed; empty if it has not failed."""

NO_GAME = "no game ended within the budget"
"""Failure of a trial whose budget is spent and that has no score."""


def open_study(search_dir: Path, search: SearchConfig, number: int = 0) -> optuna.Study:
    """Opens the study of a search, or creates it. Its sampler is seeded for trial `number`.

    TPE counts trials that are RUNNING as bad ones (`constant_liar`), so that trials side by side differ. Trials
    that failed with an error also count as bad. A serial search without failures has neither kind.
    """
    # `SeedSequence` separates neighbouring integers, whose samples would be nearly equal.
    seed = int(np.random.SeedSequence([search.seed, number]).generate_state(1)[0])
    sampler = TPESampler(seed=seed, constant_liar=True) if search.sampler == "tpe" else RandomSampler(seed)
    asha = search.early_stopping == "asha"
    return optuna.create_study(
        study_name=STUDY_NAME, storage=open_journal(search_dir), load_if_exists=True, direction="maximize",
        sampler=sampler,
        pruner=SuccessiveHalvingPruner(search.grace_env_steps, search.reduction) if asha else NopPruner(),
    )  # fmt: skip


def unfinished_trials(search_dir: Path, search: SearchConfig) -> list[int]:
    """The numbers of the trials that have not ended in the study, or are not in it yet. Writes nothing."""
    study = read_study(search_dir)
    ended = {trial.number for trial in study.trials if trial.state.is_finished()} if study else set()
    return [number for number in range(search.trials) if number not in ended]


def start_trial(search_dir: Path, search: SearchConfig, number: int) -> Trial:
    """Marks a trial as running and returns it. A new trial samples its fields; a resumed one keeps them."""
    # Not `study.ask()`, which takes any waiting trial: this process trains the trial whose directory it was given.
    journal = open_journal(search_dir)
    trial_id = journal.get_trial_id_from_study_id_trial_number(journal.get_study_id_from_name(STUDY_NAME), number)
    journal.set_trial_state_values(trial_id, TrialState.RUNNING)
    trial = Trial(open_study(search_dir, search, number), trial_id)
    for name, distribution in search.space.items():
        match distribution:
            case FloatDistribution(low=low, high=high, step=step, log=log):
                trial.suggest_float(name, low, high, step=step, log=log)
            case IntDistribution(low=low, high=high, step=step, log=log):
                trial.suggest_int(name, low, high, step=step, log=log)
            case CategoricalDistribution(choices=choices):
                trial.suggest_categorical(name, choices)
    return trial


# --- Results -----------------------------------------------------------------------------------------------------


def record_return_mean(trial: Trial, config: Config, return_mean: Any) -> None:
    """Stores the `return_mean` of a trial beside its score, where its budget is short (`LONG_BUDGET`)."""
    if config.total_env_steps < LONG_BUDGET:
        trial.set_user_attr("return_mean", return_mean)


def failure_text(trial: FrozenTrial) -> str:
    """Why a trial has failed: its error, or that no game has ended. Empty if it has not failed."""
    failure = trial.user_attrs.get(FAILURE, "")
    if trial.state == TrialState.FAIL:
        return failure or NO_GAME
    return "" if trial.state.is_finished() else failure


def status_text(trial: FrozenTrial) -> str:
    """The status of a trial: `finished`, `stopped by ASHA`, `failed: REASON` or `unfinished`."""
    failure = failure_text(trial)
    if failure:
        return f"failed: {failure}"
    if trial.state == TrialState.PRUNED:
        return "stopped by ASHA"
    return "finished" if trial.state == TrialState.COMPLETE else "unfinished"


def ranked_trials(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that have started, best first: finished ones, then those that ASHA stopped, then all others.

    A trial that ASHA stopped comes after finished ones, because it was worse than others at the same env steps.
    """

    def key(trial: FrozenTrial) -> tuple[bool, bool, float]:
        score = trial.value
        return score is None, trial.state == TrialState.PRUNED, 0.0 if score is None else -score

    return sorted((trial for trial in study.get_trials(deepcopy=False) if trial.params), key=key)


def results_table(search: SearchConfig, study: optuna.Study) -> Table:
    """The table of the trials that have started, the best first. An unknown value is None.

    The score and the env steps of a trial that has not ended are those of its newest log point in the study.
    """
    columns = ("trial", *search.space, "score", "return_mean", "env_steps", "status")
    rows = []
    for trial in ranked_trials(study):
        # A choice None is the text `None`; a field that a killed trial has not sampled is unknown.
        fields = {name: "None" if value is None else value for name, value in trial.params.items()}
        score = trial.intermediate_values.get(trial.last_step or 0) if trial.value is None else trial.value
        row: dict[str, Any] = dict.fromkeys(columns) | fields
        row |= {"trial": trial.number, "score": score, "return_mean": trial.user_attrs.get("return_mean")}
        row |= {"env_steps": trial.last_step, "status": status_text(trial)}
        rows.append(row)
    return Table({name: name for name in columns}, rows)


def save_results(search_dir: Path, config: Config, search: SearchConfig, study: optuna.Study) -> None:
    """Writes trials.csv, trials.md and, once a trial has ended with a score, NAME_best.py to train it again."""
    table = results_table(search, study)
    table.write_csv(search_dir / SEARCH_TABLE_FILE)
    write_file(search_dir / "trials.md", f"{table.to_markdown()}\n")
    best = next(iter(ranked_trials(study)), None)
    if best is not None and best.value is not None:
        new_seed = config.seed + config.sessions  # no trial has used it
        config = set_fields(config, best.params | {"name": f"{config.name}_best", "seed": new_seed})
        values = ", ".join(f"{name} {cell_text(value)}" for name, value in table.rows[0].items())
        usage = f"    python -m jaxrl_atari.train --config SEARCH_DIR/{config.name}.py --sessions 4"
        write_file(search_dir / f"{config.name}.py", config_source(config, f"{values}\n\n{usage}\n"))
