"""The memory that training needs on a device, by XLA's analysis of the compiled update."""

import math
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax

from jaxrl_atari.algorithm import Rollout, TrainState, find_algorithm, resolved_options
from jaxrl_atari.config import Config, PPOConfig
from jaxrl_atari.frames import STACK
from jaxrl_atari.hardware.device_class import device_class
from jaxrl_atari.keys import new_key
from jaxrl_atari.networks import make_network
from jaxrl_atari.random_rollout import random_rollout
from jaxrl_atari.update import init_train_state, update

ACTIONS = 18
"""The full action set: no ALE game has more actions."""


class UpdateMemory(NamedTuple):
    """Bytes on a learner device that also acts."""

    held: int  # parameters, optimiser state, and the rollout that is learned from
    next_rollout: int  # frames of the rollout that is filled at the same time
    working: int  # gradients and activations


def update_memory(config: Config, device: jax.Device, num_learners: int = 1) -> UpdateMemory:
    """The memory that training needs on each device, by XLA's analysis of the update.

    Args:
        device: one of the learner's devices. The update is compiled for it, with its share of the environments and
            of the minibatches.
        num_learners: number of the learner's devices, of all processes.
    """
    num_envs = config.env.num_envs // num_learners
    minibatch_size = config.ppo.minibatch_size // num_learners
    options = replace(resolved_options(config), minibatch_size=minibatch_size)
    network = make_network(config.network, ACTIONS, device_class(device))
    algorithm = find_algorithm(config.algorithm)
    frames = (options.rollout_length + STACK, num_envs, *network.frame_shape)

    def arguments(key: jax.Array) -> tuple[TrainState, Rollout, PPOConfig, jax.Array]:
        """The arguments of an update. Only their shapes are used, so nothing of this is computed."""
        rollout = random_rollout(
            key, network, length=options.rollout_length, num_envs=num_envs, num_actions=ACTIONS
        )
        return init_train_state(network.init(key), options, algorithm, key), rollout, options, key

    program = jax.jit(partial(update, apply=network.apply, algorithm=algorithm), donate_argnums=0)
    shapes = jax.eval_shape(arguments, new_key(0))
    with jax.default_device(device):
        analysis = program.lower(*shapes).compile().memory_analysis()
    assert analysis is not None
    return UpdateMemory(
        held=analysis.argument_size_in_bytes,
        next_rollout=math.prod(frames),
        working=analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
    )


def memory_report(config: Config, device: jax.Device, num_learners: int = 1) -> str:
    """The text of `update_memory`, with the option that reduces it."""
    memory = update_memory(config, device, num_learners)
    lower = "ppo.minibatch_size" if memory.working > 2 * memory.next_rollout else "env.num_envs"
    return f"""
memory of a learner device, if it also acts, by XLA's analysis of the compiled update:
  parameters, optimiser, rollout {memory.held / 2**20:10,.1f} MiB
  the next rollout               {memory.next_rollout / 2**20:10,.1f} MiB
  gradients and activations      {memory.working / 2**20:10,.1f} MiB
  total                          {sum(memory) / 2**20:10,.1f} MiB
  what reduces it: {lower}
On a GPU, add 0.6 to 0.8 GiB for the CUDA context, cuDNN and cuBLAS.
"""
