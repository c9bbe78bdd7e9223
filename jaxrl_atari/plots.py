"""Graphs of sessions, trials and comparisons of trials, as PNG and SVG.

    python -m jaxrl_atari.plots RUN_DIR... [--output DIR]

draws every session of each run into RUN_DIR/session_<i>/graphs/, each trial into RUN_DIR/graphs/ and, of several runs,
their comparison into DIR. Nothing here uses pyplot or changes matplotlib's global state, so that a training session
can draw from a thread of its own.
"""

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from jaxrl_atari import cli
from jaxrl_atari.config import Config
from jaxrl_atari.config_files import read_config
from jaxrl_atari.errors import UserError
from jaxrl_atari.games import GAMES, Game
from jaxrl_atari.run_dir.metrics import Table, aggregate_trial, align_sessions, moving_average
from jaxrl_atari.run_dir.results import read_metrics, read_sessions, score_text

# Okabe & Ito 2008, "Color Universal Design", without the yellow (too pale for a line) and the black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
LINE_STYLES = ("-", "--", "-.", ":")  # the same colours again, told apart by their dashes
GREY = "#555555"

SESSION_PANELS = (
    ("policy_loss", "policy loss", ""),
    ("value_loss", "value loss", ""),
    ("entropy", "policy entropy", "nats"),
    ("approx_kl", "approximate KL", "nats"),
    ("clip_fraction", "clip fraction", "share of samples"),
    ("explained_variance", "explained variance of the value", ""),
    ("gradient_norm", "gradient norm before clipping", ""),
    ("sps", "speed", "env steps / s"),
    ("gpu_busy_percent", "GPU busy", "%"),
    ("learning_rate", "learning rate", ""),
)
"""Column, title and unit of the small panels of a session's graph: the first nine that its table has values of."""

RETURN_MEAN = "return_mean (last 100 games)"
RETURN_MA = "return_ma (mean of the last 100 log points)"
THIN_LINES = " (thin: not all sessions have come so far)"
SMOOTHING = 20
"""Log points in the moving average of a session's small panels."""

# matplotlib shares fonts and text layouts between figures, and does not promise that two threads may draw at once.
_drawing = threading.Lock()


class _Run(NamedTuple):
    path: Path
    config: Config
    tables: dict[Path, Table]  # of `read_sessions`

    @property
    def game(self) -> Game:
        return GAMES[self.config.env.game_name]


def _read_run(run_dir: str | Path) -> _Run:
    path = Path(run_dir)
    return _Run(path, read_config(path), read_sessions(path))


def _tick_text(value: float, _position: int) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _format_axes(axes: Axes, last_env_step: float, ylabel: str = "") -> None:
    """Env steps from 0 as 2M or 400k along x, plain numbers with separators along y, a light grid, no box."""
    axes.set_xlim(0, max(last_env_step, 1))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick_text))
    axes.set_ylabel(ylabel)
    axes.grid(color="#E0E0E0", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _marker(points: Sequence[float] | np.ndarray) -> str:
    """Few points are marked, as a line would not show a single one."""
    return "o" if len(points) <= 3 else ""


def _draw_reference_lines(axes: Axes, game: Game) -> None:
    """Marks the random and the reference score, labelled to the right of the panel; call it after drawing the data.

    A score so far from the data that a line there would flatten them is named at the panel's edge instead.
    """
    lines = [(score, name) for name, score in (("random", game.random_mean), ("reference", game.reference_score))]
    scores = sorted((score, name) for score, name in lines if score is not None)
    has_data = bool(np.isfinite(axes.dataLim.intervaly).all())
    low, high = axes.get_ylim() if has_data or not scores else (scores[0][0], scores[-1][0])
    if not has_data:
        axes.text(0.5, 0.5, "no finished game yet", transform=axes.transAxes, ha="center", color=GREY)
    reach = 2 * (high - low)
    near = [score for score, _ in scores if low - reach <= score <= high + reach]
    low, high = min([low, *near]), max([high, *near])
    margin = 0.04 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)
    heights = [min(max(score, low), high) for score, _ in scores]
    crowded = len(scores) == 2 and abs(heights[1] - heights[0]) < 0.15 * (high - low)
    for index, (score, name) in enumerate(scores):
        if score in near:
            dashes = (0, (6, 3)) if name == "reference" else (0, (1, 2))
            axes.axhline(score, color=GREY, linestyle=dashes, linewidth=1.1)
        arrow = "" if score in near else " ↑" if score > high else " ↓"
        axes.annotate(
            f"{name} (v5){arrow}\n{score_text(score)}",
            xy=(1.0, heights[index]),
            xycoords=axes.get_yaxis_transform(),
            xytext=(5, 0),
            textcoords="offset points",
            va=("top", "bottom")[index] if crowded else "center",  # so that two close labels do not overlap
            color=GREY,
            fontsize="small",
        )


def _new_figure(title: str, width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize="large", fontweight="bold")
    return figure


def _save(figure: Figure, directory: Path, name: str) -> list[Path]:
    """Writes NAME.png and NAME.svg, each in one piece: a viewer never finds half a picture."""
    paths = [directory / f"{name}.png", directory / f"{name}.svg"]
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for path, metadata in zip(paths, (None, {"Date": None}), strict=True):
            partial = directory / f".{path.name}.{os.getpid()}.partial"
            figure.savefig(partial, format=path.suffix[1:], dpi=150, metadata=metadata)
            figure.set_layout_engine("none")  # the layout is found, and costs as much as the drawing
            os.replace(partial, path)
    except OSError as error:
        raise UserError(f"{directory}: cannot write graphs here ({error.strerror}); choose another place") from error
    return paths


def plot_session(session_dir: str | Path) -> list[Path]:
    """Draws a session's returns and training figures against env steps; returns the files it wrote.

    They are graphs/session.png and .svg in `session_dir`. The run's config.json is read for the names and scores.

    Raises:
      UserError: the session or its run's config cannot be read, or the graphs cannot be written.
    """
    path = Path(session_dir).absolute()
    return _plot_session(_Run(path.parent, read_config(path.parent), {path: read_metrics(path)}), path)


def _plot_session(run: _Run, session_dir: Path) -> list[Path]:
    table = run.tables[session_dir]
    env_steps, last = table["env_steps"], table["env_steps"][-1]
    panels = [panel for panel in SESSION_PANELS if np.isfinite(table.get(panel[0], np.nan)).any()][:9]
    strong: dict[str, Any] = {"color": COLOURS[0]}
    faint: dict[str, Any] = {"color": COLOURS[0], "alpha": 0.35, "linewidth": 0.9, "clip_on": False}
    with _drawing:
        figure = _new_figure(f"{_title(run)}, {session_dir.name.replace('_', ' ')}", 11, 11)
        figure.supxlabel(f"small graphs: each log point, and the mean of the last {SMOOTHING}", fontsize="medium")
        grid = figure.add_gridspec(4, 3, height_ratios=[1.8, 1, 1, 1])
        axes = figure.add_subplot(grid[0, :])
        marker = _marker(env_steps)
        axes.plot(env_steps, table["return_mean"], **faint, marker=marker, label=RETURN_MEAN)
        axes.plot(env_steps, table["return_ma"], **strong, marker=marker, linewidth=2.2, label=RETURN_MA)
        _format_axes(axes, last, "raw return of a full game")
        axes.set_xlabel("env steps")
        _draw_reference_lines(axes, run.game)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
        for index, (column, name, unit) in enumerate(panels):
            axes = figure.add_subplot(grid[1 + index // 3, index % 3])
            window = 1 if column == "learning_rate" else SMOOTHING  # a schedule has no noise to average away
            axes.plot(env_steps, table[column], **faint, marker=marker)
            axes.plot(env_steps, moving_average(table[column], window), **strong, linewidth=1.3)
            axes.set_title(name, fontsize="medium")
            _format_axes(axes, last, unit)
            if index >= len(panels) - 3:
                axes.set_xlabel("env steps")
        return _save(figure, session_dir / "graphs", "session")


def _draw_mean(axes: Axes, tables: Sequence[Table], column: str, band: bool, **line: Any) -> None:
    """The mean over sessions, with a band of one population standard deviation to either side if `band`.

    Where some sessions have no value (yet), mean and band are over the others, and the line is thinner.
    """
    env_steps, values = align_sessions(tables, column)
    sessions = np.isfinite(values).sum(axis=0)
    env_steps, values, sessions = env_steps[sessions > 0], values[:, sessions > 0], sessions[sessions > 0]
    mean, std = np.nanmean(values, axis=0), np.nanstd(values, axis=0)
    if band and len(tables) > 1:
        axes.fill_between(env_steps, mean - std, mean + std, color=line["color"], alpha=0.2, linewidth=0)
    thin = {**line, "linewidth": 0.4 * line["linewidth"], "label": "_"}
    axes.plot(env_steps, mean, **thin, marker=_marker(env_steps))
    axes.plot(env_steps, np.where(sessions == len(tables), mean, np.nan), **line)


def _legend_below(axes: Axes) -> None:
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.14), frameon=False, borderaxespad=0)


def _sessions_and_score(run: _Run) -> str:
    """`4 sessions, score 14,482 ± 41`: the score with its standard deviation over sessions."""
    count = f"{len(run.tables)} session{'' if len(run.tables) == 1 else 's'}"
    trial = aggregate_trial(list(run.tables.values()), run.game)
    if trial["score"] is None:
        return f"{count}, no finished game yet"
    spread = f" ± {score_text(trial['score_std'])}" if len(run.tables) > 1 else ""
    return f"{count}, score {score_text(trial['score'])}{spread}"


def _title(run: _Run) -> str:
    return f"{run.config.name}: {run.game.name}, protocol {run.config.env.resolved_protocol}"


def _last_env_step(run: _Run) -> float:
    return max(float(table["env_steps"][-1]) for table in run.tables.values())


def _lags(run: _Run) -> bool:
    """Whether some session has not come as far as another, by more than what interpolation bridges."""
    _, values = align_sessions(list(run.tables.values()), "env_steps")
    return bool(np.isnan(values[:, -1]).any())


def plot_trial(run_dir: str | Path) -> list[Path]:
    """Draws the sessions' mean return_mean with a band of one std, and their mean return_ma; returns the files.

    They are graphs/trial.png and .svg in `run_dir`.

    Raises:
      UserError: the run cannot be read, or the graphs cannot be written.
    """
    return _plot_trial(_read_run(run_dir))


def _plot_trial(run: _Run) -> list[Path]:
    tables = list(run.tables.values())
    with _drawing:
        figure = _new_figure(f"{_title(run)}, {_sessions_and_score(run)}", 9, 5.5)
        axes = figure.add_subplot()
        spread = "; band: ± 1 std over sessions" if len(tables) > 1 else ""
        _draw_mean(axes, tables, "return_mean", True, color=COLOURS[4], linewidth=1.2, label=RETURN_MEAN + spread)
        _draw_mean(axes, tables, "return_ma", False, color=COLOURS[0], linewidth=2.4, label=RETURN_MA)
        _format_axes(axes, _last_env_step(run), "raw return of a full game")
        axes.set_xlabel("env steps" + (THIN_LINES if _lags(run) else ""))
        _draw_reference_lines(axes, run.game)
        _legend_below(axes)
        return _save(figure, run.path / "graphs", "trial")


def plot_comparison(run_dirs: Sequence[str | Path], output: str | Path) -> list[Path]:
    """Draws the return_ma of several runs over one another, a panel for each game; returns the files it wrote.

    They are comparison.png and .svg in `output`. A line is a trial's mean over sessions, its band one standard
    deviation; the runs are named by their directories.

    Raises:
      UserError: a run cannot be read, or the graphs cannot be written.
    """
    return _plot_comparison([_read_run(run_dir) for run_dir in run_dirs], Path(output))


def _plot_comparison(runs: Sequence[_Run], output: Path) -> list[Path]:
    names = [run.path.absolute().name for run in runs]
    panels: dict[str, list[_Run]] = {}
    for run in runs:
        panels.setdefault(run.game.name, []).append(run)
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    with _drawing:
        width, height = (9, 5.5) if columns == 1 else (6 * columns, 4.5 * rows)
        figure = _new_figure("return_ma: mean ± 1 std over sessions", width, height)
        for index, (game, trials) in enumerate(sorted(panels.items())):
            axes = figure.add_subplot(rows, columns, index + 1)
            for number, run in enumerate(trials):
                path = run.path.absolute()
                name = path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}"
                line = {
                    "color": COLOURS[number % len(COLOURS)],
                    "linestyle": LINE_STYLES[number // len(COLOURS) % len(LINE_STYLES)],
                    "label": f"{name}: {run.config.env.resolved_protocol}, {_sessions_and_score(run)}",
                }
                _draw_mean(axes, list(run.tables.values()), "return_ma", True, linewidth=2.2, **line)
            axes.set_title(game)
            _format_axes(axes, max(map(_last_env_step, trials)), "" if index % columns else "raw return of a full game")
            axes.set_xlabel("env steps" + (THIN_LINES if any(map(_lags, trials)) else ""))
            _draw_reference_lines(axes, GAMES[game])
            _legend_below(axes)
        return _save(figure, output, "comparison")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status: 0, or 2 after one line about what is wrong."""
    parser = cli.Parser(prog="python -m jaxrl_atari.plots", description="Draws the graphs of runs.")
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="directory of a run, with its config.json")
    parser.add_argument("--output", default="graphs", metavar="DIR", help="for the comparison of several runs [graphs]")
    options = parser.parse_args(arguments)
    try:
        runs = [_read_run(run_dir) for run_dir in options.run_dirs]
        for run in runs:
            for session_dir in run.tables:
                print(*_plot_session(run, session_dir), sep="\n")
            print(*_plot_trial(run), sep="\n")
        if len(runs) > 1:
            print(*_plot_comparison(runs, Path(options.output)), sep="\n")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    cli.run(lambda: sys.exit(main()))
