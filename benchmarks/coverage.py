"""Coverage of the intervals of suites: how often a 95% interval, ours and that of rliable, has the true value.

    python benchmarks/coverage.py [--suites 400 --sessions 2 3 5 10 --games 1 5 26 57]

prints a Markdown table: a row for each number of sessions and games, a column for each statistic. A cell has the
share of the intervals of `score_statistics.estimate` that cover the true value, then that of
`bootstrap_interval`, which is rliable's, and how much wider ours are, in the median. If ours has
no interval for some of the suites, the share that has one follows in parentheses; the coverage is of those.

The games of the simulated suites have the human-normalised mean and the standard deviation over seeds that CleanRL
reports under `classic`, and normally distributed sessions. The improvement is over a suite whose scores are higher
by half of the standard deviation, in each game. The true value is that of 2,000 sessions a game.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tyro

from jaxrl_atari.envs.games import GAMES, game_under
from jaxrl_atari.report.score_statistics import (
    IMPROVEMENT,
    RESAMPLES,
    STATISTICS,
    UPPER_QUANTILE,
    Statistic,
    estimate,
)

TRUE_SESSIONS = 2000

MEASURED: dict[str, tuple[Statistic, tuple[float, ...]]] = {
    **{statistic.title: (statistic, (0.0,)) for statistic in STATISTICS.values()},
    IMPROVEMENT.title: (IMPROVEMENT, (0.0, 0.5)),
}
"""Title -> the statistic, and by how many standard deviations the scores of each of its suites are higher."""


class Game(NamedTuple):
    """A game whose sessions have normally distributed scores."""

    mean: float
    std: float

    def play(self, rng: np.random.Generator, sessions: int, shift: float) -> np.ndarray:
        """Scores of sessions `[sessions]`, higher by `shift` standard deviations."""
        return rng.normal(self.mean + shift * self.std, self.std, sessions)


def read_games(rng: np.random.Generator) -> list[Game]:
    """The games of CleanRL's table, human-normalised, in random order."""
    games = []
    for name in GAMES:
        known = game_under(name, "classic")
        if known.references and known.human and known.dqn_random:
            first = known.references[0]
            random = known.dqn_random.score
            scale = known.human.score - random
            games.append(Game((first.score - random) / scale, (first.std or 0.0) / abs(scale)))
    rng.shuffle(games)  # type: ignore[arg-type]
    return games


def bootstrap_interval(statistic: Statistic, *suites: np.ndarray) -> tuple[float, float]:
    """The interval of rliable: quantiles of the statistic over stratified resamples of the scores.

    The sessions of each game are resampled with replacement; the games are kept. With few sessions, the interval
    is too narrow.
    """
    rng = np.random.default_rng(0)
    drawn = [rng.integers(len(scores), size=(RESAMPLES, *scores.shape)) for scores in suites]
    resampled = [
        np.take_along_axis(scores[None], sessions, axis=1) for scores, sessions in zip(suites, drawn, strict=True)
    ]
    low, high = np.quantile(statistic.compute(*resampled), [1 - UPPER_QUANTILE, UPPER_QUANTILE])
    return float(low), float(high)


def measure(
    statistic: Statistic, shifts: Sequence[float], games: Sequence[Game], sessions: int, suites: int
) -> str:
    """A cell of the table: see the module's docstring."""
    rng = np.random.default_rng(0)

    def draw(count: int) -> list[np.ndarray]:
        return [np.stack([game.play(rng, count, shift) for game in games], axis=1) for shift in shifts]

    true = float(statistic.compute(*draw(TRUE_SESSIONS)))
    holds = []
    rliable_holds = []
    ratios = []
    for _ in range(suites):
        suite = draw(sessions)
        ours = estimate(statistic, *suite).interval
        theirs = bootstrap_interval(statistic, *suite)
        rliable_holds.append(theirs[0] <= true <= theirs[1])
        if ours is not None:
            holds.append(ours[0] <= true <= ours[1])
            if theirs[1] > theirs[0]:
                ratios.append((ours[1] - ours[0]) / (theirs[1] - theirs[0]))
    cell = f"{np.mean(holds):.0%}" if holds else "-"
    cell += f" / {np.mean(rliable_holds):.0%}"
    if ratios:
        cell += f", ×{np.median(ratios):.1f}"
    if len(holds) < suites:
        cell += f" ({len(holds) / suites:.0%} shown)"
    return cell


def main(
    suites: int = 400, sessions: tuple[int, ...] = (2, 3, 5, 10), games: tuple[int, ...] = (1, 5, 26, 57)
) -> None:
    """Measures how often intervals cover the true value. Prints the table, row by row.

    Args:
        suites: simulated suites for each cell of the table
        sessions: sessions of each game
        games: games of a suite
    """
    known = read_games(np.random.default_rng(0))
    print(f"| sessions per game | games | {' | '.join(MEASURED)} |")
    print(f"|{'---:|' * (2 + len(MEASURED))}")
    for each in sessions:
        for count in games:
            cells = [
                measure(statistic, shifts, known[:count], each, suites) for statistic, shifts in MEASURED.values()
            ]
            print(f"| {each} | {count} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    tyro.cli(main)
