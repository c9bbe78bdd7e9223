"""Learning: from pixels to the optimum on a game of seconds."""

import numpy as np
from fake_pools import Corridor, games_while_learning
from small_networks import FeedForward

from jaxrl_atari.config import PPOConfig


def test_learns_to_walk_to_the_lamp():
    """Chance reaches the lit end in half of the games after 4 steps on average; the optimum always, in 2 steps."""
    config = PPOConfig(rollout_length=16, minibatch_size=32, learning_rate=2.5e-4, gae_lambda=0.95)
    played = games_while_learning(Corridor(8, seed=0), FeedForward, config, updates=20)
    means = [np.mean(games, axis=0) for games in played]
    _, _, returns, lengths, _ = np.array(means).T
    assert returns[:2].mean() < 0.75
    assert returns[-5:].mean() > 0.9
    assert lengths[-5:].mean() < 3.0
