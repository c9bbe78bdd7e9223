"""A suite as it was read from its directory, and its results: the table of games, and aggregates over games."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_atari.config import Config
from jaxrl_atari.envs.games import GAMES, game_under
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.errors import DamagedMetrics, NoLogPoint
from jaxrl_atari.output import counted
from jaxrl_atari.report.aggregates import (
    missing_intervals,
    normalised,
    statistics_by_name,
    statistics_rows,
    write_rliable,
)
from jaxrl_atari.report.score_statistics import INTERVALS
from jaxrl_atari.report.summary import Run, TrialSummary, is_verified, read_run, trial_summary
from jaxrl_atari.report.text import left_out_text, markdown_table, score_text
from jaxrl_atari.runs.description import read_config, read_games
from jaxrl_atari.runs.files import read_json, write_file, write_json
from jaxrl_atari.runs.layout import RESULTS_FILE, SUITE_FILE, TRIAL_SUMMARY_FILE, is_run

GAME_COLUMNS = {
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
"""Column of the table of games, as in results.csv -> title in results.md and in the report."""

EXPLANATION = (
    "ours: `return_ma` at the end, mean and sample standard deviation over the sessions that count, and the 95% "
    "interval of the mean (from 3 sessions on). "
    "sessions: the number that counts. Once one has finished, only finished ones do; the status names the others. "
    "reference: PPO after 10,000,000 env steps of the same protocol. "
    "ratio: (ours - random) / (reference - random), which is meaningful for negative scores too. "
    "human-normalised: (ours - random) / (human - random), with the random and human scores of DQN Zoo. "
    "hours and env steps: mean over these sessions. "
    "A game in which a session has no score is left out of the statistics over games."
)
"""Explanation below the table of games."""


class Suite(NamedTuple):
    """A suite as it was read from its directory."""

    path: Path
    config: Config
    description: dict[str, Any]  # the content of suite.json
    games: list[str]  # the games of suite.json that ALE has
    runs: dict[str, Run]  # game -> its run, for games that have a log point
    summaries: dict[str, TrialSummary]  # game -> the summary of its run
    damaged: dict[str, str]  # game -> why its log points cannot be read

    def complete_games(self) -> list[str]:
        """The games in which every session has finished."""
        return [game for game, run in self.runs.items() if run.is_complete(self.config)]

    def scores(self) -> dict[str, list[float]]:
        """The raw final scores of the sessions of each game.

        A game counts if it is complete and every session has a score.
        """
        found = {}
        for game in self.complete_games():
            scores = self.summaries[game]["session_scores"]
            if len(scores) == len(self.runs[game].tables):
                found[game] = scores
        return found


def read_suite(suite_dir: Path, earlier: Suite | None = None) -> Suite:
    """Reads a suite.

    Args:
        earlier: the suite as it was read before. The games that were complete are taken from it, and not read
            again.

    Raises:
        UserError: the directory holds no suite, or suite.json or the config.json of a game cannot be used.
    """
    config = read_config(suite_dir, SUITE_FILE)
    description = read_json(suite_dir / SUITE_FILE)
    games = [game for game in read_games(suite_dir) if game in GAMES]
    runs = {}
    summaries = {}
    damaged = {}
    if earlier is not None:
        for game in earlier.complete_games():
            runs[game] = earlier.runs[game]
            summaries[game] = earlier.summaries[game]
    for game in games:
        if game in runs or not is_run(suite_dir / game):
            continue
        try:
            runs[game] = read_run(suite_dir / game, config.sessions)
        except DamagedMetrics as error:
            damaged[game] = str(error)
        except NoLogPoint:
            continue
        else:
            summaries[game] = trial_summary(runs[game])
    return Suite(suite_dir, config, description, games, runs, summaries, damaged)


def game_rows(suite: Suite, failures: Mapping[str, str]) -> list[dict[str, Any]]:
    """The table of games: a row for each game, with the keys of `GAME_COLUMNS`. An unknown value is None.

    Args:
        failures: game -> why sessions of it failed.
    """
    rows = []
    for game in suite.games:
        references = game_under(game, suite.config.env.resolved_protocol).references
        row: dict[str, Any] = dict.fromkeys(GAME_COLUMNS) | {"game": game, "sessions": 0, "status": "waiting"}
        row["reference_score"] = references[0].score if references else None
        if game in suite.runs:
            run = suite.runs[game]
            summary = suite.summaries[game]
            row["score_low"], row["score_high"] = summary["score_interval"] or (None, None)
            row |= {
                "score": summary["score"],
                "score_std": summary["score_std"],
                "reference_normalised_score": summary["reference_normalised_score"],
                "human_normalised_score": summary["human_normalised_score"],
                "gae_lambda": run.config.resolved_gae_lambda,
                "sessions": len(summary["sessions"]),
                "env_steps": summary["mean"]["env_steps"],
                "hours": summary["mean"]["wall_hours"],
                "status": "complete" if run.is_complete(suite.config) else "not complete",
            }
            left_out = left_out_text(summary)
            if left_out:
                row["status"] += f"; {left_out}"
            if all(is_verified(session_dir, table) for session_dir, table in run.tables.items()):
                row["status"] += ", verified"
        if game in suite.damaged:
            row["status"] = f"damaged: {suite.damaged[game]}"
        if game in failures and not row["status"].startswith("complete"):
            row["status"] = f"failed: {failures[game]}"
        rows.append(row)
    return rows


def result_values(suite: Suite, failures: Mapping[str, str]) -> dict[str, Any]:
    """The content of results.json: table of games, raw scores, and aggregates. `failures`: see `game_rows`."""
    protocol = suite.config.env.resolved_protocol
    scores = suite.scores()
    return {
        "protocol": protocol,
        "games": game_rows(suite, failures),
        "failures": failures,
        "scores": scores,
        "aggregates": statistics_by_name(normalised(scores, protocol)),
    }


def text_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The rows of `game_rows` as text, with a header."""
    cells = ([value if isinstance(value, str) else score_text(value) for value in row.values()] for row in rows)
    return [[*GAME_COLUMNS.values()], *cells]


class SuiteResults(NamedTuple):
    """The results of a suite."""

    suite: Suite
    values: dict[str, Any]  # see `result_values`
    text: str  # the content of results.md


def suite_results(suite_dir: Path, failures: Mapping[str, str], earlier: Suite | None = None) -> SuiteResults:
    """Reads the results of a suite; writes nothing.

    Args:
        failures: game -> why sessions of it failed.
        earlier: the suite as it was read before, whose complete games are not read again.

    Raises:
        UserError: as `read_suite`.
    """
    suite = read_suite(suite_dir, earlier)
    values = result_values(suite, failures)
    protocol = values["protocol"]
    rows = values["games"]
    count = f"{counted(len(rows), 'game')}, {counted(suite.config.sessions, 'session')}"
    parts = [
        f"# {suite_dir.absolute().name}: {count} of {suite.config.total_env_steps:,} env steps each",
        markdown_table(text_rows(rows)),
        f"Protocol {protocol}. {EXPLANATION}",
    ]
    if values["aggregates"]:
        parts.append(markdown_table(statistics_rows(values["aggregates"], "over the complete games")))
        parts += [*missing_intervals(values["aggregates"]), INTERVALS]
    else:
        parts.append(
            f"No aggregates: {comparison_note(protocol) or 'no complete game has a score to compare with'}."
        )
    return SuiteResults(suite, values, "\n\n".join(parts) + "\n")


def save_results(results: SuiteResults, saved: Suite | None = None) -> None:
    """Writes results.md, results.csv, results.json, rliable's files, and the trial.json of each game.

    Args:
        saved: the suite as it was last saved. The games that were complete then keep their trial.json.
    """
    suite_dir = results.suite.path
    values = results.values
    up_to_date = set() if saved is None else set(saved.complete_games())
    for game in results.suite.runs:
        if game in up_to_date:
            continue
        whole_run = read_run(suite_dir / game)  # which may have more sessions than the suite
        write_json(suite_dir / game / TRIAL_SUMMARY_FILE, trial_summary(whole_run))
    scores = normalised(values["scores"], values["protocol"])
    rliable_games = write_rliable(suite_dir, {suite_dir.absolute().name: scores})
    write_json(suite_dir / RESULTS_FILE, values | {"rliable_games": rliable_games})
    file = io.StringIO()
    writer = csv.DictWriter(file, GAME_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(values["games"])
    write_file(suite_dir / "results.csv", file.getvalue())
    write_file(suite_dir / "results.md", results.text)
