"""The command `devices`: what JAX sees on this machine, what each `gpu` option picks, memory, and problems.

python -m jaxrl_atari.devices [--config configs/qbert.py ...]
"""

import dataclasses
import importlib.metadata
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_atari import cli
from jaxrl_atari.algorithm import TrainState, find_algorithm, init_train_state, update
from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.cli.options import FromConfig, parse, read_start
from jaxrl_atari.config import Config, DevicesConfig, PPOConfig
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.fast.forms import make_network
from jaxrl_atari.frames import STACK
from jaxrl_atari.hardware.choice import choose_devices, limit_jax, start_gpus
from jaxrl_atari.hardware.gpus import driver_version, network_platform, visible
from jaxrl_atari.hardware.memory import do_not_preallocate
from jaxrl_atari.keys import new_key
from jaxrl_atari.minibatches import Rollout
from jaxrl_atari.networks import init_params, make_module
from jaxrl_atari.output import say

ACTIONS = 18
"""The full action set: no ALE game has more actions."""


@dataclasses.dataclass(frozen=True)
class Options(FromConfig):
    """Reports this machine's devices, which of them each `devices.gpu` value picks, and problems.

    With a config file or options of the config, also the memory that the learner needs.
    """


def print_report(config: Config, with_memory: bool) -> list[str]:
    """Prints the report.

    Args:
        config: its `devices` are those whose memory is reported.
        with_memory: without a fault, also report the memory that training with the config needs.

    Returns:
        What fails: the driver or a device.
    """
    shown = visible()
    print_versions()
    do_not_preallocate()  # other processes on the GPU may need the memory
    limit_jax(DevicesConfig(data_parallel="all"))
    gpu_devices = start_gpus()

    faults = []
    if shown.fault == "failed":
        faults.append(shown.problem)
    if len(gpu_devices) < len(shown.gpus):
        faults.append(visible().problem or f"JAX has {len(gpu_devices)} of {len(shown.gpus)} GPUs")
    faults += try_devices([*gpu_devices, jax.devices("cpu")[0]])
    if not shown.gpus and shown.fault == "none":
        say(f"no GPU: {shown.problem}")

    print_choices(gpu_devices)
    if with_memory and not faults:
        say(memory_report(config, learner_devices(config.devices, gpu_devices)))

    problems = [*faults]
    if shown.fault == "unused":
        problems.append(shown.problem)
    for problem in problems:
        say(f"problem: {problem}")
    if not problems:
        say("no problem found")
    return faults


def print_versions() -> None:
    """Prints the versions of the NVIDIA driver, of JAX and of NVIDIA's packages."""
    version = driver_version()
    if version is not None:
        say(f"NVIDIA driver {version}")
    for package in importlib.metadata.distributions():
        if package.name.startswith(("jax", "nvidia-")):
            say(f"{package.name} {package.version}")


def try_devices(devices: Sequence[jax.Device]) -> list[str]:
    """Multiplies matrices on each device, prints a line for each, and returns the faults."""
    faults = []
    for device in devices:
        result = multiply(device)
        limit = (device.memory_stats() or {}).get("bytes_limit")
        memory = f"; JAX may take {limit / 2**30:.1f} GiB" if limit else ""
        say(f"{device} ({device.device_kind}): matrix product {result}{memory}")
        if result != "right":
            faults.append(f"{device}: matrix product {result}")
    return faults


def print_choices(gpu_devices: Sequence[jax.Device]) -> None:
    """Prints the device that each value of `devices.gpu` picks."""
    for option in ("auto", True, False, *range(len(gpu_devices))):
        try:
            choice = learner_devices(DevicesConfig(gpu=option), gpu_devices)[0]
        except UserError:
            choice = "an error"
        say(f"devices.gpu = {str(option).lower():6}{choice}")


def learner_devices(devices: DevicesConfig, gpu_devices: Sequence[jax.Device]) -> list[jax.Device]:
    """The devices that would learn with these options.

    Args:
        gpu_devices: all visible GPUs, on which JAX has started.

    Raises:
        ConfigError: this machine does not have them.
    """
    chosen = choose_devices(devices).learner
    return [gpu_devices[index] for index in chosen] or [jax.devices("cpu")[0]]


def multiply(device: jax.Device) -> str:
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


class UpdateMemory(NamedTuple):
    """Bytes on a learner device that also acts."""

    held: int  # parameters, optimizer state, and the rollout that is learned from
    next_rollout: int  # frames of the rollout that is filled at the same time
    working: int  # gradients and activations


def update_memory(config: Config, devices: Sequence[jax.Device]) -> UpdateMemory:
    """The memory that training needs on each device, by XLA's analysis of the update.

    The update is compiled for the first device, with its share of the environments and of the minibatches.

    Args:
        devices: the learner's devices.
    """
    home = devices[0]
    num_envs = config.env.num_envs // len(devices)
    minibatch_size = config.ppo.minibatch_size // len(devices)
    ppo = replace(config.ppo, minibatch_size=minibatch_size, gae_lambda=config.resolved_gae_lambda)
    network = make_network(config.network, ACTIONS, network_platform(home))
    algorithm = find_algorithm(config.algorithm)
    frames = (ppo.rollout_length + STACK, num_envs, *network.layout.shape)

    def arguments(key: jax.Array) -> tuple[TrainState, Rollout, PPOConfig, jax.Array]:
        numbers = jnp.zeros((ppo.rollout_length, num_envs))
        integers = numbers.astype(int)
        marks = numbers > 0
        rollout = Rollout(
            frames=jnp.zeros(frames, np.uint8),
            age=integers,
            action=integers,
            log_prob=numbers,
            value=numbers,
            reward=numbers,
            terminated=marks,
            truncated=marks,
            weight=numbers,
            bootstrap_value=numbers[0],
            carry=network.initial_carry(num_envs),
        )
        params = init_params(make_module(config.network, ACTIONS, jnp.float32), key)
        return init_train_state(params, ppo, algorithm, key), rollout, ppo, key

    with jax.default_device(home):
        program = jax.jit(partial(update, apply=network.apply, algorithm=algorithm), donate_argnums=0)
    shapes = jax.eval_shape(arguments, new_key(0))
    analysis = program.lower(*shapes).compile().memory_analysis()
    assert analysis is not None
    return UpdateMemory(
        held=analysis.argument_size_in_bytes,
        next_rollout=math.prod(frames),
        working=analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
    )


def memory_report(config: Config, devices: Sequence[jax.Device]) -> str:
    """The text of `update_memory`, with the option that reduces it."""
    memory = update_memory(config, devices)
    lower = "ppo.minibatch_size" if memory.working > 2 * memory.next_rollout else "env.num_envs"
    return f"""
memory of a learner device that also acts, by XLA's analysis of the compiled update:
  parameters, optimiser, rollout {memory.held / 2**20:10,.1f} MiB
  the next rollout               {memory.next_rollout / 2**20:10,.1f} MiB
  gradients and activations      {memory.working / 2**20:10,.1f} MiB
  total                          {sum(memory) / 2**20:10,.1f} MiB
  what reduces it: {lower}
On a GPU, add 0.6 to 0.8 GiB for the CUDA context, cuDNN and cuBLAS.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Exits with status 1 if the driver or a device fails."""
    start = read_start(arguments)
    options = parse(Options, arguments, "devices", Options(full_config=load_config(start.config)))
    choose_devices(options.full_config.devices)
    chosen = start.config is not None or options.full_config != Config()
    if print_report(options.full_config, with_memory=chosen):
        sys.exit(1)


def run() -> None:
    """Runs `python -m jaxrl_atari.devices`."""
    cli.run(main)
