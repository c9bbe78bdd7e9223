"""Graphs of searches: the trials' curves, and their scores against the searched fields."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxrl_atari.report.figures import (
    COLOURS,
    GREY,
    default_style,
    digest_of,
    finish_axes,
    is_drawn,
    new_figure,
    save_figure,
)
from jaxrl_atari.report.searches import ScoredTrial, read_trials
from jaxrl_atari.report.text import number_text, score_text

if TYPE_CHECKING:
    import optuna
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOUR_OF = {"best": COLOURS[1], "finished": COLOURS[0], "stopped by ASHA": GREY, "unfinished": COLOURS[5]}
"""Kind of a trial -> its colour."""


def update_graphs(study: "optuna.Study", directory: Path) -> None:
    """Draws the trials of a search, if fields.svg is missing or shows something else than the study has now."""
    if not is_drawn(directory / "fields.svg", digest_of(read_trials(study))):
        draw_graphs(study, directory)


def draw_graphs(study: "optuna.Study", directory: Path) -> list[Path]:
    """Draws the trials of a search, each graph as PNG and SVG; returns the files.

    - curves: return_ma against env steps, with a line for each trial
    - fields: score against each searched field
    - parallel: fields and score, with a line for each trial
    - importances: how important each field is for a good score (PED-ANOVA, arXiv:2304.10255); the sum is 1

    `parallel` and `importances` need two trials with a score. Before a game has ended, nothing is drawn.
    """
    trials = read_trials(study)
    if not trials:
        return []
    source = digest_of(trials)
    with default_style():
        figures = {"curves": _draw_curves(trials), "fields": _draw_fields(trials)}
        if len(trials) > 1:
            figures["parallel"] = _draw_parallel(trials)
            figures["importances"] = _draw_importances(trials)
        files = []
        for name, figure in figures.items():
            if figure is not None:
                files += save_figure(figure, directory, name, source)
    return files


def _draw_curves(trials: Sequence[ScoredTrial]) -> "Figure | None":
    """Draws return_ma against env steps; None without log points."""
    figure = new_figure("return_ma of each trial", 10, 5)
    axes = figure.add_subplot()
    for trial in sorted(trials, key=lambda each: each.kind == "best"):  # the best one on top
        width = 2.2 if trial.kind == "best" else 1.1
        axes.plot(trial.env_steps, trial.returns, color=COLOUR_OF[trial.kind], linewidth=width)
    if not axes.has_data():
        return None
    finish_axes(axes, "env steps", "return_ma")
    _add_legend(figure, trials)
    return figure


def _draw_fields(trials: Sequence[ScoredTrial]) -> "Figure":
    """Draws the score against each searched field, with a panel for each field."""
    names = _field_names(trials)
    columns = min(len(names), 3)
    rows = math.ceil(len(names) / columns)
    figure = new_figure("score of each trial against its fields", 4.4 * columns, 3.8 * rows)
    for index, name in enumerate(names, 1):
        axes = figure.add_subplot(rows, columns, index)
        positions = _positions(name, trials)
        for kind, colour in COLOUR_OF.items():
            shown = [i for i, trial in enumerate(trials) if trial.kind == kind]
            axes.plot(positions[shown], [trials[i].score for i in shown], "o", color=colour, zorder=3)
        if _is_logarithmic(name, trials):
            axes.set_xscale("log")
        _write_ticks(axes, name, trials)
        axes.set_xlabel(name)
        axes.set_ylabel("score")
    _add_legend(figure, trials)
    return figure


def _draw_parallel(trials: Sequence[ScoredTrial]) -> "Figure":
    """Draws a vertical axis for each field and for the score, and each trial as a line coloured by its score."""
    import matplotlib
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.ticker import StrMethodFormatter

    names = _field_names(trials)
    figure = new_figure("fields and score of each trial", max(8, 2.4 * (len(names) + 1)), 5)
    axes = figure.add_subplot()
    columns = []  # positions of the trials on each axis
    labels = []  # values of the trials, as text
    for name in names:
        positions = _positions(name, trials)
        columns.append(np.log(positions) if _is_logarithmic(name, trials) else positions)
        to_text = str if _categories(name, trials) else number_text
        labels.append([to_text(trial.fields[name]) if name in trial.fields else "" for trial in trials])
    scores = [trial.score for trial in trials]
    columns.append(np.array(scores))
    labels.append([number_text(score) for score in scores])
    heights = np.array([_to_unit(column) for column in columns])
    colours = ScalarMappable(Normalize(columns[-1].min(), columns[-1].max()), matplotlib.colormaps["viridis_r"])
    for trial_index in np.argsort(columns[-1]):  # the best trial is drawn last, on top
        axes.plot(heights[:, trial_index], color=colours.to_rgba(columns[-1][trial_index]), linewidth=1.6)
    for index, (column, texts) in enumerate(zip(columns, labels, strict=True)):
        axes.axvline(index, color=GREY, linewidth=0.8)
        for trial_index in (int(np.nanargmin(column)), int(np.nanargmax(column))):
            place = (index, heights[index, trial_index])
            axes.annotate(texts[trial_index], place, (4, 3), textcoords="offset points", color=GREY)
    axes.set_xticks(range(len(columns)), [*names, "score"])
    axes.set_yticks([])
    axes.set_ylim(-0.05, 1.1)
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    figure.colorbar(colours, ax=axes, label="score", format=StrMethodFormatter("{x:,.10g}"))
    return figure


def _draw_importances(trials: Sequence[ScoredTrial]) -> "Figure | None":
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


def _field_names(trials: Sequence[ScoredTrial]) -> list[str]:
    """The searched fields, in the order of the search space."""
    return list(dict.fromkeys(name for trial in trials for name in trial.fields))


def _is_logarithmic(name: str, trials: Sequence[ScoredTrial]) -> bool:
    """Whether the values of a field were sampled on a logarithmic scale."""
    return any(getattr(trial.distributions.get(name), "log", False) for trial in trials)


def _categories(name: str, trials: Sequence[ScoredTrial]) -> list[str]:
    """The values of a categorical field as text; empty for a field of numbers."""
    values = [trial.fields[name] for trial in trials if name in trial.fields]
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
        return []
    return sorted({str(value) for value in values})


def _positions(name: str, trials: Sequence[ScoredTrial]) -> np.ndarray:
    """The positions of trials on the axis of a field: numbers themselves, categories 0, 1, ... (None may be one).

    A trial that lacks the field has NaN: it ended before the field was sampled.
    """
    categories = _categories(name, trials)
    positions = np.full(len(trials), np.nan)
    for index, trial in enumerate(trials):
        if name in trial.fields:
            value = trial.fields[name]
            positions[index] = categories.index(str(value)) if categories else value
    return positions


def _write_ticks(axes: "Axes", name: str, trials: Sequence[ScoredTrial]) -> None:
    """Labels the x axis of a field with the categories of the field, or with a few plain numbers."""
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


def _add_legend(figure: "Figure", trials: Sequence[ScoredTrial]) -> None:
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
