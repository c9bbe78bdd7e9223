"""The command `devices`: what JAX sees on this machine, what each `gpu` option picks, memory, and problems.

It is started with the name of `devices.py`, whose last lines call `run`:

python -m jaxrl_atari.devices [--config configs/qbert.py ...]

It is not in `devices.py`, which sessions import, because it reads a command line and imports the whole update.
"""

import dataclasses
import importlib.metadata
from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax
import numpy as np

from jaxrl_atari import cli
from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.cli.options import FromConfig, parse, read_sources
from jaxrl_atari.config import Config, DevicesConfig, GpuOption, changed_fields
from jaxrl_atari.devices import learner_devices
from jaxrl_atari.errors import ConfigError, UserError, reason
from jaxrl_atari.hardware.choice import DeviceChoice, choose_devices
from jaxrl_atari.hardware.gpu_interface import VisibleGpus
from jaxrl_atari.hardware.gpus import gpu_provider, limit_to_cpu, visible_gpus
from jaxrl_atari.hardware.memory import apply_memory_fraction, do_not_preallocate
from jaxrl_atari.hardware.start import StartedGpus, settle_devices, start_gpus
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


class FoundGpus(NamedTuple):
    """The visible GPUs, for the report."""

    visible: VisibleGpus  # without a GPU if there is an `error`
    error: ConfigError | None = None  # what is wrong with CUDA's variables

    def for_session(self) -> VisibleGpus:
        """What a session finds that looks for GPUs. Raises the error, as `visible_gpus` does."""
        if self.error is not None:
            raise self.error
        return self.visible


class TriedGpus(NamedTuple):
    """How JAX has started for the report: on all visible GPUs with free memory. A session starts it on fewer."""

    started: StartedGpus = StartedGpus()
    problems: Sequence[str] = ()  # what is wrong with the other visible GPUs
    full: Collection[int] = ()  # those that lack memory
    doubtful: Collection[int] = ()  # at least one of these lacks memory; JAX does not say which

    def of_session(self, used: Collection[int]) -> StartedGpus:
        """How JAX starts in a session that uses these GPUs alone."""
        by_index = {index: gpu for index, gpu in self.started.by_index.items() if index in used}
        full = tuple(index for index in used if index in self.full)
        why_none = f"JAX cannot start on GPU {', '.join(map(str, used))}"
        return StartedGpus(tuple(by_index.values()), by_index, full, why_none)


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
    found = _find_gpus()
    visible = found.visible
    _print_versions()
    do_not_preallocate()  # other processes on the GPU may need the memory
    tried = _try_gpus(visible, config.devices.memory_fraction)
    broken = _try_devices([*tried.started.by_index.values(), jax.devices("cpu")[0]])

    failures = [*visible.failures, *tried.problems, *broken]
    problems = failures
    if visible.lacks_plugin:
        problems = [*failures, visible.why_none]  # GPUs stay unused, which is no failure
    elif not visible.gpus and visible.why_none not in failures:
        say(f"no GPU: {visible.why_none}")

    for option in ("auto", True, False, *range(len(visible.in_one_process))):
        say(f"devices.gpu = {str(option).lower():5} -> {_session_device(option, found, tried)}")
    if with_memory and chosen is not None and not broken:
        try:
            say(_memory_text(config, chosen, tried.started))
        except UserError as caught:
            error = caught

    for problem in problems:
        say(f"problem: {problem}")
    if not problems and error is None:
        say("no problem found")
    if failures and error is None:
        error = DeviceProblems(f"{counted(len(problems), 'problem')} found, listed above")
    return error


def _find_gpus() -> FoundGpus:
    """The visible GPUs, or what is wrong with CUDA's variables."""
    try:
        return FoundGpus(visible_gpus())
    except ConfigError as error:
        return FoundGpus(VisibleGpus((), str(error), failures=(str(error),)), error)


def _try_gpus(visible: VisibleGpus, memory_fraction: float | None) -> TriedGpus:
    """Starts JAX on the visible GPUs, except those whose memory other processes hold: one may keep JAX off all."""
    all_indices = range(len(visible.in_one_process))
    full = [index for index in all_indices if gpu_provider().is_full(visible.gpus[index])]
    free = tuple(index for index in all_indices if index not in full)
    problems = [f"GPU {index}: other processes hold its memory" for index in full]
    if not free:
        limit_to_cpu("; ".join(problems) or visible.why_none)  # JAX can still start on the CPU
        return TriedGpus(StartedGpus(), problems, full)
    apply_memory_fraction(DevicesConfig(memory_fraction=memory_fraction))
    gpu_provider().limit(free)
    started = start_gpus(visible.gpus, free)
    if started.full:  # there is memory on each, and not enough on one
        limit_to_cpu(started.why_none)
        if len(free) == 1:
            return TriedGpus(started, [*problems, started.why_none], [*full, *free])
        hint = "for a report on one GPU alone, set CUDA_VISIBLE_DEVICES to its index"
        return TriedGpus(started, [*problems, f"{started.why_none}; {hint}"], full, doubtful=free)
    if started.gpus:
        problems += [f"JAX has started without GPU {index}" for index in free if index not in started.by_index]
    else:
        problems.append(started.why_none)
    return TriedGpus(started, problems, full)


def _print_versions() -> None:
    """Prints the versions of the NVIDIA driver, of JAX, and of the packages with which it computes on GPUs."""
    driver = gpu_provider().driver_version()
    if driver is not None:
        say(f"NVIDIA driver {driver}")
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    for name, version in (versions | gpu_provider().packages()).items():
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


def _session_device(option: GpuOption, found: FoundGpus, tried: TriedGpus) -> str:
    """The device on which a session with this `devices.gpu` would learn, `unknown`, or the error."""
    options = DevicesConfig(gpu=option)
    try:
        chosen = choose_devices(options, found.for_session)
    except UserError:
        return f"an error: {found.visible.why_none}"
    if any(index in tried.doubtful for index in chosen.used):
        return "unknown"
    started = tried.of_session(chosen.used)
    try:
        settled = settle_devices(options, chosen, started)
    except UserError:
        return f"an error: {started.why_none}"
    return str(learner_devices(options, settled, started)[0])


def _memory_text(config: Config, chosen: DeviceChoice, started: StartedGpus) -> str:
    """The memory that training with a config needs on each device that learns.

    The other processes of `devices.distributed` are taken to have as many devices as this one.

    Args:
        chosen: the devices that the config asks for.

    Raises:
        ConfigError: training cannot be split over so many devices.
    """
    if not started.by_index.keys() >= set(chosen.learner):
        return "memory of a learner device: unknown, because JAX has not started on it"
    options = config.devices
    here = dataclasses.replace(options, distributed=False, data_parallel="all") if options.distributed else options
    local = learner_devices(here, chosen, started)
    num_learners = len(local)
    if options.distributed and options.data_parallel != "all":
        num_learners = options.data_parallel
    elif options.distributed:
        if options.num_processes is None:
            return "memory of a learner device: unknown without devices.num_processes"
        num_learners *= options.num_processes
    config.check_split(num_learners)
    return memory_report(config, local[0], num_learners)


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
    changed = changed_fields(Config().to_dict(), options.config.to_dict())
    has_config = sources.config_file is not None or bool(changed)
    error = _print_report(options.config, with_memory=has_config)
    if error is not None:
        raise error


def run() -> None:
    """Runs `python -m jaxrl_atari.devices`."""
    cli.run(main)
