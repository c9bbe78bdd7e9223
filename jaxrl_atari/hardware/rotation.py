"""Rotation: the GPUs of each session of a trial, assigned before JAX starts its back end."""

import os
from typing import Literal, NamedTuple, TypeGuard

from jaxrl_atari.config import Config, GpuOption
from jaxrl_atari.errors import ConfigError
from jaxrl_atari.hardware.gpus import no_such_gpu, visible


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


def rotate(number: int, visible: int, per_session: int = 1, offset: int = 0) -> tuple[int, ...]:
    """The block of consecutive GPUs of session `number`, counted over trials (trial * sessions + session).

    With one GPU per session it is `(number + offset) % visible`. If `visible` is not a multiple of `per_session`, the
    remaining GPUs stay idle, so that two blocks are equal or disjoint.
    """
    first = number * per_session + offset
    used = visible - visible % per_session
    return tuple((first + i) % used for i in range(per_session))


def place_session(config: Config, session: int, trial: int = 0) -> Place:
    """The GPUs of session `session` of a trial. Does not start JAX's back end.

    `auto` and `true` rotate; an index does not. A session whose actor or evaluator has an index of its own sees all
    GPUs, because that index counts all visible ones.

    Raises:
        ConfigError: the config asks for a GPU that does not exist, or CUDA_OFFSET is invalid.
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
        raise ConfigError("devices.data_parallel", per_session, f"at most {len(shown) - first}, the number of GPUs")
    if _is_index(devices.actor) or _is_index(devices.evaluator):
        return Place(tuple(range(len(shown))), devices.gpu, "all visible: devices.actor or evaluator is an index")
    if _is_index(devices.gpu):
        return Place(tuple(range(first, first + per_session)), 0, f"devices.gpu = {first}")
    offset = cuda_offset()
    block = rotate(trial * config.sessions + session, len(shown), per_session, offset)
    return Place(block, devices.gpu, f"{len(shown)} visible, CUDA_OFFSET {offset}")


def _is_index(option: GpuOption | Literal["learner"]) -> TypeGuard[int]:
    return isinstance(option, int) and not isinstance(option, bool)
