"""What a network is: a `flax.linen.Module`; and `Network`, the pure functions that the rest of the package uses.

A module is here called a network if it has:

**Fields**, which the package sets. Further fields have defaults, and values that can be hashed.

    num_actions    A, of the game
    dtype          type of the torso's products, float32 or bfloat16; parameters are float32
    for_cpu        optional: compute gradients in the way that is fast on CPUs. Pass it to each `layers.Conv`;
                   `layers.in_chunks` reads it. True if `network.conv` is `layers` or `by_hand`, or `auto` and
                   only CPUs learn and act
    features_by_hand
                   optional, for a network that calls `networks.nature_features`, which reads it: where only CPUs
                   learn and act, `fast/` computes these features

**A call**, `module(stacks)`, with frame stacks uint8 [N, 84, 84, 4], the oldest frame first. It returns `Outputs`,
or a pair: logits float32 [N, A] and value float32 [N]. A tuple of three is refused: further outputs are named, as
in `Outputs(logits, value, features=x)`. A logit of -1e9 rules an action out; -inf would make the entropy NaN.

**Parameters**, and no other variables: layers with statistics or random numbers, such as batch normalisation,
spectral normalisation and dropout, are refused. Layer and group normalisation work.

**A memory**, if it is recurrent: a method `initial_carry(num_envs)` returns what it remembers before the first
game, any pytree [num_envs, ...]. Its call is `module(stacks, first, carry)`, the fields of an `Observation`, and
returns `Outputs` with the new carry.

`networks.py` has those that are shipped, and `register_network` adds one of your own (docs/idea.md, "A network").
`network_forms.py` makes a module into a `Network`, in the form that suits its devices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_atari.config import NetworkConfig
from jaxrl_atari.errors import ConfigError, require
from jaxrl_atari.frames import FRAME_SIZE, STACK, FrameLayout
from jaxrl_atari.registry import NETWORKS


class Observation(NamedTuple):
    """Input of a network: N samples.

    A recurrent network gets N / n consecutive steps of n environments, ordered by step, then by environment.
    """

    stacks: jax.Array
    """uint8 [N, H, W, 4 * C] in the network's layout, the oldest frame first; in `frames.PLAIN` [N, 84, 84, 4]."""
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


FeaturesByHand = Callable[[nn.Module, jax.Array], jax.Array]
"""Computes what `networks.NatureFeatures` computes: that module, and stacks uint8 [N, H, W, 4 * C] in the layout
of the `Network` -> float32 [N, 512]."""


@dataclass(frozen=True)
class HiddenStacks:
    """What a network is called with, in place of frame stacks, while its `features_by_hand` is set.

    The stacks are then in a layout that only `features_by_hand` knows. A network that reads pixels itself would
    silently compute something else from them. This class is no array, so JAX's trace of such a network fails.
    """

    array: jax.Array


Apply = Callable[[Any, Observation], Outputs]
"""A network as a pure function: parameters, observation -> outputs."""


class Network(NamedTuple):
    """A network as the rest of the package knows it: pure functions that suit the devices which compute it."""

    init: Callable[[jax.Array], Any]  # key -> its first parameters, as `init_params` makes them
    apply: Apply
    layout: FrameLayout  # how frames are stored: `Observation.stacks` is uint8 [N, H, W, 4 * C]
    acting_params: Callable[[Any], Any]  # params -> params that `apply` reads faster: for acting, not for learning
    dtype: Any  # type of the torso's arithmetic
    initial_carry: Callable[[int], Any] = lambda num_envs: ()  # memory before the first game, [num_envs, ...]


# --- From a name to a module -------------------------------------------------------------------------------------


def register_network(name: str, network: Callable[..., nn.Module]) -> None:
    """Lets a config choose a network of your own, as in `--network.name tiny`.

    Args:
        name: a new name. A later network of the same name replaces the earlier one.
        network: a class of modules, as the top of this file describes them; or a `functools.partial` of one that
            sets fields of its own.

    Raises:
        ConfigError: the name has other characters than letters, digits and `._-`, or is taken by the package; or
            `network` is a module and no class.
    """
    usable = callable(network) and not isinstance(network, nn.Module)
    require(usable, NETWORKS.field, name, "a class of modules, such as Tiny and not Tiny(...)", f"got {network!r}")
    NETWORKS.register(name, network)


def make_module(config: NetworkConfig, num_actions: int, dtype: Any = jnp.float32) -> nn.Module:
    """The module of a config, for `init_params`. To compute with it, see `network_forms.make_network`.

    Args:
        dtype: type of the torso's arithmetic.

    Raises:
        ConfigError: no network has that name, or it cannot be made of these arguments alone.
    """
    network = NETWORKS.get(config.name)
    try:
        module = network(num_actions=num_actions, dtype=dtype)
        hash(module)  # the module is a key of the caches of compiled programs
    except TypeError as error:
        expected = "a flax.linen.Module with the fields num_actions and dtype, and hashable values in its others"
        raise ConfigError(NETWORKS.field, config.name, expected, str(error)) from error
    return module


# --- A module as functions ---------------------------------------------------------------------------------------

PARAMETERS_ALONE = "parameters alone (the collection `params`), and no random numbers"
"""What is expected of a network's variables, in messages."""


def init_params(module: nn.Module, key: jax.Array) -> Any:
    """The first parameters, float32; the same in every form of the network.

    Raises:
        ConfigError: the network has other variables than parameters.
    """
    variables = module.init(key, *_inputs(module, empty_observation(module)))
    others = ", ".join(sorted(set(variables) - {"params"}))
    hint = f"it also has the collection {others}, which no update would change"
    require(not others, "network", type(module).__name__, PARAMETERS_ALONE, hint)
    return variables["params"]


def apply_module(module: nn.Module, params: Any, observation: Observation) -> Outputs:
    """The `Apply` of a module.

    Raises:
        ConfigError: the network draws random numbers, or returns something else than outputs of its kind.
        ValueError: the network is recurrent, but the observation has no memory.
    """
    try:
        returned: Any = module.apply({"params": params}, *_inputs(module, observation))
    except flax.errors.InvalidRngError as error:
        raise ConfigError("network", type(module).__name__, PARAMETERS_ALONE, f"flax says: {error}") from error
    return check_outputs(module, returned, observation)


def empty_observation(module: nn.Module, samples: int = 1) -> Observation:
    """Black stacks at the start of a game, each in an environment of its own."""
    stacks = jnp.zeros((samples, FRAME_SIZE, FRAME_SIZE, STACK), jnp.uint8)
    return Observation(stacks, jnp.ones(samples, bool), initial_carry(module, samples))


def _inputs(module: nn.Module, observation: Observation) -> tuple[Any, ...]:
    """The arguments with which a module is called."""
    if getattr(module, "features_by_hand", None) is not None:
        observation = observation._replace(stacks=HiddenStacks(observation.stacks))
    if not _has_memory(module):
        return (observation.stacks,)
    if observation.first is None or not is_recurrent(observation.carry):
        name = type(module).__name__
        raise ValueError(f"{name} is recurrent: its Observation needs `first` and `carry`, see `initial_carry`")
    return tuple(observation)


# --- Memory ------------------------------------------------------------------------------------------------------


def initial_carry(module: Any, num_envs: int) -> Any:
    """What a network remembers before its first game, [num_envs, ...]: `()` unless it is recurrent.

    Raises:
        ConfigError: the network has a method `initial_carry`, which returns no array.
    """
    if not _has_memory(module):
        return ()
    carry = module.initial_carry(num_envs)
    expected = "an initial_carry of one array or more; a network without a memory has no such method"
    require(is_recurrent(carry), "network", type(module).__name__, expected, f"it returns {carry}")
    return carry


def is_recurrent(carry: Any) -> bool:
    """Whether a carry is that of a recurrent network: it holds something."""
    return bool(jax.tree.leaves(carry))


def _has_memory(module: nn.Module) -> bool:
    """Whether a network is recurrent: it then has a method `initial_carry(num_envs)`."""
    return hasattr(module, "initial_carry")


# --- Checks ------------------------------------------------------------------------------------------------------


def check_outputs(module: Any, returned: Any, observation: Observation) -> Outputs:
    """What a network returned for an observation, as `Outputs`.

    Raises:
        ConfigError: it is neither `Outputs` nor a pair; logits or value have another shape, or not the precision
            of float32; the features, or an array of `extra`, do not have one row per sample; or the carry has
            another form than that of the observation.
    """
    name = type(module).__name__
    samples = observation.stacks.shape[0]
    if not isinstance(returned, Outputs):
        pair = isinstance(returned, tuple) and len(returned) == 2
        got = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
        expected = "Outputs, as in Outputs(logits, value, features=x), or the pair of logits and value"
        require(pair, "network", name, expected, f"it returns {got}")
        returned = Outputs(*returned)
    shapes = {"logits": (samples, module.num_actions), "value": (samples,)}
    for field, shape in shapes.items():
        output = getattr(returned, field)
        got, dtype = jnp.shape(output), jnp.result_type(output)
        hint = ", such as nn.Dense(1)(x)[:, 0]" if field == "value" else ""
        expected = f"{field} of shape {_text(shape)}{hint}"
        require(got == shape, "network", name, expected, f"its shape is {_text(got)}")
        is_precise = jnp.promote_types(dtype, jnp.float32) == dtype
        expected = f"{field} in float32: heads compute in float32, whatever the `dtype` of the torso"
        require(is_precise, "network", name, expected, f"it is {dtype}")
    for field in ("features", "extra"):
        for output in jax.tree.leaves(getattr(returned, field)):
            shape = jnp.shape(output)
            expected = f"{field} with one row per sample, of shape [{samples}, ...]"
            require(shape[:1] == (samples,), "network", name, expected, f"its shape is {_text(shape)}")
    if _has_memory(module):
        given, got = (jax.tree.map(form_of, carry) for carry in (observation.carry, returned.carry))
        require(got == given, "network", name, f"a carry of the form that it is given, {given}", f"it is {got}")
    else:
        expected = "no carry: a network with a memory has a method initial_carry"
        require(not is_recurrent(returned.carry), "network", name, expected)
    return returned


def form_of(x: jax.typing.ArrayLike) -> str:
    """Type and shape of an array, such as `float32[16, 256]`."""
    return f"{jnp.result_type(x)}{_text(jnp.shape(x))}"


def _text(shape: tuple[int, ...]) -> str:
    """A shape in messages, such as `[256, 6]`."""
    return f"[{', '.join(map(str, shape))}]"
