"""The Optuna study of a search: running one of its trials, and the results of all.

    SEARCH_DIR/search.json           config and search options
    SEARCH_DIR/journal.log           the study: fields, log points and end of every trial
    SEARCH_DIR/trial_<i>/            a run directory like any other: config.json, session_<j>/
    SEARCH_DIR/trial_<i>/output.txt  output of the trial
    SEARCH_DIR/trials.csv, ...       results: the table of the trials, graphs, and the best trial's config

The states of a trial are Optuna's:

| state | meaning |
|---|---|
| WAITING | not started |
| RUNNING | started; it may have been interrupted, or have failed with an error |
| PRUNED | stopped by ASHA |
| COMPLETE | its budget is spent |
| FAIL | its budget is spent, and no game has ended |

Optuna never reopens a trial that has ended. A trial that failed with an error therefore stays RUNNING, so that it
can run again. In both kinds of failure, the attribute `failure` has the reason.
"""

import csv
import io
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import optuna
from optuna.pruners import NopPruner, SuccessiveHalvingPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.trial import FrozenTrial, Trial, TrialState

from jaxrl_atari.cli.config_files import config_source
from jaxrl_atari.config import Config, set_fields
from jaxrl_atari.errors import DamagedMetrics, UserError
from jaxrl_atari.output import say
from jaxrl_atari.report.searches import open_journal, read_study
from jaxrl_atari.report.summary import read_run, trial_summary
from jaxrl_atari.report.text import markdown_table, number_text
from jaxrl_atari.runs.files import write_file, write_json
from jaxrl_atari.runs.journal import STUDY_NAME
from jaxrl_atari.runs.layout import CONFIG_FILE, session_path, trial_dir, trial_number
from jaxrl_atari.runs.reading import is_finished
from jaxrl_atari.runs.run_dir import describe
from jaxrl_atari.runs.writers import Row, Writer
from jaxrl_atari.search.options import SearchConfig, read_search, space_dict
from jaxrl_atari.trials.ray_cluster import MachineShare

FAILURE = "failure"
"""Attribute of a trial in the study: why it failed; empty if it has not failed."""

NO_GAME = "no game ended within the budget"
"""Failure of a trial whose budget is spent and that has no score."""


def open_study(search_dir: Path, search: SearchConfig, number: int = 0) -> optuna.Study:
    """Opens the study of a search, or creates it. Its sampler is seeded for trial `number`."""
    # `SeedSequence` separates neighbouring integers, whose samples would be nearly equal.
    seed = int(np.random.SeedSequence([search.seed, number]).generate_state(1)[0])
    asha = search.early_stopping == "asha"
    return optuna.create_study(
        study_name=STUDY_NAME, storage=open_journal(search_dir), load_if_exists=True, direction="maximize",
        sampler=TPESampler(seed=seed) if search.method == "optuna" else RandomSampler(seed),
        pruner=SuccessiveHalvingPruner(search.grace_env_steps, search.reduction) if asha else NopPruner(),
    )  # fmt: skip


def start_trial(search_dir: Path, search: SearchConfig, number: int) -> Trial:
    """Marks a trial as running and returns it. A new trial samples its fields; one that continues keeps them."""
    journal = open_journal(search_dir)
    trial_id = journal.get_trial_id_from_study_id_trial_number(journal.get_study_id_from_name(STUDY_NAME), number)
    journal.set_trial_state_values(trial_id, TrialState.RUNNING)
    trial = Trial(open_study(search_dir, search, number), trial_id)
    for name, distribution in space_dict(search).items():
        suggest = {
            "FloatDistribution": trial.suggest_float,
            "IntDistribution": trial.suggest_int,
            "CategoricalDistribution": trial.suggest_categorical,
        }[distribution["name"]]
        suggest(name, **distribution["attributes"])
    return trial


def record_failure(search_dir: Path, search: SearchConfig, number: int, reason: str) -> None:
    """Stores why a trial failed that has not ended in the study.

    If its process died before it sampled the trial's fields, they are sampled now, so that the results can show
    them.
    """
    start_trial(search_dir, search, number).set_user_attr(FAILURE, reason)


def has_failed(trial: FrozenTrial) -> bool:
    """Whether a trial ended with an error, or without a finished game."""
    return trial.state == TrialState.FAIL or bool(not trial.state.is_finished() and trial.user_attrs.get(FAILURE))


def status_text(trial: FrozenTrial) -> str:
    """The status of a trial: `finished`, `stopped by ASHA`, `failed: REASON` or `unfinished`."""
    if has_failed(trial):
        return f"failed: {trial.user_attrs.get(FAILURE) or NO_GAME}"
    if trial.state == TrialState.PRUNED:
        return "stopped by ASHA"
    return "finished" if trial.state == TrialState.COMPLETE else "unfinished"


def ranked(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that have started, best first: finished ones, then stopped ones, then those without a score.

    Stopped ones come second, because they were worse than others at the same env steps.
    """

    def key(trial: FrozenTrial) -> tuple[bool, bool, float]:
        score = trial.value
        return score is None, trial.state == TrialState.PRUNED, 0.0 if score is None else -score

    return sorted((trial for trial in study.trials if trial.params), key=key)


def trial_progress(run_dir: Path) -> tuple[float | None, int]:
    """The progress of a trial, as means over its sessions.

    Returns:
        Its score, which is None before its first finished game, and its env steps.

    Raises:
        DamagedMetrics: its log points cannot be read.
    """
    try:
        summary = trial_summary(read_run(run_dir))
    except DamagedMetrics:
        raise
    except UserError:  # the trial has not started, or has no log point
        return None, 0
    return summary["score"], round(summary["mean"]["env_steps"])


@dataclass
class Reporter(Writer):
    """Reports log points to the study, whose pruner may then stop the trial.

    A stopped trial ends in the study at once, with the score of that log point. The log point that a stop request
    causes is not reported, because an uninterrupted trial would not have it.
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
        share: its share of a machine.
        stop_requested: whether a stop has been requested.

    Raises:
        KeyboardInterrupt: ASHA or a stop request has stopped it, and its last checkpoint has been written.
    """
    from jaxrl_atari.session import run_session  # not imported by the command itself, which does not train

    config, search = read_search(run_dir.parent)
    trial = start_trial(run_dir.parent, search, trial_number(run_dir))
    trial.set_user_attr(FAILURE, "")  # clears the failure of an earlier process
    say(str(trial.params))
    config = share.configure(set_fields(config, trial.params))
    write_json(run_dir / CONFIG_FILE, describe(config, run_dir))
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


# --- Results -----------------------------------------------------------------------------------------------------


class SearchResults(NamedTuple):
    """The results of a search."""

    rows: list[list[Any]]  # rows of trials.csv: the header, then a row for each trial, the best first
    text: str  # the same table in Markdown, with rounded numbers
    best: Config | None  # the config of a run that confirms the best trial; None before a trial has a score


def cell_text(value: Any) -> str:
    """A value as text: numbers below 1 with three significant digits, other numbers with up to six."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return number_text(value) if abs(value) < 1 else f"{value:,.6g}"
    return f"{value:,}" if type(value) is int else str(value)


def search_results(search_dir: Path) -> SearchResults:
    """Reads the results of a search; writes nothing.

    Raises:
        UserError: the directory is not a search directory, or its journal is damaged.
    """
    config, search = read_search(search_dir)
    study = read_study(search_dir)
    trials = [] if study is None else ranked(study)
    rows: list[list[Any]] = [["trial", *search.space, "score", "env_steps", "status"]]
    for trial in trials:
        fields = [trial.params.get(name) for name in search.space]
        status = status_text(trial)
        try:
            score, env_steps = trial_progress(trial_dir(search_dir, trial.number))
        except DamagedMetrics as error:  # the study has the score of a trial that has ended
            score = trial.value
            env_steps = trial.last_step or 0
            status += f"; {error}"
        rows.append([trial.number, *fields, score, env_steps, status])
    table = markdown_table([[cell_text(value) for value in row] for row in rows])
    best = None
    if trials and trials[0].value is not None:
        new_seed = config.seed + config.sessions  # no trial has used it
        best = set_fields(config, trials[0].params | {"name": f"{config.name}_best", "seed": new_seed})
    return SearchResults(rows, table, best)


def save_results(search_dir: Path, results: SearchResults) -> None:
    """Writes trials.csv, trials.md and, once a trial has a score, NAME_best.py."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(results.rows)
    write_file(search_dir / "trials.csv", file.getvalue())
    write_file(search_dir / "trials.md", f"{results.text}\n")
    if results.best is not None:
        header, first, *_ = results.rows
        values = ", ".join(f"{name} {cell_text(value)}" for name, value in zip(header, first, strict=True))
        file = f"{results.best.name}.py"
        usage = f"    python -m jaxrl_atari.train --config SEARCH_DIR/{file} --sessions 4"
        write_file(search_dir / file, config_source(results.best, f"{values}\n\n{usage}\n"))
