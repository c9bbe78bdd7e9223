"""Graphs of sessions, trials, comparisons of trials, and suites, each as PNG and SVG.

matplotlib is imported when something is drawn, and not pyplot: files are drawn with Agg, whatever the user's backend.
"""

import contextlib
import io
import itertools
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from jaxrl_atari.cli import counted
from jaxrl_atari.envs.games import Game
from jaxrl_atari.report.metrics import align_sessions
from jaxrl_atari.report.statistics import CONFIDENCE
from jaxrl_atari.report.summary import Run, score_text, trial_summary
from jaxrl_atari.runs.columns import COLUMNS
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.reading import read_evaluations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe & Ito 2008, "Color Universal Design", without yellow (too pale for a line) and black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
GREY = "#555555"

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

RETURN_MEAN = "return_mean (last 100 games)"

XAxis = Literal["env steps", "hours"]
X_AXES: dict[XAxis, tuple[str, float]] = {"env steps": ("env_steps", 1), "hours": ("wall_seconds", 3600)}
"""Axis -> its column, and the unit of its labels in that of the column."""


@contextlib.contextmanager
def default_style() -> Iterator[None]:
    """The style of graphs.mplstyle within a block or a decorated function, whatever the user has configured."""
    backend = os.environ.pop("MPLBACKEND", None)
    import matplotlib.style

    if backend is not None:  # a notebook exports its own to `!python`, where matplotlib refuses it if it is missing
        os.environ["MPLBACKEND"] = backend
    with matplotlib.style.context(Path(__file__).with_suffix(".mplstyle"), after_reset=True):
        yield


def new_figure(title: str, width: float, height: float) -> "Figure":
    """A figure with a title; its size is in inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    figure.suptitle(title)
    return figure


def save_figure(figure: "Figure", directory: Path, name: str) -> list[Path]:
    """Writes NAME.png and NAME.svg, each atomically, and returns their paths."""
    paths = [directory / f"{name}.png", directory / f"{name}.svg"]
    directory.mkdir(parents=True, exist_ok=True)
    for path in paths:
        figure.savefig(image := io.BytesIO(), format=path.suffix[1:], metadata={"Date": None})
        figure.set_layout_engine("none")  # the SVG keeps the layout of the PNG: computing it is slow
        write_file(path, image.getvalue())
    return paths


def finish_axes(axes: "Axes", x_label: str = "env steps", y_label: str = "") -> None:
    """Finishes axes that hold their data: x to the last point (400k, 2M), plain numbers along y."""
    from matplotlib.ticker import EngFormatter, StrMethodFormatter

    axes.margins(x=0)
    axes.set_xlim(left=min(0, axes.get_xlim()[0]))
    if axes.get_xlim()[1] >= 1000:
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.10g}"))
    axes.set(xlabel=x_label, ylabel=y_label)


def finish_returns(axes: "Axes", game: Game, x_label: str = "env steps") -> None:
    """Axes and legend of a panel of returns, and lines at the first reference, a human tester and random play.

    A score so far from the data that its line would flatten them stands only in the legend.
    """
    low, high = axes.get_ylim()
    if not np.isfinite(axes.dataLim.intervaly).all():
        axes.text(0.5, 0.5, "no finished game yet", transform=axes.transAxes, ha="center", color=GREY)
    finish_axes(axes, x_label, "raw return of a full game")
    first = next(iter(game.references), None)
    for reference, style in ((first, "--"), (game.human, "-."), (game.random, ":")):
        if reference is not None:
            is_far = not 2 * low - high <= reference.score <= 2 * high - low
            label = f"{reference.source}: {score_text(reference.score)}"
            axes.axhline(np.nan if is_far else reference.score, color=GREY, linewidth=1.1, linestyle=style, label=label)
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.14), borderaxespad=0)


@default_style()
def plot_session(run: Run, session_dir: Path) -> list[Path]:
    """Draws returns, evaluations and learning metrics into graphs/session.png and .svg; returns the files."""
    table = run.tables[session_dir]
    env_steps = table["env_steps"]
    panels = [column for column in SESSION_PANELS if np.isfinite(table.get(column, np.nan)).any()]
    rows = math.ceil(len(panels) / 3)
    strong: dict[str, Any] = {"color": COLOURS[0]}
    title = f"{run.config.name}: {run.game.name}, protocol {run.protocol}, {session_dir.name.replace('_', ' ')}"
    figure = new_figure(title, 11, 5 + 2.3 * rows)
    grid = figure.add_gridspec(1 + rows, 3, height_ratios=[1.8] + rows * [1])
    axes = figure.add_subplot(grid[0, :])
    axes.plot(env_steps, table["return_mean"], **strong, linewidth=0.9, alpha=0.35, label=RETURN_MEAN)
    axes.plot(env_steps, table["return_ma"], **strong, linewidth=2.2, label=f"return_ma ({run.return_ma_definition})")
    if (found := read_evaluations(session_dir))["mean"].size:
        style: dict[str, Any] = {"fmt": "o", "color": COLOURS[1], "clip_on": False, "label": "evaluation (± 1 std)"}
        axes.errorbar(found["env_steps"], found["mean"], found["std"], **style)
    finish_returns(axes, run.game)
    for index, column in enumerate(panels):
        axes = figure.add_subplot(grid[1 + index // 3, index % 3])
        axes.plot(env_steps, table[column], **strong, linewidth=0.9)
        axes.set_title(SESSION_PANELS[column], fontsize="medium")
        finish_axes(axes, y_label=COLUMNS[column].unit)
    return save_figure(figure, session_dir / "graphs", "session")


def _draw_mean(axes: "Axes", run: Run, column: str, x: XAxis, **line: Any) -> None:
    """Draws the mean over the sessions that have got that far, with a band of ± one population std."""
    along, unit = X_AXES[x]
    points, values = align_sessions(list(run.tables.values()), column, along)
    known = np.isfinite(values).any(axis=0)
    points = points[known] / unit
    values = values[:, known]
    mean = np.nanmean(values, axis=0)
    std = np.nanstd(values, axis=0)
    axes.plot(points, mean, **line)
    axes.fill_between(points, mean - std, mean + std, color=line["color"], alpha=0.15, linewidth=0)


def plot_run(run: Run, title: str = "") -> list[Path]:
    """Draws every session as `plot_session`, and the trial, as `plot_comparison` of one run; returns the files.

    The trial's are graphs/trial.png and .svg in the run's directory.
    """
    files = [file for session_dir in run.tables for file in plot_session(run, session_dir)]
    return files + plot_comparison([("return_ma", run)], run.path / "graphs", title or run.config.name, "trial")


@default_style()
def plot_comparison(
    runs: Sequence[tuple[str, Run]], output: Path, title: str = "", file: str = "comparison", x: XAxis = "env steps"
) -> list[Path]:
    """Draws the return_ma of runs, a panel for each game and protocol, into FILE.png and .svg; returns the files.

    A line is the mean over a trial's sessions, and its band one standard deviation. A panel of a single run also has
    its return_mean.

    Args:
        runs: each with the name that stands in the legend.
    """
    panels = {}
    for name, run in runs:
        panels.setdefault(f"{run.game.name}, protocol {run.protocol}", []).append((name, run))
    columns = min(len(panels), 3)
    rows = math.ceil(len(panels) / columns)
    figure = new_figure(title or "return_ma", 7 * columns, 5.5 * rows)
    if any(len(run.tables) > 1 for _, run in runs):
        figure.supxlabel("mean ± 1 std over sessions", fontsize="medium")
    for index, (panel, trials) in enumerate(sorted(panels.items()), 1):
        axes = figure.add_subplot(rows, columns, index)
        if len(trials) == 1:
            _draw_mean(axes, trials[0][1], "return_mean", x, color=COLOURS[4], linewidth=1.2, label=RETURN_MEAN)
        lines = itertools.cycle(itertools.product(("-", "--", "-.", ":"), COLOURS))
        for (name, run), (style, colour) in zip(trials, lines, strict=False):
            trial = trial_summary(run)
            spread = "" if trial["score_std"] is None else f" ± {score_text(trial['score_std'])}"
            label = f"{name}: {counted(len(run.tables), 'session')}, score {score_text(trial['score'])}{spread}"
            _draw_mean(axes, run, "return_ma", x, linewidth=2.2, color=colour, linestyle=style, label=label)
        axes.set_title(panel)
        finish_returns(axes, trials[0][1].game, x)
    return save_figure(figure, output, file)


@default_style()
def plot_profiles(suites: Mapping[str, Mapping[str, Any]], output: Path) -> list[Path]:
    """Draws performance profiles into suites.png and .svg, with bands of their intervals; returns the files.

    Args:
        suites: name -> normalisation, of which the first is drawn -> result of `statistics.aggregate`.
    """
    kind = next(iter(next(iter(suites.values()))))
    figure = new_figure(f"performance profile, {CONFIDENCE:.0%} intervals", 9, 6)
    axes = figure.add_subplot()
    for (name, kinds), colour in zip(suites.items(), itertools.cycle(COLOURS), strict=False):
        thresholds, shares, low, high = np.array(kinds[kind]["profile"], np.float64).T
        label = f"{name}: {counted(kinds[kind]['games'], 'game')}"
        axes.plot(thresholds, shares, color=colour, linewidth=2, label=label)
        axes.fill_between(thresholds, low, high, color=colour, alpha=0.2, linewidth=0)
    finish_axes(axes, f"{kind} score τ", "share of sessions with score > τ")
    axes.legend()
    return save_figure(figure, output, "suites")
