"""GPU memory: the fraction of it that JAX reserves in a process, and advice when a device runs out."""

import contextlib
import math
import os
import re
from collections.abc import Iterator

import jax

from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import UserError, require

FRACTION_VARIABLE = "XLA_CLIENT_MEM_FRACTION"
OLD_FRACTION_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
PREALLOCATE_VARIABLE = "XLA_PYTHON_CLIENT_PREALLOCATE"
BESIDE_THE_POOL = 0.8 * 2**30
"""Bytes that a process needs in addition to what JAX reserves: CUDA context, cuDNN and cuBLAS handles."""

NO_MEMORY = re.compile(
    r"RESOURCE_EXHAUSTED|OUT_OF_MEMORY|out of memory|(failed|could not|couldn't) \w* ?create \w+ handle"
    r"|CUDNN_STATUS_(NOT_INITIALIZED|ALLOC_FAILED)|CUBLAS_STATUS_(NOT_INITIALIZED|ALLOC_FAILED)",
    re.IGNORECASE,
)
"""Matches XLA's errors when JAX's own pool, another process or a library has left no memory."""


def memory_fraction(options: DevicesConfig, sharing: int = 1, total: int = 0) -> float | None:
    """The fraction of a GPU's memory that each process reserves, where one or several use the GPU.

    `devices.memory_fraction` sets it. Otherwise, processes that share a GPU reserve at most 90% together, and
    `BESIDE_THE_POOL` bytes per process stay free.

    Args:
        sharing: number of processes on the GPU.
        total: memory of the GPU in bytes; 0 if it is unknown.

    Returns:
        The fraction for a new process. None: JAX's default (75%), or what the user has set in the environment.

    Raises:
        ConfigError: the GPU is too small for so many processes, or the fractions add up to more than 1.
    """
    advice = "lower trial.parallel or, in a search or on Ray, raise resources.gpu"
    fraction = options.memory_fraction
    if fraction is not None:
        expected = f"at most 1/{sharing}, as {sharing} processes share a GPU"
        require(fraction * sharing <= 1, "devices.memory_fraction", fraction, expected, f"lower it, or {advice}")
        return fraction
    has_own = FRACTION_VARIABLE in os.environ or OLD_FRACTION_VARIABLE in os.environ
    if sharing == 1 or has_own:
        return None
    fraction = min(0.9 / sharing, 1 / sharing - BESIDE_THE_POOL / (total or math.inf))
    of_memory = f"{total / 2**30:.0f} GiB" if total else "the GPU's memory"
    expected = f"fewer: each takes 0.8 GiB of {of_memory} in addition to what JAX reserves"
    require(fraction >= 0.01, "sessions on a GPU", sharing, expected, advice)
    return round(fraction, 4)


def is_fraction_applied(options: DevicesConfig) -> bool:
    """Whether `devices.memory_fraction` is in force, set by this process or the one that started it."""
    return os.environ.get(FRACTION_VARIABLE) == str(options.memory_fraction)


def apply_memory_fraction(options: DevicesConfig) -> None:
    """Sets the memory fraction of this process. Call it before JAX starts."""
    if options.memory_fraction is not None:
        os.environ[FRACTION_VARIABLE] = str(options.memory_fraction)
        os.environ.pop(OLD_FRACTION_VARIABLE, None)  # JAX refuses the two together


def do_not_preallocate() -> None:
    """Makes JAX take GPU memory only as needed: a training run may use the GPU. Call it before JAX starts."""
    os.environ.setdefault(PREALLOCATE_VARIABLE, "false")


@contextlib.contextmanager
def out_of_memory_advice(minibatch_size: int, num_envs: int) -> Iterator[None]:
    """Turns JAX's out-of-memory error into a `UserError` that says which options to lower."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if not NO_MEMORY.search(text):
            raise
        raise UserError(
            f"out of device memory ({text[:160]}); lower ppo.minibatch_size = {minibatch_size} or"
            f" env.num_envs = {num_envs}, or where sessions share a GPU, lower trial.parallel (in a search or on"
            " Ray, raise resources.gpu), and use --resume"
        ) from error
