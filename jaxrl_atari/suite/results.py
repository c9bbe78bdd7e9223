"""Results of a suite: results.md, results.csv and results.json, and its scores as rliable's dictionary."""

import contextlib
import csv
import io
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_atari.cli import counted, say
from jaxrl_atari.config import Config
from jaxrl_atari.envs.games import comparable
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.errors import UserError
from jaxrl_atari.plots import plot_comparison
from jaxrl_atari.report.metrics import Table
from jaxrl_atari.report.pages import write_report
from jaxrl_atari.report.statistics import aggregate, score_interval
from jaxrl_atari.report.suites import (
    INTERVALS,
    NORMALISATIONS,
    aggregate_rows,
    describe_suite,
    draw_suites,
    estimate_text,
    markdown_table,
    normalise,
    scores_at,
    write_rliable,
)
from jaxrl_atari.report.summary import Run, aligned, number_text, read_run, status_text, trial_summary
from jaxrl_atari.runs.files import write_file, write_json
from jaxrl_atari.runs.run_dir import is_finished, session_dir
from jaxrl_atari.suite.suite import game_configs, read_suite_file
from jaxrl_atari.suite.trial import draw

COLUMNS = {
    "game": "game",
    "gae_lambda": "λ",
    "sessions": "sessions",
    "env_steps": "env steps",
    "score": "ours",
    "score_std": "± std",
    "score_low": "95% from",
    "score_high": "to",
    "reference_score": "reference",
    "reference_normalised_score": "ratio",
    "human_normalised_score": "human-normalised",
    "hours": "hours",
    "status": "status",
}
"""Columns of the table of games: name in results.csv -> title in results.md."""

EXPLANATION = (
    "ours: `return_ma` at the end, mean and standard deviation over sessions, and the 95% bootstrap interval of the "
    "mean. reference: SLM Lab's PPO, protocol v5, 10,000,000 env steps. ratio: (ours - random) / (reference - random), "
    "which is meaningful for negative scores too. human-normalised: (ours - random) / (human - random), with the "
    "random and human scores of DQN Zoo. hours: training time, mean over sessions. env steps: mean over the sessions "
    "so far. "
    "A game in which a session has no score is left out of the statistics over games."
)

Rows = list[list[str]]
"""A table: its header, and its rows of cells."""


def write_results(suite_dir: Path, failures: Mapping[str, str], final: bool = False) -> None:
    """Writes results.md, results.csv, results.json and the scores in rliable's form, and trial.json of each game.

    Args:
        failures: game -> why it failed.
        final: print the tables, and draw the graphs and the report if the config asks for them.
    """
    config, games, points = read_suite_file(suite_dir)
    name, protocol = suite_dir.absolute().name, config.env.resolved_protocol
    note = comparison_note(protocol)
    rows, runs, scores = [], {}, {}
    for game, game_config in game_configs(config, games).items():
        row, run, found = _read_game(game_config, suite_dir / game)
        if game in failures:
            row["status"] = f"failed: {failures[game].replace('|', '/')}"
        if run is not None:
            runs[game], scores[game] = run, found
        rows.append(row)
    tables = {game: list(run.tables.values()) for game, run in runs.items()}
    complete = {game: found for game, found in tables.items() if config.is_complete(_reached(found))}
    aggregates = {} if note else describe_suite(complete)
    report = {point: _report_at(point, tables, config) for point in points}

    file = io.StringIO()
    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(suite_dir / "results.csv", file.getvalue())
    results = {
        "protocol": protocol,
        "games": rows,
        "scores": {"games": list(scores), "matrix": list(zip_longest(*scores.values()))},
        "aggregates": aggregates,
        "report_at": {str(point): found for point, (found, _) in report.items()},
        "rliable_games": {} if note else write_rliable(suite_dir, {name: scores_at(complete)}),
    }
    write_json(suite_dir / "results.json", results)

    cells = [[_cell(column, row[column]) for column in COLUMNS] for row in rows]
    count = f"{counted(len(rows), 'game')}, {counted(config.sessions, 'session')}"
    parts: list[str | Rows] = [
        f"# {name}: {count} of {config.total_env_steps:,} env steps each",
        [[*COLUMNS.values()], *cells],
        f"Protocol {protocol}. {EXPLANATION}",
    ]
    if note:
        parts.append(f"No aggregates. Scores are {note}.")
    elif aggregates:
        parts.append(aggregate_rows(aggregates, "over the complete games"))
    else:
        parts.append("No game with a score to compare with is complete: no aggregates yet.")
    if report:
        texts = [found for _, found in report.values()]
        reported = [[row, *(found.get(row, "-") for found in texts)] for row in dict.fromkeys(chain(*texts))]
        parts.append([["`return_ma` at", *(f"{point:,}" for point in report)], *reported])
    parts.append(INTERVALS)
    write_file(suite_dir / "results.md", _text(parts, markdown_table))
    if final:
        say("\n" + _text(parts, aligned))
    if final and config.log.graphs:
        graphs, described = suite_dir / "graphs", {name: aggregates}
        draw(suite_dir, lambda: [
            *plot_comparison([*runs.values()], graphs), *draw_suites(described, graphs), write_report(suite_dir)
        ])  # fmt: skip


def _text(parts: Sequence[str | Rows], lines_of: Callable[[Rows], list[str]]) -> str:
    """Paragraphs and tables as text."""
    return "\n\n".join(part if isinstance(part, str) else "\n".join(lines_of(part)) for part in parts) + "\n"


def _read_game(config: Config, run_dir: Path) -> tuple[dict[str, Any], Run | None, list[float | None]]:
    """A game's row, its run and the scores of its sessions; writes trial.json. No run: it has no log point."""
    game, run, scores = comparable(config.env.game_name, config.env.resolved_protocol), None, []
    found: dict[str, Any] = {
        "game": game.name,
        "gae_lambda": config.resolved_gae_lambda,
        "sessions": 0,
        "reference_score": game.reference_score,
        "status": "waiting",
    }
    with contextlib.suppress(UserError):
        run = read_run(run_dir)
        summary = trial_summary(run)
        write_json(run_dir / "trial.json", summary)
        scores = [session["final_return_ma"] for session in summary["sessions"]]
        low, high = summary["score_interval"] or (None, None)
        found |= summary | {
            "gae_lambda": run.config.resolved_gae_lambda,  # of its training
            "sessions": len(scores),
            "env_steps": summary["mean"]["env_steps"],
            "hours": summary["mean"]["wall_hours"],
            "score_low": low,
            "score_high": high,
            "status": status_text(config, summary),
        }
    finished = (is_finished(config, session_dir(run_dir, session)) for session in range(config.sessions))
    if found["status"] in ("waiting", "not complete") and all(finished):
        found["status"] = "complete, but metrics are missing"
    return {column: found.get(column) for column in COLUMNS}, run, scores


def _reached(tables: Sequence[Table]) -> list[float]:
    """Env steps of sessions so far."""
    return [float(table["env_steps"][-1]) for table in tables]


def _report_at(
    point: int, tables: Mapping[str, Sequence[Table]], config: Config
) -> tuple[dict[str, Any], dict[str, str]]:
    """The scores of each game's sessions at a reporting point, and their aggregates over the games.

    A game appears where all sessions of the config have come that far.

    Returns:
        Both for results.json, and the cells of a table: row -> text.
    """
    far = {
        game: found
        for game, found in tables.items()
        if len(found) >= config.sessions and all(x >= point or config.is_spent(x) for x in _reached(found))
    }
    scores, aggregates, cells = scores_at(far, point), {}, {}
    for game, values in scores.items():
        low, high = score_interval(values) or (None, None)
        cells[game] = f"{number_text(float(np.mean(values)))} ({number_text(low)} to {number_text(high)})"
    for kind in () if comparison_note(config.env.resolved_protocol) else NORMALISATIONS:
        if normalised := normalise(scores, kind):
            found = aggregates[kind] = aggregate(normalised)
            text = estimate_text(found["iqm"], found["iqm_interval"])
            cells[f"IQM, {kind}"] = f"{text}, {counted(found['games'], 'game')}"
    return {"scores": {game: values.tolist() for game, values in scores.items()}, "aggregates": aggregates}, cells


def _cell(column: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if column == "gae_lambda":
        return f"{value:g}"
    return f"{value:.3f}" if "normalised" in column and value is not None else number_text(value)
