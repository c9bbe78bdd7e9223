"""The form and the arithmetic of a network that suit a kind of device.

Where CPUs alone learn and act, or with `network.conv = "matmul"`, convolutions have the gradients of `layers.py`,
which suit CPUs. `nature` is faster still in a form of its own (`cpu_conv.py`), as long as it is what that form was
written for. Everywhere else networks are computed as their modules say.
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

FAST_FORMS: dict[str, Any] = {"nature": cpu_conv}
"""`network.name` -> the module that computes it fast on CPUs: `apply`, `acting_params`, `chunk_size`, and
`Computed`, the flax module that these were written for."""

BFLOAT16_CPUS = {"bfloat16 cpu", "amx cpu"}
"""The platforms that are CPUs which multiply bfloat16; see `hardware.gpus.network_platform`."""


class Network(NamedTuple):
    """A network as plain functions, in the form and arithmetic that suit a kind of device."""

    apply: Apply  # parameters, observation -> outputs
    layout: FrameLayout  # the form of the frames in `Observation.stacks`, uint8 [N, H, W, 4 * C]
    acting_params: Callable[[Any], Any]  # params -> params that `apply` reads faster, with the same outputs
    dtype: Any  # type of the torso's arithmetic
    initial_carry: Callable[[int], Any] = lambda num_envs: ()  # memory before the first game, [num_envs, ...]


def make_network(config: NetworkConfig, num_actions: int, platform: str, peer: str | None = None) -> Network:
    """The network of a config in the form that suits a platform (`network_platform`).

    The same arguments give the same object. With `network.conv = "matmul"` and, with `auto`, on CPUs alone,
    convolutions have gradients for CPUs. With `network.compute_dtype = "auto"`, the torso's arithmetic is bfloat16
    if learner and actor are both GPUs with bfloat16 units (not measured yet) or, for `nature`, both CPUs with
    bfloat16 instructions; else float32. On every CPU, XLA computes bfloat16 convolutions by way of float32.

    Args:
        peer: the platform of the other side: of the actor if this is the learner's network, of the learner if it
            is the actor's. None: the same. Both store frames in the same layout and compute in the same
            arithmetic: if a GPU learns and a CPU acts, float32 in both keeps the ratio at 1 in an update's first
            gradient step.

    Raises:
        ConfigError: no network has that name.
    """
    return _make_network(make_module(config, num_actions, jnp.float32), config, platform, peer or platform)


@cache
def _make_network(module: nn.Module, config: NetworkConfig, platform: str, peer: str) -> Network:
    platforms = {platform, peer}
    on_cpu = config.conv == "matmul" or (config.conv == "auto" and platforms <= {"cpu", *BFLOAT16_CPUS})
    form = FAST_FORMS.get(config.name) if on_cpu else None
    if form is not None and _program(module) != _program(form.Computed(module.num_actions)):
        _log.warning(
            "%s was edited: it trains up to a fifth more slowly on a CPU than in %s, which computes it as it was",
            type(module).__name__, form.__name__,
        )  # fmt: skip
        form = None
    in_bfloat16 = platforms == {"gpu"} or (form is not None and platforms <= BFLOAT16_CPUS)
    automatic = "bfloat16" if in_bfloat16 else "float32"
    dtype = jnp.dtype(automatic if config.compute_dtype == "auto" else config.compute_dtype)
    if form is not None:
        acting_params = jax.jit(partial(form.acting_params, dtype=dtype))
        chunk = form.chunk_size(platform, dtype)
        return Network(partial(form.apply, dtype=dtype, chunk=chunk), BLOCKED, acting_params, dtype)

    module = module.clone(dtype=dtype)

    def apply(params: Any, observation: Observation) -> Outputs:
        with cpu_gradients(on_cpu):
            return apply_module(module, params, observation)

    if on_cpu and _has_plain_convolutions(module):
        _log.warning(
            "%s has convolutions of flax, whose gradients are 10 to 30 times slower on a CPU than those of"
            " jaxrl_atari.layers.Conv",
            type(module).__name__,
        )
    return Network(apply, PLAIN, lambda params: params, dtype, partial(initial_carry, module))


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


def _program(module: nn.Module) -> str:
    """The program of a network as text: its jaxpr, from the parameters and one stack to policy and value.

    Of two networks, the programs are compared and not the texts, so comments, names and initialisation are free;
    nor the outputs, because an edit may change gradients alone, as a `stop_gradient` does.
    """
    stacks = jax.ShapeDtypeStruct((1, 84, 84, STACK), jnp.uint8)
    params = jax.eval_shape(module.init, jax.random.key(0), stacks)
    program = jax.make_jaxpr(lambda params, stacks: module.apply(params, stacks)[:2])(params, stacks)
    return re.sub(r"0x[0-9a-f]+", "", f"{jax.tree.structure(params)} {program}")
