"""Results of a suite: results.md, results.csv and results.json, and its scores as rliable's dictionary."""

import csv
import io
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_atari.cli import counted
from jaxrl_atari.config import Config
from jaxrl_atari.envs.games import comparable
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.errors import UserError
from jaxrl_atari.report.statistics import aggregate, score_interval
from jaxrl_atari.report.suites import (
    INTERVALS,
    NORMALISATIONS,
    aggregate_rows,
    describe_suite,
    estimate_text,
    markdown_table,
    normalise,
    read_suite,
    scores_at,
    write_rliable,
)
from jaxrl_atari.report.summary import read_run, status_text, write_trial_summary
from jaxrl_atari.runs.files import write_file, write_json
from jaxrl_atari.runs.run_dir import read_config
from jaxrl_atari.suite.suite import game_configs, read_suite_file

TABLE_COLUMNS = {
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
"""Columns of the table: name in CSV -> title in Markdown."""

EXPLANATION = (
    "ours: `return_ma` at the end, mean and standard deviation over sessions, and the 95% bootstrap interval of the "
    "mean. reference: SLM Lab's PPO, protocol v5, 10,000,000 env steps. ratio: (ours - random) / (reference - random), "
    "which is meaningful for negative scores too. human-normalised: (ours - random) / (human - random), with the "
    "random and human scores of DQN Zoo. hours: training time, mean over sessions. env steps: mean over the sessions "
    "so far. "
    "A game in which a session has no score is left out of the statistics over games."
)


def read_rows(suite_dir: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row of `TABLE_COLUMNS` for each game of a suite, and its score matrix.

    The matrix is sessions x games: final `return_ma`, or None where a session has no score yet.
    """
    config, games, _ = read_suite_file(suite_dir)
    rows: list[dict[str, Any]] = []
    scores: dict[str, list[float | None]] = {}
    for name, game_config in game_configs(config, games).items():
        game = comparable(name, game_config.env.resolved_protocol)
        row = dict.fromkeys(TABLE_COLUMNS) | {
            "game": name,
            "gae_lambda": game_config.resolved_gae_lambda,  # of a game that has not begun
            "sessions": 0,
            "reference_score": game.reference_score,
            "status": "waiting",
        }
        rows.append(row)
        try:
            summary = write_trial_summary(suite_dir / name)
        except UserError:
            continue  # no log point yet
        row |= {key: summary[key] for key in row if key in summary and key not in ("sessions", "game")}
        row["gae_lambda"] = read_config(suite_dir / name).resolved_gae_lambda
        row["sessions"] = len(summary["sessions"])
        row["env_steps"], row["hours"] = summary["mean"]["env_steps"], summary["mean"]["wall_hours"]
        row["status"] = status_text(game_config, summary)
        scores[name] = [session["final_return_ma"] for session in summary["sessions"]]
        row["score_low"], row["score_high"] = summary["score_interval"] or (None, None)
    return rows, {"games": list(scores), "matrix": list(itertools.zip_longest(*scores.values()))}


def read_report(suite_dir: Path) -> dict[str, Any]:
    """Scores at the reporting points: env steps -> scores of each game's sessions, and aggregates over the games.

    A game appears where all sessions of the config have come that far.
    """
    config, games, points = read_suite_file(suite_dir)
    suite = {}
    for name in game_configs(config, games):
        try:
            suite[name] = list(read_run(suite_dir / name).tables.values())
        except UserError:
            continue  # no log point yet
    report = {}
    for point in points:
        far = {
            name: tables
            for name, tables in suite.items()
            if len(tables) >= config.sessions
            and all(table["env_steps"][-1] >= point or config.is_spent(int(table["env_steps"][-1])) for table in tables)
        }
        reached = scores_at(far, point)
        comparable_kinds = () if comparison_note(config.env.resolved_protocol) else NORMALISATIONS
        kinds = {kind: normalise(reached, kind) for kind in comparable_kinds}
        report[str(point)] = {
            "scores": {name: scores.tolist() for name, scores in reached.items()},
            "aggregates": {kind: aggregate(scores) for kind, scores in kinds.items() if scores},
        }
    return report


def _cell(name: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    if name == "gae_lambda":
        return f"{value:.2f}" if round(value, 2) == value else f"{value:g}"
    if name in ("sessions", "env_steps"):
        return f"{value:,.0f}"
    if name in ("reference_normalised_score", "human_normalised_score"):
        return f"{value:.3f}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.2f}"


def _report_table(report: Mapping[str, Any]) -> list[str]:
    """Markdown table of the scores at the reporting points: a row for each game and for the IQM over games."""
    rows = [["`return_ma` at", *(f"{int(point):,}" for point in report)]]
    for game in dict.fromkeys(game for found in report.values() for game in found["scores"]):
        rows.append([game, *(_score_cell(found["scores"].get(game)) for found in report.values())])
    for kind in NORMALISATIONS:
        if any(kind in found["aggregates"] for found in report.values()):
            rows.append([f"IQM, {kind}", *(_iqm_cell(found["aggregates"].get(kind)) for found in report.values())])
    return markdown_table(rows)


def _iqm_cell(figures: Mapping[str, Any] | None) -> str:
    if figures is None:
        return "-"
    return f"{estimate_text(figures['iqm'], figures['iqm_interval'])}, {counted(figures['games'], 'game')}"


def _score_cell(scores: Sequence[float] | None) -> str:
    if scores is None:
        return "-"
    interval = score_interval(scores)
    bounds = "-" if interval is None else f"{_cell('', interval[0])} to {_cell('', interval[1])}"
    return f"{_cell('', float(np.mean(scores)))} ({bounds})"


def markdown(
    name: str,
    config: Config,
    rows: Sequence[Mapping[str, Any]],
    aggregates: Mapping[str, Any],
    report: Mapping[str, Any],
) -> str:
    """The results as Markdown, under the name of the suite's directory."""
    protocol = config.env.resolved_protocol
    lines = [
        f"# {name}: {counted(len(rows), 'game')}, {counted(config.sessions, 'session')} of "
        f"{config.total_env_steps:,} env steps each",
        "",
        "| " + " | ".join(TABLE_COLUMNS.values()) + " |",
        "|---|" + "---:|" * (len(TABLE_COLUMNS) - 2) + "---|",
        *("| " + " | ".join(_cell(name, row[name]) for name in TABLE_COLUMNS) + " |" for row in rows),
        "",
        f"Protocol {protocol}. {EXPLANATION}",
        "",
    ]
    if note := comparison_note(protocol):
        lines += [f"No aggregates. Scores are {note}.", ""]
    elif aggregates:
        lines += [*markdown_table(aggregate_rows(aggregates, "over the complete games")), ""]
    else:
        lines += ["No game with a score to compare with is complete: no aggregates yet.", ""]
    if report:
        lines += [*_report_table(report), ""]
    if aggregates or report:
        lines += [INTERVALS, ""]
    return "\n".join(lines)


def write_results(suite_dir: Path, failures: Mapping[str, str] | None = None) -> str:
    """Writes results.md, results.csv, results.json and the scores in rliable's form; returns the Markdown.

    Args:
        failures: game -> why it failed; None if not known yet.
    """
    config, _, _ = read_suite_file(suite_dir)
    rows, matrix = read_rows(suite_dir)
    for row in rows:
        if failures and row["game"] in failures:
            row["status"] = "failed: " + failures[row["game"]].replace("|", "/")
    complete, report = read_suite(suite_dir), read_report(suite_dir)
    protocol = config.env.resolved_protocol
    aggregates = {} if comparison_note(protocol) else describe_suite(complete)
    text, table = markdown(suite_dir.absolute().name, config, rows, aggregates, report), io.StringIO()
    writer = csv.DictWriter(table, TABLE_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_file(suite_dir / "results.md", text)
    write_file(suite_dir / "results.csv", table.getvalue())
    results = {"protocol": protocol, "games": rows, "scores": matrix, "aggregates": aggregates, "report_at": report}
    if not comparison_note(protocol):
        results["rliable_games"] = write_rliable(suite_dir, {suite_dir.absolute().name: scores_at(complete)})
    write_json(suite_dir / "results.json", results)
    return text
