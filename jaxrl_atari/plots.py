"""Graphs of sessions, trials and comparisons of trials, as PNG and SVG.

    python -m jaxrl_atari.plots RUN_DIR... [--output DIR]

draws each session into RUN_DIR/session_<i>/graphs/, each trial into RUN_DIR/graphs/ and, for several runs, their
comparison into DIR. Several runs of one game are also compared by their probability of improvement.

    python -m jaxrl_atari.plots SUITE_DIR... [--output DIR]

compares suites: learning curves of each game, and statistics over the games that are complete in all suites.
"""

import argparse
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from jaxrl_atari import cli
from jaxrl_atari.envs.games import Game
from jaxrl_atari.envs.protocols import REFERENCE_PROTOCOL
from jaxrl_atari.errors import UserError
from jaxrl_atari.report.drawing import COLOURS, GREY, LINE_STYLES, env_step_axes, new_figure, plain_text, save_figure
from jaxrl_atari.report.statistics import probability_of_improvement
from jaxrl_atari.report.suites import NothingToCompare, compare_suites, estimate_text, scores_at, suite_runs
from jaxrl_atari.report.summary import Run, read_run, score_text, sessions_text, trial_summary
from jaxrl_atari.runs.columns import COLUMNS
from jaxrl_atari.runs.reading import Table, align_sessions, moving_average, read_evaluations
from jaxrl_atari.runs.run_dir import is_suite, session_dirs

_log = logging.getLogger(__name__)

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
RETURN_MA = "return_ma (mean of the last 100 log points)"
EVALUATIONS = "evaluation (± 1 std)"
THIN_LINES = " (thin: not all sessions have got this far)"
SMOOTHING = 20
"""Log points in the moving average of a session's small panels."""


def _marker(points: Sequence[float] | np.ndarray) -> str:
    """Marks the points if there are few: a line through a single point is invisible."""
    return "o" if len(points) <= 3 else ""


def _draw_reference_lines(axes: Axes, game: Game) -> None:
    """Draws lines at the random and the reference score, with labels right of the panel. Call it after drawing data.

    A score so far from the data that its line would flatten them gets only a label, at the edge of the panel.
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
            f"{name} ({REFERENCE_PROTOCOL}){arrow}\n{score_text(score)}",
            xy=(1.0, heights[index]),
            xycoords=axes.get_yaxis_transform(),
            xytext=(5, 0),
            textcoords="offset points",
            va=("top", "bottom")[index] if crowded else "center",  # keeps two close labels apart
            color=GREY,
            fontsize="small",
        )


def plot_session(run: Run, session_dir: Path) -> list[Path]:
    """Draws a session's returns, evaluations and learning metrics into graphs/session.png and .svg; returns the files.

    Raises:
        UserError: the graphs cannot be written.
    """
    table = run.tables[session_dir]
    env_steps, last = table["env_steps"], table["env_steps"][-1]
    panels = [column for column in SESSION_PANELS if np.isfinite(table.get(column, np.nan)).any()]
    rows = math.ceil(len(panels) / 3)
    strong: dict[str, Any] = {"color": COLOURS[0]}
    faint: dict[str, Any] = {"color": COLOURS[0], "alpha": 0.35, "linewidth": 0.9, "clip_on": False}
    figure = new_figure(f"{_title(run)}, {session_dir.name.replace('_', ' ')}", 11, 4.1 + 2.3 * rows)
    if panels:
        figure.supxlabel(f"small graphs: each log point, and the mean of the last {SMOOTHING}", fontsize="medium")
    grid = figure.add_gridspec(1 + rows, 3, height_ratios=[1.8] + rows * [1])
    axes = figure.add_subplot(grid[0, :])
    marker = _marker(env_steps)
    axes.plot(env_steps, table["return_mean"], **faint, marker=marker, label=RETURN_MEAN)
    axes.plot(env_steps, table["return_ma"], **strong, marker=marker, linewidth=2.2, label=RETURN_MA)
    if evaluations := read_evaluations(session_dir):
        at, _, means, stds = np.array(evaluations, np.float64).T
        axes.errorbar(at, means, stds, fmt="o", color=COLOURS[1], elinewidth=0.9, clip_on=False, label=EVALUATIONS)
    env_step_axes(axes, last, "raw return of a full game")
    axes.set_xlabel("env steps")
    _draw_reference_lines(axes, run.game)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)
    for index, column in enumerate(panels):
        axes = figure.add_subplot(grid[1 + index // 3, index % 3])
        window = 1 if column == "learning_rate" else SMOOTHING  # a schedule has no noise
        axes.plot(env_steps, table[column], **faint, marker=marker)
        axes.plot(env_steps, moving_average(table[column], window), **strong, linewidth=1.3)
        axes.set_title(SESSION_PANELS[column], fontsize="medium")
        env_step_axes(axes, last, COLUMNS[column].unit)
        if index >= len(panels) - 3:
            axes.set_xlabel("env steps")
    return save_figure(figure, session_dir / "graphs", "session")


def _draw_mean(axes: Axes, tables: Sequence[Table], column: str, band: bool, **line: Any) -> None:
    """Draws the mean over sessions, with a band of ± one population standard deviation if `band`.

    Where some sessions have no value, mean and band are over the others, and the line is thinner.
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


def _sessions_and_score(run: Run) -> str:
    """The score and its standard deviation over sessions: `4 sessions, score 14,482 ± 41`."""
    trial = trial_summary(run)
    if trial["score"] is None:
        return f"{sessions_text(trial)}, no finished game yet"
    spread = "" if trial["score_std"] is None else f" ± {score_text(trial['score_std'])}"
    return f"{sessions_text(trial)}, score {score_text(trial['score'])}{spread}"


def _title(run: Run) -> str:
    return f"{run.config.name}: {run.game.name}, protocol {run.config.env.resolved_protocol}"


def _last_env_step(run: Run) -> float:
    return max(float(table["env_steps"][-1]) for table in run.tables.values())


def _lags(run: Run) -> bool:
    """Whether a session is behind another by more than `align_sessions` bridges."""
    _, values = align_sessions(list(run.tables.values()), "env_steps")
    return bool(np.isnan(values[:, -1]).any())


def plot_trial(run: Run) -> list[Path]:
    """Draws return_mean, with a band of one std, and return_ma, both as means over sessions; returns the files.

    The files are graphs/trial.png and .svg in the run's directory.

    Raises:
        UserError: the graphs cannot be written.
    """
    tables = list(run.tables.values())
    figure = new_figure(f"{_title(run)}, {_sessions_and_score(run)}", 9, 5.5)
    axes = figure.add_subplot()
    spread = "; band: ± 1 std over sessions" if len(tables) > 1 else ""
    _draw_mean(axes, tables, "return_mean", True, color=COLOURS[4], linewidth=1.2, label=RETURN_MEAN + spread)
    _draw_mean(axes, tables, "return_ma", False, color=COLOURS[0], linewidth=2.4, label=RETURN_MA)
    env_step_axes(axes, _last_env_step(run), "raw return of a full game")
    axes.set_xlabel("env steps" + (THIN_LINES if _lags(run) else ""))
    _draw_reference_lines(axes, run.game)
    _legend_below(axes)
    return save_figure(figure, run.path / "graphs", "trial")


def plot_comparison(runs: Sequence[Run], output: Path) -> list[Path]:
    """Draws the return_ma of several runs, with one panel for each game; returns the files.

    The files are comparison.png and .svg in `output`. A line is the mean over a trial's sessions, and its band one
    standard deviation. Runs are named after their directories.

    Raises:
        UserError: the graphs cannot be written.
    """
    names = [run.path.absolute().name for run in runs]
    panels: dict[str, list[Run]] = {}
    for run in runs:
        panels.setdefault(run.game.name, []).append(run)
    columns = min(len(panels), 3)
    rows = -(-len(panels) // columns)
    width, height = (9, 5.5) if columns == 1 else (6 * columns, 4.5 * rows)
    figure = new_figure("return_ma: mean ± 1 std over sessions", width, height)
    for index, (game, trials) in enumerate(sorted(panels.items())):
        axes = figure.add_subplot(rows, columns, index + 1)
        for number, run in enumerate(trials):
            path = run.path.absolute()
            name = path.name if names.count(path.name) == 1 else f"{path.parent.name}/{path.name}"
            line = {
                "color": COLOURS[number % len(COLOURS)],
                "linestyle": LINE_STYLES[number // len(COLOURS) % len(LINE_STYLES)],
                "label": f"{plain_text(name)}: {run.config.env.resolved_protocol}, {_sessions_and_score(run)}",
            }
            _draw_mean(axes, list(run.tables.values()), "return_ma", True, linewidth=2.2, **line)
        axes.set_title(game)
        env_step_axes(axes, max(map(_last_env_step, trials)), "" if index % columns else "raw return of a full game")
        axes.set_xlabel("env steps" + (THIN_LINES if any(map(_lags, trials)) else ""))
        of_v5 = [run.game for run in trials if run.config.env.resolved_protocol == REFERENCE_PROTOCOL]
        _draw_reference_lines(axes, of_v5[0] if of_v5 else trials[0].game)
        _legend_below(axes)
    return save_figure(figure, output, "comparison")


def _improvements(runs: Sequence[Run]) -> list[str]:
    """The probability that the first run of each game and protocol beats each further one, as lines of text.

    A run with a single session is left out: one session against another shows nothing about their settings. So is one
    that is not complete.
    """
    lines, first = [], {}
    for run in (run for run in runs if len(run.tables) > 1):
        name = run.game.name
        if not run.config.is_complete([table["env_steps"][-1] for table in run.tables.values()]):
            _log.warning("%s: not complete; no probability of improvement is given for it", run.path)
            continue
        found = scores_at({name: list(run.tables.values())})
        if not found:
            _log.warning("%s: a session has no score; no probability of improvement is given for it", run.path)
            continue
        earlier, scores = first.setdefault((name, run.config.env.resolved_protocol), (run, found))
        if earlier is not run:
            chance = estimate_text(*probability_of_improvement(scores, found))
            line = f"{name}: probability of improvement of {earlier.path} over {run.path}: {chance}"
            budgets = earlier.config.total_env_steps, run.config.total_env_steps
            differ = "; the budgets differ: {:,} and {:,} env steps".format(*budgets)
            lines.append(line + (differ if budgets[0] != budgets[1] else ""))
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_atari.plots", description="Draws graphs.")
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="directory of a run or of a suite")
    parser.add_argument("--output", default="graphs", metavar="DIR", help="for the comparison of several runs [graphs]")
    options = parser.parse_args(arguments)
    suites = [path for path in options.run_dirs if is_suite(path)]
    if suites:
        if len(suites) < len(options.run_dirs):
            raise UserError(
                f"{' '.join(options.run_dirs)}: runs and suites; compare runs with runs, suites with suites"
            )
        begun = [run_dir for suite in suites for run_dir in suite_runs(suite) if session_dirs(run_dir)]
        if not begun:
            raise UserError(f"{suites[0]}: no game has a session yet; wait for the first one")
        if runs := _all_possible(read_run, begun):
            print(*plot_comparison(runs, Path(options.output)), sep="\n")
        try:
            print("\n" + compare_suites(suites, Path(options.output)))
        except NothingToCompare as error:
            if len(suites) > 1 or not runs:
                raise
            print(f"\nno statistics: {error}")  # the curves of one suite are drawn
        return
    if len(options.run_dirs) == 1:
        _draw(read_run(options.run_dirs[0]))
        return
    runs = _all_possible(read_run, options.run_dirs)
    drawn = _all_possible(_draw, runs)
    if len(runs) > 1:
        print(*plot_comparison(runs, Path(options.output)), *_improvements(runs), sep="\n")
    if len(drawn) < len(options.run_dirs):
        raise UserError(f"drew {len(drawn)} of {len(options.run_dirs)} runs; the warnings above say why")


def _draw(run: Run) -> None:
    for session_dir in run.tables:
        print(*plot_session(run, session_dir), sep="\n")
    print(*plot_trial(run), sep="\n")


def _all_possible(function: Callable[[Any], Any], arguments: Iterable[Any]) -> list[Any]:
    """The results of a function for each argument; one that raises `UserError` is left out with a warning."""
    results = []
    for argument in arguments:
        try:
            results.append(function(argument))
        except UserError as error:
            _log.warning("left out: %s", error)
    return results


if __name__ == "__main__":
    cli.run(main)
