"""Networks as functions, in the form that suits the devices on which they learn and act.

A network is written as a flax module (`networks.py`). The rest of the package gets a `Network` from here:

    make_network(config, num_actions, *device_classes)    for the classes of the devices that learn and act

`hardware/device_class.py` lists the classes of devices. All forms of a network have the same parameters:

    form                `network.conv`      computed by
    as written          `plain`             the module, with XLA's own convolutions
    gradients for CPUs  `layers`            the module with `for_cpu`, if it has this field
    features by hand    `by_hand`           as `layers`, but where only CPUs learn and act, `fast/` computes the
                                            module `NatureFeatures`

`auto`, the default, is `by_hand` where only CPUs learn and act, and `plain` elsewhere.

`_network_of` makes the choice. The third form exists for networks that use `networks.NatureFeatures`: `nature`,
`nature_lstm`, and yours if it does. If somebody edits that module or one of its layers, the network gets the
second form, and `Network.advice` says so. A comparison of programs notices such edits (`fast/programs.py`, which
names the two kinds that it misses). What a network does with the features runs as it is written, in every form.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxrl_atari.config import NetworkConfig
from jaxrl_atari.fast import nature_features
from jaxrl_atari.fast.programs import features_by_hand, why_not_by_hand
from jaxrl_atari.frames import BLOCKED, PLAIN
from jaxrl_atari.hardware.device_class import DeviceClass
from jaxrl_atari.layers import Conv
from jaxrl_atari.network_interface import Network, apply_module, init_params, initial_carry, make_module

BFLOAT16_CPUS: set[DeviceClass] = {"bfloat16 cpu", "amx cpu"}
"""The classes of CPUs that multiply bfloat16."""

CPUS: set[DeviceClass] = {"cpu", *BFLOAT16_CPUS}
"""The classes of CPUs."""


def make_network(config: NetworkConfig, num_actions: int, *device_classes: DeviceClass) -> Network:
    """The network of a config. Equal arguments give the same object, so that programs are compiled once.

    The devices that learn and those that act use the same network, so they store frames in the same layout and
    compute in the same arithmetic. If a GPU learns and a CPU acts, float32 in both keeps the ratio near 1 in an
    update's first gradient step, up to TF32 in the GPU's convolutions.

    Args:
        device_classes: of the devices that learn and of those that act. One is enough where both are equal.

    Raises:
        ConfigError: no network has that name, or it cannot be made.
    """
    classes = tuple(dict.fromkeys(device_classes))  # each once: those that learn come first
    return _network_of(make_module(config, num_actions), config, classes)


@cache
def _network_of(module: nn.Module, config: NetworkConfig, device_classes: tuple[DeviceClass, ...]) -> Network:
    """The network of a module, whose `dtype` and `for_cpu` are set here: the choice between the three forms.

    It is kept by the module, so that another one, registered later under its name, gets its own.
    """
    only_cpus = CPUS.issuperset(device_classes)
    dtype = compute_dtype(config, device_classes)
    as_written = module.clone(dtype=dtype)
    for_cpus = as_written.clone(for_cpu=True) if hasattr(module, "for_cpu") else as_written
    if config.conv == "plain" or (config.conv == "auto" and not only_cpus):
        return _by_module(as_written, dtype)
    if not only_cpus:  # the config asks for it
        return _by_module(for_cpus, dtype)
    slow_layers = slow_convolutions(for_cpus)
    if not hasattr(module, "features_by_hand") or config.conv == "layers":
        return _by_module(for_cpus, dtype, _advice_on_layers(module, slow_layers))
    obstacle = why_not_by_hand(as_written)
    if obstacle:
        advice = _advice_on_layers(module, slow_layers) or _advice_on_features(obstacle)
        return _by_module(for_cpus, dtype, advice)
    advice = _advice_on_layers(module, [layer for layer in slow_layers if layer not in nature_features.KERNELS])
    return _with_features_by_hand(for_cpus, dtype, advice, device_classes[0])


def compute_dtype(config: NetworkConfig, device_classes: Sequence[DeviceClass]) -> jnp.dtype:
    """The type of the torso's arithmetic on devices of these classes, as `network.compute_dtype` chooses it.

    `auto` is bfloat16 where learner and actor are both CPUs with bfloat16 instructions, unless `network.conv` is
    `plain`: XLA computes the bfloat16 gradients of plain convolutions by way of float32 on every CPU. Elsewhere it
    is float32. On GPUs nobody has compared the scores of the two, and on those that we measured the GPU waits for
    the host (BENCHMARKS.md).
    """
    if config.compute_dtype != "auto":
        return jnp.dtype(config.compute_dtype)
    in_bfloat16 = BFLOAT16_CPUS.issuperset(device_classes) and config.conv != "plain"
    return jnp.dtype("bfloat16" if in_bfloat16 else "float32")


# --- The forms ---------------------------------------------------------------------------------------------------


def _by_module(module: nn.Module, dtype: jnp.dtype, advice: str = "") -> Network:
    """The first two forms, which apply the module itself."""
    return Network(
        init=partial(init_params, module),
        apply=partial(apply_module, module),
        layout=PLAIN,
        acting_params=lambda params: params,
        dtype=dtype,
        initial_carry=partial(initial_carry, module),
        advice=advice,
    )


def _with_features_by_hand(module: nn.Module, dtype: jnp.dtype, advice: str, device_class: DeviceClass) -> Network:
    """The third form: the module with features of `fast/`, in chunks that suit the class of device."""
    chunk = nature_features.chunk_size(device_class, dtype)
    features = features_by_hand(partial(nature_features.features, dtype=dtype, chunk=chunk))
    return Network(
        init=partial(init_params, module),
        apply=partial(apply_module, module.clone(features_by_hand=features)),
        layout=BLOCKED,
        acting_params=jax.jit(partial(nature_features.acting_params, dtype=dtype)),
        dtype=dtype,
        initial_carry=partial(initial_carry, module),
        advice=advice,
    )


# --- Advice: what would make a network faster on a CPU -----------------------------------------------------------


def _advice_on_layers(module: nn.Module, layers: Sequence[str]) -> str:
    """The layers of a network whose gradients are slow; empty if there are none.

    Args:
        layers: those of `slow_convolutions` that run.
    """
    if not layers:
        return ""
    return (
        f"{type(module).__name__}: the gradients of {', '.join(layers)} are many times slower on a CPU than those"
        " of jaxrl_atari.layers.Conv(..., for_cpu=self.for_cpu); see docs/idea.md, A network"
    )


def _advice_on_features(obstacle: str) -> str:
    """The line about features that are not computed by hand.

    Args:
        obstacle: what `why_not_by_hand` returned.
    """
    return (
        f"{obstacle}: training is slower than with {nature_features.__name__}, which computes the features as"
        f" shipped; {nature_features.__package__} says how much"
    )


def slow_convolutions(module: nn.Module) -> list[str]:
    """Paths of a network's layers that are flax's own `nn.Conv`, or a `layers.Conv` without `for_cpu`.

    A path leads to a layer's parameters: `ResidualBlock_0/Conv_1`. A layer that is called twice is listed once.
    """
    found: dict[str, None] = {}  # a set that keeps the order

    def note(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        layer = context.module
        if isinstance(layer, nn.Conv) or (isinstance(layer, Conv) and not layer.for_cpu):
            found["/".join(layer.path)] = None
        return call(*args, **kwargs)

    with nn.intercept_methods(note):
        jax.eval_shape(partial(init_params, module), jax.random.key(0))
    return list(found)
