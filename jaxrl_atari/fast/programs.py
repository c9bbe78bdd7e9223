"""Whether a module is still the network that `cpu_conv.py` computes by hand: a comparison of programs."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_atari.layers import Conv
from jaxrl_atari.networks import Observation, Outputs, apply_module, empty_observation, init_params

SIZES = (1, 256)
"""Numbers of samples with which programs are compared: a network may treat few samples and many differently."""


def is_computed_by_hand(module: Any) -> bool:
    """Whether `cpu_conv.py` computes this network: whether it has the program of `Computed`.

    Args:
        module: with the fields of a network, `num_actions` and `dtype`.
    """
    computed = Computed(module.num_actions, module.dtype)
    return all(program_of(module, size) == program_of(computed, size) for size in SIZES)


class Computed(nn.Module):
    """The network that `cpu_conv.py` computes, layer by layer."""

    num_actions: int
    dtype: Any

    @nn.compact
    def __call__(self, stacks: jax.Array) -> Outputs:
        """uint8 `[N, 84, 84, 4]` -> logits float32 `[N, A]`, value float32 `[N]`, features float32 `[N, 512]`."""
        x = stacks
        for name, features, size, stride in (("conv1", 32, 8, 4), ("conv2", 64, 4, 2), ("conv3", 64, 3, 1)):
            x = nn.relu(Conv(features, (size, size), stride, "VALID", dtype=self.dtype, name=name)(x))
        precision = "highest" if self.dtype == jnp.float32 else None
        hidden = nn.Dense(512, dtype=self.dtype, precision=precision, name="dense")(x.reshape(*x.shape[:-3], -1))
        hidden = nn.relu(hidden).astype(jnp.float32)
        head = partial(nn.Dense, dtype=jnp.float32, precision="highest")
        logits, value = head(self.num_actions, name="policy")(hidden), head(1, name="value")(hidden)
        return Outputs(logits, value[..., 0], features=hidden)


def program_of(module: nn.Module, samples: int) -> tuple[Any, ...]:
    """The program of a network, in values that can be compared: how parameters become outputs and gradients.

    It is what JAX hands to XLA (StableHLO), and the structure of what goes in and comes out. Names in the source,
    comments and initialisation are not part of it. Gradients are: a `stop_gradient` changes nothing else.

    Args:
        samples: number of samples in the observation.
    """

    @jax.jit
    def outputs_and_gradients(params: Any, observation: Observation) -> Any:
        def apply(params: Any) -> tuple[list[jax.Array], Outputs]:
            outputs = apply_module(module, params, observation)
            return [x for x in jax.tree.leaves(outputs) if jnp.issubdtype(x.dtype, jnp.floating)], outputs

        numbers, gradients_of, outputs = jax.vjp(apply, params, has_aux=True)
        return outputs, gradients_of(numbers)

    params = jax.eval_shape(partial(init_params, module), jax.random.key(0))
    lowered = outputs_and_gradients.lower(params, empty_observation(module, samples))
    return lowered.as_text(), lowered.in_tree, lowered.out_tree
