"""Comparison of suites: statistics over the games that are complete in all of them, as text, JSON and graphs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.errors import UserError
from jaxrl_atari.report.aggregates import (
    NormalisedScores,
    SuiteStatistics,
    estimate_text,
    missing_intervals,
    normalised,
    statistics_by_name,
    statistics_rows,
    write_rliable,
)
from jaxrl_atari.report.graphs import plot_profiles
from jaxrl_atari.report.score_statistics import INTERVALS_NOTE, Estimate, probability_of_improvement
from jaxrl_atari.report.suites import Suite
from jaxrl_atari.report.tables import markdown_table
from jaxrl_atari.runs.files import write_file, write_json


class Comparison(NamedTuple):
    """A comparison of suites over the games that are complete in all of them. A name is that of a suite."""

    protocol: str  # of all suites
    budgets: dict[str, int]  # name -> env steps of each session
    games: list[str]
    scores: dict[str, NormalisedScores]
    statistics: dict[str, dict[str, SuiteStatistics]]  # name -> normalisation -> its statistics
    improvements: dict[str, dict[str, Estimate]]  # normalisation -> name -> how probably the first suite beats it

    def _statistics_under(self, normalisation: str) -> dict[str, SuiteStatistics]:
        """The statistics of each suite under a normalisation."""
        return {name: by_normalisation[normalisation] for name, by_normalisation in self.statistics.items()}

    def to_json(self) -> dict[str, Any]:
        """The content of comparison.json, apart from the games of rliable's files."""
        values: dict[str, Any] = {
            "suites": list(self.statistics),
            "protocol": self.protocol,
            "games": self.games,
        }
        for normalisation, estimates in self.improvements.items():
            values[normalisation] = {
                "suites": {
                    name: statistics.to_json()
                    for name, statistics in self._statistics_under(normalisation).items()
                },
                "probability_of_improvement": {name: estimate._asdict() for name, estimate in estimates.items()},
            }
        return values

    def to_markdown(self) -> str:
        """The content of comparison.md."""
        first = next(iter(self.statistics))
        lines = [f"# {' and '.join(self.statistics)}, protocol {self.protocol}", ""]
        lines += [f"- {name}: {budget:,} env steps a session" for name, budget in self.budgets.items()]
        for normalisation, estimates in self.improvements.items():
            by_name = self._statistics_under(normalisation)
            lines += [
                "",
                markdown_table(statistics_rows(by_name, normalisation)),
                "",
                *missing_intervals(by_name),
            ]
            for other, estimate in estimates.items():
                text = estimate_text(estimate)
                if estimate.why_none:
                    text += f", no interval: {estimate.why_none}"
                lines.append(f"Probability of improvement of {first} over {other}: {text}.")
        return "\n".join([*lines, "", INTERVALS_NOTE, ""])


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
    statistics = {name: statistics_by_name(by_normalisation) for name, by_normalisation in scores.items()}
    if not statistics[first]:
        waiting = "no game that is complete in every suite has a score to compare with; wait for one"
        raise UserError(f"{where}: {comparison_note(protocol) or waiting}")
    improvements = {}
    for normalisation in statistics[first]:
        ours = scores[first][normalisation]
        improvements[normalisation] = {
            other: probability_of_improvement(ours, scores[other][normalisation]) for other in others
        }
    budgets = {name: suite.config.total_env_steps for name, suite in suites.items()}
    return Comparison(protocol, budgets, shared, scores, statistics, improvements)


def save_comparison(comparison: Comparison, output: Path) -> None:
    """Writes comparison.md, comparison.json, suites.png, suites.svg and rliable's files into a directory."""
    plot_profiles(comparison.statistics, output)
    rliable_games = write_rliable(output, comparison.scores)
    write_json(output / "comparison.json", comparison.to_json() | {"rliable_games": rliable_games})
    write_file(output / "comparison.md", comparison.to_markdown())
