"""Statistics of suites: normalised scores aggregated over games, as JSON, Markdown and rliable's dictionary."""

import contextlib
import io
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_atari.config import Config, config_from_dict
from jaxrl_atari.envs.games import GAMES
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.report.graphs import draw_suites
from jaxrl_atari.report.metrics import human_normalised, reference_normalised, score_at
from jaxrl_atari.report.statistics import (
    CONFIDENCE,
    FIGURES,
    Estimate,
    aggregate,
    aggregates_note,
    estimate,
    interquartile_mean,
    probability_of_improvement,
    share_above,
)
from jaxrl_atari.report.summary import Run, fraction_text, names_of, read_run
from jaxrl_atari.runs.files import read_json, write_file, write_json
from jaxrl_atari.runs.run_dir import SUITE_FILE

Suite = Mapping[str, Run]
"""Game -> its run."""

NORMALISATIONS = {"human-normalised": human_normalised, "ratio": reference_normalised}
Curve = list[list[float | None]]
"""Points of a curve: x, value, and the ends of its interval."""
POINTS = 50
"""Points of a performance profile and of a learning curve."""


def read_group(path: Path) -> tuple[Config, dict[str, Any]]:
    """The config and the content of a suite.json, with its `games`, or of a search.json.

    Raises:
        UserError: the file cannot be used.
    """
    try:
        values = read_json(path)
        games = [game for game in values.get("games", ()) if game in GAMES]
        return config_from_dict(values["config"]), values | {"games": games}
    except (OSError, ValueError, KeyError, TypeError, UserError) as error:
        raise UserError(f"{path}: damaged ({reason(error)}); restore it from a copy") from error


def suite_runs(suite_dir: Path) -> list[Run]:
    """The games of a suite that have a log point."""
    runs = []
    for game in read_group(suite_dir / SUITE_FILE)[1]["games"]:
        with contextlib.suppress(UserError):
            runs.append(read_run(suite_dir / game))
    return runs


def read_suite(suite_dir: Path) -> dict[str, Run]:
    """Reads the complete games of a suite: those whose sessions have all spent the suite's budget."""
    planned, _ = read_group(suite_dir / SUITE_FILE)
    protocol = planned.env.resolved_protocol
    return {
        run.game.name: run for run in suite_runs(suite_dir) if run.is_complete(planned) and run.protocol == protocol
    }


def scores_at(suite: Suite, point: float = np.inf, along: str = "env_steps") -> dict[str, np.ndarray]:
    """Game -> raw scores of its sessions `[sessions]` at a point along a column; without one, the final scores.

    A game with a session that has no score there is left out.
    """
    found = {
        game: np.array([score_at(table, point, along) for table in run.tables.values()]) for game, run in suite.items()
    }
    return {game: scores for game, scores in found.items() if np.isfinite(scores).all()}


def normalised(suite: Suite, kind: str, point: float = np.inf, along: str = "env_steps") -> dict[str, np.ndarray]:
    """`scores_at`, normalised, of the games that have the scores to compare with; `kind` is of `NORMALISATIONS`."""
    scores = scores_at(suite, point, along)
    found = {game: NORMALISATIONS[kind](values, suite[game].game) for game, values in scores.items()}
    return {game: values for game, values in found.items() if values is not None}


def describe_suite(suite: Suite) -> dict[str, Any]:
    """Statistics of a suite for each normalisation, ready for JSON: aggregates, performance profile, IQM curves."""
    described = {}
    for kind in NORMALISATIONS:
        scores = normalised(suite, kind)
        if not scores:
            continue
        compared = {game: suite[game] for game in scores}
        thresholds = np.linspace(0, max(1.0, *map(np.max, scores.values())), POINTS + 1)
        shares = (estimate(partial(share_above, threshold=threshold), scores) for threshold in thresholds)
        described[kind] = aggregate(scores) | {
            "profile": _curve(thresholds, shares),
            "iqm_by_env_steps": _iqm_curve(compared, kind, "env_steps"),
            "iqm_by_hours": _iqm_curve(compared, kind, "wall_seconds", 3600.0),
        }
    return described


def _iqm_curve(suite: Suite, kind: str, along: str, unit: float = 1.0) -> Curve:
    """The IQM along a column, from where every session has a score; a finished session keeps its last score."""
    tables = [table for run in suite.values() for table in run.tables.values()]
    scored = [table[along][np.isfinite(table["return_ma"])] for table in tables]
    grid = np.unique(np.linspace(max(points[0] for points in scored), max(points[-1] for points in scored), POINTS))
    return _curve(grid / unit, (estimate(interquartile_mean, normalised(suite, kind, point, along)) for point in grid))


def _curve(x: np.ndarray, estimates: Iterable[Estimate]) -> Curve:
    pairs = zip(x.tolist(), estimates, strict=True)
    return [[at, value, *(interval or (None, None))] for at, (value, interval) in pairs]


def write_rliable(directory: Path, suites: Mapping[str, Suite]) -> dict[str, list[str]]:
    """Writes scores_human_normalised.npz and scores_ratio.npz: `dict(numpy.load(FILE))` is rliable's dictionary.

    It is algorithm -> scores `[sessions, games]`, of the games that all suites have. A game with more sessions than
    another of its suite gives only its first ones: the array is rectangular.

    Returns:
        The games in the order of the columns, for each normalisation: those that have the scores to compare with.
    """
    columns = {}
    for kind in NORMALISATIONS:
        scores = {name: normalised(suite, kind) for name, suite in suites.items()}
        columns[kind] = games = sorted(set.intersection(*map(set, scores.values())))
        arrays: dict[str, Any] = {
            name: np.array([*zip(*(found[game] for game in games), strict=False)]) for name, found in scores.items()
        }
        np.savez(content := io.BytesIO(), **arrays)
        write_file(directory / f"scores_{kind.replace('-', '_')}.npz", content.getvalue())
    return columns


# Texts.


def estimate_text(value: float, interval: Sequence[float] | None) -> str:
    """A figure and its interval: `0.85 (0.80 to 0.91)`, or `0.85 (-)` without one."""
    bounds = "-" if interval is None else " to ".join(map(fraction_text, interval))
    return f"{fraction_text(value)} ({bounds})"


def intervals_text(results: Mapping[str, Mapping[str, Any]]) -> str:
    """What the intervals of `aggregate` results are, and a warning if they are too narrow."""
    return (
        f"In parentheses: {CONFIDENCE:.0%} intervals of the stratified bootstrap over sessions (Agarwal et al. 2021); "
        f"(-) where a game has a single session. {aggregates_note(results.values())}"
    ).rstrip()


def aggregate_rows(results: Mapping[str, Mapping[str, Any]], heading: str) -> list[list[str]]:
    """Table of `aggregate` results: its header, and a row for each name."""
    rows = [[heading, "games", *(title for title, _ in FIGURES.values())]]
    for name, found in results.items():
        cells = [estimate_text(found[figure], found[f"{figure}_interval"]) for figure in FIGURES]
        rows.append([name, str(found["games"]), *cells])
    return rows


def markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells, the header first, as lines of Markdown; all columns but the first are aligned right."""
    header, *lines = [f"| {' | '.join(row)} |" for row in rows]
    return [header, "|---|" + "---:|" * (len(rows[0]) - 1), *lines]


# Comparison.


def compare_suites(suite_dirs: Sequence[Path], output: Path, labels: Sequence[str] = ()) -> str:
    """Compares suites over the games that are complete in all of them; returns Markdown.

    Writes comparison.md, comparison.json, suites.png, suites.svg and rliable's dictionaries into `output`.

    Args:
        labels: names of the suites; by default those of their directories.

    Raises:
        UserError: the suites have no complete game in common, or not one protocol that has reference scores.
    """
    names, where = list(labels or names_of(suite_dirs)), " and ".join(map(str, suite_dirs))
    configs = {name: read_group(path / SUITE_FILE)[0] for name, path in zip(names, suite_dirs, strict=True)}
    protocol, *more = sorted({config.env.resolved_protocol for config in configs.values()})
    if note := f"{protocol} and {more[0]} are different protocols" if more else comparison_note(protocol):
        raise UserError(f"{where}: not compared: {note}")
    suites: dict[str, Suite] = {name: read_suite(path) for name, path in zip(names, suite_dirs, strict=True)}
    shared = sorted(set.intersection(*({*scores_at(suite)} for suite in suites.values())))
    suites = {name: {game: suite[game] for game in shared} for name, suite in suites.items()}
    described = {name: describe_suite(suite) for name, suite in suites.items()}
    first, *others = suites
    if not described[first]:
        raise UserError(f"{where}: no game that is complete in every suite has a score to compare with; wait for one")
    compared: dict[str, Any] = {"suites": names, "protocol": protocol, "games": shared}
    lines = [f"# {' and '.join(names)}, protocol {protocol}", ""]
    lines += [f"- {name}: {config.total_env_steps:,} env steps a session" for name, config in configs.items()]
    for kind in described[first]:
        results = {name: described[name][kind] for name in suites}
        scores = {name: normalised(suite, kind) for name, suite in suites.items()}
        chances = {other: probability_of_improvement(scores[first], scores[other]) for other in others}
        compared[kind] = {"suites": results, "probability_of_improvement": chances}
        lines += ["", *markdown_table(aggregate_rows(results, kind)), ""]
        for other, found in chances.items():
            lines.append(f"Probability of improvement of {first} over {other}: {estimate_text(*found)}.")
    text = "\n".join([*lines, "", intervals_text(results), ""])
    draw_suites(described, output)
    compared["rliable_games"] = write_rliable(output, suites)
    write_json(output / "comparison.json", compared)
    write_file(output / "comparison.md", text)
    return text
