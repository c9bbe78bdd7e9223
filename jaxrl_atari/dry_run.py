"""An update on a rollout of random numbers: to try an algorithm or a network without playing."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_atari.algorithm import (
    Algorithm,
    Metrics,
    Rollout,
    TrainState,
    as_numbers,
    check_config,
    find_algorithm,
    new_key,
    resolved_options,
)
from jaxrl_atari.config import Config, PPOConfig
from jaxrl_atari.devices import device_class
from jaxrl_atari.frames import STACK, next_age
from jaxrl_atari.learner import compiled_update
from jaxrl_atari.networks import Network, make_network
from jaxrl_atari.update import init_train_state


def try_update(config: Config, num_actions: int = 6) -> tuple[TrainState, Metrics]:
    """One update of a config's algorithm on a random rollout, to look at before a training.

    It is compiled and runs on JAX's default device. The same config gives the same numbers.

    Args:
        num_actions: of the network. Nothing is played, so it need not be that of the game.

    Returns:
        The state after the update, and the metrics, as `update.update` returns them.

    Raises:
        ConfigError: there is no such algorithm or network, or the minibatches do not suit the rollout.
        InterfaceError: one of them breaks a rule of its interface.
    """
    check_config(config, devices=1)
    key = new_key(config.seed)
    algorithm = find_algorithm(config.algorithm)
    (device,) = key.devices()  # JAX's default device
    network = make_network(config.network, num_actions, device_class(device))
    state, rollout, options, update_key = update_arguments(
        key, network, algorithm, resolved_options(config), num_envs=config.env.num_envs
    )
    return compiled_update((device,), network, algorithm)(state, rollout, options, key=update_key)


def update_arguments(
    key: jax.Array, network: Network, algorithm: Algorithm, options: PPOConfig, *, num_envs: int
) -> tuple[TrainState, Rollout, PPOConfig, jax.Array]:
    """The arguments of an update: a first state, a random rollout, the options, and a key."""
    params_key, init_key, rollout_key, update_key = jax.random.split(key, 4)
    state = init_train_state(network.init(params_key), options, algorithm, init_key)
    rollout = random_rollout(rollout_key, network, length=options.rollout_length, num_envs=num_envs)
    return state, rollout, as_numbers(options), update_key


def random_rollout(key: jax.Array, network: Network, *, length: int, num_envs: int) -> Rollout:
    """A rollout of random frames, actions, values and rewards.

    Games are lost at random; the step after a lost game is an auto-reset step.

    Args:
        network: the network that learns from it.
        length: T, steps of each environment.
    """
    frame_key, end_key, value_key, reward_key, action_key = jax.random.split(key, 5)
    steps = (length, num_envs)
    num_actions = network.module.num_actions
    ends = jax.random.bernoulli(end_key, 0.05, steps)
    terminated = ends & ~_one_later(ends)
    auto_reset = _one_later(terminated)
    first = jnp.concatenate([jnp.ones((1, num_envs), bool), auto_reset])  # steps 0 .. T that start a game

    def count(age: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array]:
        age = next_age(age, first)
        return age, age

    _, age = lax.scan(count, jnp.zeros(num_envs, jnp.int32), first)
    value = jax.random.normal(value_key, (length + 1, num_envs))
    return Rollout(
        frames=jax.random.bits(frame_key, (length + STACK, num_envs, *network.frame_shape), jnp.uint8),
        age=age,
        action=jax.random.randint(action_key, steps, 0, num_actions),
        log_prob=jnp.full(steps, -math.log(num_actions), jnp.float32),
        value=value[:-1],
        reward=jax.random.normal(reward_key, steps),
        terminated=terminated,
        truncated=jnp.zeros(steps, bool),
        weight=(~auto_reset).astype(jnp.float32),
        bootstrap_value=value[-1],
        carry=network.initial_carry(num_envs),
    )


def _one_later(mark: jax.Array) -> jax.Array:
    """Marks [T, B] moved to the step after; step 0 has none."""
    return jnp.pad(mark[:-1], ((1, 0), (0, 0)))
