"""Pure functions of a network: its module, its first parameters, its memory and its outputs, which are checked.

`network_interface.py` says what a network is. A network that breaks a rule of it is an `InterfaceError`, which
says what is expected.
"""

from inspect import signature
from typing import Any

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_atari.config import NetworkConfig
from jaxrl_atari.errors import ConfigError, InterfaceError, require, require_interface
from jaxrl_atari.frames import FRAME_SIZE, STACK
from jaxrl_atari.network_interface import Observation, Outputs, is_recurrent
from jaxrl_atari.registry import NETWORKS

A_NETWORK = "a flax.linen.Module with the fields num_actions and dtype, and hashable values in its others"
"""What is expected of a registered network, in messages."""

PARAMETERS_ALONE = "parameters alone (the collection `params`), and no random numbers"
"""What is expected of a network's variables, in messages."""


def make_module(config: NetworkConfig, num_actions: int, dtype: Any = jnp.float32) -> nn.Module:
    """The module of a config, for `init_params`. To compute with it, see `network_forms.make_network`.

    Args:
        dtype: type of the torso's arithmetic.

    Raises:
        ConfigError: no network has that name, or it cannot be made of these arguments alone.
    """
    network = NETWORKS.get(config.name)
    fields = {"num_actions": num_actions, "dtype": dtype}
    try:
        signature(network).bind(**fields)
    except TypeError as error:
        raise ConfigError(NETWORKS.field, config.name, A_NETWORK, str(error)) from error
    module = network(**fields)  # a `TypeError` within it keeps its traceback
    require(isinstance(module, nn.Module), NETWORKS.field, config.name, A_NETWORK, f"it makes {described(module)}")
    try:
        hash(module)  # the module is a key of the caches of compiled programs
    except TypeError as error:
        raise ConfigError(NETWORKS.field, config.name, A_NETWORK, str(error)) from error
    return module


def init_params(module: nn.Module, key: jax.Array) -> Any:
    """The first parameters, float32; the same in every form of the network.

    Raises:
        InterfaceError: the network has no parameters, other variables than these, or a parameter that is not
            float32 or wider.
    """
    variables = module.init(key, *_inputs(module, empty_observation(module)))
    others = ", ".join(sorted(set(variables) - {"params"}))
    hint = f"it also has the collection {others}, which no update would change"
    name = type(module).__name__
    require_interface(not others, "network", name, PARAMETERS_ALONE, hint)
    require_interface("params" in variables, "network", name, PARAMETERS_ALONE, "no layer of it has been called")
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables["params"]):
        parameter = f"parameter {jax.tree_util.keystr(path)} of network {name}"
        hint = "the type of the arithmetic is the `dtype` of a layer, and not its `param_dtype`"
        require_interface(is_precise(leaf), parameter, described(leaf), "float32", hint)
    return variables["params"]


def apply_module(module: nn.Module, params: Any, observation: Observation) -> Outputs:
    """The `Apply` of a module.

    Raises:
        InterfaceError: the network draws random numbers, or returns something else than outputs of its kind.
        ValueError: the network is recurrent, but the observation has no memory.
    """
    try:
        returned: Any = module.apply({"params": params}, *_inputs(module, observation))
    except flax.errors.InvalidRngError as error:
        raise InterfaceError("network", type(module).__name__, PARAMETERS_ALONE, f"flax says: {error}") from error
    return check_outputs(module, returned, observation)


def empty_observation(module: nn.Module, samples: int = 1) -> Observation:
    """Black stacks at the start of a game, each in an environment of its own."""
    stacks = jnp.zeros((samples, FRAME_SIZE, FRAME_SIZE, STACK), jnp.uint8)
    return Observation(stacks, jnp.ones(samples, bool), initial_carry(module, samples))


def _inputs(module: nn.Module, observation: Observation) -> tuple[Any, ...]:
    """The arguments with which a module is called."""
    if not _is_recurrent_module(module):
        return (observation.stacks,)
    if observation.first is None or not is_recurrent(observation.carry):
        name = type(module).__name__
        raise ValueError(f"{name} is recurrent: its Observation needs `first` and `carry`, see `initial_carry`")
    return tuple(observation)


# --- Memory ------------------------------------------------------------------------------------------------------


def initial_carry(module: Any, num_envs: int) -> Any:
    """What a network remembers before its first game, [num_envs, ...]: `()` unless it is recurrent.

    Raises:
        InterfaceError: the network has a method `initial_carry`, which returns no array, or something else than
            arrays [num_envs, ...].
    """
    if not _is_recurrent_module(module):
        return ()
    carry = module.initial_carry(num_envs)
    name = f"initial_carry of network {type(module).__name__}"
    hint = "a network without a memory has no such method"
    require_interface(is_recurrent(carry), name, carry, "one array or more", hint)
    for memory in jax.tree.leaves(carry):
        fits = is_array_like(memory) and jnp.shape(memory)[:1] == (num_envs,)
        expected = f"arrays with one row per environment, of shape [{num_envs}, ...]"
        require_interface(fits, name, described(memory), expected)
    return strongly_typed(carry)


def _is_recurrent_module(module: nn.Module) -> bool:
    """Whether a network has a memory: it then has a method `initial_carry(num_envs)`."""
    return hasattr(module, "initial_carry")


# --- Checks ------------------------------------------------------------------------------------------------------


def check_outputs(module: Any, returned: Any, observation: Observation) -> Outputs:
    """What a network returned for an observation, as `Outputs`.

    Raises:
        InterfaceError: it is neither `Outputs` nor a pair; logits or value have another shape, or not the
            precision of float32; the features, or an array of `extra`, do not have one row per sample; or the
            carry has other shapes or types than that of the observation.
    """
    of_network = f"of network {type(module).__name__}"
    samples = observation.stacks.shape[0]
    if not isinstance(returned, Outputs):
        is_pair = isinstance(returned, tuple) and len(returned) == 2
        expected = "Outputs, as in Outputs(logits, value, features=x), or the pair of logits and value"
        require_interface(is_pair, f"outputs {of_network}", described(returned), expected)
        returned = Outputs(*returned)
    shapes = {"logits": (samples, module.num_actions), "value": (samples,)}
    for field, shape in shapes.items():
        output = getattr(returned, field)
        name, got, expected = f"{field} {of_network}", described(output), f"float32{_text(shape)}"
        hint = "such as nn.Dense(1)(x)[:, 0]" if field == "value" else ""
        require_interface(is_array_like(output) and jnp.shape(output) == shape, name, got, expected, hint)
        hint = "heads compute in float32, whatever the `dtype` of the torso"
        require_interface(is_precise(output), name, got, expected, hint)
    for field in ("features", "extra"):
        for path, output in jax.tree_util.tree_leaves_with_path(getattr(returned, field)):
            name = f"{field}{jax.tree_util.keystr(path)} {of_network}"
            fits = is_array_like(output) and jnp.shape(output)[:1] == (samples,)
            expected = f"one row per sample, of shape [{samples}, ...]"
            require_interface(fits, name, described(output), expected)
    given, got = (jax.tree.map(described, carry) for carry in (observation.carry, returned.carry))
    if _is_recurrent_module(module):
        expected = f"{given}, the shapes and types of the carry that it is given"
        require_interface(got == given, f"carry {of_network}", got, expected)
    else:
        hint = "a network with a memory has a method initial_carry"
        require_interface(not is_recurrent(returned.carry), f"carry {of_network}", got, "none", hint)
    return returned._replace(carry=strongly_typed(returned.carry))


def described(x: Any) -> str:
    """A value in messages: `float32[64]` for an array, `(TrainState, dict)` for a tuple, else its class."""
    if type(x) is tuple:
        return f"({', '.join(map(described, x))})"
    return f"{jnp.result_type(x)}{_text(jnp.shape(x))}" if is_array_like(x) else type(x).__name__


def strongly_typed(tree: Any) -> Any:
    """The leaves of a tree as arrays of fixed types.

    Python numbers, and arrays that are computed from them alone, are weakly typed in JAX. A state or a memory with
    such leaves would compile its program twice, because they have fixed types once they were stored or restored.
    """
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)


def is_precise(x: Any) -> bool:
    """Whether x is an array or a number of floats, float32 or wider."""
    if not is_array_like(x):
        return False
    dtype = jnp.result_type(x)
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.promote_types(dtype, jnp.float32) == dtype


def is_array_like(x: Any) -> bool:
    """Whether JAX can make an array of x: an array, a tracer, a random key or a number."""
    try:
        jax.typeof(x)
    except TypeError:
        return False
    return True


def _text(shape: tuple[int, ...]) -> str:
    """A shape in messages, such as `[256, 6]`."""
    return f"[{', '.join(map(str, shape))}]"
