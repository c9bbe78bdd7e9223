"""Whether `networks.NatureFeatures` still computes what `by_hand.py` computes: a comparison of programs.

`features_as_shipped` says in a few lines what `by_hand.py` computes. It uses no layer of this package, so an edit
of a layer, such as `layers.Conv`, changes `NatureFeatures` and not this function. First the shapes of the kernels
are compared, and then the programs that JAX makes of the two. (It makes them in less than a second. To compare
numbers, it would have to compile the programs as well.)

The number of samples is a symbol, so programs are compared for all numbers at once: an edit that treats few
samples and many differently is noticed. A single sample, which broadcasts, is compared too. Two kinds of edit are
not noticed, and `by_hand.py` still computes the features as they were:

- a test for one particular number of samples, such as `x.shape[0] == 64`: for a symbol it is false;
- an edit of what runs on CPUs alone (`if layers.for_cpus.value`): what is compared is the module in the
  form that a GPU runs. To try such an edit, move it out of the branch.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax import lax

from jaxrl_atari.fast.by_hand import KERNELS
from jaxrl_atari.frames import FRAME_SIZE, STACK
from jaxrl_atari.networks import NatureFeatures

Features = Callable[[Any, jax.Array], jax.Array]
"""Parameters, stacks -> features."""


def is_as_shipped(dtype: Any) -> bool:
    """Whether `networks.NatureFeatures` computes in `dtype` what `features_as_shipped` does."""
    features = NatureFeatures(dtype)
    params = jax.eval_shape(features.init, jax.random.key(0), stacks_shape(1))["params"]
    if kernel_shapes(params) != KERNELS:
        return False
    as_shipped = partial(features_as_shipped, dtype=dtype)
    return programs_of(partial(_apply, features), params) == programs_of(as_shipped, params)


def features_as_shipped(params: Any, stacks: jax.Array, dtype: Any) -> jax.Array:
    """What `by_hand.features` computes, layer by layer: a copy of `networks.NatureFeatures`, on purpose.

    Args:
        params: of the network.
        stacks: uint8 [N, 84, 84, 4].

    Returns:
        float32 [N, 512].
    """
    x = stacks.astype(dtype) / 255
    for name, stride in (("conv1", 4), ("conv2", 2), ("conv3", 1)):
        x, kernel = x.astype(dtype), params[name]["kernel"].astype(dtype)
        axes = ("NHWC", "HWIO", "NHWC")
        x = lax.conv_general_dilated(x, kernel, (stride, stride), "VALID", dimension_numbers=axes)
        x = nn.relu(x + params[name]["bias"])  # in float32
    dense = nn.Dense(KERNELS["dense"][-1], dtype=dtype, precision="highest" if dtype == jnp.float32 else None)
    hidden: Any = dense.apply({"params": params["dense"]}, x.reshape(x.shape[0], -1))
    return nn.relu(hidden).astype(jnp.float32)


def _apply(module: nn.Module, params: Any, stacks: jax.Array) -> Any:
    return module.apply({"params": params}, stacks)


def kernel_shapes(params: Any) -> dict[str, tuple[int, ...] | None]:
    """The shapes of the kernels in `KERNELS`; None for one that is missing."""
    shapes: Any = flatten_dict(jax.tree.map(lambda x: x.shape, params), sep="/")
    return {layer: shapes.get(f"{layer}/kernel") for layer in KERNELS}


def stacks_shape(samples: Any) -> jax.ShapeDtypeStruct:
    """The shape of frame stacks, for a number of samples or a symbol."""
    return jax.ShapeDtypeStruct((samples, FRAME_SIZE, FRAME_SIZE, STACK), jnp.uint8)


def programs_of(features: Features, params: Any) -> list[Any]:
    """The programs of features, in values that can be compared: how parameters become features and gradients.

    A program is what JAX hands to XLA (StableHLO), and the structure of what goes in and comes out. Names in the
    source and comments are not part of it. Gradients are: a `stop_gradient` changes nothing else.

    Args:
        params: shapes of the parameters.

    Returns:
        The program for any number of samples, and that for one.
    """

    @jax.jit
    def features_and_gradients(params: Any, stacks: jax.Array) -> Any:
        outputs, gradients_of = jax.vjp(lambda params: features(params, stacks), params)
        return outputs, gradients_of(outputs)

    numbers_of_samples: list[Any] = [*jax.export.symbolic_shape("samples"), 1]
    programs = []
    for samples in numbers_of_samples:
        lowered = features_and_gradients.lower(params, stacks_shape(samples))
        programs.append((lowered.as_text(), lowered.in_tree, lowered.out_tree))
    return programs
