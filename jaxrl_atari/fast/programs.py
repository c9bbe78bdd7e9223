"""Whether a network's features are still those that `nature_features.py` computes: a comparison of programs.

`features_as_shipped` computes these features in a few lines. It uses no layer of this package, so that an edit of
one, as of `layers.Conv`, changes the network's features and not these. Two programs of the network are compared:
with its own features, and with `features_as_shipped` in their place. The rest of the network is the same in both.
Before, the shapes of the kernels are compared, which both programs take from the parameters.

Why programs and not numbers: JAX makes these programs in less than a second. To compare outputs and gradients it
would have to compile them, too.

The number of samples is a symbol, so programs are compared for all numbers at once. A network that treats few
samples and many differently is then not taken for one with the features as shipped. A single sample, which
broadcasts, is compared too. Two kinds of edit of the features are not noticed, and `nature_features.py` still
computes them as they were:

- a test for one particular number of samples, such as `x.shape[0] == 64`: for a symbol it is false;
- an edit under `if self.for_cpu`: the network is compared in the form that a GPU runs, in which this is false. To
  try such an edit, move it out of the branch.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax import lax

from jaxrl_atari.fast.nature_features import KERNELS
from jaxrl_atari.network_interface import Observation, Outputs, apply_module, empty_observation, init_params


def why_not_by_hand(module: Any) -> str:
    """Why `nature_features.py` does not compute the features of this network; empty if it does.

    Args:
        module: with the fields of a network; its `for_cpu` is false, and its `features_by_hand` is None.

    Returns:
        The beginning of a message, with the name of the module.
    """
    name = type(module).__name__
    edited = f"the features of {name}, or a layer of them, were edited"
    as_shipped = module.clone(features_by_hand=partial(features_as_shipped, dtype=module.dtype))
    params = jax.eval_shape(partial(init_params, module), jax.random.key(0))
    shapes: Any = flatten_dict(jax.tree.map(lambda x: x.shape, params), sep="/")
    kernels = {layer: shapes.get(f"{layer}/kernel") for layer in KERNELS}
    if None in kernels.values():
        return f"{name} lacks one of the layers {', '.join(KERNELS)} of networks.nature_features"
    if kernels != KERNELS:
        return edited
    try:
        same = programs_of(module, params) == programs_of(as_shipped, params)
    except Exception as error:
        # For example, it reads the stacks itself, or asks how many samples there are, by a comparison or by `len`.
        # Then its layers compute the features, and show any error of their own.
        why = str(error).partition("\n")[0]
        return f"{name} cannot be compared with the features by hand ({type(error).__name__}: {why})"
    return "" if same else edited


def features_as_shipped(params: Any, stacks: jax.Array, dtype: Any) -> jax.Array:
    """What `nature_features.features` computes, layer by layer: a copy of `networks.NatureFeatures`, on purpose.

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


def programs_of(module: nn.Module, params: Any) -> list[Any]:
    """The programs of a network, in values that can be compared: how parameters become outputs and gradients.

    A program is what JAX hands to XLA (StableHLO), and the structure of what goes in and comes out. Names in the
    source, comments and initialisation are not part of it. Gradients are: a `stop_gradient` changes nothing else.

    Args:
        params: shapes of its parameters.

    Returns:
        The program for any number of samples, and that for one.

    Raises:
        Exception: whatever the network raises for a number of samples that is a symbol.
    """

    @jax.jit
    def outputs_and_gradients(params: Any, observation: Observation) -> Any:
        def floats_and_outputs(params: Any) -> tuple[list[jax.Array], Outputs]:
            outputs = apply_module(module, params, observation)
            return [x for x in jax.tree.leaves(outputs) if jnp.issubdtype(x.dtype, jnp.floating)], outputs

        floats, gradients_of, outputs = jax.vjp(floats_and_outputs, params, has_aux=True)
        return outputs, gradients_of(floats)

    numbers_of_samples: list[Any] = [*jax.export.symbolic_shape("samples"), 1]
    programs = []
    for samples in numbers_of_samples:
        observation = jax.eval_shape(partial(empty_observation, module, samples))
        lowered = outputs_and_gradients.lower(params, observation)
        programs.append((lowered.as_text(), lowered.in_tree, lowered.out_tree))
    return programs
