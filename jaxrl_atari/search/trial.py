"""A trial of a search: trained in its process, with its log points reported to the study."""

from dataclasses import dataclass
from pathlib import Path

from optuna.trial import Trial, TrialState

from jaxrl_atari.config import Config, set_fields
from jaxrl_atari.errors import Stopped
from jaxrl_atari.output import say
from jaxrl_atari.report.page import try_report
from jaxrl_atari.report.searches import FAILURE, RETURN_MEAN
from jaxrl_atari.report.summary import read_run
from jaxrl_atari.runs.layout import trial_number
from jaxrl_atari.runs.writers import Row, Writer, known_values
from jaxrl_atari.search.space import read_search
from jaxrl_atari.search.study import start_trial
from jaxrl_atari.trials.sessions import begin_run, train_session, unfinished_sessions


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


def train_trial(run_dir: Path) -> None:
    """Trains the sessions of a trial one after the other, tells the study how it has ended, and writes its report.

    Only session 0 reports its log points, which ASHA compares. A trial that ASHA stops writes its last checkpoint.

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
    if not study_writer.pruned:
        summary = read_run(run_dir).summary
        score = summary["score"]
        trial.set_user_attr(RETURN_MEAN, summary["mean"]["final_return_mean"])
        trial.study.tell(trial, score, TrialState.FAIL if score is None else TrialState.COMPLETE)
    if config.log.graphs:
        try_report(run_dir)
