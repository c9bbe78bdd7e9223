"""Learning: from pixels to the optimum on a game of seconds."""

from functools import partial

import jax
import numpy as np
from fake_pools import Corridor, group_of
from small_networks import FeedForward, make

from jaxrl_atari.config import PPOConfig
from jaxrl_atari.ppo import PPO
from jaxrl_atari.rollout import collect
from jaxrl_atari.update import init_train_state, update


def test_learns_to_walk_to_the_lamp():
    """Chance reaches the lit end in half of the games after 4 steps on average; the optimum always, in 2 steps."""
    length, num_envs = 16, 8
    config = PPOConfig(rollout_length=length, minibatch_size=32, learning_rate=2.5e-4, gae_lambda=0.95)
    params, network = make(FeedForward, Corridor.num_actions)
    state = init_train_state(params, config, PPO, jax.random.key(0))
    learn = jax.jit(partial(update, apply=network.apply, algorithm=PPO), donate_argnums=0)
    group = group_of(Corridor(num_envs, seed=0), network)
    means = []
    for number in range(20):
        act_key, update_key = jax.random.split(jax.random.fold_in(jax.random.key(1), number))
        collected = collect([[group]], [state.params], act_key, length)
        state, _ = learn(state, collected.rollouts[0], config, update_key)
        means.append(np.mean(collected.games, axis=0))
    _, _, returns, lengths, _ = np.array(means).T
    assert returns[:2].mean() < 0.75
    assert returns[-5:].mean() > 0.9
    assert lengths[-5:].mean() < 3.0
