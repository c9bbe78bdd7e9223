"""Graphs of sessions, trials, comparisons of trials, and suites, each as PNG and SVG."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxrl_atari.envs.games import Game
from jaxrl_atari.report.drawing import (
    COLOURS,
    GREY,
    LINE_STYLES,
    default_style,
    new_figure,
    open_axes,
    plain_text,
    save_figure,
    x_axis,
)
from jaxrl_atari.report.metrics import align_sessions, moving_average
from jaxrl_atari.report.statistics import CONFIDENCE, FIGURES, aggregates_note
from jaxrl_atari.report.summary import Run, names_of, score_text, sessions_text, trial_summary
from jaxrl_atari.runs.columns import COLUMNS
from jaxrl_atari.runs.reading import Table, read_evaluations

if TYPE_CHECKING:
    from matplotlib.axes import Axes

XAxis = Literal["env_steps", "hours"]

SESSION_PANELS = {
    "policy_loss": "policy loss",
    "value_loss": "value loss",
    "entropy": "policy entropy",
    "approx_kl": "approximate KL",
    "clip_fraction": "clip fraction",
    "explained_variance": "explained variance of the value",
    "gradient_norm": "gradient norm before clipping",
    "sps": "speed",
    "gpu_busy_percent": "GPU busy",
    "learning_rate": "learning rate",
}
"""Column -> title of the small panels of a session's graph, which shows those that have values."""

RETURN = "raw return of a full game"
RETURN_MEAN = "return_mean (last 100 games)"
SMOOTHING = 20
"""Log points in the moving average of a session's small panels."""


def _along(x: XAxis, table: Table) -> Table:
    """A table with its x coordinates as the column `x`."""
    return {**table, "x": table["wall_seconds"] / 3600 if x == "hours" else table["env_steps"]}


def _marker(points: Sequence[float] | np.ndarray) -> str:
    """Marks the points if there are few: a line through a single point is invisible."""
    return "o" if len(points) <= 3 else ""


def finish_returns(
    axes: "Axes", game: Game, last: float, x: XAxis = "env_steps", ylabel: str = RETURN, **legend: Any
) -> None:
    """Axes and legend of a panel of returns, and lines at the first reference and at random play.

    A score so far from the data that its line would flatten them stands only in the legend.
    """
    (low, high), has_data = axes.get_ylim(), np.isfinite(axes.dataLim.intervaly).all()
    if not has_data:
        axes.text(0.5, 0.5, "no finished game yet", transform=axes.transAxes, ha="center", color=GREY)
    for reference in (*game.references[:1], game.random):
        if reference is not None:
            is_far = has_data and not 3 * low - 2 * high <= reference.score <= 3 * high - 2 * low
            line = axes.axhline(np.nan if is_far else reference.score, color=GREY, linewidth=1.1)
            line.set_linestyle(":" if reference is game.random else "--")
            line.set_label(f"{reference.source}: {score_text(reference.score)}")
    x_axis(axes, last, x.replace("_", " "), ylabel)
    axes.legend(frameon=False, **({"loc": "upper left", "bbox_to_anchor": (0, -0.14), "borderaxespad": 0} | legend))


def _return_ma(*runs: Run) -> str:
    return f"return_ma ({' or '.join(sorted({run.return_ma for run in runs}))})"


def _title(run: Run) -> str:
    return f"{run.config.name}: {run.game.name}, protocol {run.protocol}"


@default_style()
def plot_session(run: Run, session_dir: Path, x: XAxis = "env_steps") -> list[Path]:
    """Draws returns, evaluations and learning metrics into graphs/session.png and .svg; returns the files."""
    table = _along(x, run.tables[session_dir])
    points, last = table["x"], table["x"][-1]
    panels = [column for column in SESSION_PANELS if np.isfinite(table.get(column, np.nan)).any()]
    rows = math.ceil(len(panels) / 3)
    strong: dict[str, Any] = {"color": COLOURS[0], "marker": _marker(points)}
    faint: dict[str, Any] = {**strong, "alpha": 0.35, "linewidth": 0.9, "clip_on": False}
    figure = new_figure(f"{_title(run)}, {session_dir.name.replace('_', ' ')}", 11, 4.4 + 2.3 * rows)
    if panels:
        figure.supxlabel(f"small graphs: each log point, and the mean of the last {SMOOTHING}", fontsize="medium")
    grid = figure.add_gridspec(1 + rows, 3, height_ratios=[1.8] + rows * [1])
    axes = figure.add_subplot(grid[0, :])
    axes.plot(points, table["return_mean"], **faint, label=RETURN_MEAN)
    axes.plot(points, table["return_ma"], **strong, linewidth=2.2, label=_return_ma(run))
    if (found := read_evaluations(session_dir))["mean"].size:
        at = np.interp(found["env_steps"], table["env_steps"], points)
        style: dict[str, Any] = {"fmt": "o", "color": COLOURS[1], "clip_on": False, "label": "evaluation (± 1 std)"}
        axes.errorbar(at, found["mean"], found["std"], **style)
    finish_returns(axes, run.game, last, x, loc="lower right", bbox_to_anchor=(1, 1), ncols=2)
    for index, column in enumerate(panels):
        axes = figure.add_subplot(grid[1 + index // 3, index % 3])
        window = 1 if column == "learning_rate" else SMOOTHING  # a schedule has no noise
        axes.plot(points, table[column], **faint)
        axes.plot(points, moving_average(table[column], window), **strong, linewidth=1.3)
        axes.set_title(SESSION_PANELS[column], fontsize="medium")
        x_axis(axes, last, x.replace("_", " ") if index >= len(panels) - 3 else "", COLUMNS[column].unit)
    return save_figure(figure, session_dir / "graphs", "session")


def _draw_mean(axes: "Axes", run: Run, x: XAxis, column: str, band: bool, **line: Any) -> float:
    """Draws the mean over sessions, with a band of ± one population standard deviation if `band`; returns the last x.

    Where some sessions have no value, mean and band are over the others, and the line is thinner.
    """
    points, values = align_sessions([_along(x, table) for table in run.tables.values()], column, "x")
    last, sessions = points[-1], np.isfinite(values).sum(axis=0)
    note = "_" if sessions[-1] in (0, len(values)) else "thin: not all sessions have got this far"
    points, values, sessions = points[sessions > 0], values[:, sessions > 0], sessions[sessions > 0]
    mean, std = np.nanmean(values, axis=0), np.nanstd(values, axis=0)
    if band and len(values) > 1:
        axes.fill_between(points, mean - std, mean + std, color=line["color"], alpha=0.2, linewidth=0)
    axes.plot(points, np.where(sessions == len(values), mean, np.nan), **line, marker=_marker(points))
    axes.plot(points, mean, **line | {"linewidth": 0.4 * line["linewidth"], "label": note})
    return last


def _sessions_and_score(run: Run) -> str:
    """The score and its standard deviation over sessions: `4 sessions, score 14,482 ± 41`."""
    trial = trial_summary(run)
    spread = "" if trial["score_std"] is None else f" ± {score_text(trial['score_std'])}"
    return f"{sessions_text(trial)}, score {score_text(trial['score'])}{spread}"


@default_style()
def plot_trial(run: Run, x: XAxis = "env_steps", title: str = "") -> list[Path]:
    """Draws return_mean, with a band of one std, and return_ma, both as means over sessions; returns the files.

    The files are graphs/trial.png and .svg in the run's directory.
    """
    figure = new_figure(title or f"{_title(run)}, {_sessions_and_score(run)}", 9, 6)
    axes = figure.add_subplot()
    label = RETURN_MEAN + ("; band: ± 1 std over sessions" if len(run.tables) > 1 else "")
    _draw_mean(axes, run, x, "return_mean", True, color=COLOURS[4], linewidth=1.2, label=label)
    last = _draw_mean(axes, run, x, "return_ma", False, color=COLOURS[0], linewidth=2.4, label=_return_ma(run))
    finish_returns(axes, run.game, last, x)
    return save_figure(figure, run.path / "graphs", "trial")


@default_style()
def plot_comparison(
    runs: Sequence[Run], output: Path, labels: Sequence[str] = (), title: str = "", x: XAxis = "env_steps"
) -> list[Path]:
    """Draws the return_ma of several runs, a panel for each game and protocol; returns the files.

    The files are comparison.png and .svg in `output`. A line is the mean over a trial's sessions, and its band one
    standard deviation.

    Args:
        labels: names of the runs; by default those of their directories.
    """
    panels: dict[str, list[tuple[str, Run]]] = {}
    for name, run in zip(labels or names_of([run.path for run in runs]), runs, strict=True):
        panels.setdefault(f"{run.game.name}, protocol {run.protocol}", []).append((name, run))
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    size = (9, 6) if columns == 1 else (6 * columns, 5 * rows)
    figure = new_figure(title or f"{_return_ma(*runs)}: mean ± 1 std over sessions", *size)
    for index, (panel, trials) in enumerate(sorted(panels.items())):
        axes, last = figure.add_subplot(rows, columns, index + 1), 0.0
        for number, (name, run) in enumerate(trials):
            line = {
                "color": COLOURS[number % len(COLOURS)],
                "linestyle": LINE_STYLES[number // len(COLOURS) % len(LINE_STYLES)],
                "label": plain_text(f"{name}: {_sessions_and_score(run)}"),
            }
            last = max(last, _draw_mean(axes, run, x, "return_ma", True, linewidth=2.2, **line))
        axes.set_title(panel)
        finish_returns(axes, trials[0][1].game, last, x, "" if index % columns else RETURN)
    return save_figure(figure, output, "comparison")


@default_style()
def draw_suites(suites: Mapping[str, Mapping[str, Any]], output: Path) -> list[Path]:
    """Draws aggregates, performance profiles, and the IQM against env steps and hours; returns the files, if any.

    The files are suites.png and .svg, of human-normalised scores if there are any.

    Args:
        suites: name -> result of `describe_suite`.
    """
    kind = next(iter(next(iter(suites.values()))), None)
    if kind is None:
        return []
    described = {plain_text(name): found[kind] for name, found in suites.items()}
    figure = new_figure(f"{kind} scores, games: {next(iter(described.values()))['games']}", 12, 8)
    figure.supxlabel(aggregates_note(described.values()), fontsize="medium")
    bars, profile, by_env_steps, by_hours = figure.subplots(2, 2).flat
    panels = [
        (profile, "profile", "performance profile", f"{kind} score τ", "share of sessions with score > τ"),
        (by_env_steps, "iqm_by_env_steps", "interquartile mean against env steps", "env steps", f"{kind} IQM"),
        (by_hours, "iqm_by_hours", "interquartile mean against hours", "hours of a session", f"{kind} IQM"),
    ]
    for number, (name, found) in enumerate(described.items()):
        colour = COLOURS[number % len(COLOURS)]
        heights = np.arange(len(FIGURES)) + 0.5 * ((number + 0.5) / len(described) - 0.5)
        bounds = [found[f"{figure_name}_interval"] or (np.nan, np.nan) for figure_name in FIGURES]
        bars.plot([found[figure_name] for figure_name in FIGURES], heights, "o", color=colour, label=name)
        bars.hlines(heights, *zip(*bounds, strict=True), color=colour, linewidth=5, alpha=0.35)
        for axes, key, title, x_label, y_label in panels:
            points, values, low, high = np.array(found[key], np.float64).T
            axes.plot(points, values, color=colour, linewidth=2, marker=_marker(points))
            axes.fill_between(points, low, high, color=colour, alpha=0.2, linewidth=0)
            x_axis(axes, max(points[-1], axes.dataLim.x1), x_label, y_label)
            axes.set_title(title, fontsize="medium")
    bars.set_yticks(range(len(FIGURES)), [title for title, _ in FIGURES.values()])
    bars.set_ylim(len(FIGURES) - 0.5, -0.5)
    bars.set_title(f"aggregates, {CONFIDENCE:.0%} intervals", fontsize="medium")
    open_axes(bars)
    bars.legend(frameon=False)
    return save_figure(figure, output, "suites")
