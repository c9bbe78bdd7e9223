"""The form of a network that suits the devices on which it learns and acts.

A network is computed in one of three forms, with the same parameters and in the same arithmetic:

- **As written**: its module, with XLA's own convolutions. On GPUs.
- **With gradients for CPUs**: its module with `for_cpu`, which makes the gradients of `layers.Conv` fast on a CPU.
  Where only CPUs learn and act, or `network.conv` is `matmul`.
- **By hand**: `nature`, in the same places, by `cpu_conv.py`, as long as `networks.py` says what was written out.
  Both are compared by their programs (`program_of`): an edit of what the network computes is always what is
  computed, and `Network.advice` says what it costs.
"""

from functools import cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_atari.config import NetworkConfig
from jaxrl_atari.fast import cpu_conv
from jaxrl_atari.frames import BLOCKED, PLAIN
from jaxrl_atari.layers import Conv
from jaxrl_atari.networks import (
    Network,
    Networks,
    Observation,
    Outputs,
    apply_module,
    empty_observation,
    init_params,
    initial_carry,
    make_module,
)

BFLOAT16_CPUS = {"bfloat16 cpu", "amx cpu"}
"""The platforms that are CPUs which multiply bfloat16; see `hardware.gpus.network_platform`."""

CPUS = {"cpu", *BFLOAT16_CPUS}
"""The platforms that are CPUs."""


SIZES = (1, 256)
"""Numbers of samples with which programs are compared: a network may treat few samples and many differently."""


def networks_for(config: NetworkConfig, num_actions: int, learner: str, actor: str) -> Networks:
    """The networks of a session, for the platforms (`network_platform`) that learn and act.

    Both store frames in the same layout and compute in the same arithmetic. If a GPU learns and a CPU acts,
    float32 in both keeps the ratio near 1 in an update's first gradient step, up to TF32 in the GPU's
    convolutions. Equal arguments give the same objects.

    Raises:
        ConfigError: no network has that name, or it cannot be made.
    """
    return _networks_for(make_module(config, num_actions, jnp.float32), config, learner, actor)


def make_network(config: NetworkConfig, num_actions: int, platform: str) -> Network:
    """The network of a config where one platform learns and acts; see `networks_for`."""
    return networks_for(config, num_actions, platform, platform).acting


@cache
def _networks_for(module: nn.Module, config: NetworkConfig, learner: str, actor: str) -> Networks:
    platforms = {learner, actor}
    dtype = jnp.dtype(arithmetic(config, platforms))
    module = module.clone(dtype=dtype)
    for_cpus = config.conv == "matmul" or (config.conv == "auto" and platforms <= CPUS)
    if not for_cpus:
        network = _of_module(module, dtype)
        return Networks(network, network)
    is_nature = config.name == "nature"
    if is_nature and is_computed_by_hand(module):
        learning = _by_hand(dtype, learner)
        return Networks(learning, learning if actor == learner else _by_hand(dtype, actor))
    if hasattr(module, "for_cpu"):
        module = module.clone(for_cpu=True)
    # The advice is about CPUs. With `matmul`, this form is that of GPUs too.
    network = _of_module(module, dtype, advice=_advice(module, is_nature) if platforms <= CPUS else "")
    return Networks(network, network)


def _of_module(module: nn.Module, dtype: Any, advice: str = "") -> Network:
    apply = partial(apply_module, module)
    return Network(apply, PLAIN, lambda params: params, dtype, partial(initial_carry, module), advice)


def _by_hand(dtype: Any, platform: str) -> Network:
    apply = partial(cpu_conv.apply, dtype=dtype, chunk=cpu_conv.chunk_size(platform, dtype))
    return Network(apply, BLOCKED, jax.jit(partial(cpu_conv.acting_params, dtype=dtype)), dtype)


def arithmetic(config: NetworkConfig, platforms: set[str]) -> str:
    """The type of the torso's arithmetic on these platforms.

    With `network.compute_dtype = "auto"` it is bfloat16 where learner and actor are both GPUs with bfloat16 units
    (not measured yet), or both CPUs with bfloat16 instructions, unless `network.conv` is `plain`: XLA computes
    bfloat16 gradients of plain convolutions by way of float32 on every CPU. Else it is float32.
    """
    if config.compute_dtype != "auto":
        return config.compute_dtype
    in_bfloat16 = platforms == {"gpu"} or (platforms <= BFLOAT16_CPUS and config.conv != "plain")
    return "bfloat16" if in_bfloat16 else "float32"


def is_computed_by_hand(module: Any) -> bool:
    """Whether `cpu_conv.py` computes this network: whether it has the program of `cpu_conv.Computed`."""
    computed = cpu_conv.Computed(module.num_actions, module.dtype)
    return all(program_of(module, size) == program_of(computed, size) for size in SIZES)


def program_of(module: nn.Module, samples: int) -> tuple[Any, ...]:
    """The program of a network, in values that can be compared: how parameters become outputs and gradients.

    It is what JAX hands to XLA (StableHLO), and the structure of what goes in and comes out. Names in the source,
    comments and initialisation are not part of it. Outputs alone would not do: a `stop_gradient` changes gradients
    only.
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


def _advice(module: nn.Module, is_nature: bool) -> str:
    """What would make a network faster on a CPU."""
    name = type(module).__name__
    layers = slow_convolutions(module)
    if layers:
        return (
            f"{name}: the gradients of {', '.join(layers)} are 10 to 30 times slower on a CPU than those of"
            " jaxrl_atari.layers.Conv(..., for_cpu=self.for_cpu); see docs/idea.md, A network"
        )
    if is_nature:
        return (
            f"{name} was edited: on a CPU its gradients take 1.2 times as long in float32, and twice in bfloat16,"
            f" as those of the network as it was, which {cpu_conv.__name__} computes"
        )
    return ""


def slow_convolutions(module: nn.Module) -> list[str]:
    """Names of a network's layers that are flax's own `nn.Conv`, or a `layers.Conv` without `for_cpu`."""
    found: list[str] = []

    def note(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        layer = context.module
        if isinstance(layer, nn.Conv) or (isinstance(layer, Conv) and not layer.for_cpu):
            found.append(str(layer.name))
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(partial(init_params, module), jax.random.key(0))
    return found
