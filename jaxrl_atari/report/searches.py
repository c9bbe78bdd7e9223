"""Results of searches: the table of trials and the search space as text, and graphs of the trials.

The trials are read from the search's Optuna study, SEARCH_DIR/journal.log. Only then is Optuna imported.
"""

import csv
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxrl_atari.config import flat
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.output import say
from jaxrl_atari.report.graphs import (
    COLOURS,
    GREY,
    RETURN_MA,
    default_style,
    digest_of,
    finish_axes,
    is_drawn,
    new_figure,
    save_figure,
)
from jaxrl_atari.report.summary import number_text, score_text
from jaxrl_atari.runs.files import unused, write_file
from jaxrl_atari.runs.layout import session_dirs
from jaxrl_atari.runs.tables import DELIMITERS

if TYPE_CHECKING:
    import optuna
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from optuna.distributions import BaseDistribution

STUDY_NAME = "search"
JOURNAL_FILE = "journal.log"
REMAKE = "move it away: `python -m jaxrl_atari.search --resume SEARCH_DIR` makes it again"
COLOUR_OF = {"best": COLOURS[1], "finished": COLOURS[0], "stopped by ASHA": GREY, "unfinished": COLOURS[5]}
"""Kind of a trial -> its colour."""


class Trial(NamedTuple):
    """A trial that has a score: its last `return_ma`."""

    number: int
    fields: dict[str, Any]  # dotted name of a searched field -> value
    distributions: dict[str, "BaseDistribution"]  # dotted name -> the distribution of the value
    score: float
    env_steps: list[int]  # env steps of the log points that have a return_ma
    returns: list[float]  # return_ma at these log points
    kind: str  # a key of COLOUR_OF


# Tables.


def trial_rows(search_dir: Path) -> list[list[str]]:
    """The table of trials.csv with rounded numbers: a header, then a row for each trial, the best first.

    Before the search has written its first results, the table is empty.

    Raises:
        UserError: trials.csv is damaged.
    """
    path = search_dir / "trials.csv"
    if not path.is_file():
        return []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
        tables = [[*csv.reader(lines, delimiter=delimiter)] for delimiter in DELIMITERS]
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}: cannot be used ({reason(error)}); {REMAKE}") from error
    found = next((table for table in tables if table and {"trial", "score", "status"} <= {*table[0]}), None)
    if found is None:
        raise UserError(f"{path}: cannot be used (its first line is no header of trials); {REMAKE}")
    header, *rows = found
    scores = {"score", "env_steps"}

    def text(name: str, cell: str) -> str:
        try:
            value = float(cell)
        except ValueError:
            return cell
        if name == "trial" or not math.isfinite(value):
            return cell
        return score_text(value) if name in scores else number_text(value)

    return [header, *([text(name, cell) for name, cell in zip(header, row, strict=False)] for row in rows)]


def search_facts(search: Any) -> dict[str, Any]:
    """The search space and the options in a search.json as text: name -> value.

    The value of a searched field is its range, such as `0.0001 to 0.0005, logarithmic`, or its choices.
    """
    if not isinstance(search, Mapping):  # a search.json of unknown origin
        return {}
    space = search.get("space")
    fields = space.items() if isinstance(space, Mapping) else ()
    options = flat({name: value for name, value in search.items() if name != "space"})
    return {name: distribution_text(saved) for name, saved in fields} | {
        name: _number(value) for name, value in options.items()
    }


def distribution_text(saved: Any) -> str:
    """A distribution of Optuna, given as JSON, in words."""
    attributes = saved.get("attributes", saved) if isinstance(saved, Mapping) else None
    if not isinstance(attributes, Mapping):
        return str(saved)
    if "choices" in attributes:
        choices = attributes["choices"]
        return " or ".join(map(str, choices)) if isinstance(choices, list) else str(choices)
    if not {"low", "high"} <= set(attributes):
        return str(saved)
    text = f"{_number(attributes['low'])} to {_number(attributes['high'])}"
    if attributes.get("step") not in (None, 1):
        text += f" in steps of {_number(attributes['step'])}"
    return f"{text}, logarithmic" if attributes.get("log") else text


def _number(value: Any) -> str:
    """A JSON value as text; numbers as in `number_text`."""
    return number_text(value) if type(value) in (int, float) else str(value)


# Trials.


def check_journal(search_dir: Path, mend: bool = False) -> None:
    """Refuses a study whose journal.log is damaged. Optuna would raise an error of its own or start a new study.

    Optuna ignores a last line that a killed process has left unfinished, until another one is appended to it.

    Args:
        mend: the search is to go on. Such a line is removed, and the file as it was is kept beside it.

    Raises:
        UserError: a line is not understood; with `mend`, there is none although trials have trained.
    """
    journal = search_dir / JOURNAL_FILE
    *lines, unfinished = journal.read_bytes().split(b"\n") if journal.is_file() else [b""]
    for number, line in enumerate(lines, start=1):
        try:
            json.loads(line)
        except ValueError as error:
            raise UserError(
                f"{journal}: line {number} is not understood ({reason(error)}); restore it from a copy"
            ) from error
    begun = [path for path in search_dir.glob("trial_*") if session_dirs(path)]
    if mend and not lines and begun:
        raise UserError(
            f"{journal}: holds no trial, although {begun[0].name} has trained; restore it from a copy, or start a"
            " new search"
        )
    if unfinished and mend:
        copy = unused(journal)
        shutil.copy2(journal, copy)
        write_file(journal, b"".join(line + b"\n" for line in lines))
        say(f"{journal.name}: the last line does not end, and is left out; the file as it was is now {copy.name}")


def read_study(search_dir: Path) -> "optuna.Study | None":
    """The study of a search; None if the search has not begun or Optuna is not installed.

    Raises:
        UserError: as `check_journal`.
    """
    journal = search_dir / JOURNAL_FILE
    check_journal(search_dir)
    if not journal.is_file() or find_spec("optuna") is None:
        return None
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    storage = JournalStorage(JournalFileBackend(str(journal)))
    try:
        return optuna.load_study(study_name=STUDY_NAME, storage=storage)
    except KeyError:  # the process died before it wrote the study
        return None


def read_trials(study: "optuna.Study") -> list[Trial]:
    """The trials that have a score, in the order of their numbers. A running trial has its score so far."""
    from optuna.trial import TrialState

    kinds = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "stopped by ASHA"}
    trials = []
    for found in study.trials:
        points = sorted((step, value) for step, value in found.intermediate_values.items() if math.isfinite(value))
        score = found.value
        if score is None and points:
            score = points[-1][1]
        if score is not None and found.params:
            trial = Trial(
                number=found.number,
                fields=dict(found.params),
                distributions=dict(found.distributions),
                score=float(score),
                env_steps=[step for step, _ in points],
                returns=[value for _, value in points],
                kind=kinds.get(found.state, "unfinished"),
            )
            trials.append(trial)
    finished = [trial for trial in trials if trial.kind == "finished"] or trials
    best = max(finished, key=lambda trial: trial.score, default=None)
    return [trial._replace(kind="best") if trial is best else trial for trial in trials]


# Graphs.


def update_graphs(study: "optuna.Study", directory: Path) -> None:
    """Draws the trials of a search, if their graphs are missing or show other trials than those of the study."""
    if not is_drawn(directory / "fields.svg", digest_of(read_trials(study))):
        draw_graphs(study, directory)


def draw_graphs(study: "optuna.Study", directory: Path) -> list[Path]:
    """Draws the trials of a search, each graph as PNG and SVG; returns the files.

    - curves: return_ma against env steps, with a line for each trial
    - fields: score against each searched field
    - parallel: fields and score, with a line for each trial
    - importances: how important each field is for a good score (PED-ANOVA, arXiv:2304.10255); the sum is 1

    The last two need two trials with a score. Before a game has ended, nothing is drawn.
    """
    trials = read_trials(study)
    if not trials:
        return []
    source = digest_of(trials)
    drawings: dict[str, Callable[[], Figure | None]] = {
        "curves": lambda: _draw_curves(trials),
        "fields": lambda: _draw_fields(trials),
    }
    if len(trials) > 1:
        drawings["parallel"] = lambda: _draw_parallel(trials)
        drawings["importances"] = lambda: _draw_importances(trials)
    files = []
    with default_style():
        for name, draw in drawings.items():
            figure = draw()
            if figure is not None:
                files += save_figure(figure, directory, name, source)
    return files


def _draw_curves(trials: Sequence[Trial]) -> "Figure | None":
    """Draws return_ma against env steps; None without log points."""
    figure = new_figure("return_ma of each trial", 10, 5)
    axes = figure.add_subplot()
    for trial in sorted(trials, key=lambda each: each.kind == "best"):  # the best one on top
        width = 2.2 if trial.kind == "best" else 1.1
        axes.plot(trial.env_steps, trial.returns, color=COLOUR_OF[trial.kind], linewidth=width)
    if not axes.has_data():
        return None
    finish_axes(axes, "env steps", RETURN_MA)
    _add_legend(figure, trials)
    return figure


def _draw_fields(trials: Sequence[Trial]) -> "Figure":
    """Draws the score against each searched field, with a panel for each field."""
    names = _field_names(trials)
    columns = min(len(names), 3)
    rows = math.ceil(len(names) / columns)
    figure = new_figure("score of each trial against its fields", 4.4 * columns, 3.8 * rows)
    for index, name in enumerate(names, 1):
        axes = figure.add_subplot(rows, columns, index)
        for kind, colour in COLOUR_OF.items():
            shown = [trial for trial in trials if trial.kind == kind and name in trial.fields]
            positions = _positions([trial.fields[name] for trial in shown], name, trials)
            axes.plot(positions, [trial.score for trial in shown], "o", color=colour, zorder=3)
        if _is_logarithmic(name, trials):
            axes.set_xscale("log")
        _write_ticks(axes, name, trials)
        axes.set_xlabel(name)
        axes.set_ylabel("score")
    _add_legend(figure, trials)
    return figure


def _draw_parallel(trials: Sequence[Trial]) -> "Figure":
    """Draws a vertical axis for each field and for the score, and each trial as a line coloured by its score."""
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import StrMethodFormatter

    names = _field_names(trials)
    figure = new_figure("fields and score of each trial", max(8, 2.4 * (len(names) + 1)), 5)
    axes = figure.add_subplot()
    columns = []
    for name in names:
        positions = np.array(_positions([trial.fields.get(name) for trial in trials], name, trials), np.float64)
        if _is_logarithmic(name, trials):
            positions = np.log(positions)
        columns.append(positions)
    columns.append(np.array([trial.score for trial in trials]))
    heights = np.array([_to_unit(column) for column in columns])
    colours = ScalarMappable(Normalize(columns[-1].min(), columns[-1].max()), matplotlib.colormaps["viridis_r"])
    for index in np.argsort(columns[-1]):
        axes.plot(heights[:, index], color=colours.to_rgba(columns[-1][index]), linewidth=1.6)
    for place, (name, column) in enumerate(zip([*names, "score"], columns, strict=True)):
        axes.axvline(place, color=GREY, linewidth=0.8)
        for at in (int(np.nanargmin(column)), int(np.nanargmax(column))):
            value = trials[at].fields.get(name, trials[at].score)
            text = number_text(value) if isinstance(value, int | float) else str(value)
            axes.annotate(text, (place, heights[place, at]), (4, 3), textcoords="offset points", color=GREY)
    axes.set_xticks(range(len(columns)), [*names, "score"])
    axes.set_yticks([])
    axes.set_ylim(-0.05, 1.1)
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    figure.colorbar(colours, ax=axes, label="score", format=StrMethodFormatter("{x:,.10g}"))
    return figure


def _draw_importances(trials: Sequence[Trial]) -> "Figure | None":
    """Draws Optuna's importances of the fields; None if Optuna has none, as for trials of equal score."""
    import optuna
    from matplotlib.ticker import PercentFormatter
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    # Copies, because Optuna leaves out pruned trials. With ASHA, most trials are pruned.
    copies = [
        optuna.trial.create_trial(params=trial.fields, distributions=trial.distributions, value=trial.score)
        for trial in trials
    ]
    complete = optuna.create_study(direction="maximize")
    complete.add_trials(copies)
    try:
        importances = get_param_importances(complete, evaluator=PedAnovaImportanceEvaluator())
    except (ValueError, RuntimeError):  # no field differs
        return None
    names = list(importances)[::-1]
    shares = [importances[name] for name in names]
    figure = new_figure("importance of each field for the score", 9, 1.5 + 0.5 * len(names))
    axes = figure.add_subplot()
    bars = axes.barh(names, shares, color=COLOURS[0])
    axes.bar_label(bars, [f"{share:.0%}" for share in shares], padding=3)
    axes.set_xlim(0, 1.08)  # with room for the last label
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.set_xlabel("importance for a good score (PED-ANOVA; all fields: 100%)")
    return figure


def _field_names(trials: Sequence[Trial]) -> list[str]:
    """The searched fields, in the order of the search space."""
    return list(dict.fromkeys(name for trial in trials for name in trial.fields))


def _is_logarithmic(name: str, trials: Sequence[Trial]) -> bool:
    """Whether a field was drawn on a logarithmic scale."""
    return any(getattr(trial.distributions.get(name), "log", False) for trial in trials)


def _categories(name: str, trials: Sequence[Trial]) -> list[str]:
    """The values of a categorical field as text; empty for a field of numbers."""
    values = [trial.fields[name] for trial in trials if name in trial.fields]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return []
    return sorted({str(value) for value in values})


def _positions(values: Sequence[Any], name: str, trials: Sequence[Trial]) -> list[float]:
    """The positions of values on the axis of a field: numbers themselves, categories 0, 1, ...; NaN for None."""
    categories = _categories(name, trials)
    if categories:
        return [np.nan if value is None else categories.index(str(value)) for value in values]
    return [np.nan if value is None else float(value) for value in values]


def _write_ticks(axes: "Axes", name: str, trials: Sequence[Trial]) -> None:
    """Labels the x axis of a field with its categories, or with few plain numbers."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, StrMethodFormatter

    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    categories = _categories(name, trials)
    if categories:
        axes.set_xticks(range(len(categories)), categories)
        axes.set_xlim(-0.5, len(categories) - 0.5)
        return
    logarithmic = axes.get_xscale() == "log"
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if logarithmic else MaxNLocator(4))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number_text(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(axis="x", rotation=30)


def _to_unit(values: np.ndarray) -> np.ndarray:
    """Values scaled to 0 (the lowest) to 1 (the highest); 0.5 if they are equal."""
    low, high = np.nanmin(values), np.nanmax(values)
    return (values - low) / (high - low) if high > low else np.where(np.isnan(values), np.nan, 0.5)


def _add_legend(figure: "Figure", trials: Sequence[Trial]) -> None:
    """Adds a legend below the axes: the kinds of trials that are drawn, and the best trial with its score."""
    from matplotlib.lines import Line2D

    entries = []
    for kind, colour in COLOUR_OF.items():
        shown = [trial for trial in trials if trial.kind == kind]
        if shown:
            label = kind
            if kind == "best":
                label = f"best: trial {shown[0].number}, score {score_text(shown[0].score)}"
            entries.append(Line2D([], [], color=colour, linewidth=2, marker="o", label=label))
    figure.legend(handles=entries, loc="outside lower left", ncols=len(entries))
