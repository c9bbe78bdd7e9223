"""The form and the arithmetic of a network that suit a kind of device.

Where CPUs alone learn and act, or with `network.conv = "matmul"`, `fast/cpu_conv.py` computes `nature`, unless its text
was edited. Everywhere else the modules of `networks.py` do.
"""

import hashlib
import inspect
import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_atari.config import NetworkConfig
from jaxrl_atari.fast import cpu_conv
from jaxrl_atari.fast.frames import BLOCKED, PLAIN, FrameLayout
from jaxrl_atari.networks import NETWORKS, bias_in_float32, dense, heads, make_module

BFLOAT16_CPUS = {"bfloat16 cpu", "amx cpu"}
"""The platforms that are CPUs which multiply bfloat16; see `hardware.gpus.network_platform`."""


class Network(NamedTuple):
    """A network as plain functions, in the form and arithmetic that suit a kind of device."""

    apply: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]  # params, stacks -> logits [N, A], value [N]
    layout: FrameLayout  # the form of the frames in `stacks`, uint8 [N, H, W, 4 * C]
    acting_params: Callable[[Any], Any]  # params -> params that `apply` reads faster, with the same outputs
    dtype: Any  # type of the torso's arithmetic


@cache
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
    """
    platforms = {platform, peer or platform}
    chosen = config.conv == "matmul" or (config.conv == "auto" and platforms <= {"cpu", *BFLOAT16_CPUS})
    as_products = config.name == "nature" and chosen and _source_is_known(NETWORKS["nature"])
    in_bfloat16 = platforms == {"gpu"} or (as_products and platforms <= BFLOAT16_CPUS)
    automatic = "bfloat16" if in_bfloat16 else "float32"
    dtype = jnp.dtype(automatic if config.compute_dtype == "auto" else config.compute_dtype)
    if as_products:
        acting_params = jax.jit(partial(cpu_conv.acting_params, dtype=dtype))
        chunk = cpu_conv.chunk_size(platform, dtype)
        return Network(partial(cpu_conv.apply, dtype=dtype, chunk=chunk), BLOCKED, acting_params, dtype)

    module = make_module(config, num_actions, dtype)

    def apply(params: Any, stacks: jax.Array) -> Any:
        return module.apply({"params": params}, stacks)

    return Network(apply, PLAIN, lambda params: params, dtype)


@cache
def _source_is_known(network: Any) -> bool:
    """Whether the source of a module is the one that `cpu_conv` was written for. Else an edit does nothing on a CPU.

    The text is compared, comments included, not the outputs: an edit may change gradients alone, as a `stop_gradient`
    does. Python must have the source files.
    """
    text = "".join(map(inspect.getsource, (network, heads, dense, bias_in_float32)))
    digest = hashlib.sha256(text.encode()).hexdigest()
    if digest != cpu_conv.SOURCE_SHA256:
        logging.getLogger(__name__).warning(
            "%s was edited: its convolutions are plain, which is slow on a CPU; see SOURCE_SHA256 in cpu_conv (now %s)",
            network.__name__, digest,
        )  # fmt: skip
    return digest == cpu_conv.SOURCE_SHA256
