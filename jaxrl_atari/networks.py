"""Networks: what a network is, those that are shipped, and how a config and its devices choose one.

A network is a `flax.linen.Module` with

**fields**, which the package sets; any others have defaults, and values that can be hashed:

    num_actions    A, of the game
    dtype          type of the torso's products, float32 or bfloat16; parameters are float32

**a call**, `module(stacks)`, with frame stacks uint8 [N, 84, 84, 4], the oldest frame first. It returns `Outputs`,
or a pair: logits float32 [N, A] and value float32 [N]. A logit of -1e9 rules an action out; -inf would make the
entropy NaN.

**parameters**, and neither other variables, such as the statistics of batch normalisation, nor random numbers.

**a memory**, if it is recurrent: `initial_carry(num_envs)` returns what it remembers before the first game, any
pytree [num_envs, ...]. Its call is `module(stacks, first, carry)`, the fields of an `Observation`, and it returns
`Outputs` with the new carry.

`register_network` gives a network of your own a name (docs/idea.md, "A network").
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_atari.config import NetworkConfig
from jaxrl_atari.cpu import nature
from jaxrl_atari.cpu.conv import Conv, for_cpu, module_in_chunks
from jaxrl_atari.errors import UNREGISTERED, require, require_interface
from jaxrl_atari.frames import BLOCKED, FRAME_SIZE, PLAIN, STACK

# --- What goes in and comes out ----------------------------------------------------------------------------------


class Observation(NamedTuple):
    """Input of a network: N samples.

    A recurrent network gets N / n consecutive steps of n environments, ordered by step, then by environment.
    """

    stacks: jax.Array
    """uint8 [N, 84, 84, 4], the oldest frame first."""
    first: jax.Array | None = None
    """bool [N]: a game starts here. Only a recurrent network needs it."""
    carry: Any = ()
    """[n, ...]: the memory of each environment before its first step here."""


class Outputs(NamedTuple):
    """Output of a network for an `Observation`."""

    logits: jax.Array
    """float32 [N, A], of a categorical distribution over the actions."""
    value: jax.Array
    """float32 [N]."""
    carry: Any = ()
    """[n, ...]: the memory of each environment after its last step here."""
    features: jax.Array | None = None
    """[N, F]: the input of the heads, where a network gives it."""
    extra: Any = ()
    """Any pytree of arrays [N, ...]: what else a loss of your own needs, such as a second value."""


Apply = Callable[[Any, Observation], Outputs]
"""A network as a pure function: parameters, observation -> outputs."""


def is_recurrent(carry: Any) -> bool:
    """Whether a carry is that of a recurrent network: it holds an array."""
    return bool(jax.tree.leaves(carry))


# --- A network as the rest of the package uses it ----------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """The functions of a module, which check what would otherwise go wrong silently.

    Equal networks are equal keys of JAX's caches, so their programs are compiled once.
    """

    module: nn.Module
    cpu: str | None = None
    """The class of the CPUs for which it is computed in the ways of `cpu/`; None: plainly, as on a GPU."""

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the torso's arithmetic."""
        return jnp.dtype(self.module.dtype)

    @property
    def frame_shape(self) -> tuple[int, ...]:
        """The shape in which its frames are stored: `frames.PLAIN` or `frames.BLOCKED`."""
        return BLOCKED if self._has_features_by_hand else PLAIN

    @property
    def is_recurrent(self) -> bool:
        """Whether it has a memory."""
        return hasattr(self.module, "initial_carry")

    def init(self, key: jax.Array) -> Any:
        """The first parameters, float32.

        Raises:
            InterfaceError: the module has other variables, or parameters of less precision.
        """
        stacks = jnp.zeros((1, FRAME_SIZE, FRAME_SIZE, STACK), jnp.uint8)
        observation = Observation(stacks, jnp.ones(1, bool), self.initial_carry(1))
        variables = self.module.init(key, *self._inputs(observation))
        hint = "no update would change others"
        require_interface(
            set(variables) == {"params"}, f"variables of {self}", sorted(variables), "params alone", hint
        )
        for path, leaf in jax.tree.leaves_with_path(variables["params"]):
            name = f"parameter {jax.tree_util.keystr(path)} of {self}"
            hint = "the type of the arithmetic is the `dtype` of a layer, and not its `param_dtype`"
            require_interface(is_precise(leaf), name, described(leaf), "float32", hint)
        return variables["params"]

    def initial_carry(self, num_envs: int) -> Any:
        """The memory before the first game, [num_envs, ...]; `()` unless the network is recurrent."""
        return strongly_typed(self.module.initial_carry(num_envs)) if self.is_recurrent else ()

    def apply(self, params: Any, observation: Observation) -> Outputs:
        """The outputs for an observation.

        Raises:
            InterfaceError: logits or value have another shape, or less precision than float32; or the carry has
                another form than that of the observation.
        """
        with for_cpu(self.cpu):
            returned: Any = self.module.apply({"params": params}, *self._inputs(observation))
        if not isinstance(returned, Outputs):
            logits, value = returned  # further outputs are named: Outputs(logits, value, features=x)
            returned = Outputs(logits, value)
        samples = observation.stacks.shape[0]
        shapes = {"logits": (samples, self.module.num_actions), "value": (samples,)}
        for field, shape in shapes.items():
            output = getattr(returned, field)
            fits = is_precise(output) and jnp.shape(output) == shape
            hint = "such as nn.Dense(1)(x)[:, 0]" if field == "value" else "heads compute in float32"
            require_interface(fits, f"{field} of {self}", described(output), f"float32{list(shape)}", hint)
        given, got = (jax.tree.map(described, carry) for carry in (observation.carry, returned.carry))
        require_interface(got == given, f"carry of {self}", got, f"{given}, as the carry that it is given")
        return returned._replace(carry=strongly_typed(returned.carry))

    def for_acting(self, params: Any) -> Any:
        """Parameters that `apply` reads faster: for acting, not for learning."""
        return nature.for_acting(params, self.dtype) if self._has_features_by_hand else params

    @property
    def _has_features_by_hand(self) -> bool:
        return self.cpu is not None and getattr(self.module, "has_nature_features", False)

    def _inputs(self, observation: Observation) -> tuple[Any, ...]:
        """The arguments with which the module is called."""
        return tuple(observation) if self.is_recurrent else (observation.stacks,)

    def __str__(self) -> str:
        return f"network {type(self.module).__name__}"


def described(x: Any) -> str:
    """An array in messages, such as `float32[64]`."""
    return f"{jnp.result_type(x)}{list(jnp.shape(x))}"


def is_precise(x: Any) -> bool:
    """Whether an array is float32 or float64."""
    return jnp.result_type(x).name in ("float32", "float64")


def strongly_typed(tree: Any) -> Any:
    """The leaves of a tree as arrays of fixed types.

    Python numbers, and arrays that are computed from them alone, are weakly typed in JAX. A state or a memory with
    such leaves would compile its program twice, because they have fixed types once they were stored or restored.
    """
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)


# --- The choice --------------------------------------------------------------------------------------------------


def make_network(config: NetworkConfig, num_actions: int, *devices: str) -> Network:
    """The network of a config, in the form that suits its devices.

    The devices that learn and those that act compute in the same form, so that the ratio stays near 1 in an
    update's first gradient step.

    Args:
        devices: classes (`devices.device_class`) of the devices that learn, then of those that act. Without any,
            it is computed plainly.

    Raises:
        ConfigError: no network has that name.
    """
    only_cpus = bool(devices) and "gpu" not in devices
    networks = SHIPPED | _registered
    require(config.name in networks, "network.name", config.name, f"one of {', '.join(networks)}", UNREGISTERED)
    module = networks[config.name](num_actions=num_actions, dtype=jnp.dtype(config.compute_dtype))
    # Learning takes more time than acting, so the first class counts.
    return Network(module, devices[0] if only_cpus and config.conv == "auto" else None)


def speed_hints(network: Network) -> Iterator[str]:
    """What would make a network train faster on its CPUs, a line each."""
    is_slow = False

    def note(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        nonlocal is_slow
        is_slow |= isinstance(context.module, nn.Conv)
        return call(*args, **kwargs)

    if network.cpu is None:
        return
    with nn.intercept_methods(note):
        jax.eval_shape(network.init, jax.random.key(0))
    if is_slow:
        yield (
            f"{network}: on a CPU, the gradients of nn.Conv are many times slower than those of"
            " jaxrl_atari.networks.Conv; see docs/idea.md, A network"
        )
    if network.cpu != "cpu" and network.dtype == jnp.float32:
        yield (
            "this CPU multiplies bfloat16: --network.compute-dtype bfloat16 trains nature 1.3 to 1.6 times as fast"
        )


_registered: dict[str, Callable[..., nn.Module]] = {}


def register_network(name: str, network: Callable[..., nn.Module]) -> None:
    """Lets a config choose a network of your own, as in `--network.name tiny`.

    Args:
        name: a new name. A later network of the same name replaces the earlier one.
        network: a class of modules, as the top of this file describes them; or a `functools.partial` of one that
            sets fields of its own.

    Raises:
        ConfigError: the name is taken by the package.
    """
    require(name not in SHIPPED, "network.name", name, "a new name", "the package ships one of this name")
    _registered[name] = network


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


def shared(network: nn.Module, part: nn.Module) -> Any:
    """A part of a network whose layers become the network's own: no prefix stands before their names."""
    nn.share_scope(network, part)
    return part


# --- Feed-forward ------------------------------------------------------------------------------------------------


class NatureTorso(nn.Module):
    """The three convolutions of Mnih et al. 2015."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """uint8 [N, 84, 84, 4] -> float32 [N, 7, 7, 64]."""
        init = nn.initializers.orthogonal(2**0.5)
        conv = partial(Conv, padding="VALID", kernel_init=init, dtype=self.dtype)
        x = nn.relu(conv(32, (8, 8), 4, name="conv1")(x))
        x = nn.relu(conv(64, (4, 4), 2, name="conv2")(x))
        return nn.relu(conv(64, (3, 3), 1, name="conv3")(x))


class NatureFeatures(nn.Module):
    """The convolutions and the dense layer of Mnih et al. 2015: stacks -> features.

    In a network, `shared(self, NatureFeatures(self.dtype))(stacks)`. The network then has no other layers of the
    names `conv1`, `conv2`, `conv3` and `dense`.
    """

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, stacks: jax.Array) -> jax.Array:
        """uint8 [N, 84, 84, 4] -> float32 [N, 512]."""
        if for_cpu.value and not self.is_initializing():
            # A faster program for the two lines below, which does not see an edit of them. If you edit them, edit
            # cpu/nature.py too, or delete this branch: `nature` then trains at 0.75 of its speed, in bfloat16 at
            # half of it. `test_features_by_hand_are_those_of_the_plain_form` compares the two.
            chunk = nature.chunk_size(for_cpu.value, self.dtype)
            return nature.features(self.variables["params"], stacks, self.dtype, chunk)
        x = module_in_chunks(shared(self, NatureTorso(self.dtype)), stacks)
        return hidden_layer(x, 512, self.dtype)


class NatureActorCritic(nn.Module):
    """The network of Mnih et al. 2015 (doi:10.1038/nature14236) with a policy and a value head.

    Orthogonal initialisation with the gains of OpenAI Baselines' PPO: sqrt(2), policy head 0.01, value head 1. The
    torso computes in `dtype`, the heads in float32; parameters are float32. 1,687,719 parameters with 6 actions.
    """

    has_nature_features: ClassVar[bool] = True
    """On a CPU, frames are then stored in the blocks that `cpu/nature.py` reads."""
    num_actions: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, stacks: jax.Array) -> Outputs:
        """uint8 [N, 84, 84, 4] -> logits float32 [N, A], value float32 [N]."""
        return heads(shared(self, NatureFeatures(self.dtype))(stacks), self.num_actions)


class ImpalaTorso(nn.Module):
    """The 15 convolutions of Espeholt et al. 2018."""

    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """uint8 [N, 84, 84, 4] -> float32 [N, 11, 11, 32]."""

        def conv(channels: int, x: jax.Array) -> jax.Array:
            """The next convolution, of 3x3 pixels: flax names them Conv_0 to Conv_14."""
            init = nn.initializers.orthogonal(2**0.5)
            return Conv(channels, kernel_init=init, dtype=self.dtype)(x)

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
        x = module_in_chunks(shared(self, ImpalaTorso(self.dtype)), stacks)
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

    has_nature_features: ClassVar[bool] = True
    num_actions: int
    dtype: Any = jnp.float32
    units: int = 256

    def initial_carry(self, num_envs: int) -> Any:
        """Memory before the first game: float32 [num_envs, units] twice."""
        return jnp.zeros((num_envs, self.units)), jnp.zeros((num_envs, self.units))

    @nn.compact
    def __call__(self, stacks: jax.Array, first: jax.Array, carry: Any) -> Outputs:
        """The fields of an `Observation` -> `Outputs`."""
        x, carry = lstm(self.units, shared(self, NatureFeatures(self.dtype))(stacks), first, carry)
        return heads(x, self.num_actions, carry)


SHIPPED = {"nature": NatureActorCritic, "impala": ImpalaActorCritic, "nature_lstm": NatureLSTM}
"""`network.name` -> a network of the package."""
