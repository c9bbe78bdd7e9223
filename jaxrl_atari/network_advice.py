"""What would make a network faster on the devices of a session: one line for the terminal.

On a CPU, XLA's own gradients of convolutions are slow (`cpu_convolution.py`), and those of layers are slower than
features by hand (`fast/`). Nothing here changes what a network computes.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax

from jaxrl_atari.config import NetworkConfig
from jaxrl_atari.fast import by_hand
from jaxrl_atari.fast.comparison import why_not_by_hand
from jaxrl_atari.hardware.device_class import DeviceClass
from jaxrl_atari.layers import Conv
from jaxrl_atari.network_forms import CPUS, compute_dtype, form_of
from jaxrl_atari.network_interface import init_params, make_module


def network_advice(
    config: NetworkConfig, num_actions: int, device_class: DeviceClass, *other_classes: DeviceClass
) -> str:
    """What would make the network of these arguments faster; empty where nothing is known.

    Args:
        config, num_actions, device_class, other_classes: as `network_forms.make_network` takes them.
    """
    device_classes = (device_class, *other_classes)
    module = make_module(config, num_actions, compute_dtype(config, device_classes))
    form = form_of(module, config, device_classes)
    if form == "plain":  # nothing to advise: it is the best on a GPU, and on a CPU the config asks for it
        return ""
    if not CPUS.issuperset(device_classes):
        return (
            f"network.conv = {config.conv}: a GPU learns or acts, and the gradients of jaxrl_atari.layers.Conv are"
            " those for CPUs all the same; plain has those of the GPU"
        )
    # The form by hand computes the layers of `KERNELS`, whatever layers the module has for them.
    slow = [layer for layer in slow_convolutions(module) if form == "layers" or layer not in by_hand.KERNELS]
    if slow:
        return (
            f"{type(module).__name__}: the gradients of {', '.join(slow)} are many times slower on a CPU than"
            " those of jaxrl_atari.layers.Conv(..., for_cpu=self.for_cpu); see docs/idea.md, A network"
        )
    if form == "layers" and config.conv != "layers" and hasattr(module, "features_by_hand"):
        return (
            f"{why_not_by_hand(module)}: training is slower than with {by_hand.__name__}, which computes the"
            f" features as shipped; {by_hand.__package__} says how much"
        )
    return ""


def slow_convolutions(module: nn.Module) -> list[str]:
    """Paths of a network's layers whose gradients are slow on a CPU, even if `for_cpu` is true.

    They are flax's own `nn.Conv`, and a `layers.Conv` to which the network does not pass its `for_cpu`. A path
    leads to a layer's parameters: `ResidualBlock_0/Conv_1`. A layer that is called twice is listed once.
    """
    found: dict[str, None] = {}  # a set that keeps the order

    def note(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        layer = context.module
        if isinstance(layer, nn.Conv) or (isinstance(layer, Conv) and not layer.for_cpu):
            found["/".join(layer.path)] = None
        return call(*args, **kwargs)

    for_cpu = module.clone(for_cpu=True) if hasattr(module, "for_cpu") else module
    with nn.intercept_methods(note):
        jax.eval_shape(partial(init_params, for_cpu), jax.random.key(0))
    return list(found)
