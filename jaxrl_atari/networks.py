"""Networks: frame stacks in, policy logits and a value out.

To add one, write a `flax.linen.Module` with the signature of `NatureActorCritic`, enter it in `NETWORKS`, and add its
name to `config.NetworkName`. Training, evaluation, checkpoints and the memory estimate then work with it unchanged. On
a CPU it trains many times more slowly than `nature`, whose convolutions `fast/cpu_conv.py` computes as matrix products.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_atari.cli.errors import require
from jaxrl_atari.config import NetworkConfig
from jaxrl_atari.fast import cpu_conv
from jaxrl_atari.fast.frames import BLOCKED, FRAME_SIZE, PLAIN, STACK, FrameLayout, arrange_stacks


def bias_in_float32(*arrays: Any, dtype: Any = None, inexact: bool = True) -> list[Any]:
    """Casts a layer's inputs and kernel to `dtype` and leaves its bias in float32.

    The gradient of a bias is a sum over thousands of outputs, which loses several percent when added in bfloat16.
    """
    inputs, kernel, bias = arrays
    return [inputs.astype(dtype), kernel.astype(dtype), bias]


def dense(features: int, scale: float, name: str, dtype: Any) -> nn.Dense:
    """A dense layer with orthogonal initialisation, which computes in `dtype` (float32 without TF32)."""
    return nn.Dense(
        features,
        kernel_init=nn.initializers.orthogonal(scale),
        dtype=dtype,
        precision="highest" if dtype == jnp.float32 else None,
        name=name,
    )


class NatureActorCritic(nn.Module):
    """The network of Mnih et al. 2015 (doi:10.1038/nature14236) with a policy and a value head.

    Orthogonal initialisation with the gains of OpenAI Baselines' PPO: sqrt(2), policy head 0.01, value head 1. The
    torso computes in `dtype`, the heads in float32; parameters are float32. 1,687,719 parameters with 6 actions.

    On CPUs this module only makes the parameters, and `fast/cpu_conv.py` computes the outputs from them. After an edit
    of what is computed here, training on a CPU is refused unless `network.conv` is `plain`.
    """

    num_actions: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, stacks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """uint8 `[..., 84, 84, 4]`, the oldest frame first -> logits float32 `[..., A]`, value float32 `[...]`."""
        init = nn.initializers.orthogonal(2**0.5)
        conv = partial(nn.Conv, padding="VALID", kernel_init=init, dtype=self.dtype, promote_dtype=bias_in_float32)
        x = stacks.astype(self.dtype) / 255
        x = nn.relu(conv(32, (8, 8), 4, name="conv1")(x))
        x = nn.relu(conv(64, (4, 4), 2, name="conv2")(x))
        x = nn.relu(conv(64, (3, 3), 1, name="conv3")(x))
        x = x.reshape(*x.shape[:-3], -1)
        x = nn.relu(dense(512, 2**0.5, "dense", self.dtype)(x)).astype(jnp.float32)
        logits = dense(self.num_actions, 0.01, "policy", jnp.float32)(x)
        value = dense(1, 1.0, "value", jnp.float32)(x)
        return logits, value[..., 0]


class ImpalaActorCritic(nn.Module):
    """The residual network of IMPALA (Espeholt et al. 2018, arXiv:1802.01561, figure 3 right) with two heads.

    Three sections of 16, 32 and 32 channels, each a convolution, a max pooling and two residual blocks: 15
    convolutions. Then 256 features. 1,091,031 parameters with 6 actions.
    """

    num_actions: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, stacks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """uint8 `[..., 84, 84, 4]`, the oldest frame first -> logits float32 `[..., A]`, value float32 `[...]`."""
        init = nn.initializers.orthogonal(2**0.5)
        conv = partial(nn.Conv, kernel_size=(3, 3), kernel_init=init, dtype=self.dtype, promote_dtype=bias_in_float32)
        x = stacks.astype(self.dtype) / 255
        for channels in (16, 32, 32):
            x = conv(channels)(x)
            x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
            for _ in range(2):
                residual = conv(channels)(nn.relu(x))
                x = x + conv(channels)(nn.relu(residual))
        x = nn.relu(x)
        x = x.reshape(*x.shape[:-3], -1)
        x = nn.relu(dense(256, 2**0.5, "dense", self.dtype)(x)).astype(jnp.float32)
        logits = dense(self.num_actions, 0.01, "policy", jnp.float32)(x)
        value = dense(1, 1.0, "value", jnp.float32)(x)
        return logits, value[..., 0]


NETWORKS: dict[str, Any] = {"nature": NatureActorCritic, "impala": ImpalaActorCritic}
"""`network.name` -> module."""


def make_module(config: NetworkConfig, num_actions: int, dtype: Any) -> nn.Module:
    """The module of a config. An option of a network is passed to it here."""
    return NETWORKS[config.name](num_actions, dtype)


BFLOAT16_CPUS = {"bfloat16 cpu", "amx cpu"}
"""The platforms that are CPUs which multiply bfloat16; see `hardware.gpus.network_platform`."""


def init_params(config: NetworkConfig, num_actions: int, key: jax.Array) -> Any:
    """The first parameters, float32; the same in every form of the network."""
    stacks = jnp.zeros((1, FRAME_SIZE, FRAME_SIZE, STACK), jnp.uint8)
    return make_module(config, num_actions, jnp.float32).init(key, stacks)["params"]


class Network(NamedTuple):
    """A network as plain functions, in the form and arithmetic that suit a kind of device."""

    apply: Callable[[Any, jax.Array], tuple[jax.Array, jax.Array]]  # params, stacks -> logits [N, A], value [N]
    layout: FrameLayout  # the form of the frames in `stacks`, uint8 [N, H, W, 4 * C]
    acting_params: Callable[[Any], Any]  # params -> params that `apply` reads faster, with the same outputs


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
        return Network(partial(cpu_conv.apply, dtype=dtype, chunk=chunk), BLOCKED, acting_params)

    module = make_module(config, num_actions, dtype)

    def apply(params: Any, stacks: jax.Array) -> Any:
        return module.apply({"params": params}, stacks)

    return Network(apply, PLAIN, acting_params=lambda params: params)


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
