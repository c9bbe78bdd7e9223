"""The command `devices`: what JAX sees on this machine, what each `gpu` option picks, memory, and problems.

It is started with the name of `devices.py`, whose last lines call `run`:

python -m jaxrl_atari.devices [--config configs/qbert.py ...]

It is not in `devices.py`, which sessions import, because it reads a command line and imports the whole update.
"""

import dataclasses
import importlib.metadata
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_atari import cli
from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.cli.options import FromConfig, parse, read_sources
from jaxrl_atari.config import Config, DevicesConfig
from jaxrl_atari.devices import learner_devices, local_gpus
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.hardware.choice import DeviceChoice, choose_device, choose_devices, limit_jax, start_gpus
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


class Started(NamedTuple):
    """How JAX has started for the report, on the visible GPUs. Sessions start it on fewer."""

    gpus: dict[int, jax.Device]  # those on which JAX has started, by their indices
    problems: list[str]  # what is wrong with the others
    full: Collection[int] = ()  # those that lack memory: a session with one of them ends with an error
    doubtful: Collection[int] = ()  # those of which at least one lacks memory; JAX does not say which


def _print_report(config: Config, *, with_memory: bool) -> UserError | None:
    """Prints the report.

    Args:
        config: its `devices` are those whose memory is reported.
        with_memory: also report the memory that training with the config needs, if its devices work.

    Returns:
        The error with which the command ends: what keeps this machine from training with the config, or
        `DeviceProblems`. None: all devices work, or GPUs stay unused because JAX's plugin is missing.
    """
    chosen, error = None, None
    try:
        chosen = choose_devices(config.devices)
    except UserError as caught:  # the report may tell why
        error = caught
    visible = visible_gpus()
    _print_versions()
    do_not_preallocate()  # other processes on the GPU may need the memory
    started = _start(config.devices.memory_fraction)
    broken = _try_devices([*started.gpus.values(), jax.devices("cpu")[0]])

    problems = [*visible.failing, *started.problems, *broken]
    if visible.fault == "driver":
        problems.append(visible.why_none)
    if not visible.gpus and visible.fault is None:
        say(f"no GPU: {visible.why_none}")

    for option in ("auto", True, False, *range(len(visible.in_one_process))):
        say(f"devices.gpu = {str(option).lower():6}{_session_device(option, visible, started)}")
    all_work = not problems
    if with_memory and chosen is not None and not broken:
        try:
            say(_memory_text(config, chosen, started.gpus))
        except UserError as caught:
            error = caught

    if visible.fault == "plugin":
        problems.append(visible.why_none)
    for problem in problems:
        say(f"problem: {problem}")
    if not problems and error is None:
        say("no problem found")
    if not all_work and error is None:
        error = DeviceProblems(f"{counted(len(problems), 'problem')} found, listed above")
    return error


def _start(memory_fraction: float | None) -> Started:
    """Starts JAX on the visible GPUs, except those whose memory other processes hold: one may keep JAX off all."""
    chosen = limit_jax(DevicesConfig(data_parallel="all", memory_fraction=memory_fraction))
    if not chosen.used:
        return Started({}, [])
    full = [index for index in chosen.used if gpu_provider().is_full(chosen.gpus[index])]
    free = tuple(index for index in chosen.used if index not in full)
    problems = [f"GPU {index}: other processes hold its memory" for index in full]
    if not free:
        forbid_gpu("; ".join(problems))  # JAX can still start on the CPU
        return Started({}, problems, full)
    gpu_provider().limit(free)
    try:
        gpus = local_gpus(start_gpus(chosen._replace(learner=free)))
    except UserError as error:  # there is memory on each, and not enough on one
        forbid_gpu(str(error))
        if len(free) == 1:
            return Started({}, [*problems, str(error)], [*full, *free])
        hint = "for a report on one GPU alone, set CUDA_VISIBLE_DEVICES to its index"
        return Started({}, [*problems, f"{error}; {hint}"], full, doubtful=free)
    if gpus:
        problems += [f"JAX has started without GPU {index}" for index in free if index not in gpus]
    else:
        problems.append(visible_gpus().why_none)
    return Started(gpus, problems, full)


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


def _session_device(option: GpuOption, visible: VisibleGpus, started: Started) -> str:
    """The device on which a session with this `devices.gpu` would learn, `unknown` or `an error`.

    A session starts JAX on its own GPUs alone; see `devices.place`.

    Args:
        visible: the GPUs that a session finds.
    """
    cpu = jax.devices("cpu")[0]
    try:
        chosen = choose_device(option, visible, "devices.gpu")
    except UserError:
        return "an error"
    if not isinstance(chosen, int):
        return str(cpu)
    if chosen in started.gpus:
        return str(started.gpus[chosen])
    if chosen in started.doubtful:
        return "unknown"
    return str(cpu) if option == "auto" and chosen not in started.full else "an error"


def _memory_text(config: Config, chosen: DeviceChoice, gpus: Mapping[int, jax.Device]) -> str:
    """The memory that training with a config needs on each device that learns.

    The other processes of `devices.distributed` are taken to have as many devices as this one.

    Args:
        chosen: the devices that the config asks for.
        gpus: those on which JAX has started, by their indices.

    Raises:
        ConfigError: training cannot be split over so many devices.
    """
    if not gpus.keys() >= set(chosen.learner):
        return "memory of a learner device: unknown, because JAX has not started on it"
    devices = config.devices
    here = dataclasses.replace(devices, distributed=False, data_parallel="all") if devices.distributed else devices
    local = learner_devices(here, chosen, list(gpus.values()))
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
