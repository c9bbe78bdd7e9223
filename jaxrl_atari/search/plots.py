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
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from jaxrl_atari.errors import UserError
from jaxrl_atari.plots import COLOURS, GREY, _drawing, _format_axes, _new_figure, _save, _tick_text
from jaxrl_atari.run_dir.metrics import align_sessions
from jaxrl_atari.run_dir.results import read_sessions, score_text
from jaxrl_atari.search.space import LogUniform, SearchConfig, Uniform
from jaxrl_atari.search.worker import Record, ranked, short, trial_dir

LOOKS = {
    "finished": {"color": COLOURS[0], "marker": "o"},
    "stopped": {"color": COLOURS[1], "marker": "s"},
    "failed": {"color": GREY, "marker": "x"},
    "unfinished": {"color": COLOURS[2], "marker": "^"},
}
"""How a trial is drawn, by its status."""
NAMES = {"stopped": "stopped early", "unfinished": "not finished"}
RETURN = "score: last return_ma (raw return of a full game)"


def plot_search(search_dir: Path, search: SearchConfig, records: Sequence[Record]) -> list[Path]:
    """Draws graphs/fields, graphs/parallel and graphs/curves in `search_dir`, as PNG and SVG; returns the files.

    Raises:
        UserError: the graphs cannot be written.
    """
    graphs = search_dir / "graphs"
    with _drawing:
        paths = _plot_fields(search, records, graphs)
        paths += _plot_curves(search_dir, search, records, graphs)
        if ranked(records):
            paths += _plot_parallel(search, records, graphs)
    return paths


def _positions(search: SearchConfig, records: Sequence[Record], name: str) -> tuple[list[float], list[str] | None]:
    """Where the trials lie along a field's axis; the axis' labels where the field has no order of its own."""
    values = [record.fields[name] for record in records]
    if isinstance(search.space[name], Uniform | LogUniform) or all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in values
    ):
        return [float(value) for value in values], None
    labels = sorted({str(value) for value in values})
    return [float(labels.index(str(value))) for value in values], labels


def _scores(records: Sequence[Record]) -> np.ndarray:
    """The trials' scores `[N]`, NaN for those without one and those that failed: what they had says little."""
    return np.array([np.nan if r.score is None or r.status == "failed" else r.score for r in records], float)


def _plot_fields(search: SearchConfig, records: Sequence[Record], graphs: Path) -> list[Path]:
    """Score against each searched field. Trials without a score, and those that failed, lie on the lower edge."""
    names = list(search.space)
    columns = min(len(names), 3)
    rows = -(-len(names) // columns)
    figure = _new_figure("Score against each searched field", 4.2 * columns, 3.6 * rows + 0.6)
    scores = _scores(records)
    low, high = (np.nanmin(scores), np.nanmax(scores)) if np.isfinite(scores).any() else (0.0, 1.0)
    known = bool(np.isfinite(scores).any())
    scores = np.where(np.isnan(scores), low - 0.08 * ((high - low) or 1.0), scores)
    for index, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, index + 1)
        positions, labels = _positions(search, records, name)
        for status, look in LOOKS.items():
            points = [(x, score) for x, score, r in zip(positions, scores, records, strict=True) if r.status == status]
            if points:
                axes.scatter(*zip(*points, strict=True), s=45, label=NAMES.get(status, status), zorder=3, **look)
        for x, score, record in zip(positions, scores, records, strict=True):
            axes.annotate(
                str(record.number), (x, score), (5, 4), textcoords="offset points", fontsize="small", color=GREY
            )
        _field_axis(axes, search, name, labels)
        axes.yaxis.set_major_formatter(FuncFormatter(_tick_text))
        if not known:
            axes.set_yticks([])
        axes.grid(color="#E0E0E0", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supylabel(RETURN if known else "no trial has a score yet", fontsize="medium")
    by_label = {
        label: handle for axes in figure.axes for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(by_label.values(), by_label, loc="outside lower center", ncols=4, frameon=False)
    return _save(figure, graphs, "fields")


def _field_axis(axes: Axes, search: SearchConfig, name: str, labels: list[str] | None) -> None:
    axes.set_xlabel(name)
    if labels is not None:
        axes.set_xticks(range(len(labels)), labels)
    elif isinstance(search.space[name], LogUniform):
        axes.set_xscale("log")
        low, high = axes.get_xlim()
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)) if high / low >= 10 else MaxNLocator(4))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.xaxis.set_minor_formatter(NullFormatter())
    else:
        axes.xaxis.set_major_locator(MaxNLocator(5))


def _plot_parallel(search: SearchConfig, records: Sequence[Record], graphs: Path) -> list[Path]:
    """A line for each trial over the fields, each scaled to the values tried, coloured by score.

    A trial that failed or has no score is grey and ends at the last field.
    """
    names = list(search.space)
    figure = _new_figure("Parallel coordinates: a line for each trial", 2.2 * (len(names) + 2), 4.8)
    axes = figure.add_subplot()
    columns: list[list[float]] = []
    ticks: list[tuple[str, str]] = []
    for name in names:
        positions, labels = _positions(search, records, name)
        ends = (min(positions), max(positions))
        ticks.append((short_end(ends[0], labels), short_end(ends[1], labels)))
        if isinstance(search.space[name], LogUniform):
            positions, ends = [math.log(x) for x in positions], (math.log(ends[0]), math.log(ends[1]))
        columns.append([(x - ends[0]) / ((ends[1] - ends[0]) or 1.0) for x in positions])
    scores = _scores(records)
    norm = Normalize(np.nanmin(scores), np.nanmax(scores) if np.nanmax(scores) > np.nanmin(scores) else None)
    columns.append([float(norm(score)) for score in scores])
    ticks.append((score_text(np.nanmin(scores)), score_text(np.nanmax(scores))))
    colours = colormaps["viridis"]
    for record, score, *heights in zip(records, scores, *columns, strict=True):
        drawn: dict[str, Any] = {"color": GREY, "linestyle": ":", "linewidth": 1.2}
        if math.isfinite(score):
            dashes = "-" if record.status == "finished" else "--"
            drawn = {"color": colours(float(norm(score))), "linestyle": dashes, "linewidth": 2.0}
        axes.plot(range(len(heights)), heights, marker="o", markersize=4, clip_on=False, **drawn)
        end = (len(names) if math.isfinite(score) else len(names) - 1, heights[-1 if math.isfinite(score) else -2])
        axes.annotate(str(record.number), end, (7, -3), textcoords="offset points", fontsize="small", color=GREY)
    for x, (low, high) in enumerate(ticks):
        axes.axvline(x, color=GREY, linewidth=0.8, zorder=0)
        axes.text(x, -0.04, low, ha="center", va="top", fontsize="small", color=GREY)
        axes.text(x, 1.03, high, ha="center", va="bottom", fontsize="small", color=GREY)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlim(-0.3, len(names) + 0.3)
    axes.set_yticks([])
    axes.set_xticks(range(len(names) + 1), [*names, "score"])
    axes.tick_params(axis="x", length=0, pad=18)
    axes.spines[:].set_visible(False)
    figure.supxlabel(
        "full lines: budget spent; dashed: ended before; dotted: failed or without a score;"
        " numbers: the trials, and the lowest and highest value tried",
        fontsize="small", color=GREY,
    )  # fmt: skip
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=axes, pad=0.02)
    bar.set_label(RETURN)
    bar.ax.yaxis.set_major_formatter(FuncFormatter(_tick_text))
    return _save(figure, graphs, "parallel")


def short_end(value: float, labels: list[str] | None) -> str:
    """The label at one end of an axis."""
    return labels[int(value)] if labels is not None else short(value)


def _plot_curves(search_dir: Path, search: SearchConfig, records: Sequence[Record], graphs: Path) -> list[Path]:
    """return_ma of every trial, the mean over its sessions, against env steps; the best is thick."""
    figure = _new_figure("Learning curves of all trials", 9, 5.5)
    axes = figure.add_subplot()
    best = [record.number for record in ranked(records)[:1]]
    last, seen = 1.0, set()
    for record in records:
        try:
            tables = list(read_sessions(trial_dir(search_dir, record.number)).values())
        except UserError:  # none has a log point
            continue
        env_steps, values = align_sessions(tables, "return_ma")
        known = np.isfinite(values).any(axis=0)
        if not known.any():
            continue
        env_steps, mean = env_steps[known], np.nanmean(values[:, known], axis=0)
        last = max(last, float(env_steps[-1]))
        look, status = LOOKS[record.status], NAMES.get(record.status, record.status)
        width = 2.8 if record.number in best else 1.3
        label = "_" if status in seen else status
        seen.add(status)
        axes.plot(env_steps, mean, color=look["color"], linewidth=width, label=label)
        axes.plot(env_steps[-1:], mean[-1:], color=look["color"], marker=look["marker"], clip_on=False)
        text = f"{record.number}" + (" (best)" if record.number in best else "")
        axes.annotate(text, (env_steps[-1], mean[-1]), (6, 3), textcoords="offset points", color=look["color"])
    _format_axes(axes, last * 1.06, "return_ma (raw return of a full game)" if seen else "no trial has a score yet")
    if not seen:
        axes.set_yticks([])
    if search.early_stopping == "asha":
        rung = float(search.grace_env_steps)
        while rung < last:
            label = "ASHA compares" if rung == search.grace_env_steps else "_"
            axes.axvline(rung, color=GREY, linestyle=(0, (1, 2)), linewidth=1.1, label=label)
            rung *= search.reduction
    axes.set_xlabel("env steps")
    if axes.get_legend_handles_labels()[1]:
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=5, frameon=False, borderaxespad=0)
    return _save(figure, graphs, "curves")
