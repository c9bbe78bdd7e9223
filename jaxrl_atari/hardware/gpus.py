"""The GPUs that this process may use, found before JAX starts its back end.

They are those of NVIDIA (`nvidia.py`), unless a test replaces these with a `GpuProvider` of its own
(`use_provider`).
"""

from collections.abc import Sequence

import jax

from jaxrl_atari.hardware.gpu_interface import GpuProvider, VisibleGpus
from jaxrl_atari.hardware.jax_settings import has_started_on_gpu, jax_options
from jaxrl_atari.hardware.nvidia import NvidiaGpus

_provider: GpuProvider = NvidiaGpus()


def use_provider(provider: GpuProvider) -> GpuProvider:
    """Makes this process take its GPUs from `provider`. Returns the provider used before. For tests."""
    global _provider
    before = _provider
    _provider = provider
    return before


def gpu_provider() -> GpuProvider:
    """The provider of this process's GPUs: `NvidiaGpus`, unless `use_provider` has set another one."""
    return _provider


def visible_gpus() -> VisibleGpus:
    """The GPUs that JAX could use in a process that has not started it.

    Raises:
        ConfigError: CUDA_DEVICE_ORDER is another order than NVML's, CUDA_VISIBLE_DEVICES names a GPU twice, or
            the user has set `jax_cuda_visible_devices` of JAX's config.
    """
    return gpu_provider().visible_gpus()


def usable_gpus() -> VisibleGpus:
    """The GPUs of `visible_gpus`. Once JAX has started on GPUs in this process, only these are `usable`."""
    visible = visible_gpus()
    if not visible.gpus:
        return visible
    return visible._replace(started=tuple(sorted(gpus_by_index(gpu_provider().started_gpus()))))


def gpus_by_index(gpus: Sequence[jax.Device]) -> dict[int, jax.Device]:
    """Those of JAX's GPUs that this process has, by their indices among the visible GPUs.

    An index may be missing: JAX may have started without one of the visible GPUs.
    """
    own = [gpu for gpu in gpus if gpu.process_index == jax.process_index()]
    return {gpu_provider().index(gpu): gpu for gpu in own}


def limit_to_cpu(why: str = "this process needs none") -> None:
    """Keeps JAX off the GPUs, so that it takes none of their memory. Call it before JAX starts its back end.

    Once JAX has started on a GPU, it does nothing: other code of this process may use the GPU.
    """
    if has_started_on_gpu():
        return
    gpu_provider().forbid(why)
    jax_options.set_for_process("jax_platforms", "cpu")
