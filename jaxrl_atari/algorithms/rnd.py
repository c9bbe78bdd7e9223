"""PPO with random network distillation (Burda et al. 2018, arXiv:1810.12894): a reward for what is new.

A predictor learns the features that a fixed random network, the target, computes for each frame. The error of the
predictor is large where frames are new, and it is added to the reward:

    reward_t + intrinsic_reward * error_t / sqrt(running mean of error^2)

The file replaces three parts of PPO. `init` adds the predictor to the parameters and draws the target. `prepare`
adds the reward. `loss` trains the predictor together with the policy, so both gradients are clipped as one.

Differences from the paper:

- One value function learns the sum of both rewards, so both share one discount, `ppo.gamma` (the paper: 0.999, and
  0.99 for the intrinsic reward). Their return ends with the game, and by default with each life
  (`env.life_loss_terminal`), whereas the paper's intrinsic return ends with neither.
- Target and predictor are dense networks on frames of 21x21 pixels instead of convolutional networks.
- The error is divided by its running root mean square instead of the standard deviation of its discounted sums.
- The statistics start with the first rollout and not with random play.
- Every sample trains the predictor.

The file is an example of the interface. It is not tuned, and was not compared with PPO on a game.
"""

from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.core import FrozenDict

from jaxrl_atari.algorithm import Mean, Metrics, Minibatch, Rollout, TrainState
from jaxrl_atari.config import PPOConfig
from jaxrl_atari.frames import STACK, as_images
from jaxrl_atari.networks import Apply
from jaxrl_atari.ppo import PPO, Samples, ppo_loss, ppo_prepare

PIXELS = 21 * 21
"""Pixels of a frame as the target sees it."""

FEATURES = 64
"""Size of the output of target and predictor."""


class Embedding(nn.Module):
    """Target and predictor: pixels float32 [..., PIXELS] -> features [..., FEATURES]."""

    @nn.compact
    def __call__(self, pixels: jax.Array) -> jax.Array:
        hidden = nn.relu(nn.Dense(256, kernel_init=nn.initializers.orthogonal(2**0.5))(pixels))
        return nn.Dense(FEATURES, kernel_init=nn.initializers.orthogonal())(hidden)


class Statistics(NamedTuple):
    """Running means over the rollouts so far."""

    updates: jax.Array  # int32 []: rollouts so far
    pixel: jax.Array  # [PIXELS]: mean of each pixel
    pixel_square: jax.Array  # [PIXELS]: mean of the square of each pixel
    error_square: jax.Array  # []: mean of the squared prediction error


class Extra(NamedTuple):
    """State that is kept between updates: `TrainState.extra`."""

    target: Any  # parameters of the target
    statistics: Statistics


class RNDSamples(NamedTuple):
    """Samples of the loss, [T, B, ...]."""

    ppo: Samples
    pixels: jax.Array  # [T, B, PIXELS]: the frame after each step, standardised
    target_features: jax.Array  # [T, B, FEATURES]: the output of the target


def init(params: Any, key: jax.Array) -> tuple[Any, Extra]:
    """`Algorithm.init`: adds the predictor to the parameters as `rnd`, and draws the target."""
    pixels = jnp.zeros((1, PIXELS))
    target, predictor = (Embedding().init(each, pixels)["params"] for each in jax.random.split(key))
    nothing = Statistics(jnp.zeros((), jnp.int32), jnp.zeros(PIXELS), jnp.zeros(PIXELS), jnp.zeros(()))
    return {**params, "rnd": predictor}, Extra(target, nothing)


def prepare(
    state: TrainState, apply: Apply, rollout: Rollout, mean: Mean, options: PPOConfig, key: jax.Array
) -> tuple[TrainState, RNDSamples, Metrics]:
    """`Algorithm.prepare`: adds the intrinsic reward to a rollout, and updates the running statistics."""
    target, old = state.extra
    # The weight of rollout n in the running means is 1 / n, as in a plain mean, until 1 / n falls below 1 - decay.
    # From then on it is 1 - decay.
    share = jnp.maximum(1.0 - options.coefficients["decay"], 1.0 / (old.updates + 1))

    def running(before: jax.Array, now: jax.Array) -> jax.Array:
        return (1.0 - share) * before + share * now

    # The frame after each step, which is the newest frame of step t + 1, standardised pixel by pixel.
    images = as_images(rollout.frames[STACK:])[..., None] / 255.0
    pixels = nn.avg_pool(images, (4, 4), (4, 4)).reshape(*rollout.action.shape, PIXELS)
    mean_of_each = jax.vmap(mean, in_axes=-1)
    pixel = running(old.pixel, mean_of_each(pixels))
    pixel_square = running(old.pixel_square, mean_of_each(jnp.square(pixels)))
    deviation = jnp.sqrt(jnp.maximum(pixel_square - jnp.square(pixel), 1e-4))
    pixels = jnp.clip((pixels - pixel) / deviation, -5.0, 5.0)

    # The reward.
    target_features = embed(target, pixels)
    error = prediction_error(state.params, pixels, target_features)
    error_square = running(old.error_square, mean(jnp.square(error)))
    intrinsic = options.coefficients["intrinsic_reward"] * error / jnp.sqrt(error_square + 1e-8)

    statistics = Statistics(old.updates + 1, pixel, pixel_square, error_square)
    state = state.replace(extra=Extra(target, statistics))
    rollout = rollout._replace(reward=rollout.reward + intrinsic)
    state, samples, metrics = ppo_prepare(state, apply, rollout, mean, options, key)
    return state, RNDSamples(samples, pixels, target_features), metrics | {"intrinsic_reward": mean(intrinsic)}


def loss(params: Any, apply: Apply, batch: Minibatch, options: PPOConfig) -> tuple[jax.Array, Metrics]:
    """`Algorithm.loss`: the loss of PPO plus the prediction error."""
    samples = batch.samples
    loss_of_ppo, metrics = ppo_loss(params, apply, batch._replace(samples=samples.ppo), options)
    rnd_loss = batch.mean(prediction_error(params, samples.pixels, samples.target_features))
    return loss_of_ppo + rnd_loss, metrics | {"rnd_loss": rnd_loss}


def prediction_error(params: Any, pixels: jax.Array, target_features: jax.Array) -> jax.Array:
    """Mean squared error of the predictor: pixels [..., PIXELS], features [..., FEATURES] -> [...]."""
    return jnp.mean(jnp.square(embed(params["rnd"], pixels) - target_features), axis=-1)


def embed(params: Any, pixels: jax.Array) -> jax.Array:
    """The features of an `Embedding` with these parameters."""
    features: Any = Embedding().apply({"params": params}, pixels)
    return features


COEFFICIENTS = FrozenDict(
    intrinsic_reward=0.5,  # weight of the intrinsic reward after its scaling to a root mean square of 1
    decay=0.99,  # weight of the past in the running means, per update
)

RND = PPO._replace(init=init, prepare=prepare, loss=loss, coefficients=COEFFICIENTS)
