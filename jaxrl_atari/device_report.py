"""The command `devices`: what JAX sees on this machine, what each `gpu` option picks, memory, and problems.

It is started with the name of `devices.py`, whose last lines call `run`:

python -m jaxrl_atari.devices [--config configs/qbert.py ...]

It is not in `devices.py`, which sessions import, because it reads a command line and imports the whole update.
"""

import dataclasses
import importlib.metadata
from collections.abc import Sequence

import jax
import numpy as np

from jaxrl_atari import cli
from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.cli.options import FromConfig, parse, read_sources
from jaxrl_atari.config import Config, DevicesConfig
from jaxrl_atari.devices import learner_devices, local_gpus
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.hardware.choice import choose_devices, limit_jax, start_gpus
from jaxrl_atari.hardware.gpus import driver_version, gpu_packages, visible_gpus
from jaxrl_atari.hardware.memory import do_not_preallocate
from jaxrl_atari.output import counted, say
from jaxrl_atari.update_memory import memory_report


@dataclasses.dataclass(frozen=True)
class Options(FromConfig):
    """Reports this machine's devices, which of them each `devices.gpu` value picks, and problems.

    With a config file, or options that differ from the defaults, also the memory that the learner needs.
    """


class FaultyDevices(UserError):
    """The NVIDIA driver or a device fails."""

    exit_status = 1


def _print_report(config: Config, *, with_memory: bool, can_train: bool) -> list[str]:
    """Prints the report.

    A fault is a driver or a device that fails, and gives status 1. A problem is a fault, or GPUs that stay unused
    because JAX's plugin is missing.

    Args:
        config: its `devices` are those whose memory is reported.
        with_memory: without a fault, also report the memory that training with the config needs.
        can_train: whether this machine has the devices that the config demands; if not, an error follows.

    Returns:
        The faults.
    """
    visible = visible_gpus()
    _print_versions()
    do_not_preallocate()  # other processes on the GPU may need the memory
    limit_jax(DevicesConfig(data_parallel="all", memory_fraction=config.devices.memory_fraction))
    found = start_gpus()
    gpus = local_gpus(found)

    faults = [*visible.failing]
    if visible.fault == "driver":
        faults.append(visible.why_none)
    missing = [str(index) for index in range(len(visible.gpus)) if index not in gpus]
    if missing:  # if JAX could not start on any, none is visible any more
        faults.append(visible_gpus().why_none or f"JAX has started without GPU {', '.join(missing)}")
    faults += _try_devices([*gpus.values(), jax.devices("cpu")[0]])
    if not visible.gpus and visible.fault is None:
        say(f"no GPU: {visible.why_none}")

    _print_choices(found)
    if with_memory and not faults:
        say(_memory_text(config, found))

    problems = [*faults]
    if visible.fault == "plugin":
        problems.append(visible.why_none)
    for problem in problems:
        say(f"problem: {problem}")
    if not problems and can_train:
        say("no problem found")
    return faults


def _print_versions() -> None:
    """Prints the versions of the NVIDIA driver, of JAX, and of the packages with which it computes on GPUs."""
    driver = driver_version()
    if driver is not None:
        say(f"NVIDIA driver {driver}")
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")} | gpu_packages()
    for name, version in versions.items():
        say(f"{name} {version}")


def _try_devices(devices: Sequence[jax.Device]) -> list[str]:
    """Multiplies matrices on each device, prints a line for each, and returns the faults."""
    faults = []
    for device in devices:
        result = _multiply(device)
        memory = ""
        if result == "right":  # a device that fails may report no memory either
            limit = (device.memory_stats() or {}).get("bytes_limit")
            memory = f"; JAX may take {limit / 2**30:.1f} GiB" if limit else ""
        else:
            faults.append(f"{device}: matrix product {result}")
        say(f"{device} ({device.device_kind}): matrix product {result}{memory}")
    return faults


def _print_choices(found: Sequence[jax.Device]) -> None:
    """Prints the device that each value of `devices.gpu` picks.

    Args:
        found: the GPUs on which JAX has started.
    """
    for option in ("auto", True, False, *range(len(visible_gpus().gpus))):
        devices = DevicesConfig(gpu=option)
        try:
            device = learner_devices(devices, choose_devices(devices), found)[0]
        except UserError:
            device = "an error"
        say(f"devices.gpu = {str(option).lower():6}{device}")


def _memory_text(config: Config, found: Sequence[jax.Device]) -> str:
    """The memory that training with a config needs on each device that learns.

    The other processes of `devices.distributed` are taken to have as many devices as this one.

    Args:
        found: the GPUs on which JAX has started.

    Raises:
        ConfigError: JAX has started without one of the devices, or training cannot be split over so many.
    """
    devices = config.devices
    here = dataclasses.replace(devices, distributed=False, data_parallel="all") if devices.distributed else devices
    local = learner_devices(here, choose_devices(here), found)
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
        FaultyDevices: the driver or a device fails (status 1).
        UserError: the config demands a device that this machine lacks (status 2).
    """
    sources = read_sources(arguments)
    options = parse(Options, arguments, "devices", Options(config=load_config(sources.config_file)))
    config = options.config
    lacking = None
    try:
        choose_devices(config.devices)
    except UserError as error:  # this machine lacks a device that the config demands: the report may tell why
        lacking = error
    has_config = sources.config_file is not None or config != Config()
    can_train = lacking is None
    faults = _print_report(config, with_memory=has_config and can_train, can_train=can_train)
    if lacking is not None:
        raise lacking
    if faults:
        raise FaultyDevices(f"{counted(len(faults), 'fault')} of the driver or a device, listed above as problems")


def run() -> None:
    """Runs `python -m jaxrl_atari.devices`."""
    cli.run(main)
