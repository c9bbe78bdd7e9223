"""A trial of a search: trained in its process, with its log points reported to the study."""

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from optuna.trial import Trial, TrialState

from jaxrl_atari.config import Config, set_fields
from jaxrl_atari.errors import Stopped
from jaxrl_atari.output import say
from jaxrl_atari.report.summary import read_run, trial_summary
from jaxrl_atari.runs.layout import session_path, trial_number
from jaxrl_atari.runs.progress import due
from jaxrl_atari.runs.reading import logged_env_steps
from jaxrl_atari.runs.writers import Row, Writer, known_values
from jaxrl_atari.search.space import read_search
from jaxrl_atari.search.study import FAILURE, NO_GAME, record_return_mean, start_trial
from jaxrl_atari.trials.sessions import begin_run, train_session, unfinished_sessions


@dataclass
class StudyWriter(Writer):
    """Reports log points to the study, whose pruner may then stop the trial.

    A trial that the pruner stops ends in the study at once, with the score of that log point. The log point that a
    stop request causes is not reported, because an uninterrupted trial would not have it: it is neither due nor at
    the end of the budget.
    """

    trial: Trial
    config: Config
    newest: int = 0  # env steps of the newest log point; after a resume, of the newest one before the checkpoint
    reported: Set[int] = frozenset()  # env steps of the log points that the study has; a killed trial repeats some
    pruned: bool = False  # whether the pruner has stopped the trial

    def write(self, row: Row) -> None:
        env_steps = int(row["env_steps"])
        score = known_values(row).get("return_ma")  # None before the first finished game
        is_last = self.config.is_spent(env_steps)
        is_due = due(self.config.log_interval, self.newest, env_steps)
        self.newest = env_steps
        if self.pruned or not (is_due or is_last) or score is None:
            return
        if env_steps < max(self.reported, default=0):
            return
        if env_steps not in self.reported:
            self.trial.report(score, env_steps)
            record_return_mean(self.trial, self.config, known_values(row).get("return_mean"))
        if not is_last and self.trial.should_prune():
            self.pruned = True
            self.trial.study.tell(self.trial, state=TrialState.PRUNED)


def train_trial(run_dir: Path) -> None:
    """Trains the sessions of a trial one after the other, and tells the study how the trial has ended.

    Only session 0 reports its log points. With ASHA, which compares them, it is the only session. A trial that
    ASHA stops writes its last checkpoint.

    Args:
        run_dir: the directory of the trial, SEARCH_DIR/trial_<number>.

    Raises:
        Stopped: a stop request has stopped the trial, and its last checkpoint has been written.
    """
    config, search = read_search(run_dir.parent)
    trial = start_trial(run_dir.parent, search, trial_number(run_dir))
    trial.set_user_attr(FAILURE, "")  # clears the failure of an earlier process
    say(f"{run_dir.name}  {trial.params}")
    config = set_fields(config, trial.params)
    reported = trial.study.trials[trial.number].intermediate_values.keys()
    study_writer = StudyWriter(trial, config, logged_env_steps(session_path(run_dir, 0)), reported)
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
            if study_writer.pruned:
                return
            raise
    summary = trial_summary(read_run(run_dir))
    score = summary["score"]
    record_return_mean(trial, config, summary["mean"]["final_return_mean"])
    if score is None:
        trial.set_user_attr(FAILURE, NO_GAME)
        trial.study.tell(trial, state=TrialState.FAIL)
    else:
        trial.study.tell(trial, score, TrialState.COMPLETE)
