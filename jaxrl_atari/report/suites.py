"""Results of suites: the table of games, aggregates over games, comparisons, and scores for rliable."""

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_atari.config import Config
from jaxrl_atari.envs.games import GAMES, game_under
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.errors import DamagedMetrics, NoLogPoint, UserError
from jaxrl_atari.output import counted
from jaxrl_atari.report.graphs import plot_profiles
from jaxrl_atari.report.metrics import human_normalised, reference_normalised
from jaxrl_atari.report.statistics import INTERVALS, STATISTICS, Scores, aggregate, probability_of_improvement
from jaxrl_atari.report.summary import Run, read_run, trial_summary
from jaxrl_atari.report.text import left_out_text, markdown_table, score_text
from jaxrl_atari.runs.files import read_json, write_file, write_json
from jaxrl_atari.runs.layout import SUITE_FILE, TRIAL_FILE, VERIFIED_FILE, is_run
from jaxrl_atari.runs.run_dir import read_config, read_games

NORMALISATIONS = {"human-normalised": human_normalised, "ratio": reference_normalised}
"""Name of a normalisation -> its function of scores and a game."""

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
    "sessions: those that count, which are the finished ones once one has finished; the status names the others. "
    "reference: PPO after 10,000,000 env steps of the same protocol. "
    "ratio: (ours - random) / (reference - random), which is meaningful for negative scores too. "
    "human-normalised: (ours - random) / (human - random), with the random and human scores of DQN Zoo. "
    "hours and env steps: mean over these sessions. "
    "A game in which a session has no score is left out of the statistics over games."
)
"""Explanation below the table of games."""


class Suite(NamedTuple):
    """The content of a suite directory."""

    path: Path
    config: Config
    description: dict[str, Any]  # the content of suite.json
    games: list[str]  # only games that ALE has
    runs: dict[str, Run]  # game -> its run, for games that have a log point
    summaries: dict[str, dict[str, Any]]  # game -> the `trial_summary` of its run
    damaged: dict[str, str]  # game -> why its log points cannot be read

    def scores(self) -> dict[str, list[float]]:
        """Game -> raw final scores of its sessions, for complete games in which every session has a score."""
        found = {}
        for game, run in self.runs.items():
            scores = self.summaries[game]["session_scores"]
            if run.is_complete(self.config) and len(scores) == len(run.tables):
                found[game] = scores
        return found


def read_suite(suite_dir: Path) -> Suite:
    """Reads a suite.

    Raises:
        UserError: the directory holds no suite, or its suite.json or a config.json cannot be used.
    """
    config = read_config(suite_dir, SUITE_FILE)
    description = read_json(suite_dir / SUITE_FILE)
    games = [game for game in read_games(suite_dir) if game in GAMES]
    runs = {}
    damaged = {}
    for game in filter(lambda game: is_run(suite_dir / game), games):
        try:
            runs[game] = read_run(suite_dir / game, config.sessions)
        except DamagedMetrics as error:
            damaged[game] = str(error)
        except NoLogPoint:
            continue
    summaries = {game: trial_summary(run) for game, run in runs.items()}
    return Suite(suite_dir, config, description, games, runs, summaries, damaged)


def normalised(scores: Scores, protocol: str) -> dict[str, dict[str, np.ndarray]]:
    """Normalisation -> game -> normalised scores. Games without the reference scores it needs are left out."""
    kinds = {}
    for kind, normalise in NORMALISATIONS.items():
        values = {game: normalise(np.array(scores[game]), game_under(game, protocol)) for game in scores}
        kinds[kind] = {game: value for game, value in values.items() if value is not None}
    return kinds


def aggregates(scores: Mapping[str, Scores]) -> dict[str, dict[str, Any]]:
    """Name -> the `aggregate` of its scores. Names without a game are left out."""
    return {name: aggregate(games) for name, games in scores.items() if games}


def write_rliable(directory: Path, suites: Mapping[str, Mapping[str, Scores]]) -> dict[str, list[str]]:
    """Writes scores_human_normalised.npz and scores_ratio.npz, for rliable.

    `dict(numpy.load(FILE))` is the dictionary that rliable takes: name of a suite -> scores `[sessions, games]`.

    Args:
        suites: name -> result of `normalised`. All have the same games.

    Returns:
        Normalisation -> the games in the order of the columns.
    """
    columns = {}
    first = next(iter(suites.values()))
    for kind in NORMALISATIONS:
        columns[kind] = sorted(first[kind])
        arrays: dict[str, Any] = {}
        for name, scores in suites.items():
            arrays[name] = np.array([scores[kind][game] for game in columns[kind]]).T
        content = io.BytesIO()
        np.savez(content, **arrays)
        write_file(directory / f"scores_{kind.replace('-', '_')}.npz", content.getvalue())
    return columns


# --- Tables ------------------------------------------------------------------------------------------------------


def game_rows(suite: Suite, failures: Mapping[str, str]) -> list[dict[str, Any]]:
    """The table of games: for each game a row with the keys of `GAME_COLUMNS`. An unknown value is None.

    Args:
        failures: game -> why it failed.
    """
    rows = []
    for game in suite.games:
        references = game_under(game, suite.config.env.resolved_protocol).references
        row: dict[str, Any] = dict.fromkeys(GAME_COLUMNS) | {"game": game, "sessions": 0, "status": "waiting"}
        row["reference_score"] = references[0].score if references else None
        if game in suite.runs:
            run = suite.runs[game]
            summary = suite.summaries[game]
            row |= {name: summary[name] for name in GAME_COLUMNS if name in summary}
            row["score_low"], row["score_high"] = summary["score_interval"] or (None, None)
            row |= {
                "gae_lambda": run.config.resolved_gae_lambda,
                "sessions": len(summary["sessions"]),
                "env_steps": summary["mean"]["env_steps"],
                "hours": summary["mean"]["wall_hours"],
                "status": "complete" if run.is_complete(suite.config) else "not complete",
            }
            left_out = left_out_text(summary)
            if left_out:
                row["status"] += f"; {left_out}"
            if all((session_dir / VERIFIED_FILE).is_file() for session_dir in run.tables):
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
        "aggregates": aggregates(normalised(scores, protocol)),
    }


def text_rows(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The rows of `game_rows` as text, with a header."""
    cells = ([value if isinstance(value, str) else score_text(value) for value in row.values()] for row in rows)
    return [[*GAME_COLUMNS.values()], *cells]


def estimate_text(value: float, interval: Sequence[float] | None) -> str:
    """A statistic and its interval as text: `0.85 (0.80 to 0.91)`, or `0.85 (-)` without an interval."""
    bounds = "-" if interval is None else " to ".join(map(score_text, interval))
    return f"{score_text(value)} ({bounds})"


def aggregate_rows(aggregated: Mapping[str, Mapping[str, Any]], heading: str) -> list[list[str]]:
    """The table of `aggregates`: a header, which starts with `heading`, and a row for each name."""
    rows = [[heading, "games", *(statistic.title for statistic in STATISTICS.values())]]
    for name, values in aggregated.items():
        cells = [estimate_text(values[key], values[f"{key}_interval"]) for key in STATISTICS]
        rows.append([name, str(values["games"]), *cells])
    return rows


def missing_intervals(aggregated: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Why statistics of `aggregates` lack intervals: a line for each reason, which names the statistics."""
    lacking: dict[str, list[str]] = {}  # reason -> titles
    for name, values in aggregated.items():
        for key, statistic in STATISTICS.items():
            reason = values[f"{key}_why_none"]
            if reason:
                lacking.setdefault(reason, []).append(f"{statistic.title} ({name})")
    lines = []
    for reason, titles in lacking.items():
        all_lack_it = len(titles) == len(aggregated) * len(STATISTICS)
        what = "No intervals" if all_lack_it else f"No interval of the {', '.join(titles)}"
        lines.append(f"{what}: {reason}.")
    return lines


class SuiteResults(NamedTuple):
    """The results of a suite."""

    suite: Suite
    values: dict[str, Any]  # see `result_values`
    text: str  # the content of results.md


def suite_results(suite_dir: Path, failures: Mapping[str, str]) -> SuiteResults:
    """Reads the results of a suite; writes nothing.

    Args:
        failures: game -> why it failed.

    Raises:
        UserError: as `read_suite`.
    """
    suite = read_suite(suite_dir)
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
        parts.append(markdown_table(aggregate_rows(values["aggregates"], "over the complete games")))
        parts += [*missing_intervals(values["aggregates"]), INTERVALS]
    else:
        parts.append(
            f"No aggregates: {comparison_note(protocol) or 'no complete game has a score to compare with'}."
        )
    return SuiteResults(suite, values, "\n\n".join(parts) + "\n")


def save_results(found: SuiteResults) -> None:
    """Writes results.md, results.csv, results.json, rliable's files, and the trial.json of each game."""
    suite_dir = found.suite.path
    values = found.values
    for game in found.suite.runs:
        whole_run = read_run(suite_dir / game)  # which may have more sessions than the suite
        write_json(suite_dir / game / TRIAL_FILE, trial_summary(whole_run))
    scores = normalised(values["scores"], values["protocol"])
    rliable_games = write_rliable(suite_dir, {suite_dir.absolute().name: scores})
    write_json(suite_dir / "results.json", values | {"rliable_games": rliable_games})
    file = io.StringIO()
    writer = csv.DictWriter(file, GAME_COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(values["games"])
    write_file(suite_dir / "results.csv", file.getvalue())
    write_file(suite_dir / "results.md", found.text)


# --- Comparison --------------------------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """A comparison of suites over the games that are complete in all of them."""

    scores: dict[str, dict[str, dict[str, np.ndarray]]]  # name of a suite -> result of `normalised`
    aggregates: dict[str, dict[str, dict[str, Any]]]  # name of a suite -> result of `aggregates`
    values: dict[str, Any]  # the content of comparison.json
    text: str  # the content of comparison.md


def compare_suites(suites: Mapping[str, Suite]) -> Comparison:
    """Compares suites, which are given by their names; writes nothing.

    Raises:
        UserError: the suites have no complete game in common, differ in protocol, or lack reference scores.
    """
    first, *others = suites
    where = " and ".join(str(suite.path) for suite in suites.values())
    protocol, *more = sorted({suite.config.env.resolved_protocol for suite in suites.values()})
    if more:
        raise UserError(f"{where}: not compared: {protocol} and {more[0]} are different protocols")
    raw = {name: suite.scores() for name, suite in suites.items()}
    shared = sorted(set.intersection(*map(set, raw.values())))
    scores = {name: normalised({game: games[game] for game in shared}, protocol) for name, games in raw.items()}
    described = {name: aggregates(kinds) for name, kinds in scores.items()}
    if not described[first]:
        raise UserError(
            f"{where}: no game that is complete in every suite has a score to compare with; wait for one"
        )
    values: dict[str, Any] = {"suites": list(suites), "protocol": protocol, "games": shared}
    lines = [f"# {' and '.join(suites)}, protocol {protocol}", ""]
    lines += [f"- {name}: {suite.config.total_env_steps:,} env steps a session" for name, suite in suites.items()]
    for kind in described[first]:
        aggregated = {name: kinds[kind] for name, kinds in described.items()}
        chances = {other: probability_of_improvement(scores[first][kind], scores[other][kind]) for other in others}
        values[kind] = {
            "suites": aggregated,
            "probability_of_improvement": {other: chance._asdict() for other, chance in chances.items()},
        }
        lines += ["", markdown_table(aggregate_rows(aggregated, kind)), "", *missing_intervals(aggregated)]
        for other, chance in chances.items():
            text = estimate_text(chance.value, chance.interval)
            if chance.why_none:
                text += f", no interval: {chance.why_none}"
            lines.append(f"Probability of improvement of {first} over {other}: {text}.")
    return Comparison(scores, described, values, "\n".join([*lines, "", INTERVALS, ""]))


def save_comparison(comparison: Comparison, output: Path) -> None:
    """Writes comparison.md, comparison.json, suites.png, suites.svg and rliable's files into a directory."""
    plot_profiles(comparison.aggregates, output)
    rliable_games = write_rliable(output, comparison.scores)
    write_json(output / "comparison.json", comparison.values | {"rliable_games": rliable_games})
    write_file(output / "comparison.md", comparison.text)
