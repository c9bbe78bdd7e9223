"""Networks as functions, in the form that suits the devices on which they learn and act.

A network is written as a flax module (`networks.py`). The rest of the package gets a `Network` from here:

    make_network(config, num_actions, learner, *actors)    for the classes of the devices that learn and act

`hardware/device_class.py` lists the classes of devices. All forms of a network have the same parameters:

    form        each `layers.Conv`                                 `networks.NatureFeatures`
    plain       XLA's convolution                                  its layers
    layers      that for CPUs: `layers.for_cpus`,                  its layers
                forward and backward
    by_hand     that for CPUs                                      `fast/`, in place of its layers

The option `network.conv` names one of them, or is `auto`: `by_hand` where only CPUs learn and act, and `plain`
elsewhere. Where `by_hand` is impossible, the network gets `layers` (`form_of`): it does not use `NatureFeatures`,
somebody has edited that module, or the option asks for `by_hand` where a GPU learns or acts. A session says what
would be faster (`network_advice.py`).
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_atari.config import NetworkConfig
from jaxrl_atari.fast import by_hand
from jaxrl_atari.fast.substitution import apply_by_hand, why_not_by_hand
from jaxrl_atari.frames import BLOCKED, PLAIN
from jaxrl_atari.hardware.device_class import DeviceClass
from jaxrl_atari.layers import for_cpus
from jaxrl_atari.network_functions import apply_module, init_params, initial_carry, make_module
from jaxrl_atari.network_interface import Apply, Network, Observation, Outputs

BFLOAT16_CPUS: set[DeviceClass] = {"bfloat16 cpu", "amx cpu"}
"""The classes of CPUs that multiply bfloat16."""

CPUS: set[DeviceClass] = {"cpu", *BFLOAT16_CPUS}
"""The classes of CPUs."""

Form = Literal["plain", "layers", "by_hand"]
"""The forms of a network."""


def make_network(config: NetworkConfig, num_actions: int, learner: DeviceClass, *actors: DeviceClass) -> Network:
    """The network of a config. Equal arguments give the same object, so that programs are compiled once.

    The devices that learn and those that act use the same network, so they store frames in the same layout and
    compute in the same arithmetic. If a GPU learns and a CPU acts, float32 in both keeps the ratio near 1 in an
    update's first gradient step, up to TF32 in the GPU's convolutions.

    Args:
        learner: class of the devices that learn. For acting alone, that of the device that acts.
        actors: classes of the devices that act, if they may differ.

    Raises:
        ConfigError: no network has that name, or it cannot be made.
    """
    classes = tuple(dict.fromkeys((learner, *actors)))  # each once
    return _network_of(make_module(config, num_actions), config, classes)


@cache
def _network_of(module: nn.Module, config: NetworkConfig, device_classes: tuple[DeviceClass, ...]) -> Network:
    """The network of a module, whose `dtype` is set here.

    The module is a key of the cache, so that another one, registered later under its name, gets its own network.
    """
    dtype = compute_dtype(config, device_classes)
    module = module.clone(dtype=dtype)
    network = Network(
        init=partial(init_params, module),
        apply=partial(apply_module, module),
        layout=PLAIN,
        for_acting=lambda params: params,
        dtype=dtype,
        initial_carry=partial(initial_carry, module),
    )
    form = form_of(module, config, device_classes)
    if form == "by_hand":
        learner, *_ = device_classes  # learning takes more time than acting
        chunk = by_hand.chunk_size(learner, dtype)
        network = network._replace(
            apply=partial(apply_by_hand, module, chunk),
            layout=BLOCKED,
            for_acting=jax.jit(partial(by_hand.for_acting, dtype=dtype)),
        )
    return network if form == "plain" else network._replace(apply=partial(_apply_for_cpus, network.apply))


def _apply_for_cpus(apply: Apply, params: Any, observation: Observation) -> Outputs:
    """Applies a network with `layers.for_cpus`."""
    with for_cpus(True):
        return apply(params, observation)


def form_of(module: nn.Module, config: NetworkConfig, device_classes: Sequence[DeviceClass]) -> Form:
    """The form of a network on devices of these classes: that of `network.conv`, where the network can have it.

    Args:
        module: with its `dtype`.
    """
    only_cpus = CPUS.issuperset(device_classes)
    auto: Form = "by_hand" if only_cpus else "plain"
    wanted: Form = auto if config.conv == "auto" else config.conv
    if wanted != "by_hand":
        return wanted
    return "by_hand" if only_cpus and not why_not_by_hand(module) else "layers"


def compute_dtype(config: NetworkConfig, device_classes: Sequence[DeviceClass]) -> jnp.dtype:
    """The type of the torso's arithmetic on devices of these classes, as `network.compute_dtype` chooses it.

    `auto` is bfloat16 where learner and actor are both CPUs with bfloat16 instructions, unless `network.conv` is
    `plain`: XLA computes the bfloat16 gradients of plain convolutions by way of float32 on every CPU. Elsewhere it
    is float32. On a GPU it stays float32, because scores in bfloat16 were not compared there, and because no time
    is to be gained where the GPU waits for the host, as on those that we measured (BENCHMARKS.md).
    """
    if config.compute_dtype != "auto":
        return jnp.dtype(config.compute_dtype)
    in_bfloat16 = BFLOAT16_CPUS.issuperset(device_classes) and config.conv != "plain"
    return jnp.dtype("bfloat16" if in_bfloat16 else "float32")
