"""Choice of GPUs: which ones a config asks for, how sessions rotate over them, and starting JAX on them.

Only `start_gpus` starts JAX's back end.
"""

import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxrl_atari.config import Config, DevicesConfig
from jaxrl_atari.errors import UserError, reason, require
from jaxrl_atari.hardware.gpus import Gpu, Visible, forbid_gpu, gpu_provider, visible
from jaxrl_atari.hardware.memory import NO_MEMORY, apply_memory_fraction
from jaxrl_atari.hardware.runtime import jax_config, use_deterministic_kernels


def choose_gpu(option: Any, shown: Visible, field: str) -> int | None:
    """The index of the visible GPU that a `gpu` option means. None: the CPU, or the learner's device.

    | option | GPU |
    |---|---|
    | "auto" | the first one, if there is one |
    | True | the first one, or an error |
    | False, "learner" | none |
    | 0, 1, ... | exactly that one, or an error |

    Raises:
        ConfigError: no such GPU; the message names those that are visible.
    """
    models = [gpu.model for gpu in shown.gpus]
    if option is False or option == "learner" or (option == "auto" and not models):
        return None
    index = 0 if option == "auto" or option is True else option
    seen = ", ".join(f"{i}: {model}" for i, model in enumerate(models)) or f"none; {shown.problem}"
    hint = "use auto or false to run on the CPU"
    require(index < len(models), field, option, f"a visible GPU (visible: {seen})", hint)
    return index


def first_devices(devices: DevicesConfig, available: Sequence[Any], kind: str) -> tuple[Any, ...]:
    """The first `devices.data_parallel` of the available devices. Raises `ConfigError` if there are fewer."""
    count = len(available) if devices.data_parallel == "all" else devices.data_parallel
    require(count <= len(available), "devices.data_parallel", count, f"at most {len(available)} ({kind})")
    return tuple(available[:count])


class DeviceChoice(NamedTuple):
    """The GPUs that a config asks for, as indices into the visible GPUs of this process."""

    gpus: tuple[Gpu, ...]  # the visible ones; none with `devices.gpu = false`: NVML is not asked
    problem: str  # why there are none
    learner: tuple[int, ...]  # empty: the CPU
    actor: int | None  # None: the CPU, or the learner's device
    evaluator: int | None
    reason: str  # for the learner's device


def choose_devices(devices: DevicesConfig, field: str = "devices.gpu") -> DeviceChoice:
    """The GPUs that a config asks for.

    Args:
        field: the name of `devices.gpu` in texts.

    Raises:
        ConfigError: this machine does not have them.
    """
    why = f"{field} = {str(devices.gpu).lower()}"
    shown = Visible((), why) if devices.gpu is False else visible()
    problem = shown.problem
    all_indices = range(len(shown.gpus))
    first = choose_gpu(devices.gpu, shown, field)
    actor = choose_gpu(devices.actor, shown, "devices.actor")
    evaluator = choose_gpu(devices.evaluator, shown, "devices.evaluator")
    if devices.distributed:  # learners are counted over all processes
        hint = "CUDA_VISIBLE_DEVICES chooses the GPUs of each process"
        require(type(devices.gpu) is not int, field, devices.gpu, "no index with devices.distributed", hint)
        learner = tuple(all_indices)
    elif first is not None:
        learner = first_devices(devices, all_indices[first:], f"the GPUs from {first} on")
    else:
        asked = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
        cpus = range(max(1, jax_config.jax_num_cpu_devices, *map(int, asked)))
        first_devices(devices, cpus, f"the CPU devices of JAX ({problem})")
        learner = ()
    if devices.gpu == "auto" and not learner:
        why += f", and there is no GPU: {problem}"
    return DeviceChoice(shown.gpus, problem, learner, actor, evaluator, why)


# --- Rotation ----------------------------------------------------------------------------------------------------


def rotate(session: int, count: int, per_session: int, offset: int) -> tuple[int, ...]:
    """The block of consecutive GPUs of a session, among `count` visible ones.

    With one GPU per session it is `(session + offset) % count`. If `count` is not a multiple of `per_session`, the
    remaining GPUs stay idle, so that two blocks are equal or disjoint.
    """
    first = session * per_session + offset
    used = count - count % per_session
    return tuple((first + i) % used for i in range(per_session))


def session_gpus(config: Config, session: int) -> tuple[tuple[int, ...], str]:
    """The GPUs of session `session` of a trial, shifted by CUDA_OFFSET: their indices (none: the CPU), and why.

    `auto` and `true` rotate; an index does not. A session whose actor or evaluator has an index of its own sees
    all GPUs, because that index counts all visible ones.

    Raises:
        ConfigError: an option asks for devices that this machine does not have, or CUDA_OFFSET is invalid.
    """
    devices = config.devices
    use = choose_devices(devices)
    all_indices = tuple(range(len(use.gpus)))
    offset = os.environ.get("CUDA_OFFSET", "").strip() or "0"
    require(offset.isdecimal(), "CUDA_OFFSET", offset, "a whole number from 0 on")
    sees_all = devices.distributed or int in (type(devices.actor), type(devices.evaluator))
    if use.learner and sees_all:
        return all_indices, f"{use.reason}; it sees all GPUs"
    if not use.learner or type(devices.gpu) is int:
        return use.learner, use.reason
    block = rotate(session, len(all_indices), len(use.learner), int(offset))
    return block, f"{len(all_indices)} visible, CUDA_OFFSET {offset}"


# --- JAX's back end ----------------------------------------------------------------------------------------------


def limit_jax(devices: DevicesConfig, field: str = "devices.gpu") -> DeviceChoice:
    """Limits JAX to the devices that a session uses: the other GPUs get no context and no array.

    Also sets the memory fraction and the flags of `devices.deterministic`. Call before JAX starts its back end;
    afterwards JAX keeps the devices that it has.

    Raises:
        ConfigError: see `choose_devices`; or JAX has started on a GPU with other settings.
    """
    use = choose_devices(devices, field)
    apply_memory_fraction(devices)
    if devices.deterministic:
        use_deterministic_kernels()
    if use.gpus:
        gpu_provider().limit({index for index in (*use.learner, use.actor, use.evaluator) if index is not None})
    else:
        forbid_gpu(use.problem)
    return use


def start_gpus() -> list[jax.Device]:
    """Starts JAX. Returns its GPUs, of all processes; none if it is kept off them or cannot start there.

    Raises:
        UserError: a GPU has too little free memory for JAX to start.
    """
    if not visible().gpus:
        return []
    try:
        return gpu_provider().start()
    except RuntimeError as error:
        if NO_MEMORY.search(str(error)):
            raise UserError(
                f"JAX cannot start on the GPU ({str(error)[:160]}): other processes hold its memory; wait for "
                "them,"
                " lower their devices.memory_fraction, or choose another GPU with devices.gpu"
            ) from error
        forbid_gpu(f"JAX cannot start on a GPU: {reason(error)}")
        return []
