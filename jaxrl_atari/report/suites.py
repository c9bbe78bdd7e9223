"""The results of suites and sweeps: tables of games, statistics over games, and comparisons of suites.

A sweep is compared as its settings are, each of which is a suite.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_atari.config import Config
from jaxrl_atari.envs.games import GAMES, game_under
from jaxrl_atari.errors import NoLogPoint, UserError
from jaxrl_atari.output import counted
from jaxrl_atari.report.metrics import human_normalised, reference_normalised
from jaxrl_atari.report.score_statistics import (
    CONFIDENCE,
    IMPROVEMENT,
    STATISTICS,
    estimate,
)
from jaxrl_atari.report.summary import Run, read_run
from jaxrl_atari.report.tables import Section, Table
from jaxrl_atari.report.text import differences, left_out_text
from jaxrl_atari.runs.description import read_config, read_games
from jaxrl_atari.runs.files import read_result, write_file, write_json
from jaxrl_atari.runs.layout import (
    SUITE_FILE,
    SWEEP_FILE,
    held_kind,
)

GAME_COLUMNS = {
    "game": "game",
    "suite": "",
    "gae_lambda": "λ",
    "sessions": "sessions",
    "env_steps": "env steps",
    "score": "score",
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
"""Column of results.csv -> its title in results.md and in the report. `suite` is the setting in a sweep."""

GAMES_NOTE = (
    "score: return_ma at the end, mean and sample standard deviation over the sessions that count, and the 95% "
    "interval of the mean (from 3 sessions on). "
    "sessions: the number that counts. Once one has finished, only finished ones do; the status names the others. "
    "reference: PPO after 10,000,000 env steps of the same protocol. "
    "ratio: (score - random) / (reference - random), which is meaningful for negative scores too. "
    "human-normalised: (score - random) / (human - random), with the random and human scores of DQN Zoo. "
    "hours and env steps: mean over these sessions. "
    "A game in which a session has no score is left out of the statistics over games."
)
"""Explanation below the table of games."""

SWEEP_NOTE = (
    "Where intervals overlap, the table does not rank the settings. The best of several owes a part of its score "
    "to chance: train it again with other seeds (--seed) before you quote it."
)

INTERVALS_NOTE = (
    f"In parentheses: {CONFIDENCE:.0%} intervals over sessions, from a bootstrap of the residuals and Student's t "
    "(docs/compare.md says how often they cover the true value); (-) where there is none, because a game has a "
    "single session, or because resampling the sessions does not change the statistic."
)
"""Explanation below tables of statistics."""

NO_STATISTICS_NOTE = (
    "No statistics: they need a game that has reference scores and is complete in every suite, under one protocol."
)

NORMALISATIONS = {"human-normalised": human_normalised, "ratio": reference_normalised}
"""Name of a normalisation -> its function of scores and a game."""


# --- Suites ------------------------------------------------------------------------------------------------------


class Suite(NamedTuple):
    """A suite as it was read from its directory."""

    path: Path
    config: Config
    games: list[str]  # the games of suite.json that ALE has
    runs: dict[str, Run]  # game -> its run, for games that have a log point
    failures: Mapping[Path, UserError]  # absolute path of a session that failed -> its error

    @property
    def protocol(self) -> str:
        """The protocol of all games."""
        return self.config.env.resolved_protocol

    def scores(self) -> dict[str, list[float]]:
        """The raw final scores of the sessions of each game.

        A game counts if it is complete and every session has a score.
        """
        return {
            game: run.summary["session_scores"]
            for game, run in self.runs.items()
            if run.summary["complete"] and len(run.summary["session_scores"]) == self.config.sessions
        }


def read_suite(suite_dir: Path, failures: Mapping[Path, UserError] | None = None) -> Suite:
    """Reads a suite.

    Args:
        failures: absolute path of a session that has failed -> its error. None: not known.

    Raises:
        UserError: the directory holds no suite, or a file of the suite or of a run in it cannot be used.
    """
    config = read_config(suite_dir, SUITE_FILE)
    games = [game for game in read_games(suite_dir) if game in GAMES]
    runs = {}
    for game in games:
        if held_kind(suite_dir / game) == "run":
            with contextlib.suppress(NoLogPoint):
                runs[game] = read_run(suite_dir / game, config)
    return Suite(suite_dir, config, games, runs, failures or {})


def game_row(suite: Suite, game: str) -> dict[str, Any]:
    """The row of a game: column of `GAME_COLUMNS` -> value."""
    reference = next(iter(game_under(game, suite.protocol).references), None)
    row = {"game": game, "sessions": 0, "reference_score": reference and reference.score}
    run = suite.runs.get(game)
    status = ["not complete"]
    if run is not None:
        summary = run.summary
        mean = summary["mean"]
        low, high = summary["score_interval"] or (None, None)
        status = ["complete" if summary["complete"] else "not complete", left_out_text(run)]
        row |= {
            "gae_lambda": run.config.resolved_gae_lambda,
            "sessions": len(summary["sessions"]),
            "env_steps": mean["env_steps"],
            "score": summary["score"],
            "score_std": summary["score_std"],
            "score_low": low,
            "score_high": high,
            "return_mean": mean["final_return_mean"],
            "reference_normalised_score": summary["reference_normalised_score"],
            "human_normalised_score": summary["human_normalised_score"],
            "hours": mean["wall_hours"],
        }
    for session_dir, error in suite.failures.items():
        if session_dir.parent == (suite.path / game).absolute():
            status.append(f"{session_dir.name.replace('_', ' ')} failed: {error}")
    return row | {"status": "; ".join(filter(None, status))}


# --- Statistics over games ---------------------------------------------------------------------------------------


STATISTICS_COLUMNS = {
    "suite": "",
    "normalisation": "scores",
    "games": "games",
    **{name: statistic.title for name, statistic in STATISTICS.items()},
    "improvement": "P(improvement over the first)",
}
"""Column of the table of statistics -> its title. In JSON, a row also has `names` and `scores`."""


# --- Results -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Results:
    """The results of a suite, of a sweep, whose settings are suites, or of suites that are compared."""

    title: str
    suites: Mapping[str, Suite]  # by name; in a sweep by setting, such as `ppo.gamma=0.9`

    @cached_property
    def statistics(self) -> list[dict[str, Any]]:
        """The statistics of each suite under each normalisation: rows of the table of statistics.

        They are over the games that are complete in all suites. A game that lacks the reference scores of a
        normalisation is left out there, and a normalisation without a game as well. Suites of different protocols
        have nothing to compare. A statistic is an `Estimate`. A row also has the normalised scores
        `[sessions, games]`, and the names of their games.
        """
        raw = {name: suite.scores() for name, suite in self.suites.items()}
        protocol, *others = {suite.protocol for suite in self.suites.values()}
        # Sorted: their order decides which random numbers each game gets in a bootstrap.
        shared = [] if others else sorted(set.intersection(*map(set, raw.values())))
        rows = []
        for normalisation, normalise in NORMALISATIONS.items():
            games = [game for game in shared if normalise(0.0, game_under(game, protocol)) is not None]
            if not games:
                continue
            by_suite = {
                name: np.array(
                    [normalise(np.array(by_game[game]), game_under(game, protocol)) for game in games]
                ).T
                for name, by_game in raw.items()
            }
            first, *_ = by_suite.values()
            for name, scores in by_suite.items():
                row: dict[str, Any] = {"suite": name, "normalisation": normalisation, "games": len(games)}
                row |= {key: estimate(statistic, scores) for key, statistic in STATISTICS.items()}
                if scores is not first:
                    row["improvement"] = estimate(IMPROVEMENT, scores, first)
                rows.append(row | {"names": games, "scores": scores.tolist()})
        return rows

    def curves(self) -> list[tuple[str, Run]]:
        """The runs, each with the name of its suite."""
        return [(name, run) for name, suite in self.suites.items() for run in suite.runs.values()]

    def table(self) -> Table:
        """The table of games. The rows of a game in several suites stand below each other."""
        games = dict.fromkeys(game for suite in self.suites.values() for game in suite.games)
        rows = [
            {**game_row(suite, game), "suite": name if len(self.suites) > 1 else None}
            for game in games
            for name, suite in self.suites.items()
            if game in suite.games
        ]
        return Table(GAME_COLUMNS, rows)

    def sections(self) -> list[Section]:
        """The table of games, and the statistics over games."""
        notes = [*differences(self.curves()), GAMES_NOTE, *([SWEEP_NOTE] if len(self.suites) > 1 else [])]
        statistics = Table(STATISTICS_COLUMNS, self.statistics)
        note = INTERVALS_NOTE if statistics else NO_STATISTICS_NOTE
        return [Section("Games", self.table(), notes), Section("Over the complete games", statistics, [note])]

    def to_markdown(self) -> str:
        """The title and the sections in Markdown."""
        return "\n\n".join([f"# {self.title}", *(each.to_markdown() for each in self.sections())]) + "\n"


def read_results(directory: Path, failures: Mapping[Path, UserError] | None = None) -> Results:
    """Reads the results of a suite or a sweep from the metrics of its sessions.

    Args:
        failures: as for `read_suite`.

    Raises:
        UserError: as `read_suite`.
    """
    name = directory.absolute().name
    if held_kind(directory) == "sweep":
        settings = read_result(directory / SWEEP_FILE, settings=list)["settings"]
        directories = {each: directory / each for each in settings if Path(each).name == each}
    else:
        directories = {name: directory}
    suites = {each: read_suite(path, failures) for each, path in directories.items()}
    suite = next(iter(suites.values()))
    trained = f"{counted(len(suite.games), 'game')}, {counted(suite.config.sessions, 'session')}"
    budget = f"{suite.config.total_env_steps:,} env steps each"
    return Results(f"{name}: {trained} of {budget}, protocol {suite.protocol}", suites)


def save_results(results: Results, directory: Path, name: str = "results") -> None:
    """Writes NAME.md, NAME.csv and NAME.json into a directory."""
    table = results.table()
    values = {
        "games": table.rows,
        "scores": {name: suite.scores() for name, suite in results.suites.items()},
        "differences": differences(results.curves()),
        "statistics": results.statistics,
    }
    write_json(directory / f"{name}.json", values)
    table.write_csv(directory / f"{name}.csv")
    write_file(directory / f"{name}.md", results.to_markdown())
