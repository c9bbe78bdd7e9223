"""Graphs of sessions, trials, comparisons of trials, and suites, each as PNG and SVG."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxrl_atari.envs.games import Game
from jaxrl_atari.errors import UserError
from jaxrl_atari.output import counted
from jaxrl_atari.report.aggregates import SuiteStatistics
from jaxrl_atari.report.figures import (
    COLOURS,
    GREY,
    default_style,
    finish_axes,
    new_figure,
    save_figure,
)
from jaxrl_atari.report.metrics import align_sessions, sample_std
from jaxrl_atari.report.score_statistics import CONFIDENCE
from jaxrl_atari.report.summary import Run, trial_summary
from jaxrl_atari.report.tables import number_text
from jaxrl_atari.report.text import left_out_text, sessions_text
from jaxrl_atari.runs.columns import COLUMNS, unit_of
from jaxrl_atari.runs.layout import GRAPHS_FOLDER
from jaxrl_atari.runs.reading import Table, read_evaluations

if TYPE_CHECKING:
    from matplotlib.axes import Axes

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
"""Column -> title of its small panel in a session's graph. Columns without values get no panel."""

RETURN_MA = "return_ma"
RETURN_MEAN = "return_mean (last 100 games)"

XAxis = Literal["env steps", "hours"]
X_AXES: dict[XAxis, tuple[str, float]] = {"env steps": ("env_steps", 1), "hours": ("wall_seconds", 3600)}
"""Axis -> its column, and the number of the column's units in one unit of the axis."""


SuiteProfiles = Mapping[str, Mapping[str, SuiteStatistics]]
"""Name of a suite -> normalisation -> the statistics, whose profile is drawn."""


def finish_returns(axes: "Axes", game: Game, x_label: str = "env steps", x_end: float | None = None) -> None:
    """Finishes a panel of returns: axes, legend, and lines at the first reference, a human tester and random play.

    A score that is so far away that its line would flatten the data is left out. Axes without a return show a text
    instead of a scale.

    Args:
        x_end: see `finish_axes`.
    """
    finish_axes(axes, x_label, "raw return of a full game", x_end)
    if not np.isfinite(axes.dataLim.intervaly).all():
        axes.text(0.5, 0.5, "no finished game yet", transform=axes.transAxes, ha="center", color=GREY)
        axes.set_yticks([])
        return
    low, high = axes.get_ylim()
    first = next(iter(game.references), None)
    for reference, style in ((first, "--"), (game.human, "-."), (game.random, ":")):
        if reference is not None and 2 * low - high <= reference.score <= 2 * high - low:
            label = f"{reference.source}: {number_text(reference.score)}"
            axes.axhline(reference.score, color=GREY, linewidth=1.1, linestyle=style, label=label)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.14), borderaxespad=0)


@default_style()
def plot_session(run: Run, session_dir: Path) -> list[Path]:
    """Draws returns, evaluations and learning metrics into graphs/session.png and .svg; returns the files.

    A metric without an entry in `COLUMNS` is the algorithm's own, and gets a panel too.
    """
    table = run.tables[session_dir]
    env_steps = table["env_steps"]
    evaluations = read_evaluations(session_dir)
    x_end = float(np.max([env_steps[-1], *evaluations["env_steps"]]))
    titles = SESSION_PANELS | {column: column for column in table if column not in COLUMNS}
    panels = [column for column in titles if np.isfinite(table.get(column, np.nan)).any()]
    rows = math.ceil(len(panels) / 3)
    title = f"{run.config.name}: {run.game.name}, protocol {run.protocol}, {session_dir.name.replace('_', ' ')}"
    figure = new_figure(title, 11, 5 + 2.3 * rows)
    grid = figure.add_gridspec(1 + rows, 3, height_ratios=[1.8] + rows * [1])

    axes = figure.add_subplot(grid[0, :])
    if np.isfinite(table["return_mean"]).any():
        axes.plot(env_steps, table["return_mean"], color=COLOURS[0], linewidth=0.9, alpha=0.35, label=RETURN_MEAN)
        label = f"return_ma ({run.return_ma_definition})"
        axes.plot(env_steps, table["return_ma"], color=COLOURS[0], linewidth=2.2, label=label)
    if evaluations["mean"].size:
        axes.errorbar(
            evaluations["env_steps"],
            evaluations["mean"],
            evaluations["std"],
            fmt="o",
            color=COLOURS[1],
            clip_on=False,
            label="evaluation (± 1 std over games)",
        )
    finish_returns(axes, run.game, x_end=x_end)

    for index, column in enumerate(panels):
        axes = figure.add_subplot(grid[1 + index // 3, index % 3])
        axes.plot(env_steps, table[column], color=COLOURS[0], linewidth=0.9)
        axes.set_title(titles[column], fontsize="medium")
        finish_axes(axes, y_label=unit_of(column), x_end=x_end)
    return save_figure(figure, session_dir / GRAPHS_FOLDER, "session")


def _draw_mean(axes: "Axes", tables: Sequence[Table], column: str, x: XAxis, **line: Any) -> None:
    """Draws the mean over sessions with a band of ± one sample std, at the points where every session has a value.

    Args:
        tables: the log points of the sessions; see `Run.members`.
        line: properties of the line, with its `color`.
    """
    along, unit = X_AXES[x]
    points, values = align_sessions(tables, column, along)
    known = np.isfinite(values).all(axis=0)
    points = points[known] / unit
    values = values[:, known]
    mean = values.mean(axis=0)
    axes.plot(points, mean, **line)
    if len(tables) > 1:
        std = sample_std(values, axis=0)
        axes.fill_between(points, mean - std, mean + std, color=line["color"], alpha=0.15, linewidth=0)


def plot_run(run: Run, heading: str = "") -> list[Path]:
    """Draws every session, and the trial as graphs/trial.png and .svg in the run directory; returns the files."""
    files = [file for session_dir in run.tables for file in plot_session(run, session_dir)]
    curves = [(RETURN_MA, run)]
    return files + plot_comparison(curves, run.path / GRAPHS_FOLDER, heading or run.config.name, "trial")


@default_style()
def plot_comparison(
    runs: Sequence[tuple[str, Run]],
    output: Path,
    heading: str = "",
    file: str = "comparison",
    x: XAxis = "env steps",
) -> list[Path]:
    """Draws the return_ma of runs, with a panel for each game and protocol; returns the files.

    A line is the mean over the sessions of a trial that count (`Run.members`), and its band is one sample
    standard deviation. The legend names the sessions that are left out. A panel of a single run also shows its
    return_mean.

    Args:
        runs: name in the legend, and run.
        heading: title of the figure.
        file: name of the files, without their suffixes.
    """
    panels: dict[str, list[tuple[str, Run]]] = {}
    for name, run in runs:
        panels.setdefault(f"{run.game.name}, protocol {run.protocol}", []).append((name, run))
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(heading or "return_ma", 7 * columns, 5.5 * rows)
    for index, (panel, trials) in enumerate(sorted(panels.items()), 1):
        axes = figure.add_subplot(rows, columns, index)
        without_game = _draw_trials(axes, trials, x)
        title = panel
        if without_game and len(trials) > 1:
            title += f"\nno finished game yet: {', '.join(without_game)}"
        axes.set_title(title)
        along, unit = X_AXES[x]
        x_end = max(table[along][-1] for _, run in trials for table in run.members.tables.values()) / unit
        finish_returns(axes, trials[0][1].game, x, x_end)
    if any(axes.collections for axes in figure.axes):
        figure.supxlabel("mean ± 1 std over sessions", fontsize="medium")
    return save_figure(figure, output, file)


def _draw_trials(axes: "Axes", trials: Sequence[tuple[str, Run]], x: XAxis) -> list[str]:
    """Draws the trials of one panel; returns the names of trials without a finished game, which get no line."""
    without_game = []
    lines = itertools.cycle(itertools.product(("-", "--", "-.", ":"), COLOURS))
    for (name, run), (style, colour) in zip(trials, lines, strict=False):
        summary = trial_summary(run)
        if summary["score"] is None:
            without_game.append(name)
            continue
        tables = [*run.members.tables.values()]
        if len(trials) == 1:
            _draw_mean(axes, tables, "return_mean", x, color=COLOURS[4], linewidth=1.2, label=RETURN_MEAN)
        label = f"{name}: {sessions_text(summary)}, score {number_text(summary['score'])}"
        if summary["score_std"] is not None:
            label += f" ± {number_text(summary['score_std'])}"
        left_out = left_out_text(summary)
        if left_out:
            label += f"\n{left_out}"
        _draw_mean(axes, tables, "return_ma", x, linewidth=2.2, color=colour, linestyle=style, label=label)
    return without_game


@default_style()
def plot_column(
    runs: Sequence[tuple[str, Run]], column: str, output: Path, heading: str = "", x: XAxis = "env steps"
) -> list[Path]:
    """Draws any column of metrics.csv for some runs into COLUMN.png and .svg; returns the files.

    A line is the mean over the sessions of a trial that count, and its band is one sample standard deviation.

    Args:
        runs: name in the legend, and run.
        heading: title of the figure.

    Raises:
        UserError: no run has a value in this column.
    """
    figure = new_figure(heading or column, 9, 5.5)
    axes = figure.add_subplot()
    lines = itertools.cycle(itertools.product(("-", "--", "-.", ":"), COLOURS))
    for (name, run), (style, colour) in zip(runs, lines, strict=False):
        tables = [table for table in run.members.tables.values() if np.isfinite(table.get(column, np.nan)).any()]
        if tables:
            label = f"{name}: {counted(len(tables), 'session')}"
            _draw_mean(axes, tables, column, x, linewidth=1.6, color=colour, linestyle=style, label=label)
    if not axes.lines:
        known = sorted({name for _, run in runs for table in run.tables.values() for name in table})
        raise UserError(
            f"--column {column}: no run has a value in this column; expected one of {', '.join(known)}"
        )
    finish_axes(axes, x, unit_of(column))
    axes.legend()
    return save_figure(figure, output, column)


@default_style()
def plot_profiles(suites: SuiteProfiles, output: Path) -> list[Path]:
    """Draws performance profiles into suites.png and .svg, with bands of their intervals; returns the files.

    The first normalisation is drawn.
    """
    first = next(iter(suites.values()))
    normalisation = next(iter(first))
    figure = new_figure("performance profile", 9, 6)
    axes = figure.add_subplot()
    for (name, by_normalisation), colour in zip(suites.items(), itertools.cycle(COLOURS), strict=False):
        statistics = by_normalisation[normalisation]
        thresholds, shares, low, high = np.array(statistics.profile, np.float64).T
        label = f"{name}: {counted(statistics.games, 'game')}"
        axes.plot(thresholds, shares, color=colour, linewidth=2, label=label)
        if np.isfinite(low).any():
            axes.fill_between(thresholds, low, high, color=colour, alpha=0.2, linewidth=0)
            figure.suptitle(f"performance profile, {CONFIDENCE:.0%} intervals")
    finish_axes(axes, f"{normalisation} score τ", "share of sessions with score > τ")
    axes.set_ylim(-0.02, 1.02)  # a share, also where all are 0
    axes.legend()
    return save_figure(figure, output, "suites")
