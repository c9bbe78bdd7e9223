"""A suite as it was read from its directory, and its results: the table of games, and aggregates over games."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_atari.config import Config
from jaxrl_atari.envs.games import GAMES, game_under
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.errors import NoLogPoint, UserError
from jaxrl_atari.output import counted
from jaxrl_atari.report.aggregates import (
    SuiteStatistics,
    missing_intervals,
    normalised,
    statistics_by_name,
    statistics_rows,
    write_rliable,
)
from jaxrl_atari.report.score_statistics import INTERVALS_NOTE
from jaxrl_atari.report.summary import Run, TrialSummary, is_verified, read_run, trial_summary
from jaxrl_atari.report.tables import Table, markdown_table
from jaxrl_atari.report.text import LONG_BUDGET, left_out_text
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
    "return_mean": "return_mean",
    "reference_score": "reference",
    "reference_normalised_score": "ratio",
    "human_normalised_score": "human-normalised",
    "hours": "hours",
    "status": "status",
}
"""Field of `GameRow`, a column of results.csv -> title in results.md and in the report."""

GAMES_NOTE = (
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
    damaged: dict[str, str]  # game -> why its config or its log points cannot be read

    def complete_games(self) -> list[str]:
        """The games in which every session has finished."""
        return [game for game, run in self.runs.items() if run.is_complete(self.config)]

    def scores(self) -> dict[str, list[float]]:
        """The raw final scores of the sessions of each game.

        A game counts if it is complete and every session has a score.
        """
        by_game = {}
        for game in self.complete_games():
            scores = self.summaries[game]["session_scores"]
            if len(scores) == len(self.runs[game].tables):
                by_game[game] = scores
        return by_game


def read_suite(suite_dir: Path) -> Suite:
    """Reads a suite.

    Raises:
        UserError: the directory holds no suite, or suite.json cannot be used.
    """
    config = read_config(suite_dir, SUITE_FILE)
    description = read_json(suite_dir / SUITE_FILE)
    games = [game for game in read_games(suite_dir) if game in GAMES]
    runs = {}
    summaries = {}
    damaged = {}
    for game in games:
        if not is_run(suite_dir / game):
            continue
        try:
            runs[game] = read_run(suite_dir / game, config.sessions)
        except NoLogPoint:
            continue
        except UserError as error:
            damaged[game] = str(error)
        else:
            summaries[game] = trial_summary(runs[game])
    return Suite(suite_dir, config, description, games, runs, summaries, damaged)


class GameRow(NamedTuple):
    """A row of the table of games, with the columns of results.csv. An unknown value is None."""

    game: str
    gae_lambda: float | None = None
    sessions: int = 0  # that count
    env_steps: float | None = None
    score: float | None = None
    score_std: float | None = None
    score_low: float | None = None
    score_high: float | None = None
    return_mean: float | None = None  # at the end, mean over the sessions that count
    reference_score: float | None = None
    reference_normalised_score: float | None = None
    human_normalised_score: float | None = None
    hours: float | None = None
    status: str = ""


def game_row(suite: Suite, game: str, failure: str) -> GameRow:
    """The row of a game.

    Args:
        failure: why sessions of it failed; empty if none did.
    """
    references = game_under(game, suite.config.env.resolved_protocol).references
    row = GameRow(
        game,
        reference_score=references[0].score if references else None,
        status=_status(suite, game, failure),
    )
    if game not in suite.runs:
        return row
    summary = suite.summaries[game]
    low, high = summary["score_interval"] or (None, None)
    return row._replace(
        gae_lambda=suite.runs[game].config.resolved_gae_lambda,
        sessions=len(summary["sessions"]),
        env_steps=summary["mean"]["env_steps"],
        score=summary["score"],
        score_std=summary["score_std"],
        score_low=low,
        score_high=high,
        return_mean=summary["mean"]["final_return_mean"],
        reference_normalised_score=summary["reference_normalised_score"],
        human_normalised_score=summary["human_normalised_score"],
        hours=summary["mean"]["wall_hours"],
    )


def _status(suite: Suite, game: str, failure: str) -> str:
    """The status of a game: complete or not and which sessions do not count, or why it is damaged or failed."""
    is_complete = False
    status = "waiting"
    if game in suite.runs:
        run = suite.runs[game]
        is_complete = run.is_complete(suite.config)
        status = "complete" if is_complete else "not complete"
        left_out = left_out_text(suite.summaries[game])
        if left_out:
            status += f"; {left_out}"
        if all(is_verified(session_dir, table) for session_dir, table in run.tables.items()):
            status += ", verified"
    if game in suite.damaged:
        status = f"damaged: {suite.damaged[game]}"
    if failure and not is_complete:
        status = f"failed: {failure}"
    return status


def shown_columns(total_env_steps: int) -> dict[str, str]:
    """The `GAME_COLUMNS` of text tables: the final return_mean only below `LONG_BUDGET`."""
    hidden = "return_mean" if total_env_steps >= LONG_BUDGET else ""
    return {name: title for name, title in GAME_COLUMNS.items() if name != hidden}


class SuiteResults(NamedTuple):
    """The results of a suite."""

    suite: Suite
    failures: Mapping[str, str]  # game -> why sessions of it failed
    rows: list[GameRow]  # the table of games
    scores: dict[str, list[float]]  # `Suite.scores`
    statistics: dict[str, SuiteStatistics]  # normalisation -> statistics over the complete games

    @property
    def protocol(self) -> str:
        """The protocol of all games."""
        return self.suite.config.env.resolved_protocol

    def table(self) -> Table:
        """The table of games, as it is shown."""
        return Table(shown_columns(self.suite.config.total_env_steps), [row._asdict() for row in self.rows])

    def to_json(self) -> dict[str, Any]:
        """The content of results.json, apart from the games of rliable's files."""
        return {
            "protocol": self.protocol,
            "games": [row._asdict() for row in self.rows],
            "failures": self.failures,
            "scores": self.scores,
            "aggregates": {name: statistics.to_json() for name, statistics in self.statistics.items()},
        }

    def to_markdown(self) -> str:
        """The content of results.md."""
        config = self.suite.config
        count = f"{counted(len(self.rows), 'game')}, {counted(config.sessions, 'session')}"
        parts = [
            f"# {self.suite.path.absolute().name}: {count} of {config.total_env_steps:,} env steps each",
            self.table().to_markdown(),
            f"Protocol {self.protocol}. {GAMES_NOTE}",
        ]
        if self.statistics:
            parts.append(markdown_table(statistics_rows(self.statistics, "over the complete games")))
            parts += [*missing_intervals(self.statistics), INTERVALS_NOTE]
        else:
            why = comparison_note(self.protocol) or "no complete game has a score to compare with"
            parts.append(f"No aggregates: {why}.")
        return "\n\n".join(parts) + "\n"


def suite_results(suite: Suite, failures: Mapping[str, str]) -> SuiteResults:
    """The results of a suite; reads and writes nothing, apart from what `verify` has found.

    Args:
        failures: game -> why sessions of it failed.
    """
    scores = suite.scores()
    return SuiteResults(
        suite,
        failures,
        rows=[game_row(suite, game, failures.get(game, "")) for game in suite.games],
        scores=scores,
        statistics=statistics_by_name(normalised(scores, suite.config.env.resolved_protocol)),
    )


def save_results(results: SuiteResults) -> None:
    """Writes results.md, results.csv, results.json, rliable's files, and the trial.json of each game."""
    suite_dir = results.suite.path
    for game in results.suite.runs:
        whole_run = read_run(suite_dir / game)  # which may have more sessions than the suite
        write_json(suite_dir / game / TRIAL_SUMMARY_FILE, trial_summary(whole_run))
    scores = normalised(results.scores, results.protocol)
    rliable_games = write_rliable(suite_dir, {suite_dir.absolute().name: scores})
    write_json(suite_dir / RESULTS_FILE, results.to_json() | {"rliable_games": rliable_games})
    Table(GAME_COLUMNS, results.table().rows).write_csv(suite_dir / "results.csv")
    write_file(suite_dir / "results.md", results.to_markdown())
