"""Where things run: the `gpu` option -> JAX devices."""

from typing import NamedTuple

import jax

from jaxrl_atari.config import GpuOption
from jaxrl_atari.errors import ConfigError


class Choice(NamedTuple):
    """A device and why it was picked."""

    device: jax.Device
    reason: str


def forbid_gpu() -> None:
    """Keeps JAX off the GPU: it is neither initialised nor preallocated. Call before JAX starts its back end."""
    jax.config.update("jax_platforms", "cpu")


def visible_gpus() -> list[jax.Device]:
    """The GPUs that JAX sees (those that CUDA_VISIBLE_DEVICES leaves), by index."""
    try:
        return jax.devices("gpu")
    except RuntimeError:  # JAX's way to say that it has no such back end
        return []


def pick_device(gpu: GpuOption) -> Choice:
    """The device that a `gpu` option means.

    | gpu | device |
    |---|---|
    | "auto" | the first GPU if JAX has one, else the CPU |
    | True | the first GPU, or an error |
    | False | the CPU, even where a GPU is |
    | 0, 1, ... | exactly that GPU, or an error |

    Raises:
        ConfigError: no such GPU; the message names what is visible.
    """
    if gpu is False:
        forbid_gpu()
        return Choice(jax.devices("cpu")[0], "devices.gpu = false")
    gpus = visible_gpus()
    if gpu == "auto" and not isinstance(gpu, int):
        if gpus:
            return Choice(gpus[0], "devices.gpu = auto, and JAX sees a GPU")
        return Choice(jax.devices("cpu")[0], "devices.gpu = auto, and JAX sees no GPU")
    index = 0 if gpu is True else int(gpu)
    if index >= len(gpus):
        seen = ", ".join(f"{i}: {d.device_kind}" for i, d in enumerate(gpus)) or "none"
        raise ConfigError(
            "devices.gpu",
            "true" if gpu is True else gpu,
            f"a visible GPU (JAX sees {seen})",
            "use auto or false to run on the CPU, or install the GPU build: pip install 'jaxrl_atari[cuda12]'",
        )
    return Choice(gpus[index], f"devices.gpu = {'true' if gpu is True else gpu}")
