"""Networks: frame stacks in, policy logits and a value out.

A network is a `flax.linen.Module` with the fields `num_actions` and `dtype`, here `NatureActorCritic`,
`ImpalaActorCritic` and, with a memory, `NatureLSTM`. The rest of the package knows it as a pure function, `Apply`.
`register_network` adds one of your own from a file of your own; `docs/idea.md` has an example.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_atari.config import NetworkConfig
from jaxrl_atari.errors import ConfigError, require
from jaxrl_atari.layers import Conv, in_chunks
from jaxrl_atari.registry import NETWORKS

STACK = 4
"""Frames in a stack, the input of a network."""


class Observation(NamedTuple):
    """Input of a network: N samples.

    A recurrent network gets N / n consecutive steps of n environments, ordered by step, then by environment.
    """

    stacks: Any  # uint8 [N, 84, 84, 4], the oldest frame first; see `fast.frames` for stacks in blocks
    first: Any = None  # bool [N]: a game starts here. Only a recurrent network needs it
    carry: Any = ()  # [n, ...]: the memory of each environment before its first step here


class Outputs(NamedTuple):
    """Output of a network for an `Observation`."""

    logits: jax.Array  # float32 [N, A]
    value: jax.Array  # float32 [N]
    carry: Any = ()  # [n, ...]: the memory of each environment after its last step here
    features: jax.Array | None = None  # [N, F]: the input of the heads, where a network gives it


Apply = Callable[[Any, Observation], Outputs]
"""A network as a pure function: parameters, observation -> outputs."""


def dense(features: int, scale: float, name: str, dtype: Any) -> nn.Dense:
    """A dense layer with orthogonal initialisation of gain `scale`, which computes in `dtype` (float32 without
    TF32)."""
    return nn.Dense(
        features,
        kernel_init=nn.initializers.orthogonal(scale),
        dtype=dtype,
        precision="highest" if dtype == jnp.float32 else None,
        name=name,
    )


def hidden_layer(x: jax.Array, features: int, dtype: Any) -> jax.Array:
    """A dense layer on a torso's output: `[..., H, W, C]` -> float32 `[..., features]`."""
    x = x.reshape(*x.shape[:-3], -1)
    return nn.relu(dense(features, 2**0.5, "dense", dtype)(x)).astype(jnp.float32)


def heads(features: jax.Array, num_actions: int, carry: Any = ()) -> Outputs:
    """Policy and value head on features float32 `[..., F]`: the `Outputs` of a network."""
    logits = dense(num_actions, 0.01, "policy", jnp.float32)(features)
    value = dense(1, 1.0, "value", jnp.float32)(features)
    return Outputs(logits, value[..., 0], carry, features)


# --- Feed-forward ------------------------------------------------------------------------------------------------


def nature_torso(x: jax.Array, dtype: Any) -> jax.Array:
    """The three convolutions of Mnih et al. 2015: uint8 `[N, 84, 84, 4]` -> float32 `[N, 7, 7, 64]`."""
    conv = partial(Conv, padding="VALID", kernel_init=nn.initializers.orthogonal(2**0.5), dtype=dtype)
    x = nn.relu(conv(32, (8, 8), 4, name="conv1")(x))
    x = nn.relu(conv(64, (4, 4), 2, name="conv2")(x))
    return nn.relu(conv(64, (3, 3), 1, name="conv3")(x))


class NatureActorCritic(nn.Module):
    """The network of Mnih et al. 2015 (doi:10.1038/nature14236) with a policy and a value head.

    Orthogonal initialisation with the gains of OpenAI Baselines' PPO: sqrt(2), policy head 0.01, value head 1. The
    torso computes in `dtype`, the heads in float32; parameters are float32. 1,687,719 parameters with 6 actions.
    """

    num_actions: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, stacks: jax.Array) -> Outputs:
        """uint8 `[N, 84, 84, 4]` -> logits float32 `[N, A]`, value float32 `[N]`."""
        x = in_chunks(partial(nature_torso, dtype=self.dtype), self, stacks)
        return heads(hidden_layer(x, 512, self.dtype), self.num_actions)


def impala_torso(x: jax.Array, dtype: Any) -> jax.Array:
    """The 15 convolutions of Espeholt et al. 2018: uint8 `[N, 84, 84, 4]` -> float32 `[N, 11, 11, 32]`."""
    names = (f"Conv_{number}" for number in range(15))

    def conv(x: jax.Array, channels: int) -> jax.Array:
        init = nn.initializers.orthogonal(2**0.5)
        return Conv(channels, kernel_init=init, dtype=dtype, name=next(names))(x)

    for channels in (16, 32, 32):
        x = nn.max_pool(conv(x, channels), (3, 3), strides=(2, 2), padding="SAME")
        for _ in range(2):
            residual = conv(nn.relu(x), channels)
            x = x + conv(nn.relu(residual), channels)
    return nn.relu(x)


class ImpalaActorCritic(nn.Module):
    """The residual network of IMPALA (Espeholt et al. 2018, arXiv:1802.01561, figure 3 right) with two heads.

    Three sections of 16, 32 and 32 channels, each a convolution, a max pooling and two residual blocks: 15
    convolutions. Then 256 features. 1,091,031 parameters with 6 actions.
    """

    num_actions: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, stacks: jax.Array) -> Outputs:
        """uint8 `[N, 84, 84, 4]` -> logits float32 `[N, A]`, value float32 `[N]`."""
        x = in_chunks(partial(impala_torso, dtype=self.dtype), self, stacks)
        return heads(hidden_layer(x, 256, self.dtype), self.num_actions)


# --- Recurrent ---------------------------------------------------------------------------------------------------


class LSTMStep(nn.Module):
    """One step of an LSTM in n environments, which forgets where a game starts."""

    features: int

    @nn.compact
    def __call__(self, carry: Any, step: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        """Carry `[n, features]` twice; x `[n, F]`, first bool `[n]` -> new carry, output `[n, features]`."""
        x, first = step
        carry = jax.tree.map(lambda memory: jnp.where(first[:, None], 0.0, memory), carry)
        return nn.OptimizedLSTMCell(self.features, name="cell")(carry, x)


def lstm(features: int, x: jax.Array, first: jax.Array, carry: Any) -> tuple[jax.Array, Any]:
    """An LSTM (Hochreiter and Schmidhuber 1997) over N / n consecutive steps of n environments.

    Args:
        x: float32 `[N, F]`; first: bool `[N]`, where a game starts.
        carry: float32 `[n, features]` twice, before the first step.

    Returns:
        Outputs float32 `[N, features]`, and the carry after the last step.
    """
    num_envs = len(jax.tree.leaves(carry)[0])
    steps = jax.tree.map(lambda y: y.reshape(-1, num_envs, *y.shape[1:]), (x, first))
    over_steps = nn.scan(LSTMStep, variable_broadcast="params", split_rngs={"params": False})
    carry, outputs = over_steps(features, name="lstm")(carry, steps)
    return outputs.reshape(-1, features), carry


class NatureLSTM(nn.Module):
    """`NatureActorCritic` with an LSTM of 256 units between its features and its heads.

    Trained as in OpenAI Baselines (`ppo2`, Dhariwal et al. 2017): minibatches of whole environments, from the
    carry with which the rollout began. It forgets where a game starts, and remembers through a lost life.
    2,473,383 parameters with 6 actions.
    """

    num_actions: int
    dtype: Any = jnp.float32

    @staticmethod
    def initial_carry(num_envs: int) -> Any:
        """Memory before the first game: float32 `[num_envs, 256]` twice."""
        return jnp.zeros((num_envs, 256)), jnp.zeros((num_envs, 256))

    @nn.compact
    def __call__(self, stacks: jax.Array, first: jax.Array, carry: Any) -> Outputs:
        """The fields of an `Observation` -> `Outputs`."""
        x = in_chunks(partial(nature_torso, dtype=self.dtype), self, stacks)
        features, carry = lstm(256, hidden_layer(x, 512, self.dtype), first, carry)
        return heads(features, self.num_actions, carry)


# --- Modules as functions ----------------------------------------------------------------------------------------


def register_network(name: str, network: Callable[..., nn.Module]) -> None:
    """Lets a config choose a network of your own, as in `--network.name tiny`.

    Args:
        name: a new name. A later network of the same name replaces the earlier one.
        network: a class of modules with the fields `num_actions` and `dtype`, or a `functools.partial` of one that
            sets fields of its own.

    Raises:
        ConfigError: the name has other characters than letters, digits and `._-`, or is taken by the package; or
            `network` is a module and no class.
    """
    usable = callable(network) and not isinstance(network, nn.Module)
    require(usable, NETWORKS.field, name, "a class of modules, such as Tiny and not Tiny(...)", f"got {network!r}")
    NETWORKS.register(name, network)


def make_module(config: NetworkConfig, num_actions: int, dtype: Any) -> nn.Module:
    """The module of a config.

    Args:
        dtype: type of the torso's arithmetic.

    Raises:
        ConfigError: no network has that name, or it cannot be made of these arguments alone.
    """
    network = NETWORKS.get(config.name)
    try:
        module = network(num_actions=num_actions, dtype=dtype)
        hash(module)  # compiled programs are kept by their modules
    except TypeError as error:
        expected = "a flax.linen.Module with the fields num_actions and dtype, and hashable values in its others"
        raise ConfigError(NETWORKS.field, config.name, expected, str(error)) from error
    return module


def initial_carry(module: nn.Module, num_envs: int) -> Any:
    """What a network remembers before its first game, `[num_envs, ...]`: `()` unless it is recurrent."""
    method = getattr(module, "initial_carry", None)
    return () if method is None else method(num_envs)


def apply_module(module: nn.Module, params: Any, observation: Observation) -> Outputs:
    """The `Apply` of a module. A module without a carry is called with the stacks alone, and may return a pair."""
    inputs = observation if is_recurrent(observation.carry) else (observation.stacks,)
    outputs: Any = module.apply({"params": params}, *inputs)
    return Outputs(*outputs)


def is_recurrent(carry: Any) -> bool:
    """Whether a carry holds anything."""
    return bool(jax.tree.leaves(carry))


def init_params(module: nn.Module, key: jax.Array) -> Any:
    """The first parameters, float32; the same in every form of the network."""
    stacks = jnp.zeros((1, 84, 84, STACK), jnp.uint8)
    carry = initial_carry(module, 1)
    inputs = (stacks, jnp.ones(1, bool), carry) if is_recurrent(carry) else (stacks,)
    return module.init(key, *inputs)["params"]
