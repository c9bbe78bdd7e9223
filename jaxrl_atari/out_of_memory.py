"""Advice for a session whose device runs out of memory: the options to lower."""

import contextlib
from collections.abc import Iterator

import jax

from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware.memory import NO_MEMORY


@contextlib.contextmanager
def out_of_memory_advice(minibatch_size: int, num_envs: int) -> Iterator[None]:
    """Turns JAX's out-of-memory error into a `UserError` that says which options to lower."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not NO_MEMORY.search(str(error)):
            raise
        raise UserError(
            f"out of device memory ({str(error)[:160]}); lower ppo.minibatch_size = {minibatch_size} or"
            f" env.num_envs = {num_envs}, or where sessions share a GPU, lower trial.parallel (on a Ray cluster,"
            " raise resources.gpu), and use --resume"
        ) from error
