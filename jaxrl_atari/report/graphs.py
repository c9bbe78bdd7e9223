"""Graphs of sessions, trials and comparisons of trials, each as PNG and SVG.

matplotlib is imported only when something is drawn, without pyplot. It draws with Agg, whatever back end the user
has configured.
"""

import contextlib
import io
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxrl_atari.envs.games import Game
from jaxrl_atari.errors import NoLogPoint, require
from jaxrl_atari.report.metrics import align_sessions
from jaxrl_atari.report.summary import Run
from jaxrl_atari.report.tables import number_text
from jaxrl_atari.report.text import left_out_text, sessions_text
from jaxrl_atari.runs.columns import section_of, unit_of
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.layout import GRAPHS_FOLDER
from jaxrl_atari.runs.reading import Table, read_evaluations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
"""Okabe & Ito 2008, "Color Universal Design", without black, and without yellow, which is too pale for lines."""
GREY = "#555555"


CHART_PANELS = ("sps", "episode_length", "learning_rate")
"""The columns of the section "charts" that get a small panel in a session's graph. All other metrics get one."""

RETURN_MEAN = "return_mean (last 100 games)"

XAxis = Literal["env steps", "hours"]
X_AXES: dict[XAxis, tuple[str, float]] = {"env steps": ("env_steps", 1), "hours": ("wall_seconds", 3600)}
"""Axis -> its column, and the number of the column's units in one unit of the axis."""


# --- The form of all graphs --------------------------------------------------------------------------------------


@contextlib.contextmanager
def default_style() -> Iterator[None]:
    """Draws a block or a decorated function in the style of graphs.mplstyle, whatever the user has configured."""
    # A notebook exports its back end to `!python`, where matplotlib may not find it and then fails.
    os.environ.pop("MPLBACKEND", None)
    import matplotlib.style

    with matplotlib.style.context(Path(__file__).with_suffix(".mplstyle"), after_reset=True):
        yield


def new_figure(title: str, width: float, height: float) -> "Figure":
    """A figure with a title. Width and height are in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    figure.suptitle(title)
    return figure


def save_figure(figure: "Figure", directory: Path, name: str) -> list[Path]:
    """Writes NAME.png and NAME.svg, each atomically, and returns their paths."""
    paths = [directory / f"{name}.png", directory / f"{name}.svg"]
    directory.mkdir(parents=True, exist_ok=True)
    for path in paths:
        image = io.BytesIO()
        figure.savefig(image, format=path.suffix[1:], metadata={"Date": None} if path.suffix == ".svg" else None)
        figure.set_layout_engine("none")  # the SVG keeps the layout of the PNG, which is slow to compute
        write_file(path, image.getvalue())
    return paths


def finish_axes(axes: "Axes", x_label: str = "env steps", y_label: str = "") -> None:
    """Sets limits, labels and number formats (400k, 2M; 10,000) of axes that hold their data; x starts at 0."""
    from matplotlib.ticker import EngFormatter, StrMethodFormatter

    axes.margins(x=0)
    axes.set_xlim(left=0)
    if axes.get_xlim()[1] >= 1000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axes.set(xlabel=x_label, ylabel=y_label)


def finish_returns(axes: "Axes", game: Game, x_label: str = "env steps") -> None:
    """Finishes a panel of returns: axes, legend, and lines at the first reference, a human tester and random play.

    A score that is so far away that its line would flatten the data is left out. Axes without a return show a text
    instead of a scale.
    """
    finish_axes(axes, x_label, "raw return of a full game")
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


# --- Graphs ------------------------------------------------------------------------------------------------------


@default_style()
def plot_session(run: Run, session_dir: Path) -> list[Path]:
    """Draws returns, evaluations and all other metrics into graphs/session.png and .svg; returns the files."""
    table = run.tables[session_dir]
    env_steps = table["env_steps"]
    evaluations = read_evaluations(session_dir)
    metrics = [column for column in table if column in CHART_PANELS or section_of(column) != "charts"]
    panels = [column for column in metrics if np.isfinite(table[column]).any()]
    rows = math.ceil(len(panels) / 3)
    session = run.session_name(session_dir).replace("_", " ")
    title = f"{run.config.name}: {run.game.name}, protocol {run.protocol}, {session}"
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
    finish_returns(axes, run.game)

    for index, column in enumerate(panels):
        axes = figure.add_subplot(grid[1 + index // 3, index % 3])
        axes.plot(env_steps, table[column], color=COLOURS[0], linewidth=0.9)
        axes.set_title(column, fontsize="medium")
        finish_axes(axes, y_label=unit_of(column))
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
        std = values.std(axis=0, ddof=1)
        axes.fill_between(points, mean - std, mean + std, color=line["color"], alpha=0.15, linewidth=0)


def plot_run(run: Run, heading: str = "") -> list[Path]:
    """Draws every session, and the trial as graphs/trial.png and .svg in the run directory; returns the files."""
    files = [file for session_dir in run.tables for file in plot_session(run, session_dir)]
    return files + plot_comparison(
        [("return_ma", run)], run.path / GRAPHS_FOLDER, heading or run.config.name, "trial"
    )


@default_style()
def plot_comparison(
    runs: Sequence[tuple[str, Run]],
    output: Path,
    heading: str = "",
    file: str = "comparison",
    x: XAxis = "env steps",
    column: str = "return_ma",
) -> list[Path]:
    """Draws a column of metrics.csv for some runs, with a panel for each game and protocol; returns the files.

    A line is the mean over the sessions of a trial that count (`Run.members`), and its band is one sample
    standard deviation. The legend names the sessions that are left out. A panel of a single run also shows its
    return_mean beside its return_ma.

    Args:
        runs: name in the legend, and run.
        heading: title of the figure.
        file: name of the files, without their suffixes.

    Raises:
        NoLogPoint: there is no run.
        UserError: no run has the column.
    """
    if not runs:
        raise NoLogPoint("no session has a log point; wait for the first one")
    known = sorted({name for _, run in runs for table in run.tables.values() for name in table})
    require(column in known, "--column", column, f"one of {', '.join(known)}")
    panels: dict[str, list[tuple[str, Run]]] = {}
    for name, run in runs:
        panels.setdefault(f"{run.game.name}, protocol {run.protocol}", []).append((name, run))
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(heading or column, 7 * columns, 5.5 * rows)
    for index, (panel, trials) in enumerate(sorted(panels.items()), 1):
        axes = figure.add_subplot(rows, columns, index)
        axes.set_title(panel)
        _draw_trials(axes, trials, column, x)
        if column == "return_ma":
            finish_returns(axes, trials[0][1].game, x)
        else:
            finish_axes(axes, x, unit_of(column))
            axes.legend(loc="upper left", bbox_to_anchor=(0, -0.14), borderaxespad=0)
    if any(axes.collections for axes in figure.axes):
        figure.supxlabel("mean ± 1 std over sessions", fontsize="medium")
    return save_figure(figure, output, file)


def _draw_trials(axes: "Axes", trials: Sequence[tuple[str, Run]], column: str, x: XAxis) -> None:
    """Draws a column of the trials of one panel."""
    lines = itertools.cycle(itertools.product(("-", "--", "-.", ":"), COLOURS))
    for (name, run), (style, colour) in zip(trials, lines, strict=False):
        score, std = run.summary["score"], run.summary["score_std"]
        tables = [table for table in run.members.tables.values() if np.isfinite(table.get(column, np.nan)).any()]
        label = f"{name}: {sessions_text(run)}, score {number_text(score)}"
        if std is not None:
            label += f" ± {number_text(std)}"
        left_out = left_out_text(run)
        if left_out:
            label += f"\n{left_out}"
        if tables and column == "return_ma" and len(trials) == 1:
            _draw_mean(axes, tables, "return_mean", x, color=COLOURS[4], linewidth=1.2, label=RETURN_MEAN)
        if tables:
            _draw_mean(axes, tables, column, x, linewidth=2.2, color=colour, linestyle=style, label=label)
        else:  # in the legend alone
            axes.plot([], [], color=colour, linestyle=style, label=f"{name}: no value yet")
