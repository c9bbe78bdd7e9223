"""Advice when a device runs out of memory."""

import contextlib
import re
from collections.abc import Iterator

import jax

from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError

# What XLA reports when the pool of JAX, another process, or a library has left no memory.
NO_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|OUT_OF_MEMORY|out of memory|(failed|could not|couldn't) \w* ?create \w+ handle"
    r"|CUDNN_STATUS_(NOT_INITIALIZED|ALLOC_FAILED|INTERNAL_ERROR)|CUBLAS_STATUS_(NOT_INITIALIZED|ALLOC_FAILED)"
    r"|DNN library initialization failed",
    re.IGNORECASE,
)


def is_out_of_memory(message: str) -> bool:
    """Whether an error message of JAX means that a device had too little memory."""
    return NO_MEMORY.search(message) is not None


@contextlib.contextmanager
def out_of_memory_advice(config: Config) -> Iterator[None]:
    """Turns JAX's out-of-memory error into a `UserError` that names the fields to lower."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(str(error)):
            raise
        advice = f"lower ppo.minibatch_size = {config.ppo.minibatch_size} or env.num_envs = {config.env.num_envs}"
        if jax.default_backend() != "cpu":
            advice += (
                "; devices.memory_fraction sets what JAX takes of the GPU, 0.75 of it by default: raise it if no other"
                " process uses this GPU, or lower it or trial.parallel if others do"
            )
        text = " ".join(str(error).split())[:160]
        raise UserError(f"out of device memory ({text}); {advice} (--resume continues a run)") from error
