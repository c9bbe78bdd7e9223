"""The trials of a search, in an Optuna study: one trial in its process, and the results.

SEARCH_DIR/search.json           config and search options
SEARCH_DIR/journal.log           the study: fields, log points and end of every trial
SEARCH_DIR/trial_<i>/            a run directory like any other: config.json, session_<j>/
SEARCH_DIR/trial_<i>/output.txt  output of the trial
SEARCH_DIR/trials.csv, ...       results: the table of the trials, graphs, and the best trial's config for `train`

A trial is WAITING until it starts, then RUNNING. It ends as PRUNED if ASHA stops it; with its budget spent it is
COMPLETE or, if none of its games has ended, FAIL. Optuna never reopens a trial, so one that failed with an error stays
RUNNING, with the attribute `failure`: it can run again.
"""

import csv
import io
import math
import pprint
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from optuna.pruners import NopPruner, SuccessiveHalvingPruner
from optuna.samplers import RandomSampler, TPESampler
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState

from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError
from jaxrl_atari.report.graphs import default_style, save_figure
from jaxrl_atari.report.summary import markdown_table, read_run, trial_summary
from jaxrl_atari.runs.files import write_file, write_json
from jaxrl_atari.runs.reading import is_finished
from jaxrl_atari.runs.run_dir import CONFIG_FILE, describe, session_dir
from jaxrl_atari.runs.writers import Row, Writer
from jaxrl_atari.search.options import SearchConfig, read_search, set_fields, space_dict
from jaxrl_atari.suite.ray_cluster import Share

NAME = "search"


def _open_journal(search_dir: Path) -> JournalStorage:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return JournalStorage(JournalFileBackend(str(search_dir / "journal.log")))


def open_study(search_dir: Path, search: SearchConfig, number: int = 0) -> optuna.Study:
    """The study of a search, a new one if it has none, with the sampler of trial `number`."""
    # Neighbouring integers would give nearly equal samples.
    seed = int(np.random.SeedSequence([search.seed, number]).generate_state(1)[0])
    asha = search.early_stopping == "asha"
    return optuna.create_study(
        study_name=NAME, storage=_open_journal(search_dir), load_if_exists=True, direction="maximize",
        sampler=TPESampler(seed=seed) if search.method == "optuna" else RandomSampler(seed),
        pruner=SuccessiveHalvingPruner(search.grace_env_steps, search.reduction) if asha else NopPruner(),
    )  # fmt: skip


def open_trial(search_dir: Path, search: SearchConfig, number: int) -> Trial:
    """Marks a trial as running and returns it. A new trial samples its fields; one that continues keeps its own.

    The command calls it too: a trial whose process died before it sampled has fields all the same.
    """
    journal = _open_journal(search_dir)
    trial_id = journal.get_trial_id_from_study_id_trial_number(journal.get_study_id_from_name(NAME), number)
    journal.set_trial_state_values(trial_id, TrialState.RUNNING)
    trial = Trial(open_study(search_dir, search, number), trial_id)
    for name, distribution in space_dict(search).items():
        kind = distribution["name"].removesuffix("Distribution").lower()
        getattr(trial, f"suggest_{kind}")(name, **distribution["attributes"])  # suggest_float, _int or _categorical
    return trial


def status(trial: FrozenTrial) -> str:
    """`finished`, `stopped` by ASHA, `failed: why` or `unfinished`. `finished` without a score: no game ended."""
    if trial.state.is_finished():
        return "stopped" if trial.state == TrialState.PRUNED else "finished"
    failure = trial.user_attrs.get("failure")
    return f"failed: {failure}" if failure else "unfinished"


def ranked(study: optuna.Study) -> list[FrozenTrial]:
    """The trials that have started, best first: finished ones with a score, stopped ones, then the others.

    Trials that ASHA stopped were worse than others at the same env steps, though perhaps not in the end.
    """
    started = [trial for trial in study.trials if trial.params]
    return sorted(started, key=lambda trial: (trial.value is None, status(trial) == "stopped", -(trial.value or 0)))


def reached(run_dir: Path) -> tuple[float | None, int]:
    """The score of a trial so far, None before its first finished game, and its env steps: means over its sessions."""
    try:
        summary = trial_summary(read_run(run_dir))
    except UserError:  # not begun, or no log point
        return None, 0
    return summary["score"], round(summary["mean"]["env_steps"])


@dataclass
class Reporter(Writer):
    """Reports log points to the study, whose pruner may then stop the trial: it ends with the score of that point."""

    trial: Trial
    config: Config
    stop_requested: Callable[[], bool]  # the log point of a stop, which an uninterrupted trial lacks, does not count
    stopped: bool = False

    def write(self, row: Row) -> None:
        env_steps = int(row["env_steps"])
        score = float(row.get("return_ma", math.nan))
        if self.stopped or self.stop_requested() or not math.isfinite(score):
            return
        self.trial.report(score, env_steps)
        if not self.config.is_spent(env_steps) and self.trial.should_prune():
            self.stopped = True
            self.trial.study.tell(self.trial, state=TrialState.PRUNED)


def run_trial(run_dir: Path, share: Share, stop_requested: Callable[[], bool]) -> None:
    """Trains the trial SEARCH_DIR/trial_<number> to its end.

    Raises:
        KeyboardInterrupt: ASHA or a request has stopped it; its last checkpoint is written.
    """
    from jaxrl_atari.session import run_session  # the command itself does not train

    config, search = read_search(run_dir.parent)
    trial = open_trial(run_dir.parent, search, int(run_dir.name.removeprefix("trial_")))
    trial.set_user_attr("failure", "")  # clears that of an earlier end
    print(trial.params)
    config = share.configure(set_fields(config, trial.params))
    write_json(run_dir / CONFIG_FILE, describe(config, run_dir))
    reporter = Reporter(trial, config, stop_requested)
    for session in range(config.sessions):
        directory = session_dir(run_dir, session)
        if not is_finished(config, directory):
            run_session(
                config, directory, session, resume=True, writers=[reporter] if session == 0 else [],
                stop_requested=lambda: reporter.stopped or stop_requested(),
            )  # fmt: skip
    score, _ = reached(run_dir)
    trial.study.tell(trial, score, TrialState.FAIL if score is None else TrialState.COMPLETE)


# Results.


def cell_text(value: Any) -> str:
    """A value in a table, with six significant digits of a float."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.6g}"
    return f"{value:,}" if type(value) is int else str(value)


def write_results(search_dir: Path) -> str:
    """Writes trials.csv, trials.md and, once a trial has a score, NAME_best.py.

    Returns:
        The table as text.

    Raises:
        UserError: the directory is not a search directory, or it cannot be written to.
    """
    config, search = read_search(search_dir)
    trials = ranked(open_study(search_dir, search))
    rows: list[list[Any]] = [["trial", *search.space, "score", "env_steps", "status"]]
    for trial in trials:
        fields = map(trial.params.get, search.space)
        rows.append([trial.number, *fields, *reached(search_dir / f"trial_{trial.number}"), status(trial)])
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    write_file(search_dir / "trials.csv", file.getvalue())
    table = markdown_table([list(map(cell_text, row)) for row in rows])
    write_file(search_dir / "trials.md", f"{table}\n")
    if trials and trials[0].value is not None:
        new_seed = config.seed + config.sessions  # of no trial
        chosen = set_fields(config, trials[0].params | {"name": f"{config.name}_best", "seed": new_seed})
        origin = f"trial {rows[1][0]}: {dict(zip(*rows[:2], strict=True))}"
        write_file(search_dir / f"{chosen.name}.py", config_file(chosen, origin))
    return table


def config_file(config: Config, origin: str) -> str:
    """The text of a config file for a run that confirms the score of the best trial."""
    return f'''"""{origin}

    python -m jaxrl_atari.train --config SEARCH_DIR/{config.name}.py --sessions 4
"""

from jaxrl_atari.config import *


def get_config() -> Config:
    return {pprint.pformat(config, width=110)}
'''


def draw_graphs(study: optuna.Study, directory: Path) -> None:
    """Draws Optuna's graphs, as PNG and SVG: curves, fields (a panel for each), parallel, and importances.

    They need two trials with a score. That of a stopped trial is the one that it was stopped at.
    """
    trials = study.get_trials(states=[TrialState.COMPLETE, TrialState.PRUNED])
    if len(trials) < 2:
        return
    for trial in trials:
        trial.state = TrialState.COMPLETE  # Optuna would leave out pruned trials, which with ASHA are most of them
    drawn = optuna.create_study(direction="maximize")
    drawn.add_trials(trials)
    with default_style(), warnings.catch_warnings():
        from matplotlib import pyplot
        from optuna.visualization import matplotlib as graphs

        warnings.simplefilter("ignore")  # the graphs are experimental; few trials have equal importances
        drawings = {
            "curves": graphs.plot_intermediate_values,
            "fields": graphs.plot_slice,
            "parallel": graphs.plot_parallel_coordinate,
            "importances": graphs.plot_param_importances,
        }
        pyplot.switch_backend("agg")
        pyplot.rcParams["text.parse_math"] = True  # in the numbers along a logarithmic axis
        for name, draw in drawings.items():
            axes = draw(drawn)
            if name == "curves":
                axes.set(title="return_ma of each trial", xlabel="env steps", ylabel="return_ma")
            for panel in pyplot.gcf().axes:
                panel.tick_params(axis="x", which="both", rotation=30)
            save_figure(pyplot.gcf(), directory, name)
            pyplot.close()
