"""Results of a suite: results.md, results.csv and results.json, and its scores as rliable's dictionary."""

import csv
import io
from collections.abc import Callable, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

from jaxrl_atari.cli import counted, say
from jaxrl_atari.config import Config
from jaxrl_atari.envs.games import comparable
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.report.page import try_report
from jaxrl_atari.report.suites import (
    aggregate_rows,
    describe_suite,
    intervals_text,
    markdown_table,
    suite_runs,
    write_rliable,
)
from jaxrl_atari.report.summary import aligned, fraction_text, score_text, status_text, trial_summary
from jaxrl_atari.runs.files import write_file, write_json
from jaxrl_atari.runs.run_dir import is_finished, session_dir
from jaxrl_atari.suite.suite import game_configs, read_suite_file

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
    "ours: `return_ma` at the end, mean and standard deviation over sessions, and the 95% interval of the mean (from 3 "
    "sessions on). reference: PPO after 10,000,000 env steps of the same protocol. ratio: (ours - random) / (reference "
    "- random), which is meaningful for negative scores too. human-normalised: (ours - random) / (human - random), "
    "with the random and human scores of DQN Zoo. hours: training time, mean over sessions. env steps: mean over the "
    "sessions so far. A game in which a session has no score "
    "is left out of the statistics over games."
)

Rows = list[list[str]]
"""A table: its header, and its rows of cells."""


def write_results(suite_dir: Path, failures: Mapping[str, str], final: bool = False) -> None:
    """Writes results.md, results.csv, results.json and the scores in rliable's form, and trial.json of each game.

    Args:
        failures: game -> why it failed.
        final: print the tables, and draw the graphs and the report if the config asks for them.
    """
    config, games = read_suite_file(suite_dir)
    name, protocol = suite_dir.absolute().name, config.env.resolved_protocol
    runs = {run.path.name: run for run in suite_runs(suite_dir)}
    rows, scores = [], {}
    for game, game_config in game_configs(config, games).items():
        summary, trained = {}, game_config
        if game in runs:
            summary, trained = trial_summary(runs[game]), runs[game].config
            write_json(suite_dir / game / "trial.json", summary)
            scores[game] = [session["final_return_ma"] for session in summary["sessions"]]
        row = _row(game_config, summary, suite_dir / game) | {"gae_lambda": trained.resolved_gae_lambda}
        if game in failures:
            row["status"] = f"failed: {failures[game].replace('|', '/')}"
        rows.append(row)
    complete = {game: run for game, run in runs.items() if run.is_complete(config)}
    aggregates = describe_suite(complete)

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
        "rliable_games": write_rliable(suite_dir, {name: complete}),
    }
    write_json(suite_dir / "results.json", results)

    table = [[*COLUMNS.values()], *([_cell(column, row[column]) for column in COLUMNS] for row in rows)]
    count = f"{counted(len(rows), 'game')}, {counted(config.sessions, 'session')}"
    parts: list[str | Rows] = [
        f"# {name}: {count} of {config.total_env_steps:,} env steps each",
        table,
        f"Protocol {protocol}. {EXPLANATION}",
    ]
    if aggregates:
        parts.append(aggregate_rows(aggregates, "over the complete games"))
    else:
        note = comparison_note(protocol)
        parts.append(f"No aggregates{f': scores are {note}' if note else ' yet: no complete game has a score'}.")
    parts.append(intervals_text(aggregates))
    write_file(suite_dir / "results.md", _text(parts, markdown_table))
    if final:
        say("\n" + _text(parts, aligned))
    if final and config.log.graphs:
        try_report(suite_dir)


def _text(parts: list[str | Rows], lines_of: Callable[[Rows], list[str]]) -> str:
    """Paragraphs and tables as text."""
    return "\n\n".join(part if isinstance(part, str) else "\n".join(lines_of(part)) for part in parts) + "\n"


def _row(config: Config, summary: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """A game's row of the table; its summary is empty if it has no log point."""
    game, mean = comparable(config.env.game_name, config.env.resolved_protocol), summary.get("mean", {})
    low, high = summary.get("score_interval") or (None, None)
    status = status_text(config, summary) if summary else "waiting"
    finished = (is_finished(config, session_dir(run_dir, session)) for session in range(config.sessions))
    if status in ("waiting", "not complete") and all(finished):
        status = "complete, but metrics are missing"
    return {column: summary.get(column) for column in COLUMNS} | {
        "game": game.name,
        "sessions": len(summary.get("sessions", ())),
        "env_steps": mean.get("env_steps"),
        "score_low": low,
        "score_high": high,
        "reference_score": next((reference.score for reference in game.references), None),
        "hours": mean.get("wall_hours"),
        "status": status,
    }


def _cell(column: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if column in ("gae_lambda", "sessions"):
        return f"{value:g}"
    return (fraction_text if "normalised" in column else score_text)(value)
