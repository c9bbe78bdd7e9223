"""PPO with random network distillation (Burda et al. 2018, arXiv:1810.12894): a reward for what was not seen
before.

A predictor learns the outputs of a fixed random network, the target, for each frame. Its error is large where
frames are new, and is added to the reward. The predictor is trained with the policy, by the same optimiser, which
scales both gradients down together.

Differences from the paper: one value function, of the sum of both rewards, which ends with the game; dense
networks on frames of 21x21 pixels in place of convolutions; the error is divided by its running root mean square
instead of the standard deviation of its discounted sums.
"""

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_atari.config import PPOConfig
from jaxrl_atari.fast.frames import images
from jaxrl_atari.networks import STACK, Apply
from jaxrl_atari.ppo import PPO, Mean, Metrics, Minibatch, Rollout, Samples, TrainState, ppo_loss, ppo_samples

COEFFICIENT = 0.5
"""Weight of the intrinsic reward."""

DECAY = 0.99
"""Weight of the past in the running means, per update. In the first 100 updates they are plain means."""


class Embedding(nn.Module):
    """Target and predictor: pixels float32 `[..., 441]` -> features `[..., 64]`."""

    @nn.compact
    def __call__(self, pixels: jax.Array) -> jax.Array:
        hidden = nn.relu(nn.Dense(256, kernel_init=nn.initializers.orthogonal(2**0.5))(pixels))
        return nn.Dense(64, kernel_init=nn.initializers.orthogonal())(hidden)


class Extra(NamedTuple):
    """What is kept between updates: `TrainState.extra`."""

    target: Any  # parameters of the target
    updates: jax.Array  # int32 []: updates so far
    pixel_mean: jax.Array  # [441]: running means, of each pixel
    pixel_mean_square: jax.Array  # [441]: and of its square
    error_mean_square: jax.Array  # []: running mean of the squared prediction error


class RNDSamples(NamedTuple):
    """Samples of the loss, [T, B, ...]."""

    ppo: Samples
    pixels: jax.Array  # [T, B, 441]: what a step led to, standardised
    feature: jax.Array  # [T, B, 64]: what the target says of it


def init(params: Any, key: jax.Array) -> tuple[Any, Extra]:
    """`Algorithm.init`: adds the predictor to the parameters, and draws the target."""
    assert "rnd" not in params, "the network has parameters of that name itself"
    pixels = jnp.zeros((1, 441))
    target, predictor = (Embedding().init(each, pixels)["params"] for each in jax.random.split(key))
    return {**params, "rnd": predictor}, Extra(
        target, jnp.zeros((), jnp.int32), jnp.zeros(441), jnp.zeros(441), jnp.zeros(())
    )


def prepare(
    state: TrainState, apply: Apply, rollout: Rollout, mean: Mean, config: PPOConfig
) -> tuple[TrainState, RNDSamples, Metrics]:
    """`Algorithm.prepare`: adds the intrinsic reward to a rollout, and updates the running statistics."""
    extra = state.extra
    frames = images(rollout.frames[STACK:])  # of step t + 1
    pixels = nn.avg_pool(frames[..., None] / 255.0, (4, 4), (4, 4)).reshape(*frames.shape[:2], 441)
    mean_of_each = jax.vmap(mean, in_axes=-1)
    share = jnp.maximum(1.0 - DECAY, 1.0 / (extra.updates + 1))  # of this rollout in the running means

    def running(before: jax.Array, now: jax.Array) -> jax.Array:
        return (1.0 - share) * before + share * now

    pixel_mean = running(extra.pixel_mean, mean_of_each(pixels))
    pixel_mean_square = running(extra.pixel_mean_square, mean_of_each(jnp.square(pixels)))
    deviation = jnp.sqrt(jnp.maximum(pixel_mean_square - jnp.square(pixel_mean), 1e-4))
    pixels = jnp.clip((pixels - pixel_mean) / deviation, -5.0, 5.0)

    feature = embed(extra.target, pixels)
    error = prediction_error(state.params, pixels, feature)
    error_mean_square = running(extra.error_mean_square, mean(jnp.square(error)))
    bonus = COEFFICIENT * error / jnp.sqrt(error_mean_square + 1e-8)

    state = dataclasses.replace(
        state, extra=Extra(extra.target, extra.updates + 1, pixel_mean, pixel_mean_square, error_mean_square)
    )
    rollout = rollout._replace(reward=rollout.reward + bonus)
    state, samples, metrics = ppo_samples(state, apply, rollout, mean, config)
    return state, RNDSamples(samples, pixels, feature), metrics | {"intrinsic_reward": mean(bonus)}


def loss(params: Any, apply: Apply, batch: Minibatch, config: PPOConfig) -> tuple[jax.Array, Metrics]:
    """`Algorithm.loss`: PPO's, and the prediction error."""
    samples = batch.samples
    policy_loss, metrics = ppo_loss(params, apply, batch._replace(samples=samples.ppo), config)
    rnd_loss = batch.mean(prediction_error(params, samples.pixels, samples.feature))
    return policy_loss + rnd_loss, metrics | {"rnd_loss": rnd_loss}


def prediction_error(params: Any, pixels: jax.Array, feature: jax.Array) -> jax.Array:
    """Mean squared error of the predictor: pixels `[..., 441]`, feature `[..., 64]` -> `[...]`."""
    return jnp.mean(jnp.square(embed(params["rnd"], pixels) - feature), axis=-1)


def embed(params: Any, pixels: jax.Array) -> jax.Array:
    """The features of an `Embedding` with these parameters."""
    features: Any = Embedding().apply({"params": params}, pixels)
    return features


RND = PPO._replace(init=init, prepare=prepare, loss=loss)
