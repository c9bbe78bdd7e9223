"""Report of this machine's devices: what JAX sees, what each `gpu` option picks, memory, and problems.

python -m jaxrl_atari.devices [--config configs/qbert.py ...]
"""

import dataclasses
import importlib.metadata
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_atari import cli
from jaxrl_atari.cli import say
from jaxrl_atari.cli.options import FromConfig, load_config, parse, read_start
from jaxrl_atari.config import Config, DevicesConfig
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.fast.forms import make_network
from jaxrl_atari.hardware.choice import choose_devices, limit_jax, start_gpus
from jaxrl_atari.hardware.gpus import driver_version, network_platform, visible
from jaxrl_atari.hardware.memory import do_not_preallocate
from jaxrl_atari.networks import STACK, init_params, make_module
from jaxrl_atari.ppo import KEYS, Rollout, init_train_state, update
from jaxrl_atari.registry import ALGORITHMS

ACTIONS = 18  # the most that a game has


@dataclasses.dataclass(frozen=True)
class Options(FromConfig):
    """Reports this machine's devices, which of them each `devices.gpu` value picks, and problems.

    With a config file or options of the config, also the memory that the learner needs.
    """


def print_report(config: Config, with_memory: bool) -> None:
    """Prints the report. Exits with status 1 if the driver or a device fails.

    Args:
        config: its `devices` are those for which memory is reported.
        with_memory: report also what training with the config needs, unless there is a fault.
    """
    shown = visible()
    if version := driver_version():
        say(f"NVIDIA driver {version}")
    for package in importlib.metadata.distributions():
        if package.name.startswith(("jax", "nvidia-")):
            say(f"{package.name} {package.version}")
    do_not_preallocate()  # other processes on the GPU may need the memory
    limit_jax(DevicesConfig(data_parallel="all"))
    gpu_devices = start_gpus()
    cpu = jax.devices("cpu")[0]

    faults = []
    if shown.fault == "failed":
        faults.append(shown.problem)
    if len(gpu_devices) < len(shown.gpus):
        faults.append(visible().problem or f"JAX has {len(gpu_devices)} of {len(shown.gpus)} GPUs")
    for device in (*gpu_devices, cpu):
        result = multiply(device)
        limit = (device.memory_stats() or {}).get("bytes_limit")
        memory = f"; JAX may take {limit / 2**30:.1f} GiB" if limit else ""
        say(f"{device} ({device.device_kind}): matrix product {result}{memory}")
        if result != "right":
            faults.append(f"{device}: matrix product {result}")
    if not shown.gpus and shown.fault == "none":
        say(f"no GPU: {shown.problem}")

    for option in ("auto", True, False, *range(len(gpu_devices))):
        try:
            choice = learner_devices(DevicesConfig(gpu=option), gpu_devices)[0]
        except UserError:
            choice = "an error"
        say(f"devices.gpu = {str(option).lower():6}{choice}")
    if with_memory and not faults:
        say(memory_report(config, learner_devices(config.devices, gpu_devices)))

    problems = [*faults]
    if shown.fault == "unused":
        problems.append(shown.problem)
    for problem in problems:
        say(f"problem: {problem}")
    if not problems:
        say("no problem found")
    if faults:
        sys.exit(1)


def learner_devices(devices: DevicesConfig, gpu_devices: Sequence[jax.Device]) -> list[jax.Device]:
    """The devices that would learn. Raises `ConfigError` if this machine does not have them.

    Args:
        gpu_devices: all visible GPUs, on which JAX has started.
    """
    chosen = choose_devices(devices).learner
    return [gpu_devices[index] for index in chosen] or [jax.devices("cpu")[0]]


def multiply(device: jax.Device) -> str:
    """Multiplies two matrices on a device and compares the product with NumPy's: `right`, `wrong`, or `failed:
    why`."""
    matrix = np.arange(2**18, dtype=np.float32).reshape(512, 512) % 7  # whole numbers, whose sums are exact
    try:
        placed = jax.device_put(matrix, device)
        return "right" if np.array_equal(placed @ placed, matrix @ matrix) else "wrong"
    except Exception as error:  # a broken driver or library may raise anything
        return f"failed: {reason(error)[:300]}"


def memory_report(config: Config, devices: Sequence[jax.Device]) -> str:
    """The memory of each device that learns and acts, by XLA's analysis of the update, compiled for the first one.

    Args:
        devices: the learner's devices.
    """
    num_envs = config.env.num_envs // len(devices)
    ppo = config.ppo
    home = devices[0]
    ppo = replace(ppo, minibatch_size=ppo.minibatch_size // len(devices), gae_lambda=config.resolved_gae_lambda)
    network = make_network(config.network, ACTIONS, network_platform(home))
    algorithm = ALGORITHMS.get(config.algorithm)
    frames = (ppo.rollout_length + STACK, num_envs, *network.layout.shape)

    def arguments(key: jax.Array) -> tuple[Any, ...]:
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
    memory = program.lower(*jax.eval_shape(arguments, jax.random.key(0, impl=KEYS))).compile().memory_analysis()
    assert memory is not None
    held = memory.argument_size_in_bytes
    filled = math.prod(frames)
    working = memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return f"""
memory of a learner device that also acts, by XLA's analysis of the compiled update:
  parameters, optimiser, rollout {held / 2**20:10,.1f} MiB
  the next rollout               {filled / 2**20:10,.1f} MiB
  gradients and activations      {working / 2**20:10,.1f} MiB
  total                          {(held + filled + working) / 2**20:10,.1f} MiB
  what reduces it: {"ppo.minibatch_size" if working > 2 * filled else "env.num_envs"}
On a GPU, add 0.6 to 0.8 GiB for the CUDA context, cuDNN and cuBLAS.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. Exits with status 1 if the driver or a device fails."""
    start = read_start(arguments)
    options = parse(Options, arguments, "devices", Options(full_config=load_config(start.config)))
    choose_devices(options.full_config.devices)
    print_report(options.full_config, with_memory=options != Options())


def run() -> None:
    """Runs `python -m jaxrl_atari.devices`."""
    cli.run(main)
