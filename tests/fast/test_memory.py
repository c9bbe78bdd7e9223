"""The memory of the compiled update, and the advice when memory runs out."""

import dataclasses
import os
import re

import jax
import jax.numpy as jnp
import pytest

from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, NetworkConfig, PPOConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware.memory import (
    FRACTION_VARIABLE,
    OLD_FRACTION_VARIABLE,
    apply_memory_fraction,
)
from jaxrl_atari.out_of_memory import out_of_memory_advice
from jaxrl_atari.update_memory import memory_report

SMALL = Config(
    env=EnvConfig(num_envs=8),
    ppo=PPOConfig(rollout_length=16, minibatch_size=64, epochs=1),
    network=NetworkConfig(compute_dtype="float32"),
)


def sizes(config, devices=1):
    """MiB: what is held, the next rollout, gradients and activations, and the total."""
    report = memory_report(config, jax.devices("cpu")[0], devices)
    return [float(size) for size in re.findall(r"([\d.]+) MiB", report)]


@pytest.mark.long
def test_the_update_is_measured():
    held, following, working, total = sizes(SMALL)
    rollout = 20 * 8 * 84 * 84 / 2**20  # each frame once
    assert following == pytest.approx(rollout, abs=0.1)
    # Parameters, Adam's moments; 18 actions.
    assert held == pytest.approx(3 * 4 * 1_694_000 / 2**20 + rollout, abs=0.2)
    assert total == pytest.approx(held + following + working, abs=0.2)
    halves = sizes(SMALL, devices=2)
    assert halves[1] == pytest.approx(following / 2, abs=0.1)
    assert halves[2] < working
    larger = sizes(dataclasses.replace(SMALL, env=EnvConfig(num_envs=64)))
    assert larger[1] == pytest.approx(8 * following, abs=0.5)
    assert larger[2] == pytest.approx(working, rel=0.2)


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


@pytest.mark.parametrize(
    "message",
    [
        "INTERNAL: Failed to create cuBLAS handle: the resource allocation failed",
        "INTERNAL: Could not create cudnn handle: CUDNN_STATUS_NOT_INITIALIZED",
        "INTERNAL: failed call to cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
    ],
)
def test_handles_and_contexts_without_memory_end_in_advice(message):
    with pytest.raises(UserError, match="lower ppo"), out_of_memory_advice(256, 16):
        raise jax.errors.JaxRuntimeError(message)
    perhaps = "FAILED_PRECONDITION: DNN library initialization failed. Look at the errors above for more details."
    with pytest.raises(UserError, match="or the version of cuDNN does not suit"), out_of_memory_advice(256, 16):
        raise jax.errors.JaxRuntimeError(perhaps)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), out_of_memory_advice(256, 16):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
