"""A trial of a search: trained in its process, with its log points reported to the study; see `study.py`."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from optuna.trial import Trial, TrialState

from jaxrl_atari.config import Config
from jaxrl_atari.config_dicts import set_fields
from jaxrl_atari.output import say
from jaxrl_atari.runs.description import describe
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.runs.layout import CONFIG_FILE, session_path, trial_number
from jaxrl_atari.runs.reading import is_finished
from jaxrl_atari.runs.run_dir import keep_code
from jaxrl_atari.runs.writers import Row, Writer
from jaxrl_atari.search.options import read_search
from jaxrl_atari.search.study import FAILURE, NO_GAME, start_trial, trial_progress
from jaxrl_atari.session import run_session
from jaxrl_atari.trials.resources import MachineShare


@dataclass
class Reporter(Writer):
    """Reports log points to the study, whose pruner may then stop the trial.

    A trial that the pruner stops ends in the study at once, with the score of that log point. The log point that a
    stop request causes is not reported, because an uninterrupted trial would not have it.
    """

    trial: Trial
    config: Config
    stop_requested: Callable[[], bool]
    stopped: bool = False  # whether the pruner has stopped the trial

    def write(self, row: Row) -> None:
        env_steps = int(row["env_steps"])
        score = float(row.get("return_ma", math.nan))
        if self.stopped or self.stop_requested() or not math.isfinite(score):
            return
        self.trial.report(score, env_steps)
        if not self.config.is_spent(env_steps) and self.trial.should_prune():
            self.stopped = True
            self.trial.study.tell(self.trial, state=TrialState.PRUNED)


def run_trial(run_dir: Path, share: MachineShare, stop_requested: Callable[[], bool]) -> None:
    """Trains the trial of a directory SEARCH_DIR/trial_<number> to its end.

    Args:
        share: the share of a machine that the trial gets.
        stop_requested: returns whether a stop has been requested.

    Raises:
        Stopped: ASHA or a stop request has stopped the trial, and its last checkpoint has been written.
    """
    config, search = read_search(run_dir.parent)
    trial = start_trial(run_dir.parent, search, trial_number(run_dir))
    trial.set_user_attr(FAILURE, "")  # clears the failure of an earlier process
    say(str(trial.params))
    config = share.configure(set_fields(config, trial.params))
    write_json(run_dir / CONFIG_FILE, describe(config, run_dir))
    for line in keep_code(run_dir):
        say(line)
    reporter = Reporter(trial, config, stop_requested)
    for session in range(config.sessions):
        directory = session_path(run_dir, session)
        if not is_finished(config, directory):
            run_session(
                config, directory, session, resume=True, writers=[reporter] if session == 0 else [],
                stop_requested=lambda: reporter.stopped or stop_requested(),
            )  # fmt: skip
    score, _ = trial_progress(run_dir)
    if score is None:
        trial.set_user_attr(FAILURE, NO_GAME)
        trial.study.tell(trial, state=TrialState.FAIL)
    else:
        trial.study.tell(trial, score, TrialState.COMPLETE)
