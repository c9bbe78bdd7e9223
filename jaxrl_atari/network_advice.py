"""What would make a network faster on the devices of a session: one line for the terminal.

On a CPU, XLA's own gradients of convolutions are slow (`cpu_convolution.py`), and layers are slower than features
by hand (`fast/`). Nothing here changes what a network computes.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax

from jaxrl_atari.config import NetworkConfig
from jaxrl_atari.fast.substitution import why_not_by_hand
from jaxrl_atari.hardware.device_class import DeviceClass
from jaxrl_atari.network_forms import CPUS, compute_dtype, form_of
from jaxrl_atari.network_functions import init_params, make_module
from jaxrl_atari.networks import NatureFeatures

NATURE = {"nature", "nature_lstm"}
"""Names of the networks that are shipped with features by hand. One that was edited may lack `NatureFeatures`."""


def network_advice(config: NetworkConfig, num_actions: int, learner: DeviceClass, *actors: DeviceClass) -> str:
    """What would make the network of these arguments faster; empty where nothing is known.

    Args:
        config, num_actions, learner, actors: as `network_forms.make_network` takes them.
    """
    device_classes = (learner, *actors)
    module = make_module(config, num_actions, compute_dtype(config, device_classes))
    form = form_of(module, config, device_classes)
    if form == "plain":  # the best form on a GPU; on a CPU, the config asks for it
        return ""
    if not CPUS.issuperset(device_classes):
        return (
            f"network.conv = {config.conv}: a GPU learns or acts, and the gradients of jaxrl_atari.layers.Conv are"
            " those for CPUs all the same; plain has those of the GPU"
        )
    called = modules_called(module)
    slow = [path for path, layer in called if issubclass(layer, nn.Conv)]
    if slow:
        return (
            f"{type(module).__name__}: the gradients of {', '.join(slow)} are many times slower on a CPU than"
            " those of jaxrl_atari.layers.Conv; see docs/idea.md, A network"
        )
    could_be_by_hand = config.name in NATURE or any(issubclass(layer, NatureFeatures) for _, layer in called)
    if form == "layers" and config.conv != "layers" and could_be_by_hand:
        why = why_not_by_hand(module)
        return f"{why}: training is slower than with the features as shipped; see docs/idea.md, A network"
    return ""


def modules_called(module: nn.Module) -> list[tuple[str, type[nn.Module]]]:
    """The modules that a network calls, in the order of their first calls, and each once: path and class.

    A path leads to the parameters: `ResidualBlock_0/Conv_1`.
    """
    found: dict[tuple[str, type[nn.Module]], None] = {}  # a set that keeps the order

    def record_call(call: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        if context.method_name == "__call__":
            found["/".join(context.module.path), type(context.module)] = None
        return call(*args, **kwargs)

    with nn.intercept_methods(record_call):
        jax.eval_shape(partial(init_params, module), jax.random.key(0))
    return list(found)
