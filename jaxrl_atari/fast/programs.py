"""Whether a module is still the network that `cpu_conv.py` computes by hand: a comparison of programs.

`NatureAsShipped` is that network in a few lines of flax and JAX. It uses no layer of this package, so that an
edit of one, as of `layers.Conv`, changes the module and not `NatureAsShipped`, and is found.

The number of samples is a symbol, so programs are compared for all numbers at once. A network that treats few
samples and many differently is then not taken for the one by hand. A single sample, which broadcasts, is compared
too. Two kinds of edit are not noticed, and `cpu_conv.py` still runs in place of the edited module:

- a test for one particular number of samples, such as `x.shape[0] == 64`: for a symbol it is false;
- an edit under `if self.for_cpu`: the module is compared in the form that a GPU runs, in which this is false. To
  try such an edit, move it out of the branch.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_atari.network_interface import Apply, Observation, Outputs, apply_module, empty_observation, init_params


def why_not_by_hand(module: Any) -> str:
    """Why `cpu_conv.py` does not compute this network; empty if it does, having the programs of `NatureAsShipped`.

    Args:
        module: with the fields of a network, `num_actions` and `dtype`; its `for_cpu` is false.

    Returns:
        The beginning of a message, with the name of the module.
    """
    name = type(module).__name__
    as_shipped = NatureAsShipped(module.num_actions, module.dtype)

    def apply_as_shipped(params: Any, observation: Observation) -> Any:
        return as_shipped.apply({"params": params}, observation.stacks)

    try:
        same = programs_of(partial(apply_module, module), module) == programs_of(apply_as_shipped, as_shipped)
    except Exception as error:
        # For example, it asks how many samples there are, by a comparison or by `len`. Then the module runs, and
        # shows any error of its own.
        why = str(error).partition("\n")[0]
        return f"{name} cannot be compared with the network by hand ({type(error).__name__}: {why})"
    return "" if same else f"{name} or a layer of it was edited"


class NatureAsShipped(nn.Module):
    """What `cpu_conv.py` computes, layer by layer: a copy of `networks.NatureActorCritic`, on purpose."""

    num_actions: int
    dtype: Any

    @nn.compact
    def __call__(self, stacks: jax.Array) -> Outputs:
        """uint8 [N, 84, 84, 4] -> logits float32 [N, A], value float32 [N], features float32 [N, 512]."""
        x = stacks.astype(self.dtype) / 255
        for name, features, size, stride in (("conv1", 32, 8, 4), ("conv2", 64, 4, 2), ("conv3", 64, 3, 1)):
            x = nn.relu(Convolution(features, size, stride, self.dtype, name=name)(x))
        precision = "highest" if self.dtype == jnp.float32 else None
        hidden = nn.Dense(512, dtype=self.dtype, precision=precision, name="dense")(x.reshape(*x.shape[:-3], -1))
        hidden = nn.relu(hidden).astype(jnp.float32)
        head = partial(nn.Dense, dtype=jnp.float32, precision="highest")
        logits, value = head(self.num_actions, name="policy")(hidden), head(1, name="value")(hidden)
        return Outputs(logits, value[..., 0], features=hidden)


class Convolution(nn.Module):
    """A convolution of `NatureAsShipped`, which computes in `dtype` and adds its bias in float32.

    It is not `layers.Conv`: an edit of that layer must not change `NatureAsShipped` as well.
    """

    features: int
    size: int
    stride: int
    dtype: Any

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[N, H, W, C] -> float32 [N, h, w, features]."""
        zeros = nn.initializers.zeros
        kernel = self.param("kernel", zeros, (self.size, self.size, x.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", zeros, (self.features,), jnp.float32)
        strides = (self.stride, self.stride)
        x, kernel = x.astype(self.dtype), kernel.astype(self.dtype)
        axes = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, kernel, strides, "VALID", dimension_numbers=axes) + bias


def programs_of(apply: Apply, module: nn.Module) -> list[Any]:
    """The programs of a network, in values that can be compared: how parameters become outputs and gradients.

    A program is what JAX hands to XLA (StableHLO), and the structure of what goes in and comes out. Names in the
    source, comments and initialisation are not part of it. Gradients are: a `stop_gradient` changes nothing else.

    Args:
        apply: the network as a function.
        module: the network as a module, for its parameters and its observation.

    Returns:
        The program for any number of samples, and that for one.

    Raises:
        Exception: whatever the network raises for a number of samples that is a symbol.
    """

    @jax.jit
    def outputs_and_gradients(params: Any, observation: Observation) -> Any:
        def floats_and_outputs(params: Any) -> tuple[list[jax.Array], Outputs]:
            outputs = apply(params, observation)
            return [x for x in jax.tree.leaves(outputs) if jnp.issubdtype(x.dtype, jnp.floating)], outputs

        floats, gradients_of, outputs = jax.vjp(floats_and_outputs, params, has_aux=True)
        return outputs, gradients_of(floats)

    params = jax.eval_shape(lambda: init_params(module, jax.random.key(0)))
    numbers_of_samples: list[Any] = [*jax.export.symbolic_shape("samples"), 1]
    programs = []
    for samples in numbers_of_samples:
        observation = jax.eval_shape(partial(empty_observation, module, samples))
        lowered = outputs_and_gradients.lower(params, observation)
        programs.append((lowered.as_text(), lowered.in_tree, lowered.out_tree))
    return programs
