"""Which GPUs there are, and which of them a session gets: all that is decided before JAX starts its back end.

Counting GPUs through JAX would start its back end and take most of their memory. The driver's `cuInit` takes none, and
it reads CUDA_VISIBLE_DEVICES (indices, UUIDs, MIG slices; empty or -1 for none) itself, so nothing is guessed here.

For tests, JAXRL_ATARI_SIMULATED_GPUS=N makes CPU devices of JAX stand for the N GPUs of a machine, and
CUDA_VISIBLE_DEVICES, indices only, chooses among them as it does among real ones.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import pkgutil
import re
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeGuard

import jax
from jax._src import xla_bridge  # JAX has no public way to ask whether its back end has started

from jaxrl_atari.config import Config, DevicesConfig, GpuOption
from jaxrl_atari.errors import ConfigError

SIMULATED = "JAXRL_ATARI_SIMULATED_GPUS"
INSTALL = "pip install 'jaxrl_atari[cuda12]'"


class Gpu(NamedTuple):
    """A GPU that this process may use."""

    name: str  # in CUDA_VISIBLE_DEVICES: an index or a UUID
    model: str
    memory: int  # bytes


class Visible(NamedTuple):
    """The GPUs that this process may use, in CUDA's order; where there are none, why."""

    gpus: tuple[Gpu, ...]
    problem: str = ""


class DriverError(Exception):
    """A call of the CUDA driver failed; the message says which and why."""


def visible() -> Visible:
    """The GPUs that JAX could use in this process. Neither starts JAX's back end nor takes memory of a GPU."""
    if (count := simulated_count()) is not None:
        return simulated_gpus(count, os.environ.get("CUDA_VISIBLE_DEVICES"))
    platforms = jax.config.jax_platforms  # set by JAX_PLATFORMS too  # pyright: ignore[reportAttributeAccessIssue]
    if platforms and not {"cuda", "gpu"} & set(platforms.split(",")):
        return Visible((), f"JAX is told to use only the platform {platforms} (JAX_PLATFORMS)")
    found = driver_gpus(lambda: ctypes.CDLL("libcuda.so.1"), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if found.gpus and not has_plugin():
        return Visible((), f"the driver shows {len(found.gpus)}, but JAX's CUDA plugin is not installed; {INSTALL}")
    return found


def simulated_count() -> int | None:
    """JAXRL_ATARI_SIMULATED_GPUS, or None."""
    text = os.environ.get(SIMULATED, "")
    if not text:
        return None
    if not text.isdecimal():
        raise ConfigError(SIMULATED, text, "the number of GPUs that CPU devices stand for (it is for tests)")
    return int(text)


def simulated_gpus(count: int, names: str | None) -> Visible:
    """What CUDA_VISIBLE_DEVICES = `names` leaves of `count` GPUs: those before the first name that is no index."""
    if names is None:
        chosen = [str(i) for i in range(count)]
    else:
        chosen = []
        for name in map(str.strip, names.split(",")):
            if not name.isdecimal() or int(name) >= count:
                break
            chosen.append(name)
        if len(set(chosen)) < len(chosen):  # CUDA then shows none
            chosen = []
    gpus = tuple(Gpu(name, "simulated GPU", 0) for name in chosen)
    return Visible(gpus, "" if gpus else _hidden(names) or f"{SIMULATED} = {count}")


def _hidden(names: str | None) -> str:
    return "" if names is None else f"CUDA_VISIBLE_DEVICES={names!r} leaves none"


def driver_gpus(load: Callable[[], Any], names: str | None) -> Visible:
    """The GPUs that the CUDA driver shows.

    Args:
        load: returns the driver's library (libcuda), or raises OSError.
        names: CUDA_VISIBLE_DEVICES, which the driver has read itself: its first entries name the GPUs shown.
    """
    try:
        driver = load()
    except OSError:
        return Visible((), "there is no NVIDIA driver (libcuda.so.1 is not found)")
    try:
        _call(driver, "cuInit", 0)
        count = ctypes.c_int()
        _call(driver, "cuDeviceGetCount", ctypes.byref(count))
        shown = [str(i) for i in range(count.value)] if names is None else names.split(",")[: count.value]
        gpus = tuple(_describe(driver, ordinal, name.strip()) for ordinal, name in enumerate(shown))
    except DriverError as error:
        return Visible((), _hidden(names) or str(error))
    return Visible(gpus, "" if gpus else _hidden(names) or "the NVIDIA driver shows none")


def _describe(driver: Any, ordinal: int, name: str) -> Gpu:
    device, memory, model = ctypes.c_int(), ctypes.c_size_t(), ctypes.create_string_buffer(100)
    _call(driver, "cuDeviceGet", ctypes.byref(device), ordinal)
    _call(driver, "cuDeviceGetName", model, len(model), device)
    _call(driver, "cuDeviceTotalMem_v2", ctypes.byref(memory), device)
    return Gpu(name, model.value.decode(errors="replace"), memory.value)


def _call(driver: Any, function: str, *arguments: Any) -> None:
    if error := getattr(driver, function)(*arguments):
        reasons = {
            100: "it shows no GPU",
            802: "its fabric manager is not running",
            803: "its library and kernel module are of different versions; restart the machine",
            804: "the GPU is too old for this CUDA version",
            999: "unknown error; is the kernel module loaded?",
        }
        raise DriverError(f"the NVIDIA driver failed: {function} gave {error} ({reasons.get(error, 'see cuda.h')})")


def has_plugin() -> bool:
    """Whether JAX's CUDA plugin is installed."""
    spec = importlib.util.find_spec("jax_plugins")
    places = spec.submodule_search_locations if spec is not None else None
    return any("cuda" in module.name for module in pkgutil.iter_modules(places)) if places else False


def driver_version() -> str | None:
    """Version of the NVIDIA kernel driver, None where there is none."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    return found.group() if found else None


def library_versions() -> dict[str, str]:
    """Installed packages that computing on a GPU hangs on -> version."""
    wanted = re.compile(r"jax|jaxlib|jax-cuda\d+-plugin|nvidia-(cudnn|cublas|cuda-runtime|nccl)(-cu\d+)?")
    found = {
        (distribution.metadata["Name"] or "").lower().replace("_", "-"): distribution.version
        for distribution in importlib.metadata.distributions()
    }
    return {name: found[name] for name in sorted(found) if wanted.fullmatch(name)}


def no_such_gpu(gpu: GpuOption, models: Sequence[str], problem: str = "") -> ConfigError:
    """The error for a `gpu` option that no GPU fits; `models` are the visible ones."""
    seen = ", ".join(f"{i}: {model}" for i, model in enumerate(models)) or "none"
    return ConfigError(
        "devices.gpu",
        gpu,
        f"a visible GPU (visible: {seen}{'; ' + problem if problem else ''})",
        "choose one of these, or auto or false to run on the CPU" if models else "use auto or false to run on the CPU",
    )


# --- Rotation --------------------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where a session runs."""

    gpus: tuple[int, ...]  # indices among the visible GPUs; empty: the CPU
    gpu: GpuOption  # the option that means the same to a process that sees these alone
    reason: str


def cuda_offset() -> int:
    """CUDA_OFFSET, the number of GPUs by which rotation is shifted; 0 where it is not set.

    Raises:
        ConfigError: it is no whole number from 0 on.
    """
    text = os.environ.get("CUDA_OFFSET", "").strip()
    if text and not text.isdecimal():
        raise ConfigError("CUDA_OFFSET", text, "a whole number from 0 on", "unset it to start at the first visible GPU")
    return int(text or 0)


def rotate(number: int, visible: int, per_session: int = 1, offset: int = 0) -> tuple[int, ...]:
    """The GPUs of the session with a running number (trial * sessions + session): a block of consecutive ones.

    With one GPU a session it is `(number + offset) % visible`. The GPUs that are left over when `visible` is not a
    multiple of `per_session` stay idle, so two blocks are the same or have nothing in common.
    """
    first = number * per_session + offset
    used = visible - visible % per_session
    return tuple((first + i) % used for i in range(per_session))


def place_session(config: Config, session: int, trial: int = 0) -> Place:
    """Where session `session` of a trial runs. Does not start JAX's back end.

    `auto` and `true` rotate; an index stays where it is, and so does a session whose actor or evaluator has an index
    of its own, which counts all visible GPUs.

    Raises:
        ConfigError: a GPU is asked for that is not there, or CUDA_OFFSET cannot be used.
    """
    devices = config.devices
    if devices.gpu is False:
        return Place((), False, "devices.gpu = false")
    shown, problem = visible()
    if devices.gpu == "auto" and not shown:
        return Place((), "auto", f"devices.gpu = auto, and there is no GPU: {problem}")
    if devices.distributed:  # learner devices are counted over all processes, each of which has its own
        return Place(tuple(range(len(shown))), devices.gpu, "all visible: devices.distributed")
    first = devices.gpu if _is_index(devices.gpu) else 0
    if first >= len(shown):
        raise no_such_gpu(devices.gpu, [found.model for found in shown], problem)
    per_session = len(shown) - first if devices.data_parallel == "all" else devices.data_parallel
    if first + per_session > len(shown):
        raise ConfigError("devices.data_parallel", per_session, f"at most {len(shown) - first}, the GPUs there are")
    if _is_index(devices.actor) or _is_index(devices.evaluator):
        return Place(tuple(range(len(shown))), devices.gpu, "all visible: devices.actor or evaluator names one")
    if _is_index(devices.gpu):
        return Place(tuple(range(first, first + per_session)), 0, f"devices.gpu = {first}")
    offset = cuda_offset()
    block = rotate(trial * config.sessions + session, len(shown), per_session, offset)
    return Place(block, devices.gpu, f"{len(shown)} visible, CUDA_OFFSET {offset}")


def _is_index(option: GpuOption | Literal["learner"]) -> TypeGuard[int]:
    return isinstance(option, int) and not isinstance(option, bool)


# --- Memory of the GPU -----------------------------------------------------------------------------------------------

FRACTION = "XLA_CLIENT_MEM_FRACTION"
OLD_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"


def memory_fraction(config: DevicesConfig, sharing: int = 1) -> float | None:
    """The share of a GPU's memory for each of `sharing` processes on it; None: what JAX takes by itself (75%).

    A share that the user has set in the environment stands.

    Raises:
        ConfigError: the processes together would take more than there is.
    """
    if config.memory_fraction is not None:
        if config.memory_fraction * sharing > 1.0:
            raise ConfigError(
                "devices.memory_fraction", config.memory_fraction,
                f"at most 1/{sharing}, as {sharing} processes share a GPU", "lower it, or trial.parallel",
            )  # fmt: skip
        return config.memory_fraction
    if sharing == 1 or os.environ.get(FRACTION) or os.environ.get(OLD_FRACTION):
        return None
    return round(0.9 / sharing, 4)


def set_memory_fraction(environment: MutableMapping[str, str], fraction: float) -> None:
    """Sets the share in the environment of a process in which JAX has not started."""
    environment.pop(OLD_FRACTION, None)  # JAX refuses to see both
    environment[FRACTION] = str(fraction)


def apply_memory_fraction(config: DevicesConfig) -> None:
    """Sets the share that this process takes of a GPU's memory, before JAX starts its back end.

    Raises:
        ConfigError: JAX has started already, on a GPU and with another share.
    """
    fraction = memory_fraction(config)
    if fraction is None or os.environ.get(FRACTION) == str(fraction):
        return
    if xla_bridge.backends_are_initialized() and jax.default_backend() != "cpu":
        raise ConfigError(
            "devices.memory_fraction", fraction, "to be set before JAX starts",
            "train in a fresh process, or leave it out",
        )  # fmt: skip
    set_memory_fraction(os.environ, fraction)
