"""Networks of milliseconds: some pixels, a layer, and an LSTM or another layer, with the shipped heads."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_atari.frames import PLAIN
from jaxrl_atari.network_functions import apply_module, init_params, initial_carry
from jaxrl_atari.network_interface import Network
from jaxrl_atari.networks import dense, heads, lstm


class FeedForward(nn.Module):
    num_actions: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, stacks):
        x = stacks[..., ::7, ::7, :].reshape(*stacks.shape[:-3], -1) / 255
        x = nn.relu(dense(32, 2**0.5, "dense", jnp.float32)(x))
        return heads(nn.relu(dense(32, 2**0.5, "dense2", jnp.float32)(x)), self.num_actions)


class Recurrent(nn.Module):
    """The same with an LSTM in place of the second layer."""

    num_actions: int
    dtype: Any = jnp.float32

    @staticmethod
    def initial_carry(num_envs):
        return jnp.zeros((num_envs, 32)), jnp.zeros((num_envs, 32))

    @nn.compact
    def __call__(self, stacks, first, carry):
        x = stacks[:, ::7, ::7].reshape(len(stacks), -1) / 255
        x = nn.relu(dense(32, 2**0.5, "dense", jnp.float32)(x))
        x, carry = lstm(32, x, first, carry)
        return heads(x, self.num_actions, carry)


def make(network, num_actions, seed=0):
    """The first parameters and the functions of a module."""
    module = network(num_actions)
    made = Network(
        init=partial(init_params, module),
        apply=partial(apply_module, module),
        layout=PLAIN,
        for_acting=lambda params: params,
        dtype=jnp.dtype("float32"),
        initial_carry=partial(initial_carry, module),
    )
    return made.init(jax.random.key(seed)), made
