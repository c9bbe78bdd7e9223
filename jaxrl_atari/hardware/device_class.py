"""Classes of devices by how they compute bfloat16, which decides the form and the arithmetic of a network."""

from typing import Literal

import jax

from jaxrl_atari.hardware import cpu

DeviceClass = Literal["gpu", "old gpu", "amx cpu", "bfloat16 cpu", "cpu", "other"]
"""The classes, as `network_forms.make_network` takes them.

| class | devices |
|---|---|
| "gpu" | GPUs with bfloat16 units |
| "old gpu" | GPUs, at least one of them from before Ampere |
| "amx cpu" | a CPU with AVX512-BF16 and AMX |
| "bfloat16 cpu" | a CPU with AVX512-BF16 alone |
| "cpu" | any other CPU |
| "other" | devices of another JAX platform, such as TPUs; no session runs there |
"""


def device_class(*devices: jax.Device) -> DeviceClass:
    """The class of devices of one platform, which learn or act together."""
    if devices[0].platform == "gpu":
        # A GPU of another process may report no compute capability.
        is_old = any(float(getattr(gpu, "compute_capability", 8)) < 8 for gpu in devices)
        return "old gpu" if is_old else "gpu"
    if devices[0].platform != "cpu":
        return "other"
    sets = cpu.read_cpu().instruction_sets
    if "BF16" not in sets:
        return "cpu"
    return "amx cpu" if "AMX" in sets else "bfloat16 cpu"
