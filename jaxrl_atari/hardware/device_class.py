"""Classes of devices, which decide the form and the arithmetic of a network."""

from typing import Literal

import jax

from jaxrl_atari.hardware import cpu

DeviceClass = Literal["gpu", "amx cpu", "bfloat16 cpu", "cpu", "other"]
"""The classes, as `networks.make_network` takes them.

| class | devices |
|---|---|
| "gpu" | NVIDIA's GPUs |
| "amx cpu" | a CPU with AVX512-BF16 and AMX |
| "bfloat16 cpu" | a CPU with AVX512-BF16 alone |
| "cpu" | any other CPU |
| "other" | devices of another JAX platform, such as TPUs; no session runs there |
"""


def device_class(device: jax.Device) -> DeviceClass:
    """The class of a device.

    For a CPU of another process it is the class of this machine's CPU: `devices.place` refuses CPUs that differ.
    """
    if device.platform == "gpu":
        return "gpu"
    if device.platform != "cpu":
        return "other"
    sets = cpu.read_cpu().instruction_sets
    if "BF16" not in sets:
        return "cpu"
    return "amx cpu" if "AMX" in sets else "bfloat16 cpu"
