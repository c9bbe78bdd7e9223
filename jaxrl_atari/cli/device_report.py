"""The command `devices`: what JAX sees on this machine, what each `gpu` option picks, memory, and problems.

It is started with the name of `devices.py`, whose last lines call `main`:

python -m jaxrl_atari.devices [--config configs/qbert.py ...]

It is not in `devices.py`, which sessions import, because it reads a command line and imports the whole update.
"""

import dataclasses
import importlib.metadata
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxrl_atari.algorithm import check_config, find_algorithm, new_key, resolved_options
from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.cli.options import FromConfig, parse, read_sources
from jaxrl_atari.config import Config, DevicesConfig, GpuOption
from jaxrl_atari.devices import device_class
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.hardware.choice import choose_among
from jaxrl_atari.hardware.gpus import (
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
from jaxrl_atari.learner import compiled_update, update_arguments
from jaxrl_atari.networks import make_network
from jaxrl_atari.output import counted, say


@dataclasses.dataclass(frozen=True)
class Options(FromConfig):
    """Reports this machine's devices, which of them each `devices.gpu` value picks, and problems.

    With a config file, or options that differ from the defaults, also the memory that the learner needs.
    """


class DeviceProblems(UserError):
    """The NVIDIA driver or a device fails, or other processes hold the memory of a GPU."""

    exit_status = 1


def report(config: Config, *, with_memory: bool) -> None:
    """Prints the report.

    Args:
        config: its `devices` are those whose memory is reported.
        with_memory: also report the memory that training with the config needs.

    Raises:
        DeviceProblems: the driver or a device cannot be used (status 1).
        UserError: this machine cannot train with the config (status 2).
    """
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}
    for name, version in {"NVIDIA driver": driver_version(), **versions, **gpu_packages()}.items():
        if version:
            say(f"{name} {version}")
    do_not_preallocate()  # other processes on the GPU may need the memory
    apply_memory_fraction(config.devices)
    visible, started, problems = _start_gpus(visible_gpus())
    if visible.why_none and visible.why_none not in problems:
        say(f"no GPU: {visible.why_none}")
    problems += _try_devices([*started.values(), jax.devices("cpu")[0]])
    for option in ("auto", True, False, *range(len(visible.gpus))):
        say(f"devices.gpu = {str(option).lower():5} -> {_session_device(option, visible, started)}")
    for problem in problems:
        say(f"problem: {problem}")
    usable = visible if config.devices.may_use_gpus else VisibleGpus((), "devices.gpu = false")
    chosen = choose_among(config.devices, usable)
    if with_memory and started.keys() >= {*chosen.learner}:
        say(memory_report(config, [started[index] for index in chosen.learner] or jax.devices("cpu")))
    if problems:
        raise DeviceProblems(f"{counted(len(problems), 'problem')} found, listed above")
    say("no problem found")


def _start_gpus(visible: VisibleGpus) -> tuple[VisibleGpus, dict[int, jax.Device], list[str]]:
    """Starts JAX on the visible GPUs, except those whose memory other processes hold: one may keep JAX off all.

    Returns:
        The visible GPUs, none of them if JAX cannot start on a GPU; JAX's devices by their indices; problems.
    """
    full = [index for index, gpu in enumerate(visible.gpus) if is_full(gpu)]
    free = [index for index in range(len(visible.gpus)) if index not in full]
    problems = [*visible.failures, *(f"GPU {index}: other processes hold its memory" for index in full)]
    if not free:
        limit_to_cpu()
        return visible, {}, problems
    limit_to_gpus(free)
    try:
        started = own_gpus()
    except RuntimeError as error:
        limit_to_cpu()
        why = f"JAX cannot start on a GPU: {reason(error)}"
        return VisibleGpus((), why), {}, [*problems, why]
    problems += [f"JAX has started without GPU {index}" for index in free if index not in started]
    return visible, started, problems


def _try_devices(devices: Sequence[jax.Device]) -> list[str]:
    """Compares a product of matrices on each device with NumPy's, prints a line for each, and returns problems."""
    problems = []
    matrix = np.arange(2**18, dtype=np.float32).reshape(512, 512) % 7  # whole numbers, whose sums are exact
    for device in devices:
        try:
            placed = jax.device_put(matrix, device)
            result = "right" if np.array_equal(placed @ placed, matrix @ matrix) else "wrong"
            limit = (device.memory_stats() or {}).get("bytes_limit")
        except Exception as error:  # a broken driver or library may raise anything
            result, limit = f"failed: {reason(error)[:300]}", None
        if result != "right":
            problems.append(f"{device}: matrix product {result}")
        memory = f"; JAX may take {limit / 2**30:.1f} GiB" if limit else ""
        say(f"{device} ({device.device_kind}): matrix product {result}{memory}")
    return problems


def _session_device(option: GpuOption, visible: VisibleGpus, started: Mapping[int, jax.Device]) -> str:
    """The device on which a session with this `devices.gpu` would learn, or the error."""
    try:
        learner = choose_among(DevicesConfig(gpu=option), visible).learner
    except UserError:
        return f"an error: {visible.why_none}"
    if not learner:
        return str(jax.devices("cpu")[0])
    return str(started.get(learner[0], "an error, listed below"))


def memory_report(config: Config, local: Sequence[jax.Device]) -> str:
    """The memory that training needs on each device that learns, by XLA's analysis of the update, as text.

    Args:
        local: the devices that may learn in this process. Other processes of `devices.distributed` are taken to
            have as many.

    Raises:
        ConfigError: training cannot be split over so many devices.
    """
    device = local[0]
    num_learners = config.devices.data_parallel
    if num_learners == "all":
        num_learners = len(local) * (config.devices.num_processes or 1)
    check_config(config, num_learners)
    actions = 18  # the full action set: no ALE game has more
    num_envs = config.env.num_envs // num_learners
    options = dataclasses.replace(
        resolved_options(config), minibatch_size=config.ppo.minibatch_size // num_learners
    )
    network = make_network(config.network, actions, device_class(device))
    algorithm = find_algorithm(config.algorithm)
    make = partial(update_arguments, network=network, algorithm=algorithm, options=options, num_envs=num_envs)
    state, rollout, numbers, key = jax.eval_shape(make, new_key(0))
    program: Any = compiled_update((device,), network, algorithm)
    with jax.default_device(device):
        analysis = program.lower(state, rollout, numbers, key=key).compile().memory_analysis()
    held = analysis.argument_size_in_bytes
    next_rollout = rollout.frames.size
    working = analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return f"""
memory of a learner device, if it also acts, by XLA's analysis of the compiled update:
  parameters, optimiser, rollout {held / 2**20:10,.1f} MiB
  the next rollout               {next_rollout / 2**20:10,.1f} MiB
  gradients and activations      {working / 2**20:10,.1f} MiB
  total                          {(held + next_rollout + working) / 2**20:10,.1f} MiB
Smaller values of `ppo.minibatch_size` and `env.num_envs` reduce it.
On a GPU, add 0.6 to 0.8 GiB for the CUDA context, cuDNN and cuBLAS.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Raises what `report` raises."""
    sources = read_sources(arguments)
    options = parse(Options, arguments, "devices", Options(config=load_config(sources.config_file)))
    report(options.config, with_memory=sources.config_file is not None or options.config != Config())
