"""The command `devices`: what JAX sees on this machine, what each `gpu` option picks, memory, and problems.

It is started with the name of `devices.py`, whose last lines call `run`:

python -m jaxrl_atari.devices [--config configs/qbert.py ...]

It is not in `devices.py`, which sessions import, because it reads a command line and imports the whole update.
"""

import dataclasses
import importlib.metadata
from collections.abc import Callable, Collection, Mapping, Sequence

import jax
import numpy as np

from jaxrl_atari import cli
from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.cli.options import FromConfig, parse, read_sources
from jaxrl_atari.config import Config, DevicesConfig
from jaxrl_atari.devices import learner_devices, local_gpus
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.hardware.choice import choose_device, choose_devices, limit_jax, start_gpus
from jaxrl_atari.hardware.gpus import (
    VisibleGpus,
    driver_version,
    forbid_gpu,
    gpu_packages,
    gpu_provider,
    visible_gpus,
)
from jaxrl_atari.hardware.memory import do_not_preallocate
from jaxrl_atari.option_forms import GpuOption
from jaxrl_atari.output import counted, say
from jaxrl_atari.update_memory import memory_report


@dataclasses.dataclass(frozen=True)
class Options(FromConfig):
    """Reports this machine's devices, which of them each `devices.gpu` value picks, and problems.

    With a config file, or options that differ from the defaults, also the memory that the learner needs.
    """


class DeviceProblems(UserError):
    """The NVIDIA driver or a device fails, or other processes hold the memory of a GPU."""

    exit_status = 1


def _print_report(config: Config, *, with_memory: bool) -> UserError | None:
    """Prints the report.

    Args:
        config: its `devices` are those whose memory is reported.
        with_memory: if all devices work, also report the memory that training with the config needs.

    Returns:
        The error with which the command ends: what keeps this machine from training with the config, or
        `DeviceProblems`. None: all devices work, or GPUs stay unused because JAX's plugin is missing.
    """
    error = _error_of(lambda: choose_devices(config.devices))  # the report may tell why
    visible = visible_gpus()
    _print_versions()
    do_not_preallocate()  # other processes on the GPU may need the memory
    gpus, problems, full = _start(config.devices.memory_fraction)

    problems = [*visible.failing, *problems]
    problems += _try_devices([*gpus.values(), jax.devices("cpu")[0]])
    if visible.fault == "driver":
        problems.append(visible.why_none)
    if not visible.gpus and visible.fault is None:
        say(f"no GPU: {visible.why_none}")

    for option in ("auto", True, False, *range(len(visible.in_one_process))):
        device = _session_device(option, visible, gpus, full)
        say(f"devices.gpu = {str(option).lower():6}{device}")
    all_work = not problems
    if with_memory and all_work and error is None:
        error = _error_of(lambda: say(_memory_text(config, list(gpus.values()))))

    if visible.fault == "plugin":
        problems.append(visible.why_none)
    for problem in problems:
        say(f"problem: {problem}")
    if not problems and error is None:
        say("no problem found")
    if not all_work and error is None:
        error = DeviceProblems(f"{counted(len(problems), 'problem')} found, listed above")
    return error


def _error_of(action: Callable[[], object]) -> UserError | None:
    """Calls a function. Returns the `UserError` that it raises, so that the report goes on."""
    try:
        action()
    except UserError as error:
        return error
    return None


def _start(memory_fraction: float | None) -> tuple[dict[int, jax.Device], list[str], set[int]]:
    """Starts JAX on the visible GPUs, except those whose memory other processes hold: one may keep JAX off all.

    Returns:
        The GPUs on which it has started, by their indices; what is wrong with the others; and the indices of those
        on which a session cannot start for lack of memory.
    """
    chosen = limit_jax(DevicesConfig(data_parallel="all", memory_fraction=memory_fraction))
    full = {index for index in chosen.used if gpu_provider().is_full(chosen.gpus[index])}
    problems = [f"GPU {index}: other processes hold its memory" for index in sorted(full)]
    free = tuple(index for index in chosen.used if index not in full)
    if not free:
        forbid_gpu("; ".join(problems))  # JAX can still start on the CPU
        return {}, problems, full
    gpu_provider().limit(free)
    try:
        gpus = local_gpus(start_gpus(chosen._replace(learner=free)))
    except UserError as error:  # there is memory on each, and not enough
        forbid_gpu(str(error))
        return {}, [*problems, str(error)], set(chosen.used)
    if gpus:
        problems += [f"JAX has started without GPU {index}" for index in free if index not in gpus]
    else:
        problems.append(visible_gpus().why_none)
    return gpus, problems, full


def _print_versions() -> None:
    """Prints the versions of the NVIDIA driver, of JAX, and of the packages with which it computes on GPUs."""
    driver = driver_version()
    if driver is not None:
        say(f"NVIDIA driver {driver}")
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")} | gpu_packages()
    for name, version in versions.items():
        say(f"{name} {version}")


def _try_devices(devices: Sequence[jax.Device]) -> list[str]:
    """Multiplies matrices on each device, prints a line for each, and returns what is wrong."""
    problems = []
    for device in devices:
        result = _multiply(device)
        memory = ""
        if result == "right":  # a device that fails may report no memory either
            limit = (device.memory_stats() or {}).get("bytes_limit")
            memory = f"; JAX may take {limit / 2**30:.1f} GiB" if limit else ""
        else:
            problems.append(f"{device}: matrix product {result}")
        say(f"{device} ({device.device_kind}): matrix product {result}{memory}")
    return problems


def _session_device(
    option: GpuOption, visible: VisibleGpus, gpus: Mapping[int, jax.Device], full: Collection[int]
) -> str:
    """The device on which a session with this `devices.gpu` would learn, or `an error`; see `devices.place`.

    Args:
        visible: the GPUs that a session finds.
        gpus: those on which JAX can start, by their indices.
        full: the indices of those on which a session cannot start for lack of memory.
    """
    cpu = jax.devices("cpu")[0]
    try:
        chosen = choose_device(option, visible, "devices.gpu")
    except UserError:
        return "an error"
    if not isinstance(chosen, int):
        return str(cpu)
    if chosen in gpus:
        return str(gpus[chosen])
    return str(cpu) if option == "auto" and chosen not in full else "an error"


def _memory_text(config: Config, started: Sequence[jax.Device]) -> str:
    """The memory that training with a config needs on each device that learns.

    The other processes of `devices.distributed` are taken to have as many devices as this one.

    Args:
        started: the GPUs on which JAX has started.

    Raises:
        ConfigError: JAX has started without one of the devices, or training cannot be split over so many.
    """
    devices = config.devices
    here = dataclasses.replace(devices, distributed=False, data_parallel="all") if devices.distributed else devices
    local = learner_devices(here, choose_devices(here), started)
    learners = len(local)
    if devices.distributed and devices.data_parallel != "all":
        learners = devices.data_parallel
    elif devices.distributed:
        if devices.num_processes is None:
            return "memory of a learner device: unknown without devices.num_processes"
        learners *= devices.num_processes
    config.check_split(learners)
    return memory_report(config, local[0], learners)


def _multiply(device: jax.Device) -> str:
    """Compares a product of matrices on a device with NumPy's.

    Returns:
        `right`, `wrong`, or `failed: ` and the error.
    """
    matrix = np.arange(2**18, dtype=np.float32).reshape(512, 512) % 7  # whole numbers, whose sums are exact
    try:
        placed = jax.device_put(matrix, device)
        return "right" if np.array_equal(placed @ placed, matrix @ matrix) else "wrong"
    except Exception as error:  # a broken driver or library may raise anything
        return f"failed: {reason(error)[:300]}"


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Its errors follow the report.

    Raises:
        DeviceProblems: the driver or a device cannot be used (status 1).
        UserError: this machine cannot train with the config (status 2).
    """
    sources = read_sources(arguments)
    options = parse(Options, arguments, "devices", Options(config=load_config(sources.config_file)))
    has_config = sources.config_file is not None or options.config != Config()
    error = _print_report(options.config, with_memory=has_config)
    if error is not None:
        raise error


def run() -> None:
    """Runs `python -m jaxrl_atari.devices`."""
    cli.run(main)
