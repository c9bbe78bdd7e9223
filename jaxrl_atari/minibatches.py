"""The minibatches of a rollout: their samples, and the observations of these samples.

Axes are [T, B]: T steps of B environments. A sample is one step of one environment, numbered `t * B + b`. If there
are several devices, each one holds some of the environments (`algorithm.Shard`).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_atari.algorithm import ONE_DEVICE, Mean, Rollout, Shard
from jaxrl_atari.config import PPOConfig
from jaxrl_atari.errors import require
from jaxrl_atari.frames import gather_stacks
from jaxrl_atari.network_interface import Apply, Observation, Outputs, is_recurrent

# --- Samples -----------------------------------------------------------------------------------------------------


def minibatch_indices(
    key: jax.Array,
    *,
    rollout_length: int,
    num_envs: int,
    epochs: int,
    minibatch_size: int,
    shard: Shard = ONE_DEVICE,
    uniform: bool = False,
) -> jax.Array:
    """Random minibatches, stratified by environment: each epoch is a fresh permutation of the samples.

    The environments of all devices are divided into gcd(environments, minibatch size) equal strata (by default 16
    strata of one environment), and each minibatch takes the same number of samples from each stratum. Therefore a
    device that holds some of the strata draws its part of the minibatches that a single device would draw.

    For example, 4 environments and minibatches of 8 samples give 4 strata of one environment: each minibatch has 2
    random steps of each environment. 6 environments and minibatches of 8 give 2 strata of 3 environments: each
    minibatch has 4 samples of environments 0 to 2, and 4 of environments 3 to 5.

    Args:
        num_envs, minibatch_size: on this device.
        uniform: the whole rollout is one stratum, so minibatches are not stratified. Only for one device.

    Returns:
        int32 [epochs * T * B / minibatch_size, minibatch_size]: samples as t * B + b.
    """
    # Strata of this device. All c devices together have gcd(c * num_envs, c * minibatch_size) = c * strata.
    strata = 1 if uniform else math.gcd(num_envs, minibatch_size)
    width = num_envs // strata

    def permute(epoch: jax.Array, stratum: jax.Array) -> jax.Array:
        stratum_key = jax.random.fold_in(jax.random.fold_in(key, epoch), shard.index * strata + stratum)
        sample = jax.random.permutation(stratum_key, rollout_length * width)
        t, offset = jnp.divmod(sample, width)
        return t * num_envs + stratum * width + offset

    epoch, stratum = jnp.divmod(jnp.arange(epochs * strata), strata)
    shuffled = jax.vmap(permute)(epoch, stratum).reshape(epochs, strata, -1, minibatch_size // strata)
    return shuffled.swapaxes(1, 2).reshape(-1, minibatch_size)


def draw_minibatches(key: jax.Array, rollout: Rollout, options: PPOConfig, shard: Shard = ONE_DEVICE) -> jax.Array:
    """The samples of each gradient step of an update.

    A recurrent network learns from whole environments: a minibatch has all T steps of some of them. They are
    stratified too: each minibatch has equally many environments of each stratum.

    Returns:
        int32 [gradient steps, N]: samples as t * B + b; with a carry, ordered by step, then by environment.

    Raises:
        ConfigError: the minibatch size cannot be shared by the devices, does not divide the rollout or, with a
            carry, is not the size of whole environments; or several devices are to draw `uniform` minibatches.
    """
    length, num_envs = rollout.action.shape
    uniform = options.minibatches == "uniform"
    expected = f"stratified on {shard.count} devices"
    require(shard.count == 1 or not uniform, "ppo.minibatches", options.minibatches, expected)
    size, remainder = divmod(options.minibatch_size, shard.count)
    expected = f"a multiple of {shard.count}, the number of devices"
    require(remainder == 0, "ppo.minibatch_size", options.minibatch_size, expected)
    samples = length * num_envs
    expected = f"a divisor of the {samples * shard.count} samples of the rollout"
    require(samples % size == 0, "ppo.minibatch_size", options.minibatch_size, expected)
    if not is_recurrent(rollout.carry):
        return minibatch_indices(
            key,
            rollout_length=length,
            num_envs=num_envs,
            epochs=options.epochs,
            minibatch_size=size,
            shard=shard,
            uniform=uniform,
        )
    expected = f"a multiple of {length * shard.count}, the steps of one environment on each device"
    require(size % length == 0, "ppo.minibatch_size", options.minibatch_size, expected)
    # A rollout of one step has one sample per environment, so these samples are environments.
    envs = minibatch_indices(
        key,
        rollout_length=1,
        num_envs=num_envs,
        epochs=options.epochs,
        minibatch_size=size // length,
        shard=shard,
        uniform=uniform,
    )
    return whole_environments(envs, rollout_length=length, num_envs=num_envs)


def whole_environments(envs: jax.Array, *, rollout_length: int, num_envs: int) -> jax.Array:
    """The samples of all steps of some environments, ordered by step, then by environment.

    Args:
        envs: int32 [K, n]: K selections of n environments.

    Returns:
        int32 [K, T * n]: samples as t * B + b.
    """
    return (jnp.arange(rollout_length)[:, None] * num_envs + envs[:, None]).reshape(len(envs), -1)


# --- Observations and outputs ------------------------------------------------------------------------------------


def observe(rollout: Rollout, index: jax.Array, length: int | None = None) -> Observation:
    """The input of the network for some samples.

    Args:
        index: int32 [N], samples as t * B + b; with a carry, in the order of `whole_environments`.
        length: with a carry, the number of steps of each environment in `index`; T by default.
    """
    stacks = gather_stacks(rollout.frames, rollout.age, index)
    first = rollout.age.reshape(-1)[index] == 0
    if not is_recurrent(rollout.carry):
        return Observation(stacks, first)
    envs = index[: len(index) // (length or len(rollout.action))]  # step 0 of the environments comes first
    return Observation(stacks, first, jax.tree.map(lambda x: x[envs], rollout.carry))


def apply_to_rollout(params: Any, apply: Apply, rollout: Rollout, mean: Mean, options: PPOConfig) -> Outputs:
    """The outputs of the network for every step of a rollout and for step T, the first one of the next rollout.

    The parameters may differ from the ones that acted. To bound the memory, a device computes no more samples at a
    time than it has in a minibatch, but at least the T + 1 samples of one environment. This changes only the
    rounding of the result.

    Args:
        mean: the mean over the rollout, as `prepare` gets it. Only `mean.devices` is used, because it gives the
            size of a device's part of a minibatch.

    Returns:
        Outputs [T + 1, B, ...] without a carry.
    """
    steps, num_envs = rollout.age.shape  # T + 1
    most = max(1, options.minibatch_size // mean.devices // steps)
    width = max(n for n in range(1, min(most, num_envs) + 1) if num_envs % n == 0)  # environments at a time
    envs = jnp.arange(num_envs).reshape(-1, width)

    def outputs_of(index: jax.Array) -> Outputs:
        return apply(params, observe(rollout, index, steps))._replace(carry=())

    def in_order(x: jax.Array) -> jax.Array:
        """[B / width, (T + 1) * width, ...] -> [T + 1, B, ...]"""
        x = x.reshape(-1, steps, width, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(steps, num_envs, *x.shape[3:])

    return jax.tree.map(
        in_order, lax.map(outputs_of, whole_environments(envs, rollout_length=steps, num_envs=num_envs))
    )
