"""Whether a module is still the network that `cpu_conv.py` computes by hand: a comparison of programs.

The number of samples is a symbol, so programs are compared for all numbers at once. A network that treats few
samples and many differently is then not taken for the one by hand. A single sample, which broadcasts, is compared
too. Only a question for one other number, such as `x.shape[0] == 64`, is not noticed: for a symbol it is false.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.errors import InconclusiveDimensionOperation

from jaxrl_atari.layers import Conv
from jaxrl_atari.networks import Observation, Outputs, apply_module, empty_observation, init_params


def is_computed_by_hand(module: Any) -> bool:
    """Whether `cpu_conv.py` computes this network: whether it has the programs of `Handwritten`.

    Args:
        module: with the fields of a network, `num_actions` and `dtype`.
    """
    handwritten = programs_of(Handwritten(module.num_actions, module.dtype))
    try:
        return programs_of(module) == handwritten
    except (InconclusiveDimensionOperation, TypeError):
        # It asks how many samples there are, by a comparison or by `len`.
        return False


class Handwritten(nn.Module):
    """What `cpu_conv.py` computes, layer by layer.

    A copy of `networks.NatureActorCritic`, on purpose: an edit there must not change it.
    """

    num_actions: int
    dtype: Any

    @nn.compact
    def __call__(self, stacks: jax.Array) -> Outputs:
        """uint8 [N, 84, 84, 4] -> logits float32 [N, A], value float32 [N], features float32 [N, 512]."""
        x = stacks
        for name, features, size, stride in (("conv1", 32, 8, 4), ("conv2", 64, 4, 2), ("conv3", 64, 3, 1)):
            x = nn.relu(Conv(features, (size, size), stride, "VALID", dtype=self.dtype, name=name)(x))
        precision = "highest" if self.dtype == jnp.float32 else None
        hidden = nn.Dense(512, dtype=self.dtype, precision=precision, name="dense")(x.reshape(*x.shape[:-3], -1))
        hidden = nn.relu(hidden).astype(jnp.float32)
        head = partial(nn.Dense, dtype=jnp.float32, precision="highest")
        logits, value = head(self.num_actions, name="policy")(hidden), head(1, name="value")(hidden)
        return Outputs(logits, value[..., 0], features=hidden)


def programs_of(module: nn.Module) -> list[Any]:
    """The programs of a network, in values that can be compared: how parameters become outputs and gradients.

    A program is what JAX hands to XLA (StableHLO), and the structure of what goes in and comes out. Names in the
    source, comments and initialisation are not part of it. Gradients are: a `stop_gradient` changes nothing else.

    Returns:
        The program for any number of samples, and that for one.

    Raises:
        InconclusiveDimensionOperation, TypeError: the network asks for the number of samples, which is a symbol.
    """

    @jax.jit
    def outputs_and_gradients(params: Any, observation: Observation) -> Any:
        def apply(params: Any) -> tuple[list[jax.Array], Outputs]:
            outputs = apply_module(module, params, observation)
            return [x for x in jax.tree.leaves(outputs) if jnp.issubdtype(x.dtype, jnp.floating)], outputs

        numbers, gradients_of, outputs = jax.vjp(apply, params, has_aux=True)
        return outputs, gradients_of(numbers)

    params = jax.eval_shape(lambda: init_params(module, jax.random.key(0)))
    numbers_of_samples: list[Any] = [*jax.export.symbolic_shape("samples"), 1]
    programs = []
    for samples in numbers_of_samples:
        observation = jax.eval_shape(partial(empty_observation, module, samples))
        lowered = outputs_and_gradients.lower(params, observation)
        programs.append((lowered.as_text(), lowered.in_tree, lowered.out_tree))
    return programs
