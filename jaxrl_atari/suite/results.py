"""Results of a suite: results.md, results.csv and results.json."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_atari.config import Config
from jaxrl_atari.envs.games import comparable
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.errors import UserError
from jaxrl_atari.run_dir.files import write_file
from jaxrl_atari.run_dir.metrics import aggregate_games, reference_normalised
from jaxrl_atari.run_dir.summary import write_trial_summary
from jaxrl_atari.suite.suite import game_configs, read_suite_file

TABLE_COLUMNS = {
    "game": "game",
    "gae_lambda": "λ",
    "sessions": "sessions",
    "env_steps": "env steps",
    "score": "ours",
    "score_std": "± std",
    "reference_score": "reference",
    "reference_normalised_score": "ratio",
    "human_normalised_score": "human-normalised",
    "hours": "hours",
    "status": "status",
}
"""Columns of the table: name in CSV -> title in Markdown."""

EXPLANATION = (
    "ours: `return_ma` at the end, mean and standard deviation over sessions. reference: SLM Lab's PPO, protocol v5, "
    "10,000,000 env steps. ratio: (ours - random) / (reference - random), which is meaningful for negative scores too. "
    "human-normalised: (ours - random) / (human - random), the usual measure in DQN papers. hours: training time, mean "
    "over sessions. env steps: mean over the sessions so far."
)


def read_rows(suite_dir: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row of `TABLE_COLUMNS` for each game of a suite, and aggregates over the complete games."""
    config, games = read_suite_file(suite_dir)
    rows: list[dict[str, Any]] = []
    normalised: dict[str, dict[str, list[float]]] = {"human-normalised": {}, "ratio": {}}
    for name, game_config in game_configs(config, games).items():
        game = comparable(name, game_config.env.resolved_protocol)
        row = dict.fromkeys(TABLE_COLUMNS) | {
            "game": name,
            "gae_lambda": game_config.gae_lambda,
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
        row["sessions"] = len(summary["sessions"])
        row["env_steps"], row["hours"] = summary["mean"]["env_steps"], summary["mean"]["wall_hours"]
        row["status"] = "complete" if summary["complete"] else "not complete"
        scores = [session["final_return_ma"] for session in summary["sessions"]]
        if summary["complete"] and None not in scores:
            if summary["human_normalised_score"] is not None:
                human = [session["human_normalised_score"] for session in summary["sessions"]]
                normalised["human-normalised"][name] = human
            if summary["reference_normalised_score"] is not None:
                ratios = [reference_normalised(score, game) for score in scores]
                normalised["ratio"][name] = [ratio for ratio in ratios if ratio is not None]
    return rows, {kind: aggregate_games(scores) for kind, scores in normalised.items() if scores}


def _cell(name: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    if name in ("sessions", "env_steps"):
        return f"{value:,.0f}"
    if name in ("reference_normalised_score", "human_normalised_score"):
        return f"{value:.3f}"
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.2f}"


def markdown(config: Config, rows: Sequence[Mapping[str, Any]], aggregates: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    protocol = config.env.resolved_protocol
    lines = [
        f"# {config.name}: {len(rows)} games, {config.sessions} sessions of {config.total_env_steps:,} env steps each",
        "",
        "| " + " | ".join(TABLE_COLUMNS.values()) + " |",
        "|---|" + "---:|" * (len(TABLE_COLUMNS) - 2) + "---|",
        *("| " + " | ".join(_cell(name, row[name]) for name in TABLE_COLUMNS) + " |" for row in rows),
        "",
        f"Protocol {protocol}. {EXPLANATION}",
        "",
    ]
    if note := comparison_note(protocol):
        return "\n".join([*lines, f"No aggregates: {note}.", ""])
    if not aggregates:
        return "\n".join([*lines, "No game with a score to compare with is complete: no aggregates yet.", ""])
    lines += ["| over the complete games | games | median | interquartile mean |", "|---|---:|---:|---:|"]
    for kind, found in aggregates.items():
        cells = []
        for figure in ("median", "iqm"):
            low, high = found[f"{figure}_interval"]
            cells.append(f"{found[figure]:.3f} ({low:.3f} to {high:.3f})")
        lines.append(f"| {kind} | {found['games']} | {cells[0]} | {cells[1]} |")
    note = "In parentheses: 95% intervals of the stratified bootstrap over sessions (Agarwal et al. 2021)."
    return "\n".join([*lines, "", note, ""])


def write_results(suite_dir: Path, failures: Mapping[str, str] | None = None) -> str:
    """Writes results.md, results.csv and results.json; returns the Markdown.

    Args:
        failures: game -> why it failed; None if not known yet.
    """
    config, _ = read_suite_file(suite_dir)
    rows, aggregates = read_rows(suite_dir)
    for row in rows:
        if failures and row["game"] in failures:
            row["status"] = "failed: " + failures[row["game"]].replace("|", "/")
    text, table = markdown(config, rows, aggregates), io.StringIO()
    writer = csv.DictWriter(table, TABLE_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    protocol = config.env.resolved_protocol
    figures = json.dumps({"protocol": protocol, "games": rows, "aggregates": aggregates}, indent=2) + "\n"
    for name, content in (("results.md", text), ("results.csv", table.getvalue()), ("results.json", figures)):
        write_file(suite_dir / name, content)
    return text
