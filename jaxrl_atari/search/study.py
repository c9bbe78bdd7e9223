"""The study of a search: Optuna's record of its trials, which `runs/journal.py` keeps in a file.

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

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import NopPruner, SuccessiveHalvingPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState

from jaxrl_atari.errors import NoLogPoint
from jaxrl_atari.report.summary import read_run, trial_summary
from jaxrl_atari.runs.journal import STUDY_NAME, open_journal, read_study
from jaxrl_atari.runs.layout import is_run
from jaxrl_atari.search.options import SearchConfig

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


def record_failure(search_dir: Path, search: SearchConfig, number: int, reason: str) -> None:
    """Stores why a trial failed with an error. The trial has not ended in the study.

    If the trial's process died before it sampled the fields, they are sampled now, so that the results can show
    them.
    """
    start_trial(search_dir, search, number).set_user_attr(FAILURE, reason)


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


def trial_progress(run_dir: Path) -> tuple[float | None, int]:
    """The progress of a trial, as means over its sessions.

    Returns:
        The score, which is None before the first finished game, and the env steps.

    Raises:
        UserError: its config or its log points cannot be read.
    """
    if not is_run(run_dir):  # it has not started
        return None, 0
    try:
        summary = trial_summary(read_run(run_dir))
    except NoLogPoint:
        return None, 0
    env_steps = summary["mean"]["env_steps"]
    assert env_steps is not None  # every log point has it
    return summary["score"], round(env_steps)
