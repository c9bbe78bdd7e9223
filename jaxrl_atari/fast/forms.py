"""The form and the arithmetic of a network that suit a kind of device.

Where CPUs alone learn and act, `fast/cpu_conv.py` computes `nature`. Everywhere else the modules of `networks.py` do.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_atari.config import NetworkConfig
from jaxrl_atari.envs.pool import FRAME_SIZE
from jaxrl_atari.errors import require
from jaxrl_atari.fast import cpu_conv
from jaxrl_atari.fast.frames import BLOCKED, PLAIN, FrameLayout, arrange_stacks
from jaxrl_atari.networks import NETWORKS, STACK, make_module

BFLOAT16_CPUS = {"bfloat16 cpu", "amx cpu"}
"""The platforms that are CPUs which multiply bfloat16; see `hardware.gpus.network_platform`."""


class Network(NamedTuple):
    """A network as plain functions, in the form and arithmetic that suit a kind of device."""

    apply: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]  # params, stacks -> logits [N, A], value [N]
    layout: FrameLayout  # the form of the frames in `stacks`, uint8 [N, H, W, 4 * C]
    acting_params: Callable[[Any], Any]  # params -> params that `apply` reads faster, with the same outputs
    dtype: Any  # of the torso's arithmetic


@cache
def make_network(config: NetworkConfig, num_actions: int, platform: str, peer: str | None = None) -> Network:
    """The network of a config in the form that suits a platform (`network_platform`).

    The same arguments give the same object.

    Args:
        peer: the platform of the other side: of the actor if this is the learner's network, of the learner if it is the
            actor's. None: the same. Both store frames in the same layout and compute in the same arithmetic.
    """
    dtype = compute_dtype(config, platform, peer)
    if uses_cpu_conv(config, platform, peer):
        require(
            _cpu_conv_agrees(num_actions), "network.conv", config.conv, "plain, since NatureActorCritic was edited",
            "fast/cpu_conv.py still computes the original network",
        )  # fmt: skip
        acting_params = jax.jit(partial(cpu_conv.acting_params, dtype=dtype))
        chunk = cpu_conv.chunk_size(platform, dtype)
        return Network(partial(cpu_conv.apply, dtype=dtype, chunk=chunk), BLOCKED, acting_params, dtype)

    module = make_module(config, num_actions, dtype)

    def apply(params: Any, stacks: jax.Array) -> Any:
        return module.apply({"params": params}, stacks)

    return Network(apply, PLAIN, lambda params: params, dtype)


@cache
def _cpu_conv_agrees(num_actions: int) -> bool:
    """Whether `cpu_conv` computes what `NatureActorCritic` computes, in float32: outputs and gradients of one stack.

    Otherwise an edit of the module would have no effect on a CPU, without a word.
    """
    module, random = NETWORKS["nature"](num_actions), np.random.default_rng(0)
    stacks = random.integers(0, 256, (1, FRAME_SIZE, FRAME_SIZE, STACK), np.uint8)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), stacks)["params"])
    params = jax.tree.map(lambda x: random.normal(0, 0.05, x.shape).astype(np.float32), shapes)
    weights = random.normal(size=num_actions).astype(np.float32)

    def plain(params: Any, stacks: jax.Array) -> tuple[jax.Array, jax.Array]:
        return module.apply({"params": params}, stacks)

    def matmul(params: Any, stacks: jax.Array) -> tuple[jax.Array, jax.Array]:
        return cpu_conv.apply(params, arrange_stacks(BLOCKED, stacks), jnp.float32, chunk=1)

    def computed(apply: Callable) -> Any:
        def loss(params: Any, stacks: jax.Array) -> tuple[jax.Array, Any]:
            logits, value = apply(params, stacks)
            return jnp.sum(logits * weights) + jnp.sum(value), (logits, value)

        quick = {"xla_backend_optimization_level": 0}  # it runs once: compiling takes longer
        return jax.jit(jax.grad(loss, has_aux=True), compiler_options=quick)(params, stacks)

    def equal(x: jax.Array, y: jax.Array) -> bool:
        return x.shape == y.shape and np.allclose(x, y, rtol=1e-3, atol=1e-3 * float(np.abs(y).max()))

    with jax.default_device(jax.local_devices(backend="cpu")[0]), jax.transfer_guard("allow"):
        expected = computed(plain)
        try:
            return jax.tree.all(jax.tree.map(equal, computed(matmul), expected))
        except (KeyError, TypeError, ValueError):  # other layers, or layers of another size
            return False


def compute_dtype(config: NetworkConfig, platform: str, peer: str | None = None) -> Any:
    """The arithmetic of the torso: `network.compute_dtype`, with `auto` resolved.

    `auto` is bfloat16 if learner and actor are both GPUs with bfloat16 units (not measured yet) or, with `cpu_conv`,
    both CPUs with bfloat16 instructions; else float32. On every CPU, XLA computes plain bfloat16 convolutions by way of
    float32. If a GPU learns and a CPU acts, float32 in both keeps the ratio at 1 in an update's first gradient step.
    """
    name = config.compute_dtype
    if name == "auto":
        both = {platform, peer or platform}
        suits = both == {"gpu"} or (both <= BFLOAT16_CPUS and uses_cpu_conv(config, platform, peer))
        name = "bfloat16" if suits else "float32"
    return jnp.dtype(name)


def uses_cpu_conv(config: NetworkConfig, platform: str, peer: str | None = None) -> bool:
    """Whether `cpu_conv` computes the convolutions: `network.conv`, where `auto` is `matmul` on CPUs alone."""
    on_cpu = {platform, peer or platform} <= {"cpu", *BFLOAT16_CPUS}
    return config.name == "nature" and (config.conv == "matmul" or (config.conv == "auto" and on_cpu))
