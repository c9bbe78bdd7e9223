"""Statistics of suites: normalised scores aggregated over games, as JSON, Markdown, graphs and rliable's dictionary."""

import io
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from jaxrl_atari.cli import counted
from jaxrl_atari.config import Config, config_from_dict
from jaxrl_atari.envs.games import GAMES
from jaxrl_atari.envs.protocols import REFERENCE_PROTOCOL, comparison_note
from jaxrl_atari.errors import UserError
from jaxrl_atari.report import statistics
from jaxrl_atari.report.drawing import COLOURS, env_step_axes, new_figure, open_axes, plain_text, save_figure
from jaxrl_atari.report.statistics import Estimate
from jaxrl_atari.report.summary import read_run
from jaxrl_atari.runs.files import read_json, write_file, write_json
from jaxrl_atari.runs.reading import Table, human_normalised, reference_normalised, score_at
from jaxrl_atari.runs.run_dir import SUITE_FILE, read_config


class NothingToCompare(UserError):
    """Suites have no statistics: no complete game, or no scores of their protocol to compare with."""


Suite = Mapping[str, Sequence[Table]]
"""Game -> the metrics of its sessions, of the complete games only."""

NORMALISATIONS = {"human-normalised": human_normalised, "ratio": reference_normalised}
POINTS = 50
"""Points of a performance profile and of a learning curve."""


def suite_runs(suite_dir: str | Path) -> list[Path]:
    """The run directories of a suite, which are named after their games, in alphabetical order.

    Runs of other games or with another protocol, which somebody has put there, are left out.
    """
    planned, games = _read_plan(Path(suite_dir))

    def is_own(run_dir: Path) -> bool:
        try:
            config = read_config(run_dir)
        except UserError:
            return True  # its readers say what is wrong with it
        protocol = (planned or config).env.resolved_protocol
        return config.env.game_name == run_dir.name and config.env.resolved_protocol == protocol

    found = [path.parent for path in sorted(Path(suite_dir).glob("*/config.json"))]
    return [run_dir for run_dir in found if run_dir.name in games and is_own(run_dir)]


def is_suite(directory: str | Path) -> bool:
    """Whether a directory is that of a suite."""
    return (Path(directory) / SUITE_FILE).is_file()


def read_suite(suite_dir: str | Path) -> dict[str, list[Table]]:
    """Reads the complete games of a suite: those whose sessions have all spent the suite's budget."""
    planned, _ = _read_plan(Path(suite_dir))  # a game may still name the budget before
    suite = {}
    for run_dir in suite_runs(suite_dir):
        try:
            run = read_run(run_dir)
        except UserError:
            continue  # no log point yet
        tables = list(run.tables.values())
        if (planned or run.config).is_complete([table["env_steps"][-1] for table in tables]):
            suite[run.game.name] = tables
    return suite


def _read_plan(suite_dir: Path) -> tuple[Config | None, Collection[str]]:
    """The config and the games of a suite; None and every game if suite.json cannot be read."""
    try:
        values = read_json(suite_dir / SUITE_FILE)
        return config_from_dict(values["config"]), set(values["games"]) & GAMES.keys()
    except (OSError, ValueError, KeyError, TypeError, UserError):
        return None, GAMES.keys()


def scores_at(suite: Suite, points: Any = np.inf, along: str = "env_steps") -> dict[str, np.ndarray]:
    """Game -> raw scores of its sessions `[sessions, ...]` at points along a column; without points, the final scores.

    A game with a session that has no score there is left out.
    """
    found = {game: np.stack([score_at(table, points, along) for table in tables]) for game, tables in suite.items()}
    return {game: scores for game, scores in found.items() if np.isfinite(scores).all()}


def normalise(scores: Mapping[str, np.ndarray], kind: str) -> dict[str, np.ndarray]:
    """Normalises the scores of the games that have the scores to compare with; `kind` is one of `NORMALISATIONS`."""
    function: Any = NORMALISATIONS[kind]
    found = {game: function(values, GAMES[game]) for game, values in scores.items()}
    return {game: values for game, values in found.items() if values is not None}


def describe_suite(suite: Suite) -> dict[str, Any]:
    """Statistics of a suite for each normalisation, ready for JSON: aggregates, performance profile, IQM curves."""
    described = {}
    for kind in NORMALISATIONS:
        scores = normalise(scores_at(suite), kind)
        if not scores:
            continue
        thresholds = np.linspace(0, max(1.0, *map(np.max, scores.values())), POINTS + 1)
        described[kind] = statistics.aggregate(scores) | {
            "profile": _curve(thresholds, statistics.performance_profile(scores, thresholds.tolist())),
            "iqm_by_env_steps": _iqm_curve({game: suite[game] for game in scores}, kind, "env_steps"),
            "iqm_by_hours": _iqm_curve({game: suite[game] for game in scores}, kind, "wall_seconds", 3600.0),
        }
    return described


def _iqm_curve(suite: Suite, kind: str, along: str, unit: float = 1.0) -> dict[str, Any]:
    """The IQM along a column, from where every session has a score; a finished session keeps its last score."""
    scored = [table[along][np.isfinite(table["return_ma"])] for tables in suite.values() for table in tables]
    known = [column[np.isfinite(column)] for column in scored]
    if not all(map(len, known)):  # such as the hours of a table whose header was damaged
        return _curve(np.zeros(0), [])
    grid = np.unique(np.linspace(max(column[0] for column in known), max(column[-1] for column in known), POINTS))
    return _curve(grid / unit, statistics.iqm_curve(normalise(scores_at(suite, grid, along), kind)))


def _curve(x: np.ndarray, estimates: Sequence[Estimate]) -> dict[str, Any]:
    bands = [interval for _, interval in estimates if interval is not None]
    low, high = (list(bound) for bound in zip(*bands, strict=True)) if bands else (None, None)
    return {"x": x.tolist(), "value": [value for value, _ in estimates], "low": low, "high": high}


def write_rliable(directory: Path, suites: Mapping[str, Mapping[str, np.ndarray]]) -> dict[str, list[str]]:
    """Writes scores_human_normalised.npz and scores_ratio.npz: `dict(numpy.load(FILE))` is rliable's dictionary.

    It is algorithm -> scores `[sessions, games]`, of the games that all suites have. A game with more sessions than
    another of its suite gives only its first ones: the array is rectangular.

    Args:
        suites: name -> game -> raw scores of its sessions.

    Returns:
        The games in the order of the columns, for each normalisation: those that have the scores to compare with.
    """
    columns = {}
    for kind in NORMALISATIONS:
        normalised = {name: normalise(scores, kind) for name, scores in suites.items()}
        columns[kind] = games = sorted(set.intersection(*map(set, normalised.values())))
        content, arrays = io.BytesIO(), {}
        for name, scores in normalised.items():
            sessions = min((len(scores[game]) for game in games), default=0)
            arrays[name] = np.array([scores[game][:sessions] for game in games]).reshape(len(games), sessions).T
        np.savez(content, **arrays)
        write_file(directory / f"scores_{kind.replace('-', '_')}.npz", content.getvalue())
    return columns


def estimate_text(value: float, interval: Sequence[float] | None) -> str:
    """A figure and its interval: `0.85 (0.80 to 0.91)`, or `0.85 (-)` without one."""
    return f"{value:.3f} (-)" if interval is None else f"{value:.3f} ({interval[0]:.3f} to {interval[1]:.3f})"


INTERVALS = (
    f"In parentheses: {statistics.CONFIDENCE:.0%} intervals of the stratified bootstrap over sessions "
    "(Agarwal et al. 2021); `-` where a game has a single session."
)


def aggregate_rows(results: Mapping[str, Mapping[str, Any]], heading: str) -> list[list[str]]:
    """Table of `statistics.aggregate` results: its header, and a row for each name."""
    rows = [[heading, "games", *(title for title, _ in statistics.FIGURES.values())]]
    for name, found in results.items():
        cells = [estimate_text(found[figure], found[f"{figure}_interval"]) for figure in statistics.FIGURES]
        rows.append([name, str(found["games"]), *cells])
    return rows


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells, the header first, as lines of Markdown; all columns but the first are aligned right."""
    header, *lines = [f"| {' | '.join(row)} |" for row in rows]
    return [header, "|---|" + "---:|" * (len(rows[0]) - 1), *lines]


# Comparison.


def compare_suites(suite_dirs: Sequence[str | Path], output: Path) -> str:
    """Compares suites over the games that are complete in all of them; returns Markdown.

    Writes comparison.md, comparison.json, suites.png, suites.svg and rliable's dictionaries into `output`.

    Raises:
        NothingToCompare: the suites have no complete game in common, or one is of another protocol than the reference
          scores.
        UserError: `output` cannot be written to.
    """
    suites: dict[str, dict[str, list[Table]]] = {}
    budgets: dict[str, set[int]] = {}
    for directory in (Path(suite_dir).absolute() for suite_dir in suite_dirs):
        names = directory.name, f"{directory.parent.name}/{directory.name}", str(directory)
        name = next(name for name in names if name not in suites or name == names[-1])
        suites[name] = read_suite(directory)
        for game in suites[name]:
            config = read_config(directory / game)
            budgets.setdefault(name, set()).add(config.total_env_steps)
            if note := comparison_note(config.env.resolved_protocol):
                raise NothingToCompare(f"{directory}: {note}; compare suites of protocol {REFERENCE_PROTOCOL}")
    shared = sorted(set.intersection(*({*scores_at(suite)} for suite in suites.values())))
    suites = {name: {game: suite[game] for game in shared} for name, suite in suites.items()}
    described = {name: describe_suite(suite) for name, suite in suites.items()}
    kinds = _shared_kinds(described)
    if not kinds:
        names = " and ".join(map(str, suite_dirs))
        common, advice = (" in common", "train one in each") if len(suite_dirs) > 1 else ("", "wait for the first")
        raise NothingToCompare(f"{names}: no complete game{common} that has a score to compare with; {advice}")
    raw = {name: scores_at(suite) for name, suite in suites.items()}
    first, *others = suites
    compared: dict[str, Any] = {"suites": list(suites), "games": shared}
    lines = [f"# {' and '.join(suites)}" if others else f"# {first}", ""]
    if len(set.union(*budgets.values())) > 1:
        texts = (f"{name} {', '.join(f'{steps:,}' for steps in sorted(found))}" for name, found in budgets.items())
        lines += [f"The budgets differ, in env steps: {'; '.join(texts)}.", ""]
    for kind in kinds:
        chances = {
            other: statistics.probability_of_improvement(normalise(raw[first], kind), normalise(raw[other], kind))
            for other in others
        }
        compared[kind] = {
            "suites": {name: described[name][kind] for name in suites},
            "probability_of_improvement": {name: found._asdict() for name, found in chances.items()},
        }
        lines += [*markdown_table(aggregate_rows({name: described[name][kind] for name in suites}, kind)), ""]
        lines += [
            f"Probability of improvement of {first} over {other}: {estimate_text(*found)}."
            for other, found in chances.items()
        ]
        lines += [""] if others else []
    text = "\n".join([*lines, INTERVALS, ""])
    draw_suites(described, output)
    compared["rliable_games"] = write_rliable(output, raw)
    write_json(output / "comparison.json", compared)
    write_file(output / "comparison.md", text)
    return text


def _shared_kinds(suites: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [kind for kind in NORMALISATIONS if all(kind in found for found in suites.values())]


def draw_suites(suites: Mapping[str, Mapping[str, Any]], output: Path) -> list[Path]:
    """Draws aggregates, performance profiles, and the IQM against env steps and hours; returns the files, if any.

    The files are suites.png and .svg, of human-normalised scores if there are any.

    Args:
        suites: name -> result of `describe_suite`.
    """
    kinds = _shared_kinds(suites)
    if not kinds:
        return []
    kind = kinds[0]
    described = {name: found[kind] for name, found in suites.items()}
    games = next(iter(described.values()))["games"]
    figure = new_figure(f"{kind} scores of {counted(games, 'game')}", 12, 8)
    grid = figure.add_gridspec(2, 2)
    bars = figure.add_subplot(grid[0, 0])
    count = len(described)
    for number, (name, found) in enumerate(described.items()):
        for row, figure_name in enumerate(statistics.FIGURES):
            value, interval = found[figure_name], found[f"{figure_name}_interval"]
            y = row + 0.5 * ((number + 0.5) / count - 0.5)
            colour = COLOURS[number % len(COLOURS)]
            bars.plot(value, y, "o", color=colour, label=plain_text(name) if row == 0 else "_")
            if interval is not None:
                bars.plot(interval, [y, y], color=colour, linewidth=5, alpha=0.35, solid_capstyle="butt")
    bars.set_yticks(range(len(statistics.FIGURES)), [title for title, _ in statistics.FIGURES.values()])
    bars.set_ylim(len(statistics.FIGURES) - 0.5, -0.5)
    bars.set_title(f"aggregates, {statistics.CONFIDENCE:.0%} intervals", fontsize="medium")
    open_axes(bars)
    panels: list[tuple[str, str, str, str]] = [
        ("profile", "performance profile", f"{kind} score τ", "share of sessions with score > τ"),
        ("iqm_by_env_steps", "interquartile mean against env steps", "env steps", f"{kind} IQM"),
        ("iqm_by_hours", "interquartile mean against hours", "hours of a session", f"{kind} IQM"),
    ]
    for index, (key, title, xlabel, ylabel) in enumerate(panels, start=1):
        axes = figure.add_subplot(grid[index // 2, index % 2])
        for number, (name, found) in enumerate(described.items()):
            _draw_curve(axes, found[key], COLOURS[number % len(COLOURS)], plain_text(name))
        if key == "iqm_by_env_steps":
            env_step_axes(axes, max(found[key]["x"][-1] for found in described.values()), ylabel)
        else:
            axes.set_xlim(left=0)
            axes.set_ylabel(ylabel)
            open_axes(axes)
        axes.set_xlabel(xlabel)
        axes.set_title(title, fontsize="medium")
    bars.legend(frameon=False)
    return save_figure(figure, output, "suites")


def _draw_curve(axes: Axes, curve: Mapping[str, Any], colour: str, label: str) -> None:
    marker = "o" if len(curve["x"]) <= 3 else ""
    axes.plot(curve["x"], curve["value"], color=colour, linewidth=2, marker=marker, label=label)
    if curve["low"] is not None:
        axes.fill_between(curve["x"], curve["low"], curve["high"], color=colour, alpha=0.2, linewidth=0)
