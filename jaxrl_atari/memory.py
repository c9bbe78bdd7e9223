"""Memory of a session's device."""

import contextlib
from collections.abc import Iterator

import jax

from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError


@contextlib.contextmanager
def out_of_memory_advice(config: Config) -> Iterator[None]:
    """Turns JAX's error for too little device memory into a `UserError` that says what to lower."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise UserError("out of memory") from error
