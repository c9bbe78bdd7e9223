"""The study of a search, Optuna's record of its trials, and the training of a trial, which reports to it.

The study has the fields, the log points, the state and the score of each trial. `report/searches.py` says what the
states mean, and makes tables and graphs of them.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import optuna
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.pruners import NopPruner, SuccessiveHalvingPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import Trial, TrialState

from jaxrl_atari.cli.config_files import config_source
from jaxrl_atari.config import Config, set_fields
from jaxrl_atari.errors import Stopped
from jaxrl_atari.output import say
from jaxrl_atari.report.page import try_report
from jaxrl_atari.report.searches import FAILURE, RETURN_MEAN, STUDY_NAME, open_journal, ranked_trials, trials_table
from jaxrl_atari.report.summary import read_run
from jaxrl_atari.report.tables import cell_text
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.layout import trial_dir
from jaxrl_atari.runs.writers import Row, Writer, known_values
from jaxrl_atari.search.space import SearchConfig, read_search
from jaxrl_atari.trials.trial import begin_run, train_session, unfinished_sessions


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


def save_results(search_dir: Path, config: Config, study: optuna.Study) -> None:
    """Writes trials.csv, trials.md and, once a trial has ended with a score, NAME_best.py to train it again."""
    table = trials_table(study)
    table.write_csv(search_dir / "trials.csv")
    write_file(search_dir / "trials.md", f"{table.to_markdown()}\n")
    best = next(iter(ranked_trials(study)), None)
    if best is not None and best.value is not None:
        new_seed = config.seed + config.sessions  # no trial has used it
        config = set_fields(config, best.params | {"name": f"{config.name}_best", "seed": new_seed})
        values = ", ".join(f"{name} {cell_text(value)}" for name, value in table.rows[0].items())
        usage = f"    python -m jaxrl_atari.train --config SEARCH_DIR/{config.name}.py --sessions 4"
        write_file(search_dir / f"{config.name}.py", config_source(config, f"{values}\n\n{usage}\n"))


# --- Training a trial --------------------------------------------------------------------------------------------


@dataclass
class StudyWriter(Writer):
    """Reports log points to the study, whose pruner may then stop the trial.

    A trial that the pruner stops ends in the study at once, with the score of that log point. A trial that was
    killed repeats log points; Optuna warns that it keeps the first.
    """

    trial: Trial
    config: Config
    pruned: bool = False  # whether the pruner has stopped the trial

    def write(self, row: Row) -> None:
        values = known_values(row)
        if self.pruned or "return_ma" not in values:  # no game has finished
            return
        env_steps = int(row["env_steps"])
        self.trial.report(values["return_ma"], env_steps)
        self.trial.set_user_attr(RETURN_MEAN, values["return_mean"])
        if not self.config.is_spent(env_steps) and self.trial.should_prune():
            self.pruned = True
            self.trial.study.tell(self.trial, state=TrialState.PRUNED)


def train_trial(search_dir: Path, number: int) -> None:
    """Trains the sessions of a trial one after the other, tells the study how it has ended, and writes its report.

    Only session 0 reports its log points, which ASHA compares. A trial that ASHA stops writes its last checkpoint.

    Raises:
        Stopped: a stop request has stopped the trial, and its last checkpoint has been written.
    """
    run_dir = trial_dir(search_dir, number)
    config, search = read_search(search_dir)
    trial = start_trial(search_dir, search, number)
    trial.set_user_attr(FAILURE, "")  # clears the failure of an earlier process
    say(f"{run_dir.name}  {trial.params}")
    config = set_fields(config, trial.params)
    study_writer = StudyWriter(trial, config)
    config = begin_run(config, run_dir)
    for session in unfinished_sessions(config, run_dir):
        try:
            train_session(
                config,
                run_dir,
                session,
                name=f"{run_dir.name}  session {session}",
                writers=[study_writer] if session == 0 else [],
                stop_requested=lambda: study_writer.pruned,
            )
        except Stopped:
            if not study_writer.pruned:
                raise
            break
    if not study_writer.pruned:
        summary = read_run(run_dir).summary
        score = summary["score"]
        trial.set_user_attr(RETURN_MEAN, summary["mean"]["final_return_mean"])
        trial.study.tell(trial, score, TrialState.FAIL if score is None else TrialState.COMPLETE)
    if config.log.graphs:
        try_report(run_dir)
