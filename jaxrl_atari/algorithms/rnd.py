"""PPO with random network distillation (Burda et al. 2018, arXiv:1810.12894): a reward for what is new.

A predictor learns the features that a fixed random network, the target, gives each frame. Where frames are new its
error is large, and the error is added to the reward. As in the paper, it is divided by a running standard
deviation of its discounted sums:

    reward_t + coefficient * error_t / std(S),    S_t = error_t + gamma S_{t+1}

The file replaces three parts of PPO. `init` adds the predictor to the parameters and draws the target; `prepare`
adds the reward; `loss` trains the predictor with the policy, by the same optimiser, which clips both gradients
together and decays the weights of both.

Differences from the paper:

- One value function, of the sum of both rewards, with one gamma. It ends with the game, or with a life where
  `env.life_loss_terminal` is true. The paper's intrinsic reward has a value function of its own, which never ends.
- The sums S run over one rollout instead of all the past, but also from game to game. Their deviation also comes
  from where in the rollout a sum starts, so the reward is smaller than the paper's.
- Dense networks on frames of 21x21 pixels in place of convolutions, and a predictor no larger than the target.
- All samples train the predictor, and no random play comes first to estimate the statistics of the pixels.

An example of the interface: tested on a small environment, not tuned, and not compared with PPO on a game.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple, cast

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_atari.algorithm import Algorithm, Metrics, TrainState
from jaxrl_atari.config import PPOConfig
from jaxrl_atari.errors import require
from jaxrl_atari.frames import STACK, images
from jaxrl_atari.minibatches import Mean, Minibatch, Rollout
from jaxrl_atari.networks import Apply
from jaxrl_atari.ppo import PPO, Samples, discounted_sum, ppo_loss, ppo_samples

PIXELS = 21 * 21
"""Pixels of a frame as the target sees it."""

FEATURES = 64
"""Size of the embedding of a frame."""


class Embedding(nn.Module):
    """Target and predictor: pixels float32 `[..., PIXELS]` -> features `[..., FEATURES]`."""

    @nn.compact
    def __call__(self, pixels: jax.Array) -> jax.Array:
        hidden = nn.relu(nn.Dense(256, kernel_init=nn.initializers.orthogonal(2**0.5))(pixels))
        return nn.Dense(FEATURES, kernel_init=nn.initializers.orthogonal())(hidden)


class Statistics(NamedTuple):
    """Running means over the rollouts so far."""

    updates: jax.Array  # int32 []: rollouts so far
    pixel: jax.Array  # [PIXELS]: mean of each pixel
    pixel_square: jax.Array  # [PIXELS]: and of its square
    error_sum: jax.Array  # []: mean of the discounted sums of the prediction error
    error_sum_square: jax.Array  # []: and of their squares


class Extra(NamedTuple):
    """What is kept between updates: `TrainState.extra`."""

    target: Any  # parameters of the target
    statistics: Statistics


class RNDSamples(NamedTuple):
    """Samples of the loss, [T, B, ...], in a minibatch [N, ...]."""

    ppo: Samples
    pixels: jax.Array  # [T, B, PIXELS]: what a step led to, standardised
    feature: jax.Array  # [T, B, FEATURES]: what the target says of it


def init(params: Any, key: jax.Array) -> tuple[Any, Extra]:
    """`Algorithm.init`: adds the predictor to the parameters as `rnd`, and draws the target.

    Raises:
        ConfigError: the network has parameters of that name itself.
    """
    require("rnd" not in params, "algorithm", "rnd", "a network without parameters of the name `rnd`")
    pixels = jnp.zeros((1, PIXELS))
    target, predictor = (Embedding().init(each, pixels)["params"] for each in jax.random.split(key))
    empty = Statistics(
        updates=jnp.zeros((), jnp.int32),
        pixel=jnp.zeros(PIXELS),
        pixel_square=jnp.zeros(PIXELS),
        error_sum=jnp.zeros(()),
        error_sum_square=jnp.zeros(()),
    )
    return {**params, "rnd": predictor}, Extra(target, empty)


def prepare(
    state: TrainState,
    apply: Apply,
    rollout: Rollout,
    mean: Mean,
    config: PPOConfig,
    key: jax.Array,
    *,
    coefficient: float,
    decay: float,
) -> tuple[TrainState, RNDSamples, Metrics]:
    """`Algorithm.prepare`: adds the intrinsic reward to a rollout, and updates the running statistics.

    The options are those of `rnd`.
    """
    target, old = state.extra
    weight_of_new = jnp.maximum(1.0 - decay, 1.0 / (old.updates + 1))

    def running(before: jax.Array, now: jax.Array) -> jax.Array:
        return (1.0 - weight_of_new) * before + weight_of_new * now

    # What each step led to: the newest frame of step t + 1, standardised pixel by pixel.
    pixels = downscaled(images(rollout.frames[STACK:]))
    mean_of_each = jax.vmap(mean, in_axes=-1)
    pixel = running(old.pixel, mean_of_each(pixels))
    pixel_square = running(old.pixel_square, mean_of_each(jnp.square(pixels)))
    pixels = jnp.clip((pixels - pixel) / deviation(pixel, pixel_square, 1e-2), -5.0, 5.0)

    # The reward.
    feature = embed(target, pixels)
    error = prediction_error(state.params, pixels, feature)
    sums = discounted_sum(error, jnp.full_like(error, config.gamma))
    error_sum = running(old.error_sum, mean(sums))
    error_sum_square = running(old.error_sum_square, mean(jnp.square(sums)))
    intrinsic = coefficient * error / deviation(error_sum, error_sum_square, 1e-8)

    statistics = Statistics(old.updates + 1, pixel, pixel_square, error_sum, error_sum_square)
    state = dataclasses.replace(state, extra=Extra(target, statistics))
    rollout = rollout._replace(reward=rollout.reward + intrinsic)
    state, samples, metrics = ppo_samples(state, apply, rollout, mean, config, key)
    return state, RNDSamples(samples, pixels, feature), metrics | {"intrinsic_reward": mean(intrinsic)}


def loss(params: Any, apply: Apply, batch: Minibatch, config: PPOConfig) -> tuple[jax.Array, Metrics]:
    """`Algorithm.loss`: PPO's, and the prediction error."""
    samples = batch.samples
    loss_of_ppo, metrics = ppo_loss(params, apply, batch._replace(samples=samples.ppo), config)
    rnd_loss = batch.mean(prediction_error(params, samples.pixels, samples.feature))
    return loss_of_ppo + rnd_loss, metrics | {"rnd_loss": rnd_loss}


def deviation(mean: jax.Array, mean_square: jax.Array, least: float) -> jax.Array:
    """The standard deviation of numbers with this mean and mean square, and at least `least`."""
    return jnp.sqrt(jnp.maximum(mean_square - jnp.square(mean), least**2))


def downscaled(frames: jax.Array) -> jax.Array:
    """Frames as means over 4x4 pixels: uint8 `[T, B, 84, 84]` -> float32 `[T, B, PIXELS]`, from 0 to 1."""
    return nn.avg_pool(frames[..., None] / 255.0, (4, 4), (4, 4)).reshape(*frames.shape[:2], PIXELS)


def prediction_error(params: Any, pixels: jax.Array, feature: jax.Array) -> jax.Array:
    """Mean squared error of the predictor: pixels `[..., PIXELS]`, feature `[..., FEATURES]` -> `[...]`."""
    return jnp.mean(jnp.square(embed(params["rnd"], pixels) - feature), axis=-1)


def embed(params: Any, pixels: jax.Array) -> jax.Array:
    """The features of an `Embedding` with these parameters."""
    return cast(jax.Array, Embedding().apply({"params": params}, pixels))


def rnd(coefficient: float = 1.0, decay: float = 0.99) -> Algorithm:
    """PPO with random network distillation.

    Args:
        coefficient: weight of the intrinsic reward, whose discounted sums have a standard deviation of 1.
        decay: weight of the past in the running means, per update. Until an update's share of a plain mean is
            smaller than 1 - decay, which takes 1 / (1 - decay) updates, they are plain means.
    """
    return PPO._replace(init=init, prepare=partial(prepare, coefficient=coefficient, decay=decay), loss=loss)


RND = rnd()
