"""The share of a GPU's memory, and the advice when memory runs out."""

import os

import jax
import jax.numpy as jnp
import pytest

from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware.memory import (
    FRACTION_VARIABLE,
    OLD_FRACTION_VARIABLE,
    apply_memory_fraction,
    out_of_memory_advice,
)


def test_the_process_of_a_slot_keeps_one_of_the_two_memory_variables(monkeypatch):
    """The slot sets the new variable; the old one is the user's. JAX refuses the two together."""
    monkeypatch.setenv(FRACTION_VARIABLE, "0.4")
    monkeypatch.setenv(OLD_FRACTION_VARIABLE, "0.5")
    apply_memory_fraction(DevicesConfig(memory_fraction=0.4))
    assert (os.environ[FRACTION_VARIABLE], OLD_FRACTION_VARIABLE in os.environ) == ("0.4", False)


def test_out_of_memory_becomes_advice():
    advice = r"lower ppo.minibatch_size = 256 or env.num_envs = 16, .* use --resume"
    with pytest.raises(UserError, match=advice), out_of_memory_advice(256, 16):
        jax.block_until_ready(jax.jit(lambda: jnp.zeros((1 << 50,), jnp.uint8))())  # a petabyte


def test_handles_and_contexts_without_memory_end_in_advice():
    for message in (
        "INTERNAL: Failed to create cuBLAS handle: the resource allocation failed",
        "INTERNAL: Could not create cudnn handle: CUDNN_STATUS_NOT_INITIALIZED",
        "INTERNAL: failed call to cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    ):
        with pytest.raises(UserError, match="lower ppo"), out_of_memory_advice(256, 16):
            raise jax.errors.JaxRuntimeError(message)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), out_of_memory_advice(256, 16):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
