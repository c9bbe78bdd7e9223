"""The memory of the compiled update."""

import re
from dataclasses import replace

import jax
import pytest

from jaxrl_atari.cli.device_report import memory_report
from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, NetworkConfig, PPOConfig

SMALL = Config(
    env=EnvConfig(num_envs=8),
    ppo=PPOConfig(rollout_length=16, minibatch_size=64, epochs=1),
    network=NetworkConfig(compute_dtype="float32"),
)


def sizes(devices=1):
    """MiB: what is held, the next rollout, gradients and activations, and the total."""
    config = replace(SMALL, devices=DevicesConfig(data_parallel=devices))
    report = memory_report(config, jax.devices("cpu"))
    return [float(size) for size in re.findall(r"([\d.]+) MiB", report)]


def test_the_update_is_measured():
    held, following, working, total = sizes()
    rollout = 20 * 8 * 84 * 84 / 2**20  # each frame once
    assert following == pytest.approx(rollout, abs=0.1)
    # Parameters, Adam's moments; 18 actions.
    assert held == pytest.approx(3 * 4 * 1_694_000 / 2**20 + rollout, abs=0.2)
    assert total == pytest.approx(held + following + working, abs=0.2)
    halves = sizes(devices=2)
    assert halves[1] == pytest.approx(following / 2, abs=0.1)
    assert halves[2] < working
