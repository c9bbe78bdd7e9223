"""The networks that are shipped: frame stacks in, policy logits and a value out.

`NatureActorCritic` is the default, `ImpalaActorCritic` is deeper, and `NatureLSTM` has a memory.
`network_interface.py` says what a network has, and how to add one of your own.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_atari.layers import Conv, in_chunks
from jaxrl_atari.network_interface import Outputs

# --- Layers ------------------------------------------------------------------------------------------------------


def dense(features: int, scale: float, name: str, dtype: Any) -> nn.Dense:
    """A dense layer that computes in `dtype`, with orthogonal initialisation of gain `scale`.

    On a GPU, float32 means true float32 here, and not TF32, which would round the factors to ten bits. It costs
    little: convolutions, which are most of the arithmetic, use TF32 there, as is JAX's default.
    """
    return nn.Dense(
        features,
        kernel_init=nn.initializers.orthogonal(scale),
        dtype=dtype,
        precision="highest" if dtype == jnp.float32 else None,
        name=name,
    )


def hidden_layer(x: jax.Array, features: int, dtype: Any) -> jax.Array:
    """A dense layer on a torso's output: [N, ...] -> float32 [N, features]."""
    x = x.reshape(x.shape[0], -1)
    return nn.relu(dense(features, 2**0.5, "dense", dtype)(x)).astype(jnp.float32)


def heads(features: jax.Array, num_actions: int, carry: Any = ()) -> Outputs:
    """Policy and value head on features, float32 [N, F]: the `Outputs` of a network."""
    logits = dense(num_actions, 0.01, "policy", jnp.float32)(features)
    value = dense(1, 1.0, "value", jnp.float32)(features)
    return Outputs(logits, value[..., 0], carry, features)


# --- Feed-forward ------------------------------------------------------------------------------------------------


def nature_torso(x: jax.Array, dtype: Any) -> jax.Array:
    """The three convolutions of Mnih et al. 2015: uint8 [N, 84, 84, 4] -> float32 [N, 7, 7, 64]."""
    init = nn.initializers.orthogonal(2**0.5)
    conv = partial(Conv, padding="VALID", kernel_init=init, dtype=dtype)
    x = nn.relu(conv(32, (8, 8), 4, name="conv1")(x))
    x = nn.relu(conv(64, (4, 4), 2, name="conv2")(x))
    return nn.relu(conv(64, (3, 3), 1, name="conv3")(x))


class NatureFeatures(nn.Module):
    """The convolutions and the dense layer of Mnih et al. 2015: stacks -> features.

    Most of the arithmetic of `nature` and `nature_lstm` is here. Where only CPUs learn and act, `fast/` computes
    the same features faster, from the same parameters. If you edit this module or one of its layers, your edit
    runs there too, and a line at the start of the session says that training is slower. (`fast/comparison.py`
    names two kinds of edit that it misses.)

    A network uses it by `nature_features`.
    """

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, stacks: jax.Array) -> jax.Array:
        """uint8 [N, 84, 84, 4] -> float32 [N, 512]."""
        x = in_chunks(partial(nature_torso, dtype=self.dtype), self, stacks)
        return hidden_layer(x, 512, self.dtype)


def nature_features(network: Any, stacks: jax.Array) -> jax.Array:
    """`NatureFeatures` as a part of a network: stacks -> float32 [N, 512].

    Args:
        network: the module in whose `__call__` this is. The features have its `dtype`, and their layers `conv1`,
            `conv2`, `conv3` and `dense` become its own, so it has no other layers of these names.
        stacks: what the network was called with, unchanged.
    """
    features = NatureFeatures(network.dtype)
    nn.share_scope(network, features)  # no prefix before the names of the layers
    return features(stacks)


class NatureActorCritic(nn.Module):
    """The network of Mnih et al. 2015 (doi:10.1038/nature14236) with a policy and a value head.

    Orthogonal initialisation with the gains of OpenAI Baselines' PPO: sqrt(2), policy head 0.01, value head 1. The
    torso computes in `dtype`, the heads in float32; parameters are float32. 1,687,719 parameters with 6 actions.
    """

    num_actions: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, stacks: jax.Array) -> Outputs:
        """uint8 [N, 84, 84, 4] -> logits float32 [N, A], value float32 [N]."""
        return heads(nature_features(self, stacks), self.num_actions)


def impala_torso(x: jax.Array, dtype: Any) -> jax.Array:
    """The 15 convolutions of Espeholt et al. 2018: uint8 [N, 84, 84, 4] -> float32 [N, 11, 11, 32]."""

    def conv(channels: int, x: jax.Array) -> jax.Array:
        """The next convolution, of 3x3 pixels: flax names them Conv_0 to Conv_14."""
        init = nn.initializers.orthogonal(2**0.5)
        return Conv(channels, kernel_init=init, dtype=dtype)(x)

    for channels in (16, 32, 32):
        x = nn.max_pool(conv(channels, x), (3, 3), strides=(2, 2), padding="SAME")
        for _residual_block in range(2):
            residual = conv(channels, nn.relu(x))
            x = x + conv(channels, nn.relu(residual))
    return nn.relu(x)


class ImpalaActorCritic(nn.Module):
    """The residual network of IMPALA (Espeholt et al. 2018, arXiv:1802.01561, figure 3 right) with two heads.

    Three sections of 16, 32 and 32 channels, each a convolution, a max pooling and two residual blocks: 15
    convolutions. Then 256 features. 1,091,031 parameters with 6 actions.

    Differences from the paper: no LSTM, no input of the last action and reward, and orthogonal initialisation.
    """

    num_actions: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, stacks: jax.Array) -> Outputs:
        """uint8 [N, 84, 84, 4] -> logits float32 [N, A], value float32 [N]."""
        x = in_chunks(partial(impala_torso, dtype=self.dtype), self, stacks)
        return heads(hidden_layer(x, 256, self.dtype), self.num_actions)


# --- Recurrent ---------------------------------------------------------------------------------------------------


class LSTMStep(nn.Module):
    """One step of an LSTM in n environments, which forgets where a game starts."""

    units: int

    @nn.compact
    def __call__(self, carry: Any, step: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        """Carry [n, units] twice; x [n, F], first bool [n] -> new carry, output [n, units]."""
        x, first = step
        carry = jax.tree.map(lambda memory: jnp.where(first[:, None], 0.0, memory), carry)
        cell = nn.OptimizedLSTMCell(self.units, kernel_init=nn.initializers.orthogonal(), name="cell")
        with jax.default_matmul_precision("highest"):  # float32 without TF32, as in `dense`
            return cell(carry, x)


def lstm(units: int, x: jax.Array, first: jax.Array, carry: Any) -> tuple[jax.Array, Any]:
    """An LSTM (Hochreiter and Schmidhuber 1997) over N / n consecutive steps of n environments.

    Args:
        x: float32 [N, F]; first: bool [N], where a game starts.
        carry: float32 [n, units] twice, before the first step.

    Returns:
        Outputs float32 [N, units], and the carry after the last step.
    """
    num_envs = len(jax.tree.leaves(carry)[0])
    steps = jax.tree.map(lambda y: y.reshape(-1, num_envs, *y.shape[1:]), (x, first))
    over_steps = nn.scan(LSTMStep, variable_broadcast="params", split_rngs={"params": False})
    carry, outputs = over_steps(units, name="lstm")(carry, steps)
    return outputs.reshape(-1, units), carry


class NatureLSTM(nn.Module):
    """`NatureActorCritic` with an LSTM, by default of 256 units, between its features and its heads.

    Trained as in OpenAI Baselines (`ppo2`, Dhariwal et al. 2017): minibatches of whole environments, from the
    carry with which the rollout began; kernels are orthogonal, here those of each gate, with gain 1, and biases 0.
    It forgets where a game starts, and remembers through a lost life. The LSTM computes in float32. 2,473,383
    parameters with 6 actions.
    """

    num_actions: int
    dtype: Any = jnp.float32
    units: int = 256

    def initial_carry(self, num_envs: int) -> Any:
        """Memory before the first game: float32 [num_envs, units] twice."""
        return jnp.zeros((num_envs, self.units)), jnp.zeros((num_envs, self.units))

    @nn.compact
    def __call__(self, stacks: jax.Array, first: jax.Array, carry: Any) -> Outputs:
        """The fields of an `Observation` -> `Outputs`."""
        x, carry = lstm(self.units, nature_features(self, stacks), first, carry)
        return heads(x, self.num_actions, carry)
