"""Comparison of suites: statistics over the games that are complete in all of them, as text, JSON and graphs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.errors import UserError
from jaxrl_atari.report.aggregates import (
    SuiteStatistics,
    estimate_text,
    missing_intervals,
    normalised,
    statistics_by_name,
    statistics_json,
    statistics_rows,
    write_rliable,
)
from jaxrl_atari.report.graphs import plot_profiles
from jaxrl_atari.report.score_statistics import INTERVALS, probability_of_improvement
from jaxrl_atari.report.suites import Suite
from jaxrl_atari.report.text import markdown_table
from jaxrl_atari.runs.files import write_file, write_json


class Comparison(NamedTuple):
    """A comparison of suites over the games that are complete in all of them."""

    scores: dict[str, dict[str, dict[str, np.ndarray]]]  # name of a suite -> result of `normalised`
    statistics: dict[str, dict[str, SuiteStatistics]]  # name of a suite -> normalisation -> its statistics
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
    statistics = {name: statistics_by_name(kinds) for name, kinds in scores.items()}
    if not statistics[first]:
        waiting = "no game that is complete in every suite has a score to compare with; wait for one"
        raise UserError(f"{where}: {comparison_note(protocol) or waiting}")
    values: dict[str, Any] = {"suites": list(suites), "protocol": protocol, "games": shared}
    lines = [f"# {' and '.join(suites)}, protocol {protocol}", ""]
    lines += [f"- {name}: {suite.config.total_env_steps:,} env steps a session" for name, suite in suites.items()]
    for kind in statistics[first]:
        suite_statistics = {name: kinds[kind] for name, kinds in statistics.items()}
        ours = scores[first][kind]
        improvements = {other: probability_of_improvement(ours, scores[other][kind]) for other in others}
        values[kind] = {
            "suites": statistics_json(suite_statistics),
            "probability_of_improvement": {other: estimate._asdict() for other, estimate in improvements.items()},
        }
        lines += [
            "",
            markdown_table(statistics_rows(suite_statistics, kind)),
            "",
            *missing_intervals(suite_statistics),
        ]
        for other, estimate in improvements.items():
            text = estimate_text(estimate)
            if estimate.why_none:
                text += f", no interval: {estimate.why_none}"
            lines.append(f"Probability of improvement of {first} over {other}: {text}.")
    return Comparison(scores, statistics, values, "\n".join([*lines, "", INTERVALS, ""]))


def save_comparison(comparison: Comparison, output: Path) -> None:
    """Writes comparison.md, comparison.json, suites.png, suites.svg and rliable's files into a directory."""
    plot_profiles(comparison.statistics, output)
    rliable_games = write_rliable(output, comparison.scores)
    write_json(output / "comparison.json", comparison.values | {"rliable_games": rliable_games})
    write_file(output / "comparison.md", comparison.text)
