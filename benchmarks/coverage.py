"""Coverage of the intervals of suites: how often a 95% interval of the stratified bootstrap holds the true figure.

    python benchmarks/coverage.py

prints a row for each figure and number of sessions, a column for each number of games, in percent of 400 simulated
suites. Their games have the human-normalised mean and the standard deviation over seeds that CleanRL reports under
`classic`, and normally distributed sessions. The improvement is over a suite whose scores are higher by half of the
standard deviation, in each game. Takes about 20 minutes on one core.
"""

from functools import partial
from typing import Any

import numpy as np

from jaxrl_atari.envs.games import GAMES, comparable
from jaxrl_atari.report.statistics import FIGURES, estimate, improvement

SUITES = 400


def main() -> None:
    """Prints the table."""
    rng, games = np.random.default_rng(0), []
    for name in GAMES:
        game = comparable(name, "classic")
        if game.references and game.human and game.dqn_random:
            first, random = game.references[0], game.dqn_random.score
            scale = game.human.score - random
            games.append(((first.score - random) / scale, (first.std or 0.0) / abs(scale)))
    rng.shuffle(games)

    def draw(count: int, sessions: int, shift: float = 0.0) -> dict[str, np.ndarray]:
        return {str(i): rng.normal(mean + shift * std, std, sessions) for i, (mean, std) in enumerate(games[:count])}

    figures: dict[str, Any] = {name: (figure, (0.0,)) for name, (_, figure) in FIGURES.items()}
    figures["P(improvement)"] = (improvement, (0.0, 0.5))
    for name, (figure, shifts) in figures.items():
        for sessions in (2, 3, 4, 5, 10):
            cells = []
            for count in (1, 5, 26, 57):
                truth = partial(draw, count, 1000)
                true = float(figure(*([*truth(shift).values()] for shift in shifts)))
                found = [estimate(figure, *(draw(count, sessions, s) for s in shifts)).interval for _ in range(SUITES)]
                cells.append(f"{np.mean([bool(i) and i[0] <= true <= i[1] for i in found]):>5.0%}")
            print(f"{name:>15} {sessions:>3}", *cells, flush=True)


if __name__ == "__main__":
    main()
