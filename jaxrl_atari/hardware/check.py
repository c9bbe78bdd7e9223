"""The report of `python -m jaxrl_atari.devices`: devices, the choice of each `gpu` option, memory, and problems."""

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

from jaxrl_atari.cli import say
from jaxrl_atari.config import Config, DevicesConfig
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.fast.forms import make_network
from jaxrl_atari.hardware import gpus
from jaxrl_atari.hardware.choice import choose_devices, limit_jax, start_gpus
from jaxrl_atari.hardware.memory import do_not_preallocate
from jaxrl_atari.networks import STACK, init_params
from jaxrl_atari.ppo import KEYS, Rollout, init_train_state, update

ACTIONS = 18  # the most that a game has


def print_report(config: Config, with_memory: bool) -> None:
    """Prints the report. Exits with status 1 if the driver or a device fails.

    Args:
        with_memory: report also what training with the config needs, unless there is a fault.
    """
    visible, problem = gpus.visible()
    if version := gpus.driver_version():
        say(f"NVIDIA driver {version}")
    for package in importlib.metadata.distributions():
        if package.name.startswith(("jax", "nvidia-")):
            say(f"{package.name} {package.version}")
    do_not_preallocate()  # other processes on the GPU may need the memory
    limit_jax(DevicesConfig(data_parallel="all"))
    gpu_devices = start_gpus()
    cpu = jax.devices("cpu")[0]
    faults = []
    if gpus.NVML_FAILED in problem or len(gpu_devices) < len(visible):
        faults.append(gpus.forbidden_because or f"JAX has {len(gpu_devices)} of {len(visible)} GPUs")
    for device in (*gpu_devices, cpu):
        result = multiply(device)
        limit = (device.memory_stats() or {}).get("bytes_limit")
        memory = f"; JAX may take {limit / 2**30:.1f} GiB" if limit else ""
        say(f"{device} ({device.device_kind}): matrix product {result}{memory}")
        if result != "right":
            faults.append(f"{device}: matrix product {result}")

    def learners(devices: DevicesConfig) -> list[jax.Device]:
        return [gpu_devices[index] for index in choose_devices(devices).learner] or [cpu]

    for option in ("auto", True, False, *range(len(gpu_devices))):
        try:
            choice = learners(DevicesConfig(gpu=option))[0]
        except UserError:
            choice = "an error"
        say(f"devices.gpu = {str(option).lower():6}{choice}")
    if with_memory and not faults:
        say(memory_report(config, learners(config.devices)))
    problems = dict.fromkeys(filter(None, [problem, *faults]))
    say("\n".join(f"problem: {text}" for text in problems) or "no problem found")
    if faults:
        sys.exit(1)


def multiply(device: jax.Device) -> str:
    """Multiplies two matrices on a device and compares the product with NumPy's: `right`, `wrong`, or `failed: why`."""
    matrix = np.arange(2**18, dtype=np.float32).reshape(512, 512) % 7  # whole numbers, whose sums are exact
    try:
        placed = jax.device_put(matrix, device)
        return "right" if np.array_equal(placed @ placed, matrix @ matrix) else "wrong"
    except Exception as error:  # a broken driver or library may raise anything
        return f"failed: {reason(error)[:300]}"


def memory_report(config: Config, devices: Sequence[jax.Device]) -> str:
    """The memory of each device that learns and acts, by XLA's analysis of the update, compiled for the first one."""
    num_envs = config.env.num_envs // len(devices)
    ppo = config.ppo
    home = devices[0]
    ppo = replace(ppo, minibatch_size=ppo.minibatch_size // len(devices), gae_lambda=config.resolved_gae_lambda)
    network = make_network(config.network, ACTIONS, gpus.network_platform(home))
    frames = (ppo.rollout_length + STACK, num_envs, *network.layout.shape)

    def arguments(key: jax.Array) -> tuple[Any, ...]:
        number = jnp.zeros((ppo.rollout_length, num_envs))
        whole = number.astype(int)
        mark = number > 0
        steps = whole, whole, number, number, number, mark, mark, number
        rollout = Rollout(jnp.zeros(frames, np.uint8), *steps, bootstrap_value=number[0])
        return init_train_state(init_params(config.network, ACTIONS, key), ppo), rollout, ppo, key

    with jax.default_device(home):
        program = jax.jit(partial(update, apply=network.apply), donate_argnums=0)
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
