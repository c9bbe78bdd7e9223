"""A recurrent network: what is learned is what was played, and it learns what frames alone do not tell."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_pools import FakePool, NoisePool, games_while_learning, group_of
from small_networks import FeedForward, Recurrent, make, perturbed

from jaxrl_atari.algorithm import Mean
from jaxrl_atari.config import PPOConfig
from jaxrl_atari.ppo import log_prob_of
from jaxrl_atari.rollout import collect
from jaxrl_atari.update import apply_to_rollout, draw_minibatches, observe


@pytest.mark.parametrize("groups", [1, 2])
def test_the_policy_that_learns_says_what_the_one_that_acted_said(groups):
    """Over three rollouts with ends of games, for every minibatch: log_prob, value and bootstrap value."""
    length, num_envs = 16, 8
    params, network = make(Recurrent, NoisePool.num_actions)
    params = perturbed(params, 0.2)
    size = num_envs // groups
    made = [group_of(NoisePool(size, seed=i), network, first_env=i * size) for i in range(groups)]
    config = PPOConfig(rollout_length=length, minibatch_size=2 * length, epochs=1)
    bootstrap = None
    for number in range(3):
        rollout = collect([made], [params], jax.random.key(number), length).rollouts[0]
        if bootstrap is not None:  # the carry goes on: step 0 sees what the last rollout ended with
            np.testing.assert_allclose(rollout.value[0], bootstrap, atol=1e-5)
        bootstrap = rollout.bootstrap_value
        assert (np.asarray(rollout.age)[1:] == 0).any()
        errors = []
        for index in draw_minibatches(jax.random.key(9), rollout, config):
            seen = observe(rollout, index)
            logits, value, *_ = network.apply(params, seen)
            action, log_prob, played = (
                x.reshape(-1)[index] for x in (rollout.action, rollout.log_prob, rollout.value)
            )
            np.testing.assert_allclose(log_prob_of(logits, action), log_prob, atol=1e-5)
            np.testing.assert_allclose(value, played, atol=1e-5)
            wrong = network.apply(params, seen._replace(first=jnp.zeros_like(seen.first)))
            errors.append(float(jnp.abs(wrong.logits - logits).max()))
            assert len(set(np.asarray(index) % num_envs)) == 2  # whole environments
        assert max(errors) > 1e-3  # without the starts of games, it would be another policy
        for size in (1, 2 * length, 10 * length):
            bound = dataclasses.replace(config, minibatch_size=size)
            recomputed = apply_to_rollout(params, network.apply, rollout, Mean.over(rollout.weight), bound)
            np.testing.assert_allclose(recomputed.value[:-1], rollout.value, atol=1e-5)
            np.testing.assert_allclose(recomputed.value[-1], rollout.bootstrap_value, atol=1e-5)


class Cue(FakePool):
    """A light, left or right, that is seen in the first frame alone; the action 7 steps later must name its
    side."""

    num_actions = 2

    def __init__(self, num_envs, seed):
        super().__init__(num_envs)
        self._rng = np.random.default_rng(seed)
        self._side, self._steps = np.zeros(num_envs, int), np.zeros(num_envs, int)

    def _start(self, i):
        self._side[i], self._steps[i] = self._rng.integers(2), 0

    def _play(self, i, action):
        self._steps[i] += 1
        over = self._steps[i] == 7
        return float(over and action == self._side[i]), over, False, False

    def _frame(self, i):
        frame = np.zeros((84, 84), np.uint8)
        if self._steps[i] == 0:
            frame[:, 42 * self._side[i] : 42 * self._side[i] + 42] = 255
        frame[:7, : 10 * self._steps[i]] = 255
        return frame


@pytest.mark.parametrize("network", [Recurrent, FeedForward])
def test_memory_pays(network):
    """Stacks of four frames have forgotten the light: without memory half of the games are won, with it nearly
    all."""
    config = PPOConfig(
        rollout_length=32, minibatch_size=128, learning_rate=2e-3, gae_lambda=0.95, weight_decay=0.0
    )
    played = games_while_learning(Cue(16, seed=0), network, config, updates=60)
    means = [np.mean([game.episode_return for game in games]) for games in played]
    if network is Recurrent:
        assert np.mean(means[-5:]) > 0.9
    else:
        assert np.mean(means[-5:]) < 0.65
