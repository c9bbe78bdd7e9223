"""Graphs of a search: score against each searched field, parallel coordinates, all learning curves."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from jaxrl_atari.errors import UserError
from jaxrl_atari.report.drawing import COLOURS, GREY, env_step_axes, new_figure, open_axes, plain_numbers, save_figure
from jaxrl_atari.report.metrics import mean_curve
from jaxrl_atari.report.search_records import Record, ranked, trial_dir, value_text
from jaxrl_atari.report.summary import score_text
from jaxrl_atari.runs.reading import read_sessions
from jaxrl_atari.search.space import LogUniform, SearchConfig

LOOKS: dict[str, dict[str, Any]] = {
    "finished": {"color": COLOURS[0], "marker": "o", "label": "finished"},
    "stopped": {"color": COLOURS[1], "marker": "s", "label": "stopped early"},
    "failed": {"color": GREY, "marker": "x", "label": "failed"},
    "unfinished": {"color": COLOURS[2], "marker": "^", "label": "not finished"},
}
"""Colour, marker and legend of a trial, by its status."""
RETURN = "score: last return_ma (raw return of a full game)"


def plot_search(
    search_dir: Path, search: SearchConfig, records: Sequence[Record], importances: dict[str, float]
) -> None:
    """Draws graphs/fields, curves, parallel and importances in `search_dir`, as PNG and SVG.

    Args:
        importances: share of each field, largest first; empty if it is not known.

    Raises:
        UserError: the graphs cannot be written.
    """
    graphs = search_dir / "graphs"
    _plot_fields(search, records, graphs)
    _plot_curves(search_dir, search, records, graphs)
    if ranked(records):
        _plot_parallel(search, records, graphs)
    if importances:
        _plot_importances(importances, graphs)


def _plot_importances(importances: dict[str, float], graphs: Path) -> None:
    """A bar for the importance of each field."""
    figure = new_figure("Importance of each field for the score", 7, 0.55 * len(importances) + 1.6)
    axes = figure.add_subplot()
    names, shares = list(importances)[::-1], list(importances.values())[::-1]
    bars = axes.barh(names, shares, color=COLOURS[0], height=0.6)
    axes.bar_label(bars, [f"{share:.2f}" for share in shares], padding=4, color=GREY)
    axes.set(xlim=(0, 1.1), xlabel="share in what sets the best trials apart (PED-ANOVA)")
    axes.tick_params(axis="y", length=0)
    open_axes(axes)
    axes.grid(visible=False, axis="y")
    save_figure(figure, graphs, "importances")


def _positions(records: Sequence[Record], name: str) -> tuple[np.ndarray, list[str]]:
    """Positions `[N]` of the trials along a field's axis, and labels of 0, 1, ... if the values are no numbers."""
    values = [record.fields[name] for record in records]
    if all(type(value) in (int, float) for value in values):
        return np.array(values, float), []
    labels = sorted({str(value) for value in values})
    return np.array([labels.index(str(value)) for value in values], float), labels


def _scores(records: Sequence[Record]) -> np.ndarray:
    """The trials' scores `[N]`, NaN for trials without a score and for failed ones, whose score means little."""
    return np.array([np.nan if r.score is None or r.status == "failed" else r.score for r in records], float)


def _plot_fields(search: SearchConfig, records: Sequence[Record], graphs: Path) -> None:
    """Score against each searched field. Trials without a score, and failed ones, are on the lower edge."""
    columns = min(len(search.space), 3)
    rows = -(-len(search.space) // columns)
    figure = new_figure("Score against each searched field", 4.2 * columns, 3.6 * rows + 0.6)
    scores = _scores(records)
    known = bool(np.isfinite(scores).any())
    low, high = (np.nanmin(scores), np.nanmax(scores)) if known else (0.0, 1.0)
    scores = np.where(np.isnan(scores), low - 0.08 * ((high - low) or 1.0), scores)
    for index, name in enumerate(search.space):
        axes = figure.add_subplot(rows, columns, index + 1)
        positions, labels = _positions(records, name)
        for x, score, record in zip(positions, scores, records, strict=True):
            axes.scatter(x, score, s=45, zorder=3, **LOOKS[record.status])
            number = str(record.number)
            axes.annotate(number, (x, score), (5, 4), textcoords="offset points", fontsize="small", color=GREY)
        open_axes(axes)
        axes.yaxis.set_major_formatter(plain_numbers())
        _format_field_axis(axes, name, labels, isinstance(search.space[name], LogUniform))
        if not known:
            axes.set_yticks([])
    figure.supylabel(RETURN if known else "no trial has a score yet", fontsize="medium")
    shown = [status for status in LOOKS if any(record.status == status for record in records)]
    handles = [Line2D([], [], ls="", ms=7, **LOOKS[status]) for status in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    save_figure(figure, graphs, "fields")


def _format_field_axis(axes: Axes, name: str, labels: list[str], log: bool) -> None:
    axes.set_xlabel(name)
    axes.set_xscale("log" if log else "linear")
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)) if log and high / low >= 10 else MaxNLocator(4 if log else 5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    if labels:
        axes.set_xticks(range(len(labels)), labels)


def _plot_parallel(search: SearchConfig, records: Sequence[Record], graphs: Path) -> None:
    """A line for each trial over the fields, each scaled to the values tried, coloured by score.

    The line of a failed trial or one without a score is grey and ends at the last field.
    """
    names = list(search.space)
    figure = new_figure("Parallel coordinates: a line for each trial", 2.2 * (len(names) + 2), 4.8)
    axes = figure.add_subplot()
    columns, ticks = [], []
    for name in names:
        positions, labels = _positions(records, name)
        ends = positions.min(), positions.max()
        ticks.append([labels[int(end)] if labels else value_text(float(end)) for end in ends])
        columns.append(np.log(positions) if isinstance(search.space[name], LogUniform) else positions)
    scores = _scores(records)
    low, high = np.nanmin(scores), np.nanmax(scores)
    ticks.append([score_text(low), score_text(high)])
    heights = [(x - np.nanmin(x)) / ((np.nanmax(x) - np.nanmin(x)) or 1.0) for x in (*columns, scores)]
    colours = colormaps["viridis"]
    for record, *line in zip(records, *heights, strict=True):
        look: dict[str, Any] = {"color": GREY, "linestyle": ":", "linewidth": 1.2}
        end = len(names) - 1
        if math.isfinite(line[-1]):
            dashes = "-" if record.status == "finished" else "--"
            look, end = {"color": colours(float(line[-1])), "linestyle": dashes, "linewidth": 2.0}, len(names)
        axes.plot(line, marker="o", markersize=4, clip_on=False, **look)
        number, at = str(record.number), (end, line[end])
        axes.annotate(number, at, (7, -3), textcoords="offset points", fontsize="small", color=GREY)
    for x, (lowest, highest) in enumerate(ticks):
        axes.axvline(x, color=GREY, linewidth=0.8, zorder=0)
        axes.text(x, -0.04, lowest, ha="center", va="top", fontsize="small", color=GREY)
        axes.text(x, 1.03, highest, ha="center", va="bottom", fontsize="small", color=GREY)
    axes.set(xlim=(-0.3, len(names) + 0.3), ylim=(-0.02, 1.02), yticks=[])
    axes.set_xticks(range(len(names) + 1), [*names, "score"])
    axes.tick_params(axis="x", length=0, pad=18)
    axes.spines[:].set_visible(False)
    explanation = "solid: budget spent; dashed: ended before; dotted: failed or without a score; numbers: the trials"
    figure.supxlabel(f"{explanation}, and the lowest and highest value tried", fontsize="small", color=GREY)
    norm = Normalize(low, high if high > low else None)
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=axes, pad=0.02, label=RETURN)
    bar.ax.yaxis.set_major_formatter(plain_numbers())
    save_figure(figure, graphs, "parallel")


def _plot_curves(search_dir: Path, search: SearchConfig, records: Sequence[Record], graphs: Path) -> None:
    """return_ma of every trial, the mean over its sessions, against env steps; the best has a thick line."""
    figure = new_figure("Learning curves of all trials", 9, 5.5)
    axes = figure.add_subplot()
    best = [record.number for record in ranked(records)[:1]]
    last, shown = 1.0, set()
    for record in records:
        try:
            tables = list(read_sessions(trial_dir(search_dir, record.number)).values())
        except UserError:  # no session has a log point
            continue
        env_steps, mean = mean_curve(tables, "return_ma")
        if not env_steps.size:
            continue
        last = max(last, float(env_steps[-1]))
        color, marker, label = LOOKS[record.status].values()
        label = "_" if record.status in shown else label
        shown.add(record.status)
        width, text = (2.8, f"{record.number} (best)") if record.number in best else (1.3, f"{record.number}")
        axes.plot(env_steps, mean, color=color, linewidth=width, label=label)
        axes.plot(env_steps[-1:], mean[-1:], color=color, marker=marker, clip_on=False)
        axes.annotate(text, (env_steps[-1], mean[-1]), (6, 3), textcoords="offset points", color=color)
    env_step_axes(axes, last * 1.06, "return_ma (raw return of a full game)" if shown else "no trial has a score yet")
    axes.set_xlabel("env steps")
    if not shown:
        axes.set_yticks([])
    rung = float(search.grace_env_steps)
    while search.early_stopping == "asha" and rung < last:
        label = "ASHA compares" if rung == search.grace_env_steps else "_"
        axes.axvline(rung, color=GREY, linestyle=(0, (1, 2)), linewidth=1.1, label=label)
        rung *= search.reduction
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=5, frameon=False, borderaxespad=0)
    save_figure(figure, graphs, "curves")
