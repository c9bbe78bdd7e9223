"""The form and the arithmetic of a network that suit the devices on which it learns and acts.

A network is computed in one of three forms:

- **By hand**, in `cpu_conv.py`: `nature` on CPUs, as long as it is the network that was written out there. Two
  networks are compared by their programs (`program_of`), so an edit of a comment or a name changes nothing, and an
  edit of what is computed is never overlooked.
- **For CPUs**: any other network on CPUs. Its module is applied in `layers.cpu_gradients`, in which the gradients
  of `layers.Conv` suit XLA's CPU backend.
- **As written**: everywhere else.
"""

import logging
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params

from jaxrl_atari.config import NetworkConfig
from jaxrl_atari.envs.pool import FRAME_SIZE
from jaxrl_atari.fast import cpu_conv
from jaxrl_atari.fast.frames import BLOCKED, PLAIN, FrameLayout
from jaxrl_atari.layers import cpu_gradients
from jaxrl_atari.networks import (
    STACK,
    Apply,
    Observation,
    Outputs,
    apply_module,
    init_params,
    initial_carry,
    make_module,
)

_log = logging.getLogger(__name__)

BFLOAT16_CPUS = {"bfloat16 cpu", "amx cpu"}
"""The platforms that are CPUs which multiply bfloat16; see `hardware.gpus.network_platform`."""

CPUS = {"cpu", *BFLOAT16_CPUS}
"""The platforms that are CPUs."""


class Network(NamedTuple):
    """A network as plain functions, in the form and arithmetic that suit a kind of device."""

    apply: Apply  # parameters, observation -> outputs
    layout: FrameLayout  # how frames are stored: `Observation.stacks` is uint8 [N, H, W, 4 * C]
    acting_params: Callable[[Any], Any]  # params -> params that `apply` reads faster, with the same outputs
    dtype: Any  # type of the torso's arithmetic
    initial_carry: Callable[[int], Any] = lambda num_envs: ()  # memory before the first game, [num_envs, ...]


def make_network(config: NetworkConfig, num_actions: int, platform: str, peer: str | None = None) -> Network:
    """The network of a config in the form that suits a platform (`network_platform`).

    The same arguments give the same object.

    Args:
        peer: the platform of the other side: of the actor if this is the learner's network, of the learner if it
            is the actor's. None: the same. Both store frames in the same layout and compute in the same
            arithmetic: if a GPU learns and a CPU acts, float32 in both keeps the ratio at 1 in an update's first
            gradient step.

    Raises:
        ConfigError: no network has that name, or it cannot be made.
    """
    return _make_network(make_module(config, num_actions, jnp.float32), config, platform, peer or platform)


@cache
def _make_network(module: nn.Module, config: NetworkConfig, platform: str, peer: str) -> Network:
    platforms = {platform, peer}
    for_cpus = config.conv == "matmul" or (config.conv == "auto" and platforms <= CPUS)
    by_hand = for_cpus and config.name == "nature" and _is_written_out(module)
    dtype = jnp.dtype(_arithmetic(config, platforms, by_hand))
    if by_hand:
        apply = partial(cpu_conv.apply, dtype=dtype, chunk=cpu_conv.chunk_size(platform, dtype))
        return Network(apply, BLOCKED, jax.jit(partial(cpu_conv.acting_params, dtype=dtype)), dtype)
    if for_cpus and _has_plain_convolutions(module):
        _log.warning(
            "%s has convolutions of flax, whose gradients are 10 to 30 times slower on a CPU than those of"
            " jaxrl_atari.layers.Conv",
            type(module).__name__,
        )
    return _as_written(module.clone(dtype=dtype), dtype, for_cpus)


def _as_written(module: nn.Module, dtype: Any, for_cpus: bool) -> Network:
    def apply(params: Any, observation: Observation) -> Outputs:
        with cpu_gradients(for_cpus):
            return apply_module(module, params, observation)

    return Network(apply, PLAIN, lambda params: params, dtype, partial(initial_carry, module))


def _arithmetic(config: NetworkConfig, platforms: set[str], by_hand: bool) -> str:
    """The type of the torso's arithmetic.

    With `network.compute_dtype = "auto"` it is bfloat16 where learner and actor are both GPUs with bfloat16 units
    (not measured yet), or both CPUs with bfloat16 instructions that compute `nature` by hand. Else it is float32:
    XLA computes bfloat16 convolutions by way of float32 on every CPU.
    """
    if config.compute_dtype != "auto":
        return config.compute_dtype
    in_bfloat16 = platforms == {"gpu"} or (by_hand and platforms <= BFLOAT16_CPUS)
    return "bfloat16" if in_bfloat16 else "float32"


def _is_written_out(module: nn.Module) -> bool:
    """Whether `cpu_conv.py` computes this network. If not, a warning says what that costs."""
    if program_of(module) == program_of(cpu_conv.Computed(module.num_actions)):
        return True
    _log.warning(
        "%s was edited: it trains up to a fifth more slowly on a CPU than in %s, which computes it as it was",
        type(module).__name__, cpu_conv.__name__,
    )  # fmt: skip
    return False


def program_of(module: nn.Module) -> str:
    """The program of a feed-forward network as text: its jaxpr, from parameters and a stack to policy and value.

    Names, comments and initialisation are not part of it. Outputs would not do in its place: an edit may change
    gradients alone, as a `stop_gradient` does.
    """
    stacks = jax.ShapeDtypeStruct((1, FRAME_SIZE, FRAME_SIZE, STACK), jnp.uint8)
    params = jax.eval_shape(module.init, jax.random.key(0), stacks)
    program = jax.make_jaxpr(lambda params, stacks: module.apply(params, stacks)[:2])(params, stacks)
    without_addresses = re.sub(r"0x[0-9a-f]+", "", str(program))  # of functions in memory
    return f"{jax.tree.structure(params)} {without_addresses}"


def _has_plain_convolutions(module: nn.Module) -> bool:
    """Whether a network has convolutions other than `layers.Conv`."""
    observation = Observation(
        jnp.zeros((1, FRAME_SIZE, FRAME_SIZE, STACK), jnp.uint8), jnp.ones(1, bool), initial_carry(module, 1)
    )
    params = jax.eval_shape(partial(init_params, module), jax.random.key(0))
    with cpu_gradients():
        program = jax.make_jaxpr(partial(apply_module, module))(params, observation)
    return _convolves(program.jaxpr)


def _convolves(program: Any) -> bool:
    """Whether a jaxpr has a convolution with XLA's own gradient."""
    for equation in program.eqns:
        name = equation.primitive.name
        if name == "conv_general_dilated":
            return True
        if name.startswith("custom_vjp"):  # it has a gradient of its own
            continue
        if any(_convolves(inner) for inner in jaxprs_in_params(equation.params)):
            return True
    return False
