"""Random network distillation finds a reward that PPO does not."""

from dataclasses import replace

import numpy as np
from fake_pools import FakePool, games_while_learning
from small_networks import FeedForward

from jaxrl_atari.algorithm import find_algorithm
from jaxrl_atari.config import PPOConfig


class Chain(FakePool):
    """A walk of at most 60 steps on 10 cells, from the left end. Only the right end gives a reward, and ends the
    game.

    In each cell one of 4 actions goes right, and the frame does not show which; the others go left. Random play
    reaches the right end in about one of a thousand games.
    """

    num_actions = 4
    CELLS, STEPS = 10, 60

    def __init__(self, num_envs, seed):
        super().__init__(num_envs)
        self._right = np.random.default_rng(seed).integers(self.num_actions, size=self.CELLS)
        self._place, self._steps = np.zeros(num_envs, int), np.zeros(num_envs, int)

    def _start(self, i):
        self._place[i] = self._steps[i] = 0

    def _play(self, i, action):
        self._steps[i] += 1
        right = action == self._right[self._place[i]]
        self._place[i] = self._place[i] + 1 if right else max(0, self._place[i] - 1)
        found = self._place[i] == self.CELLS - 1
        return float(found), bool(found), bool(not found and self._steps[i] == self.STEPS), False

    def _frame(self, i):
        frame = np.zeros((84, 84), np.uint8)
        x = 8 * self._place[i]
        frame[28:56, x : x + 8] = 255
        return frame


def games_won(name):
    """Share of the games of the last ten rollouts that found the reward."""
    algorithm = find_algorithm(name)
    config = PPOConfig(
        rollout_length=64, minibatch_size=256, learning_rate=1e-3, gae_lambda=0.95, weight_decay=0.0
    )
    config = replace(config, coefficients=algorithm.coefficients)
    played = games_while_learning(Chain(16, seed=0), FeedForward, config, 80, algorithm, first_seed=1)
    won = [[game.episode_return for game in games] for games in played]
    return float(np.mean(np.concatenate(won[-10:])))


def test_rnd_finds_a_reward_that_ppo_does_not():
    assert games_won("ppo") < 0.05
    assert games_won("rnd") > 0.5
