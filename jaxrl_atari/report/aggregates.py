"""The statistics over the games of a suite: records of them, their tables, and files for rliable."""

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_atari.envs.games import game_under
from jaxrl_atari.report.metrics import human_normalised, reference_normalised
from jaxrl_atari.report.score_statistics import (
    STATISTICS,
    Estimate,
    Scores,
    estimate,
    share_statistic,
)
from jaxrl_atari.report.tables import number_text
from jaxrl_atari.runs.files import write_file

NORMALISATIONS = {"human-normalised": human_normalised, "ratio": reference_normalised}
"""Name of a normalisation -> its function of scores and a game."""

NormalisedScores = dict[str, dict[str, np.ndarray]]
"""Normalisation -> game -> normalised scores of its sessions."""


class ProfilePoint(NamedTuple):
    """A point of a performance profile."""

    threshold: float
    share: float  # of the scores above the threshold
    low: float | None  # the ends of the share's interval; None where it has none
    high: float | None


class SuiteStatistics(NamedTuple):
    """The statistics of a suite over its games."""

    games: int  # number of games
    aggregates: dict[str, Estimate]  # name in `STATISTICS` -> the statistic with its interval
    profile: list[ProfilePoint]  # by ascending threshold

    def to_json(self) -> dict[str, Any]:
        """These statistics as in results.json and comparison.json.

        The keys of an aggregate are, for example, `iqm`, `iqm_interval` and `iqm_why_none` (empty with an
        interval). A point of the `profile` is a list of its four values.
        """
        values: dict[str, Any] = {"games": self.games}
        for name, aggregate in self.aggregates.items():
            values[name] = aggregate.value
            values[f"{name}_interval"] = aggregate.interval
            values[f"{name}_why_none"] = aggregate.why_none
        values["profile"] = [list(point) for point in self.profile]
        return values


def suite_statistics(scores: Scores) -> SuiteStatistics:
    """All `STATISTICS` of a suite and its performance profile."""
    aggregates = {name: estimate(statistic, scores) for name, statistic in STATISTICS.items()}
    lowest = min(0.0, *map(np.min, scores.values()))
    highest = max(1.0, *map(np.max, scores.values()))
    profile = []
    for threshold in np.linspace(lowest, highest, 51).tolist():
        share = estimate(share_statistic(threshold), scores)
        low, high = share.interval or (None, None)
        profile.append(ProfilePoint(threshold, share.value, low, high))
    return SuiteStatistics(len(scores), aggregates, profile)


def normalised(scores: Scores, protocol: str) -> NormalisedScores:
    """Normalises scores in each way.

    A game that lacks the reference scores of a normalisation is left out there.
    """
    by_normalisation = {}
    for normalisation, normalise in NORMALISATIONS.items():
        values = {game: normalise(np.array(scores[game]), game_under(game, protocol)) for game in scores}
        by_normalisation[normalisation] = {game: value for game, value in values.items() if value is not None}
    return by_normalisation


def statistics_by_name(scores: Mapping[str, Scores]) -> dict[str, SuiteStatistics]:
    """The `suite_statistics` of scores by their name, for example the name of a normalisation.

    A name without a game is left out.
    """
    return {name: suite_statistics(games) for name, games in scores.items() if games}


def write_rliable(directory: Path, suites: Mapping[str, Mapping[str, Scores]]) -> dict[str, list[str]]:
    """Writes scores_human_normalised.npz and scores_ratio.npz for rliable.

    rliable takes `dict(numpy.load(FILE))`: name of a suite -> scores `[sessions, games]`.

    Args:
        suites: name -> result of `normalised`. All have the same games.

    Returns:
        Normalisation -> games, in the order of the columns.
    """
    columns = {}
    first = next(iter(suites.values()))
    for normalisation in NORMALISATIONS:
        columns[normalisation] = sorted(first[normalisation])
        content = io.BytesIO()
        # `numpy.savez` takes the names as keywords, and some of them are its own.
        with zipfile.ZipFile(content, "w") as archive:
            for name, scores in suites.items():
                with archive.open(f"{name}.npy", "w") as member:
                    np.lib.format.write_array(
                        member, np.array([scores[normalisation][game] for game in columns[normalisation]]).T
                    )
        write_file(directory / f"scores_{normalisation.replace('-', '_')}.npz", content.getvalue())
    return columns


def estimate_text(estimated: Estimate) -> str:
    """A statistic and its interval as text: `0.85 (0.80 to 0.91)`, or `0.85 (-)` without an interval."""
    bounds = "-" if estimated.interval is None else " to ".join(map(number_text, estimated.interval))
    return f"{number_text(estimated.value)} ({bounds})"


def statistics_rows(by_name: Mapping[str, SuiteStatistics], heading: str) -> list[list[str]]:
    """The table of `statistics_by_name`: a header, which starts with `heading`, and a row for each name."""
    rows = [[heading, "games", *(statistic.title for statistic in STATISTICS.values())]]
    for name, statistics in by_name.items():
        cells = [estimate_text(statistics.aggregates[key]) for key in STATISTICS]
        rows.append([name, str(statistics.games), *cells])
    return rows


def missing_intervals(by_name: Mapping[str, SuiteStatistics]) -> list[str]:
    """Why statistics lack intervals: a line for each reason, with the titles of its statistics.

    Args:
        by_name: the result of `statistics_by_name`.
    """
    lacking: dict[str, list[str]] = {}  # reason -> titles
    for name, statistics in by_name.items():
        for key, aggregate in statistics.aggregates.items():
            if aggregate.why_none:
                titles = lacking.setdefault(aggregate.why_none, [])
                titles.append(f"{STATISTICS[key].title} ({name})")
    lines = []
    for reason, titles in lacking.items():
        all_lack_it = len(titles) == len(by_name) * len(STATISTICS)
        what = "No intervals" if all_lack_it else f"No interval of the {', '.join(titles)}"
        lines.append(f"{what}: {reason}.")
    return lines
