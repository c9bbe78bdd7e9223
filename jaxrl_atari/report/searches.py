"""The results of a search: the table of its trials, and its graphs, which Optuna draws.

The states of a trial in Optuna's study are those of Optuna:

| state | meaning |
|---|---|
| WAITING | not started |
| RUNNING | started and not ended; it may have been interrupted, or have failed with an error |
| PRUNED | stopped by ASHA |
| COMPLETE | its budget is spent |
| FAIL | its budget is spent, and no game has ended |

Optuna never reopens a trial that has ended. A trial that failed with an error therefore stays RUNNING, so that it
can run again. Its attribute `failure` has the reason.
"""

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_atari.errors import NoLogPoint, UserError, reason
from jaxrl_atari.report.graphs import default_style, save_figure
from jaxrl_atari.report.tables import Table
from jaxrl_atari.runs.layout import GRAPHS_FOLDER, JOURNAL_FILE

if TYPE_CHECKING:  # Optuna is imported only where it is needed
    import optuna
    from optuna.storages import JournalStorage
    from optuna.trial import FrozenTrial

STUDY_NAME = "search"
"""The name of the study in the journal, which holds no other."""

FAILURE = "failure"
"""Attribute of a trial in the study: the error with which it failed; empty if it has not failed."""

RETURN_MEAN = "return_mean"
"""Attribute of a trial in the study: its newest `return_mean`."""


def failure_text(trial: "FrozenTrial") -> str:
    """Why a trial has failed: its error, or that no game has ended. Empty if it has not failed."""
    if trial.state.name == "FAIL":
        return "no game ended within the budget"
    return trial.user_attrs.get(FAILURE, "") if trial.state.name == "RUNNING" else ""


def status_text(trial: "FrozenTrial") -> str:
    """The status of a trial: `finished`, `stopped by ASHA`, `failed: REASON` or `unfinished`."""
    failure = failure_text(trial)
    if failure:
        return f"failed: {failure}"
    return {"PRUNED": "stopped by ASHA", "COMPLETE": "finished"}.get(trial.state.name, "unfinished")


def ranked_trials(study: "optuna.Study") -> list["FrozenTrial"]:
    """The trials that have started, best first: finished ones, then those that ASHA stopped, then all others.

    A trial that ASHA stopped comes after finished ones, because it was worse than others at the same env steps.
    """

    def key(trial: "FrozenTrial") -> tuple[bool, bool, float]:
        score = trial.value
        return score is None, trial.state.name == "PRUNED", 0.0 if score is None else -score

    return sorted((trial for trial in study.get_trials(deepcopy=False) if trial.params), key=key)


def trials_table(study: "optuna.Study") -> Table:
    """The table of the trials that have started, the best first. An unknown value is None.

    The score and the env steps of a trial that has not ended are those of its newest log point in the study.
    """
    trials = ranked_trials(study)
    rows = []
    for trial in trials:
        # A choice None is the text `None`; a field that a killed trial has not sampled is unknown.
        row: dict[str, Any] = {name: "None" if value is None else value for name, value in trial.params.items()}
        row |= {"trial": trial.number, "score": newest_score(trial), "status": status_text(trial)}
        row |= {"return_mean": trial.user_attrs.get(RETURN_MEAN), "env_steps": trial.last_step}
        rows.append(row)
    fields = dict.fromkeys(name for trial in trials for name in trial.params)
    columns = ("trial", *fields, "score", "return_mean", "env_steps", "status")
    return Table({name: name for name in columns}, rows)


def newest_score(trial: "FrozenTrial") -> float | None:
    """The score of a trial; of one that has not ended, its last `return_ma`. None before a game has ended."""
    return trial.intermediate_values.get(trial.last_step or 0) if trial.value is None else trial.value


def plot_search(search_dir: Path) -> list[Path]:
    """Draws the trials of a search into SEARCH_DIR/graphs/, each graph as PNG and SVG; returns the files.

    - curves: return_ma against env steps, with a line for each trial
    - fields: score against each searched field
    - parallel: fields and score, with a line for each trial
    - importances: how important each field is for a good score (PED-ANOVA, arXiv:2304.10255)

    `importances` needs trials that differ in a field.

    Raises:
        NoLogPoint: no game of a trial has ended, or Optuna is not installed.
    """
    study = read_study(search_dir)
    scored = scored_trials(study) if study else None
    if scored is None or not scored.best_trials:
        hint = "wait for the first finished game; drawing needs pip install 'jaxrl_atari[search]'"
        raise NoLogPoint(f"{search_dir}: holds no trial with a score; {hint}")
    with default_style(), warnings.catch_warnings():
        import matplotlib
        import matplotlib.pyplot as plt
        from optuna.exceptions import ExperimentalWarning
        from optuna.visualization import matplotlib as plots

        warnings.simplefilter("ignore", ExperimentalWarning)
        plt.switch_backend("agg")  # Optuna draws with pyplot
        matplotlib.rcParams["text.parse_math"] = True  # powers of ten along its axes
        draw = {
            "curves": plots.plot_intermediate_values,
            "fields": plots.plot_slice,
            "parallel": plots.plot_parallel_coordinate,
            "importances": plots.plot_param_importances,
        }
        files = []
        for name, plot in draw.items():
            try:
                figure = np.ravel(plot(scored))[0].figure  # type: ignore[operator]
            except (ValueError, RuntimeError):  # no importances, because no field differs
                continue
            for axes in figure.axes:
                axes.tick_params(which="minor", labelbottom=False)  # they overlap along a logarithmic axis
            files += save_figure(figure, search_dir / GRAPHS_FOLDER, name)
            plt.close(figure)
    return files


def scored_trials(study: "optuna.Study") -> "optuna.Study":
    """A copy of a study in memory, whose trials that have a score are all complete.

    Optuna's graphs leave out running and pruned trials; with ASHA, most are pruned.
    """
    import optuna

    complete = optuna.create_study(direction="maximize")
    for trial in study.trials:
        copy = optuna.trial.create_trial(state=optuna.trial.TrialState.FAIL)  # a copy has the number of its place
        score = newest_score(trial)
        if score is not None and trial.params:
            copy = optuna.trial.create_trial(
                params=trial.params,
                distributions=trial.distributions,
                value=score,
                intermediate_values=trial.intermediate_values,
            )
        complete.add_trial(copy)
    return complete


# --- The journal, SEARCH_DIR/journal.log: the file in which Optuna keeps the study -------------------------------


def open_journal(search_dir: Path) -> "JournalStorage":
    """Opens the journal of a search. Several processes may use it at the same time.

    Raises:
        UserError: it is damaged.
    """
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    path = (search_dir / JOURNAL_FILE).absolute()  # its lock is a link to this path
    try:
        return JournalStorage(JournalFileBackend(str(path)))
    except ValueError as error:
        raise UserError(f"{path}: cannot be used ({reason(error)}); restore it from a copy") from error


def read_study(search_dir: Path) -> "optuna.Study | None":
    """Reads the study of a search. None if the search has none yet, or if Optuna is not installed.

    Raises:
        UserError: the journal is damaged.
    """
    if not (search_dir / JOURNAL_FILE).is_file() or find_spec("optuna") is None:
        return None
    import optuna

    try:
        return optuna.load_study(study_name=STUDY_NAME, storage=open_journal(search_dir))
    except KeyError:  # the process died before it wrote the study
        return None
