"""The GPUs that this process may use, found before JAX starts its back end.

Counting GPUs through JAX would start its back end and take most of their memory. The CUDA driver takes none, and it
reads CUDA_VISIBLE_DEVICES (indices, UUIDs, MIG slices; empty or -1 for none) itself.

For tests, JAXRL_ATARI_SIMULATED_GPUS=N makes CPU devices of JAX stand in for the N GPUs of a machine.
CUDA_VISIBLE_DEVICES, indices only, then chooses among them as it does among real ones.
"""

import importlib.metadata
import importlib.util
import os
import pkgutil
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax

from jaxrl_atari.config import GpuOption
from jaxrl_atari.errors import ConfigError
from jaxrl_atari.hardware.cpu import read_cpu
from jaxrl_atari.hardware.cuda_driver import CudaDriver, DriverError, NoDevice

SIMULATED = "JAXRL_ATARI_SIMULATED_GPUS"
forbidden_because = ""  # set by `jax_gpus.forbid_gpu`
BFLOAT16_CAPABILITY = (8, 0)  # Ampere


class Gpu(NamedTuple):
    """A GPU that this process may use."""

    name: str  # in CUDA_VISIBLE_DEVICES: an index or a UUID
    model: str
    memory: int  # bytes


class Visible(NamedTuple):
    """The GPUs that this process may use, in CUDA's order, and the reason if there are none."""

    gpus: tuple[Gpu, ...]
    problem: str = ""


def visible() -> Visible:
    """The GPUs that JAX could use in this process. Neither starts JAX's back end nor takes memory of a GPU."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    if (count := simulated_count()) is not None:
        return simulated_gpus(count, names)
    platforms = jax.config.jax_platforms  # set by JAX_PLATFORMS too  # pyright: ignore[reportAttributeAccessIssue]
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return Visible((), forbidden_because or f"JAX may use only the platform {platforms} (JAX_PLATFORMS)")
    found = driver_gpus(names)
    if found.gpus and not _has_plugin():
        problem = f"the driver shows {len(found.gpus)}, but JAX's CUDA plugin is not installed"
        return Visible((), f"{problem}; pip install 'jaxrl_atari[cuda12]'")
    return found


def simulated_count() -> int | None:
    """The value of JAXRL_ATARI_SIMULATED_GPUS, None if it is not set."""
    text = os.environ.get(SIMULATED, "")
    if not text:
        return None
    if not text.isdecimal():
        raise ConfigError(SIMULATED, text, "the number of GPUs that CPU devices stand in for (it is for tests)")
    return int(text)


def simulated_gpus(count: int, names: str | None) -> Visible:
    """The GPUs that CUDA_VISIBLE_DEVICES = `names` leaves of `count`: those before the first invalid index."""
    if names is None:
        chosen = [str(i) for i in range(count)]
    else:
        chosen = []
        for name in map(str.strip, names.split(",")):
            if not name.isdecimal() or int(name) >= count:
                break
            chosen.append(name)
        if len(set(chosen)) < len(chosen):  # CUDA shows none if an index is repeated
            chosen = []
    gpus = tuple(Gpu(name, "simulated GPU", 0) for name in chosen)
    return Visible(gpus, "" if gpus else _hidden(names) or f"{SIMULATED} = {count}")


def _hidden(names: str | None) -> str:
    return "" if names is None else f"CUDA_VISIBLE_DEVICES={names!r} leaves none"


def driver_gpus(names: str | None) -> Visible:
    """The GPUs that the CUDA driver shows.

    Args:
        names: CUDA_VISIBLE_DEVICES, which the driver has read itself: its first entries name the GPUs shown.
    """
    try:
        driver = CudaDriver()
        count = driver.count()
        shown = [str(i) for i in range(count)] if names is None else names.split(",")[:count]
        gpus = tuple(Gpu(name.strip(), driver.model(i), driver.memory(i)) for i, name in enumerate(shown))
    except NoDevice:
        gpus = ()
    except DriverError as error:
        return Visible((), str(error))
    return Visible(gpus, "" if gpus else _hidden(names) or "the NVIDIA driver shows no GPU")


def network_platform(device: jax.Device, *others: jax.Device) -> str:
    """The platform for which `make_network` makes a network: how it computes bfloat16 decides arithmetic and chunks.

    "amx cpu" (it has AVX512-BF16 and AMX), "bfloat16 cpu" (AVX512-BF16 alone) or "cpu"; "gpu" (it has bfloat16 units)
    or "old gpu". If several devices compute one network together and one is an old GPU, the result is "old gpu".
    """
    if "old gpu" in map(network_platform, others):
        return "old gpu"
    if device.platform == "cpu":
        sets = read_cpu().instruction_sets or ()
        if "BF16" not in sets:
            return "cpu"
        return "amx cpu" if "AMX" in sets else "bfloat16 cpu"
    if device.platform != "gpu" or device.local_hardware_id is None:  # another process's, which is like ours
        return device.platform
    try:
        capability = CudaDriver().compute_capability(device.local_hardware_id)
    except DriverError:
        return "gpu"
    return "gpu" if capability >= BFLOAT16_CAPABILITY else "old gpu"


def _has_plugin() -> bool:
    """Whether JAX's CUDA plugin is installed."""
    spec = importlib.util.find_spec("jax_plugins")
    folders = spec.submodule_search_locations if spec is not None else None
    return any("cuda" in module.name for module in pkgutil.iter_modules(folders)) if folders else False


def driver_version() -> str | None:
    """Version of the NVIDIA kernel driver, None without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return found.group() if found else None


def library_versions() -> dict[str, str]:
    """Versions of the installed packages that matter for computing on a GPU."""
    wanted = re.compile(r"jax|jaxlib|jax-cuda\d+-plugin|nvidia-(cudnn|cublas|cuda-runtime|nccl)(-cu\d+)?")
    found = {
        (distribution.metadata["Name"] or "").lower().replace("_", "-"): distribution.version
        for distribution in importlib.metadata.distributions()
    }
    return {name: found[name] for name in sorted(found) if wanted.fullmatch(name)}


def no_such_gpu(gpu: GpuOption, models: Sequence[str], problem: str = "", field: str = "devices.gpu") -> ConfigError:
    """The error for a `gpu` option, or the one named `field`, that none of the visible GPUs (`models`) satisfies."""
    seen = ", ".join(f"{i}: {model}" for i, model in enumerate(models)) or "none"
    return ConfigError(
        field,
        gpu,
        f"a visible GPU (visible: {seen}{'; ' + problem if problem else ''})",
        "choose one of these, or auto or false to run on the CPU" if models else "use auto or false to run on the CPU",
    )
