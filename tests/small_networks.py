"""Networks of milliseconds: some pixels, a layer, and an LSTM or another layer, with the shipped heads."""

from functools import cache
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import reference

from jaxrl_atari.networks import Network, Outputs, dense, heads, lstm


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
    made = functions_of(network, num_actions)
    return made.init(jax.random.key(seed)), made


@cache
def functions_of(network, num_actions):
    """One object for all tests of a process, so that what depends on it is compiled once."""
    return Network(network(num_actions))


def perturbed(params, scale=0.02):
    """Parameters with non-zero biases and a policy head of ordinary size, so that an error anywhere shows."""
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda x: x + scale * rng.standard_normal(x.shape, np.float32), params)


def nature_in_float64(params, observation):
    """The network of `reference.forward` in JAX. Matrix products: XLA's float64 convolutions take minutes on a
    CPU."""
    x = observation.stacks.astype(jnp.float64) / 255.0
    for name, stride in reference.STRIDES.items():
        kernel = params[name]["kernel"]
        size = kernel.shape[0]
        reach = stride * ((x.shape[1] - size) // stride) + 1
        fields = [x[:, i : i + reach : stride, j : j + reach : stride] for i, j in np.ndindex(size, size)]
        x = jnp.concatenate(fields, axis=-1) @ kernel.reshape(-1, kernel.shape[-1])
        x = jax.nn.relu(x + params[name]["bias"])
    x = jax.nn.relu(x.reshape(len(x), -1) @ params["dense"]["kernel"] + params["dense"]["bias"])
    logits, value = (x @ params[head]["kernel"] + params[head]["bias"] for head in ("policy", "value"))
    return Outputs(logits, value[:, 0])
