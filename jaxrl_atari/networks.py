"""Networks: frame stacks in, policy logits and a value out.

To add one, write a `flax.linen.Module` with the signature of `NatureActorCritic`, enter it in `NETWORKS`, and add its
name to `config.NetworkName`. Training, evaluation, checkpoints and the memory estimate then work with it unchanged. On
a CPU it trains many times more slowly than `nature`, whose convolutions `fast/cpu_conv.py` computes as matrix products.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_atari.config import NetworkConfig

STACK = 4
"""Frames in a stack, the input of a network."""


def bias_in_float32(*arrays: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
    """Casts a layer's inputs and kernel to `dtype` and leaves its bias in float32.

    The gradient of a bias is a sum over thousands of outputs, which loses several percent when added in bfloat16.
    """
    inputs, kernel, bias = arrays
    return [inputs.astype(dtype), kernel.astype(dtype), bias]


def dense(features: int, scale: float, name: str, dtype: Any) -> nn.Dense:
    """A dense layer with orthogonal initialisation, which computes in `dtype` (float32 without TF32)."""
    return nn.Dense(
        features,
        kernel_init=nn.initializers.orthogonal(scale),
        dtype=dtype,
        precision="highest" if dtype == jnp.float32 else None,
        name=name,
    )


def heads(x: jax.Array, features: int, num_actions: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """A dense layer on a torso's output `[..., H, W, C]`, then logits `[..., A]` and value `[...]`, in float32."""
    x = x.reshape(*x.shape[:-3], -1)
    x = nn.relu(dense(features, 2**0.5, "dense", dtype)(x)).astype(jnp.float32)
    logits = dense(num_actions, 0.01, "policy", jnp.float32)(x)
    value = dense(1, 1.0, "value", jnp.float32)(x)
    return logits, value[..., 0]


class NatureActorCritic(nn.Module):
    """The network of Mnih et al. 2015 (doi:10.1038/nature14236) with a policy and a value head.

    Orthogonal initialisation with the gains of OpenAI Baselines' PPO: sqrt(2), policy head 0.01, value head 1. The
    torso computes in `dtype`, the heads in float32; parameters are float32. 1,687,719 parameters with 6 actions.

    Where `fast/cpu_conv.py` is used, on CPUs, this module makes only the parameters; the outputs are computed there.
    After an edit of what is computed here, a CPU computes the convolutions of this module, which is many times slower.
    """

    num_actions: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, stacks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """uint8 `[..., 84, 84, 4]`, the oldest frame first -> logits float32 `[..., A]`, value float32 `[...]`."""
        init = nn.initializers.orthogonal(2**0.5)
        conv = partial(nn.Conv, padding="VALID", kernel_init=init, dtype=self.dtype, promote_dtype=bias_in_float32)
        x = stacks.astype(self.dtype) / 255
        x = nn.relu(conv(32, (8, 8), 4, name="conv1")(x))
        x = nn.relu(conv(64, (4, 4), 2, name="conv2")(x))
        x = nn.relu(conv(64, (3, 3), 1, name="conv3")(x))
        return heads(x, 512, self.num_actions, self.dtype)


class ImpalaActorCritic(nn.Module):
    """The residual network of IMPALA (Espeholt et al. 2018, arXiv:1802.01561, figure 3 right) with two heads.

    Three sections of 16, 32 and 32 channels, each a convolution, a max pooling and two residual blocks: 15
    convolutions. Then 256 features. 1,091,031 parameters with 6 actions.
    """

    num_actions: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, stacks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """uint8 `[..., 84, 84, 4]`, the oldest frame first -> logits float32 `[..., A]`, value float32 `[...]`."""
        init = nn.initializers.orthogonal(2**0.5)
        conv = partial(nn.Conv, kernel_size=(3, 3), kernel_init=init, dtype=self.dtype, promote_dtype=bias_in_float32)
        x = stacks.astype(self.dtype) / 255
        for channels in (16, 32, 32):
            x = conv(channels)(x)
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            for _ in range(2):
                residual = conv(channels)(nn.relu(x))
                x = x + conv(channels)(nn.relu(residual))
        return heads(nn.relu(x), 256, self.num_actions, self.dtype)


NETWORKS: dict[str, Any] = {"nature": NatureActorCritic, "impala": ImpalaActorCritic}
"""`network.name` -> module."""


def make_module(config: NetworkConfig, num_actions: int, dtype: Any) -> nn.Module:
    """The module of a config. An option of a network is passed to it here."""
    return NETWORKS[config.name](num_actions, dtype)


def init_params(config: NetworkConfig, num_actions: int, key: jax.Array) -> Any:
    """The first parameters, float32; the same in every form of the network."""
    stacks = jnp.zeros((1, 84, 84, STACK), jnp.uint8)
    return make_module(config, num_actions, jnp.float32).init(key, stacks)["params"]
