"""Advice for a session whose device runs out of memory: the options to lower."""

import contextlib
from collections.abc import Iterator

import jax

from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware.memory import NO_MEMORY, PERHAPS_NO_MEMORY


@contextlib.contextmanager
def out_of_memory_advice(minibatch_size: int, num_envs: int) -> Iterator[None]:
    """Turns JAX's out-of-memory error into a `UserError` that says which options to lower."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if NO_MEMORY.search(text):
            problem = "out of device memory"
        elif PERHAPS_NO_MEMORY.search(text):
            problem = "out of device memory, or the version of cuDNN does not suit that of jaxlib"
        else:
            raise
        raise UserError(
            f"{problem} ({text[:160]}); lower ppo.minibatch_size = {minibatch_size} or"
            f" env.num_envs = {num_envs}, or where sessions share a GPU, lower trial.parallel (on a Ray cluster,"
            " raise resources.gpu), and use --resume"
        ) from error
