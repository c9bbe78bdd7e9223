"""The command `devices`: what JAX sees on this machine, what each `gpu` option picks, memory, and problems.

It is started with the name of `devices.py`, whose last lines call `run`:

python -m jaxrl_atari.devices [--config configs/qbert.py ...]

It is not in `devices.py`, which sessions import, because it reads a command line and imports the whole update.
"""

import dataclasses
import importlib.metadata
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from jaxrl_atari import cli
from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.cli.options import FromConfig, parse, read_sources
from jaxrl_atari.config import Config, DevicesConfig, GpuOption, changed_fields
from jaxrl_atari.errors import ConfigError, UserError, reason
from jaxrl_atari.hardware.choice import DeviceChoice, choose_among, choose_devices
from jaxrl_atari.hardware.gpus import (
    Gpu,
    VisibleGpus,
    driver_version,
    gpu_packages,
    is_full,
    limit_to_cpu,
    limit_to_gpus,
    own_gpus,
    visible_gpus,
)
from jaxrl_atari.hardware.memory import apply_memory_fraction, do_not_preallocate
from jaxrl_atari.learner import memory_report
from jaxrl_atari.output import counted, say


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
        with_memory: also report the memory that training with the config needs.

    Returns:
        The error with which the command ends: what keeps this machine from training with the config, or
        `DeviceProblems`. None: all devices work, or this machine has none but the CPU.
    """
    error, chosen = None, None
    try:
        chosen = choose_devices(config.devices)
    except UserError as caught:  # the report may tell why
        error = caught
    wrong_variable = None
    try:
        visible = visible_gpus()
    except ConfigError as caught:
        wrong_variable = f"an error: {caught}"
        visible = VisibleGpus((), str(caught), (str(caught),))
    _print_versions()
    do_not_preallocate()  # other processes on the GPU may need the memory
    apply_memory_fraction(config.devices)
    started, unusable = _start_gpus(visible.gpus)
    problems = [*visible.failures, *dict.fromkeys(unusable.values())]
    if not visible.gpus and visible.why_none not in problems:
        say(f"no GPU: {visible.why_none}")
    problems += _try_devices([*started.values(), jax.devices("cpu")[0]])
    for option in ("auto", True, False, *range(len(visible.gpus))):
        picked = wrong_variable if option is not False else None
        picked = picked or _session_device(option, visible, started, unusable)
        say(f"devices.gpu = {str(option).lower():5} -> {picked}")
    if with_memory and chosen is not None and unusable.keys().isdisjoint(chosen.learner):
        try:
            say(_memory_text(config, chosen, started))
        except UserError as caught:
            error = caught
    for problem in problems:
        say(f"problem: {problem}")
    if error is None and problems:
        error = DeviceProblems(f"{counted(len(problems), 'problem')} found, listed above")
    if error is None:
        say("no problem found")
    return error


def _print_versions() -> None:
    """Prints the versions of the NVIDIA driver, of JAX, and of the packages with which it computes on GPUs."""
    driver = driver_version()
    if driver is not None:
        say(f"NVIDIA driver {driver}")
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    for name, version in (versions | gpu_packages()).items():
        say(f"{name} {version}")


def _start_gpus(gpus: Sequence[Gpu]) -> tuple[Mapping[int, jax.Device], Mapping[int, str]]:
    """Starts JAX on the visible GPUs, except those whose memory other processes hold: one may keep JAX off all.

    Returns:
        JAX's devices by the indices of the GPUs, and why each of the others cannot be used.
    """
    unusable = {
        index: f"GPU {index}: other processes hold its memory" for index, gpu in enumerate(gpus) if is_full(gpu)
    }
    free = [index for index in range(len(gpus)) if index not in unusable]
    if not free:
        limit_to_cpu()
        return {}, unusable
    limit_to_gpus(free)
    try:
        started = own_gpus()
    except RuntimeError as error:
        limit_to_cpu()
        return {}, unusable | dict.fromkeys(free, f"JAX cannot start on a GPU: {reason(error)}")
    absent = {index: f"JAX has started without GPU {index}" for index in free if index not in started}
    return started, unusable | absent


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


def _session_device(
    option: GpuOption, visible: VisibleGpus, started: Mapping[int, jax.Device], unusable: Mapping[int, str]
) -> str:
    """The device on which a session with this `devices.gpu` would learn, or the error."""
    cpu = str(jax.devices("cpu")[0])
    try:
        learner = choose_among(DevicesConfig(gpu=option), visible).learner
    except UserError:
        return f"an error: {visible.why_none}"
    if not learner:
        return cpu
    (index,) = learner
    if index in started:
        return str(started[index])
    if option == "auto" and not is_full(visible.gpus[index]):
        return cpu
    return f"an error: {unusable[index]}"


def _memory_text(config: Config, chosen: DeviceChoice, started: Mapping[int, jax.Device]) -> str:
    """The memory that training with a config needs on each device that learns.

    The other processes of `devices.distributed` are taken to have as many devices as this one.

    Raises:
        ConfigError: training cannot be split over so many devices.
    """
    local = [started[index] for index in chosen.learner] or jax.devices("cpu")
    num_learners = config.devices.data_parallel
    if num_learners == "all":
        num_learners = len(local) * (config.devices.num_processes or 1)
    config.check_split(num_learners)
    return memory_report(config, local[0], num_learners)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Its errors follow the report.

    Raises:
        DeviceProblems: the driver or a device cannot be used (status 1).
        UserError: this machine cannot train with the config (status 2).
    """
    sources = read_sources(arguments)
    options = parse(Options, arguments, "devices", Options(config=load_config(sources.config_file)))
    changed = changed_fields(Config().to_dict(), options.config.to_dict())
    has_config = sources.config_file is not None or bool(changed)
    error = _print_report(options.config, with_memory=has_config)
    if error is not None:
        raise error


def run() -> None:
    """Runs `python -m jaxrl_atari.devices`."""
    cli.run(main)
