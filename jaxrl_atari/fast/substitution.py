"""Computes the features of a network by hand: `by_hand.py` takes the place of `networks.NatureFeatures`.

Networks do not know of it. While a network is applied, flax hands over each call of a module
(`flax.linen.intercept_methods`), and that of `NatureFeatures` is answered by `by_hand.features` (`apply_by_hand`).

`why_not_by_hand` says what keeps a network from this:

- `NatureFeatures` or one of its layers was edited, which `comparison.py` notices.
- The network reads the frame stacks itself, or has the features in a type of its own. To find out, it is traced on
  stacks that raise an error where they are read (`HiddenStacks`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_atari.fast.by_hand import KERNELS, features
from jaxrl_atari.fast.comparison import is_as_shipped, kernel_shapes
from jaxrl_atari.frames import BLOCKED, FRAME_SIZE, STACK
from jaxrl_atari.network_functions import apply_module, empty_observation, init_params
from jaxrl_atari.network_interface import Observation, Outputs
from jaxrl_atari.networks import NatureFeatures


@dataclass(frozen=True, eq=False)
class HiddenStacks:
    """What a network is called with in place of frame stacks: it can pass them on, and cannot read them.

    They are blocked, so a network that reads pixels itself would silently compute something else from them. It may
    ask for the shape, which is that of the stacks that it expects.
    """

    blocked: jax.Array
    """uint8 [N, 21, 21, 64]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, 84, 84, 4)."""
        return len(self.blocked), FRAME_SIZE, FRAME_SIZE, STACK

    def __len__(self) -> int:
        return len(self.blocked)

    def __getattr__(self, name: str) -> Any:
        # A `TypeError`, and no `AttributeError`: for that, `hasattr` would silently be false.
        raise TypeError(f"it asks for `{name}` of its frame stacks")

    # Without these two methods, Python would compare the objects, and not the pixels.

    def __eq__(self, other: object) -> bool:
        raise TypeError("it compares its frame stacks")

    def __ne__(self, other: object) -> bool:
        raise TypeError("it compares its frame stacks")


def apply_by_hand(module: nn.Module, chunk: int, params: Any, observation: Observation) -> Outputs:
    """`network_functions.apply_module`, with the features by hand.

    Args:
        module: a network for which `why_not_by_hand` returns nothing.
        chunk: `by_hand.chunk_size`.
        observation: with blocked stacks.

    Raises:
        TypeError: the network reads the stacks itself, or its features have another type than the network.
    """

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        called = context.module
        # A subclass may compute something else.
        if type(called) is not NatureFeatures or context.method_name != "__call__":
            return call(*args, **kwargs)
        if jnp.dtype(called.dtype) != jnp.dtype(module.dtype):
            raise TypeError("networks.NatureFeatures has another dtype than the network")
        (stacks,) = (*args, *kwargs.values())
        return features(called.variables["params"], stacks.blocked, module.dtype, chunk)

    with nn.intercept_methods(intercept):
        return apply_module(module, params, observation._replace(stacks=HiddenStacks(observation.stacks)))


@cache
def why_not_by_hand(module: nn.Module) -> str:
    """Why the features of a network cannot be computed by hand; empty if they can.

    Returns:
        The beginning of a message.
    """
    name = type(module).__name__
    params = jax.eval_shape(partial(init_params, module), jax.random.key(0))
    if None in kernel_shapes(params).values():
        return f"{name} lacks one of the layers {', '.join(KERNELS)} of networks.nature_features"
    try:
        as_shipped = is_as_shipped(module.dtype)
    except Exception as error:  # JAX makes no program for any number of samples; the layers need none
        return f"the features of {name} cannot be compared with those by hand ({_first_line(error)})"
    if not as_shipped:
        return "networks.NatureFeatures, or a layer of it, was edited"
    rows, columns, channels = BLOCKED.shape
    blocks = jax.ShapeDtypeStruct((1, rows, columns, STACK * channels), jnp.uint8)
    observation = empty_observation(module)._replace(stacks=blocks)
    try:
        jax.eval_shape(partial(apply_by_hand, module, 1), params, observation)
    except Exception as error:  # with its layers, the network shows any error of its own
        needed = "it must use its frame stacks in networks.nature_features(self, stacks) alone"
        return f"the features of {name} cannot be computed by hand, for which {needed} ({_first_line(error)})"
    return ""


def _first_line(error: Exception) -> str:
    """An error in messages: `TypeError: its first line`."""
    first, *_ = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {first}"
