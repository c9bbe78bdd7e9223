"""The results of a sweep: one table of all scores, and the learning curves of all settings in one graph."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_atari.output import counted
from jaxrl_atari.report.aggregates import missing_intervals, normalised, statistics_by_name, statistics_rows
from jaxrl_atari.report.graphs import plot_comparison
from jaxrl_atari.report.score_statistics import INTERVALS
from jaxrl_atari.report.suites import GAME_COLUMNS, Suite, SuiteResults
from jaxrl_atari.report.text import markdown_table, score_text
from jaxrl_atari.runs.files import write_file, write_json
from jaxrl_atari.runs.layout import GRAPHS_FOLDER, RESULTS_FILE
from jaxrl_atari.suite.sweep import SweepPlan
from jaxrl_atari.suite.vary import value_text

TABLE_COLUMNS = (
    "sessions", "env_steps", "score", "score_std", "score_low", "score_high", "human_normalised_score", "hours",
    "status",
)  # fmt: skip
"""Columns of the table of a sweep, after the game and the fields that vary: some of `GAME_COLUMNS`."""

EXPLANATION = (
    "score: `return_ma` at the end, mean and sample standard deviation over the sessions that count, and the 95% "
    "interval of the mean (from 3 sessions on). Where intervals overlap, the table does not rank the settings. "
    "The best of several owes a part of its score to chance: train it again with other seeds (--seed) before you "
    "quote it."
)


class SweepResults(NamedTuple):
    """The results of a sweep."""

    path: Path
    vary: dict[str, list[Any]]
    suites: Mapping[str, SuiteResults]  # label of a setting -> the results of its suite
    rows: list[dict[str, Any]]  # of the table: game, the fields that vary, `TABLE_COLUMNS`
    text: str  # the content of results.md


def sweep_results(sweep_dir: Path, plan: SweepPlan, suites: Mapping[str, SuiteResults]) -> SweepResults:
    """Makes the results of a sweep from the results of its suites; reads and writes nothing."""
    rows = []
    for setting in plan.settings:
        for row in suites[setting.label].values["games"]:
            figures = {name: row[name] for name in TABLE_COLUMNS}
            rows.append({"game": row["game"], **setting.fields, **figures})
    rows.sort(key=lambda row: plan.games.index(row["game"]))  # brings the settings of a game together
    header = ["game", *plan.vary, *(GAME_COLUMNS[name] for name in TABLE_COLUMNS)]
    header[header.index(GAME_COLUMNS["score"])] = "score"  # "ours" has no reference beside it here
    cells = [
        [
            row["game"],
            *(value_text(row[name]) for name in plan.vary),
            *(row[name] if isinstance(row[name], str) else score_text(row[name]) for name in TABLE_COLUMNS),
        ]
        for row in rows
    ]
    count = f"{counted(len(suites), 'setting')} of {', '.join(plan.vary)}, {counted(len(plan.games), 'game')}"
    sessions = counted(plan.config.sessions, "session")
    parts = [
        f"# {sweep_dir.absolute().name}: {count}, {sessions} of {plan.config.total_env_steps:,} env steps each",
        markdown_table([header, *cells]),
        EXPLANATION,
    ]
    if len(plan.games) > 1:
        parts += _aggregate_parts(suites)
    return SweepResults(sweep_dir, plan.vary, suites, rows, "\n\n".join(parts) + "\n")


def _aggregate_parts(suites: Mapping[str, SuiteResults]) -> list[str]:
    """The table of human-normalised aggregates over the games that are complete in every setting.

    Empty if there is no such game with a human score, or if the settings differ in their protocols.
    """
    protocols = {suite.values["protocol"] for suite in suites.values()}
    scores = {label: suite.values["scores"] for label, suite in suites.items()}
    shared = sorted(set.intersection(*(set(games) for games in scores.values())))
    if len(protocols) > 1 or not shared:
        return []
    (protocol,) = protocols
    kinds = {
        label: normalised({game: games[game] for game in shared}, protocol)["human-normalised"]
        for label, games in scores.items()
    }
    aggregates = statistics_by_name(kinds)
    if not aggregates:
        return []
    table = markdown_table(statistics_rows(aggregates, "human-normalised, over the complete games"))
    return [table, *missing_intervals(aggregates), INTERVALS]


def save_sweep_results(results: SweepResults) -> None:
    """Writes results.md, results.csv and results.json of a sweep."""
    values = {
        "vary": results.vary,
        "games": results.rows,
        "settings": {label: suite.values for label, suite in results.suites.items()},
    }
    write_json(results.path / RESULTS_FILE, values)
    file = io.StringIO()
    writer = csv.DictWriter(file, ["game", *results.vary, *TABLE_COLUMNS], lineterminator="\n")
    writer.writeheader()
    for row in results.rows:  # an empty cell is an unknown figure, and the value None is `none`
        writer.writerow(row | {name: value_text(row[name]) for name in results.vary})
    write_file(results.path / "results.csv", file.getvalue())
    write_file(results.path / "results.md", results.text)


def draw_sweep(sweep_dir: Path, suites: Mapping[str, Suite]) -> list[Path]:
    """Draws the learning curves of all settings, with a panel for each game.

    Args:
        suites: label of a setting -> its suite, in the order of the legend.

    Returns:
        The files; none before a session has a log point.
    """
    runs = [(label, run) for label, suite in suites.items() for run in suite.runs.values()]
    return plot_comparison(runs, sweep_dir / GRAPHS_FOLDER) if runs else []
