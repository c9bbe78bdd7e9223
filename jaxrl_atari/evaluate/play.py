"""Full games played with a policy, scored by their raw rewards."""

import dataclasses
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import jax
import numpy as np

from jaxrl_atari.envs import EnvPool, Episode, EpisodeCounter, make_pool
from jaxrl_atari.errors import require
from jaxrl_atari.evaluate.policy import Policy
from jaxrl_atari.fast.frames import empty_window, push_frame


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """The games of an evaluation, in the order in which they ended."""

    games: tuple[Episode, ...]

    @property
    def returns(self) -> np.ndarray:
        """float64 [episodes]."""
        return np.array([game.episode_return for game in self.games])

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        """Population standard deviation of the returns over these games."""
        return float(self.returns.std())


def play(policy: Policy, pool: EnvPool, quota: np.ndarray, seed: int, greedy: bool) -> Iterator[list[Episode]]:
    """Plays until environment i has finished `quota[i]` games.

    Yields after the reset and after each step: the games that just ended, without those beyond the quota.
    """
    remaining, episodes, number = quota.copy(), EpisodeCounter(pool.num_envs), 0
    with jax.default_device(policy.device):  # everything: a GPU that trains has no part in an evaluation on the CPU
        key = jax.random.fold_in(jax.random.key(seed), 2**31 + 1)  # a session of that seed uses 0 to 2**31
        step = pool.reset()
        window, age = jax.device_put(empty_window(pool.num_envs), policy.device)
        window, age, stacks = push_frame(window, age, step.frame, step.first)
        yield []
        while remaining.any():
            step = pool.step(policy.act(stacks, jax.random.fold_in(key, number), greedy))
            window, age, stacks = push_frame(window, age, step.frame, step.first)
            number += 1
            ended = [game for game in episodes.count(step) if remaining[game.env]]
            for game in ended:
                remaining[game.env] -= 1
            yield ended


def run_evaluation(
    policy: Policy,
    episodes: int = 32,
    seed: int = 0,
    greedy: bool = False,
    num_envs: int = 16,
    on_game: Callable[[Episode], None] = lambda game: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> EvaluationResult:
    """Plays full games with raw scores, under the protocol that the policy was trained with.

    Each environment plays a number of games that is fixed beforehand. Taking the first `episodes` games to end, from
    whichever environment, would favour short games, which are mostly the bad ones.

    Args:
        episodes: number of games in all.
        seed: of the games and the actions. The same seed, `num_envs` and device give the same games.
        greedy: take the most probable action instead of sampling.
        num_envs: games played at once.
        on_game: called with each game as it ends.
        cancelled: asked at each step.

    Raises:
        CancelledError: `cancelled()` was true.
        ConfigError: a number that is not possible.
    """
    require(episodes >= 1, "episodes", episodes, "a whole number >= 1")
    require(num_envs >= 1, "num_envs", num_envs, "a whole number >= 1")
    require(0 <= seed < 2**32, "seed", seed, "a whole number from 0 to 4294967295")
    num_envs = min(num_envs, episodes)
    quota = np.full(num_envs, episodes // num_envs) + (np.arange(num_envs) < episodes % num_envs)
    games: list[Episode] = []
    env = policy.config.env
    pool = make_pool(env.backend, env.game_name, num_envs, seed=seed, num_threads=env.num_threads, rules=env.rules)
    try:
        for ended in play(policy, pool, quota, seed, greedy):
            if cancelled():
                raise CancelledError
            for game in ended:
                games.append(game)
                on_game(game)
    finally:
        pool.close()
    return EvaluationResult(tuple(games))
