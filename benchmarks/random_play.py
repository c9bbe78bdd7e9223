"""Returns of uniformly random play under the protocol `classic`, for jaxrl_atari/envs/classic_scores.csv.

    python benchmarks/random_play.py

plays 30 full games of each game in the table and writes their mean return into its column `random_classic_mean`.
Games that have a value there are left out. Each of 30 environments plays its first game to the end: taking the
first 30 games that end would favour short ones. It may take hours.
"""

import csv
from pathlib import Path

import numpy as np

import jaxrl_atari.envs
from jaxrl_atari.config import EnvConfig
from jaxrl_atari.envs import EpisodeCounter, make_pool

TABLE = Path(jaxrl_atari.envs.__file__).with_name("classic_scores.csv")
GAMES_EACH = 30


def random_returns(game: str) -> list[float]:
    """Returns of the first game of each environment."""
    pool = make_pool(EnvConfig(game=game, protocol="classic"), GAMES_EACH, seed=0)
    random = np.random.default_rng(0)
    counter = EpisodeCounter(GAMES_EACH)
    counter.count(pool.reset())
    returns: dict[int, float] = {}  # environment -> return of its first game
    while len(returns) < GAMES_EACH:
        actions = random.integers(pool.num_actions, size=GAMES_EACH)
        for finished in counter.count(pool.step(actions)):
            returns.setdefault(finished.env, finished.episode_return)
    pool.close()
    return list(returns.values())


def main() -> None:
    """Fills in the table."""
    rows = list(csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines()))
    for row in rows:
        if row["random_classic_mean"]:
            continue
        returns = random_returns(row["game"])
        row["random_classic_mean"] = f"{np.mean(returns):.2f}"
        print(row["game"], row["random_classic_mean"], flush=True)
        with TABLE.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()
