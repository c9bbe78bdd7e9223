"""Rotation: the GPUs of each session of a trial, assigned before JAX starts its back end."""

import os
import re
from typing import Literal, NamedTuple, TypeGuard

import jax

from jaxrl_atari.config import Config, DevicesConfig, GpuOption
from jaxrl_atari.errors import ConfigError, require
from jaxrl_atari.hardware.gpus import Visible, no_such_gpu, simulated_count, visible


class Place(NamedTuple):
    """The GPUs of a session."""

    gpus: tuple[int, ...]  # indices among the visible GPUs; empty: the CPU
    gpu: GpuOption  # the equivalent option for a process that sees only these GPUs
    reason: str


def cuda_offset() -> int:
    """CUDA_OFFSET: the number of GPUs by which rotation is shifted; 0 if it is not set.

    Raises:
        ConfigError: it is not a whole number from 0 on.
    """
    text = os.environ.get("CUDA_OFFSET", "").strip()
    if text and not text.isdecimal():
        raise ConfigError("CUDA_OFFSET", text, "a whole number from 0 on", "unset it to start at the first visible GPU")
    return int(text or 0)


def rotate(session: int, visible: int, per_session: int = 1, offset: int = 0) -> tuple[int, ...]:
    """The block of consecutive GPUs of a session.

    With one GPU per session it is `(session + offset) % visible`. If `visible` is not a multiple of `per_session`, the
    remaining GPUs stay idle, so that two blocks are equal or disjoint.
    """
    first = session * per_session + offset
    used = visible - visible % per_session
    return tuple((first + i) % used for i in range(per_session))


def check_devices(devices: DevicesConfig) -> Visible:
    """Returns the GPUs that the config leaves to this process. Does not start JAX's back end.

    Raises:
        ConfigError: an option asks for devices that this machine does not have.
    """
    kept_off = devices.gpu is False and simulated_count() is None  # not even the CUDA driver is called
    seen = Visible((), "devices.gpu = false") if kept_off else visible()
    if devices.distributed:  # devices are counted over all processes
        return seen
    shown, problem = seen
    for field in ("gpu", "actor", "evaluator"):
        option = getattr(devices, field)
        if (option is True and not shown) or (_is_index(option) and option >= len(shown)):
            raise no_such_gpu(option, [gpu.model for gpu in shown], problem, f"devices.{field}")
    if shown and devices.gpu is not False:
        most, kind = len(shown) - (devices.gpu if _is_index(devices.gpu) else 0), "the number of GPUs"
    else:
        most, kind = _cpu_devices(), f"the CPU devices of JAX ({problem})"
        hint = "leave it out; a run that was saved with it needs --devices.memory-fraction None"
        fraction = devices.memory_fraction
        require(fraction is None, "devices.memory_fraction", fraction, f"None on a CPU ({problem})", hint)
    count = devices.data_parallel
    require(count == "all" or count <= most, "devices.data_parallel", count, f"at most {most}, {kind}")
    return seen


def _cpu_devices() -> int:
    """The CPU devices that JAX has when it starts: one, unless tests ask for more."""
    flag = re.search(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    asked = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue]
    return max(1, asked, int(flag[1]) if flag else 1)


def place_session(config: Config, session: int) -> Place:
    """The GPUs of session `session` of a trial. Does not start JAX's back end.

    `auto` and `true` rotate; an index does not. A session whose actor or evaluator has an index of its own sees all
    GPUs, because that index counts all visible ones.

    Raises:
        ConfigError: an option asks for devices that this machine does not have, or CUDA_OFFSET is invalid.
    """
    devices = config.devices
    shown, problem = check_devices(devices)
    if devices.gpu is False:
        return Place((), False, "devices.gpu = false")
    if devices.gpu == "auto" and not shown:
        return Place((), "auto", f"devices.gpu = auto, and there is no GPU: {problem}")
    if devices.distributed:  # each process has its own
        return Place(tuple(range(len(shown))), devices.gpu, "all visible: devices.distributed")
    first = devices.gpu if _is_index(devices.gpu) else 0
    per_session = len(shown) - first if devices.data_parallel == "all" else devices.data_parallel
    if _is_index(devices.actor) or _is_index(devices.evaluator):
        return Place(tuple(range(len(shown))), devices.gpu, "all visible: devices.actor or evaluator is an index")
    if _is_index(devices.gpu):
        return Place(tuple(range(first, first + per_session)), 0, f"devices.gpu = {first}")
    offset = cuda_offset()
    block = rotate(session, len(shown), per_session, offset)
    return Place(block, devices.gpu, f"{len(shown)} visible, CUDA_OFFSET {offset}")


def _is_index(option: GpuOption | Literal["learner"]) -> TypeGuard[int]:
    return isinstance(option, int) and not isinstance(option, bool)
