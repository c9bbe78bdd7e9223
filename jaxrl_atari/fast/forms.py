"""The form and the arithmetic of a network that suit a kind of device.

Where CPUs alone learn and act, or with `network.conv = "matmul"`, a network of `FAST_FORMS` is computed in its fast
form, as long as it is what that form was written for. Everywhere else the modules of `networks.py` do.
"""

import logging
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_atari.config import NetworkConfig
from jaxrl_atari.fast import cpu_conv
from jaxrl_atari.fast.frames import BLOCKED, PLAIN, FrameLayout
from jaxrl_atari.networks import STACK, Apply, apply_module, initial_carry, make_module

FAST_FORMS: dict[str, Any] = {"nature": cpu_conv}
"""`network.name` -> the module that computes it fast on CPUs: `apply`, `acting_params`, `chunk_size`, and `Computed`,
the flax module that these were written for."""

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

    The same arguments give the same object. The convolutions of `nature` are matrix products (`cpu_conv`) with
    `network.conv = "matmul"` and, with `auto`, on CPUs alone. With `network.compute_dtype = "auto"`, the torso's
    arithmetic is bfloat16 if learner and actor are both GPUs with bfloat16 units (not measured yet) or, with
    `cpu_conv`, both CPUs with bfloat16 instructions; else float32. On every CPU, XLA computes plain bfloat16
    convolutions by way of float32.

    Args:
        peer: the platform of the other side: of the actor if this is the learner's network, of the learner if it is the
            actor's. None: the same. Both store frames in the same layout and compute in the same arithmetic: if a GPU
            learns and a CPU acts, float32 in both keeps the ratio at 1 in an update's first gradient step.

    Raises:
        ConfigError: no network has that name.
    """
    return _make_network(make_module(config, num_actions, jnp.float32), config, platform, peer or platform)


@cache
def _make_network(module: nn.Module, config: NetworkConfig, platform: str, peer: str) -> Network:
    platforms = {platform, peer}
    chosen = config.conv == "matmul" or (config.conv == "auto" and platforms <= {"cpu", *BFLOAT16_CPUS})
    fast = FAST_FORMS.get(config.name) if chosen and _has_fast_form(module, config.name) else None
    in_bfloat16 = platforms == {"gpu"} or (fast is not None and platforms <= BFLOAT16_CPUS)
    automatic = "bfloat16" if in_bfloat16 else "float32"
    dtype = jnp.dtype(automatic if config.compute_dtype == "auto" else config.compute_dtype)
    if fast is not None:
        acting_params = jax.jit(partial(fast.acting_params, dtype=dtype))
        chunk = fast.chunk_size(platform, dtype)
        return Network(partial(fast.apply, dtype=dtype, chunk=chunk), BLOCKED, acting_params, dtype)

    module = module.clone(dtype=dtype)
    return Network(partial(apply_module, module), PLAIN, lambda params: params, dtype, partial(initial_carry, module))


@cache
def _has_fast_form(module: nn.Module, name: str) -> bool:
    """Whether a network is still what its fast form was written for. Else an edit would do nothing on a CPU.

    Their programs are compared, not their texts, so comments, names and initialisation are free; and not their outputs,
    because an edit may change gradients alone, as a `stop_gradient` does.
    """
    if name not in FAST_FORMS:
        return False
    same = _program(module) == _program(FAST_FORMS[name].Computed(module.num_actions))
    if not same:
        logging.getLogger(__name__).warning(
            "%s was edited: its convolutions are plain, which is slow on a CPU; see Computed in %s",
            type(module).__name__, FAST_FORMS[name].__name__,
        )  # fmt: skip
    return same


def _program(module: nn.Module) -> str:
    """What a network computes, as text: its jaxpr, from the parameters and one stack to the outputs."""
    stacks = jax.ShapeDtypeStruct((1, 84, 84, STACK), jnp.uint8)
    params = jax.eval_shape(module.init, jax.random.key(0), stacks)
    program = jax.make_jaxpr(lambda params, stacks: module.apply(params, stacks)[:2])(params, stacks)
    return re.sub(r"0x[0-9a-f]+", "", f"{jax.tree.structure(params)} {program}")
