"""The memory estimate against XLA's analysis of the compiled update, and the advice when memory runs out."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import pytest

from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, NetworkConfig, PPOConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.fast.forms import make_network
from jaxrl_atari.hardware.memory import Estimate, estimate, out_of_memory_advice, report
from jaxrl_atari.networks import init_params
from jaxrl_atari.ppo import Hyperparameters, init_train_state, update
from jaxrl_atari.rollout import Outcome, empty_state, finish_rollout


def make_config(num_envs, rollout_length, minibatch_size, data_parallel=1, **network):
    return Config(
        env=EnvConfig(num_envs=num_envs),
        ppo=PPOConfig(rollout_length=rollout_length, minibatch_size=minibatch_size),
        network=NetworkConfig(**network),
        devices=DevicesConfig(data_parallel=data_parallel),
    )


def analysed_bytes(config, platform="cpu"):
    """XLA's memory of the compiled update: arguments, results and temporaries, donated arguments counted once."""
    network = make_network(config.network, 6, platform)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(lambda key: init_train_state(init_params(config.network, 6, key), config.ppo), key)
    shape = (config.ppo.rollout_length, config.env.num_envs)
    actor = jax.eval_shape(partial(empty_state, *shape, network.layout.shape))
    dtypes = Outcome(jnp.float32, jnp.bool_, jnp.bool_, jnp.float32)
    outcome = Outcome(*(jax.ShapeDtypeStruct(shape, dtype) for dtype in dtypes))
    rollout = jax.eval_shape(finish_rollout, [(actor, outcome)])
    hyper = Hyperparameters(*[jax.ShapeDtypeStruct((), jnp.float32)] * len(Hyperparameters._fields))
    compiled = jax.jit(partial(update, apply=network.apply, config=config.ppo), donate_argnums=0)
    found = compiled.lower(state, rollout, hyper, key).compile().memory_analysis()
    assert found is not None
    return (
        found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes + found.temp_size_in_bytes
    )


CASES = {
    "default": {"num_envs": 16, "rollout_length": 128, "minibatch_size": 256},
    "large rollout": {"num_envs": 64, "rollout_length": 128, "minibatch_size": 512},
    "large minibatch": {"num_envs": 8, "rollout_length": 128, "minibatch_size": 1024},
    "plain convolutions": {"num_envs": 16, "rollout_length": 128, "minibatch_size": 256, "conv": "plain"},
    "small": {"num_envs": 4, "rollout_length": 16, "minibatch_size": 64},
    "impala": {"num_envs": 16, "rollout_length": 128, "minibatch_size": 256, "name": "impala"},
}


@pytest.mark.parametrize(
    "case",
    # Each compiles for 10 seconds or more.
    [next(iter(CASES)), *(pytest.param(case, marks=pytest.mark.slow) for case in list(CASES)[1:])],
)
def test_estimate_agrees_with_xla(case):
    config = make_config(**CASES[case])
    assert estimate(config, "cpu", 6).update == pytest.approx(analysed_bytes(config), rel=0.05)  # as the pages say


@pytest.mark.slow
@pytest.mark.parametrize("platform", ["bfloat16 cpu", "amx cpu"])
@pytest.mark.parametrize("case", ["default", "large rollout", "large minibatch", "small"])
def test_estimate_agrees_with_xla_in_bfloat16(case, platform):
    config = make_config(**CASES[case], compute_dtype="bfloat16")
    assert estimate(config, platform, 6).update == pytest.approx(analysed_bytes(config, platform), rel=0.1)


@pytest.mark.slow
def test_plain_convolutions_in_bfloat16_take_a_quarter_more_on_a_cpu():
    config = make_config(**CASES["plain convolutions"], compute_dtype="bfloat16")
    assert estimate(config, "cpu", 6).update / analysed_bytes(config) == pytest.approx(1 - 0.26, abs=0.03)


@pytest.mark.gpu
def test_estimate_agrees_with_xla_on_a_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("no GPU: cuDNN's workspaces are only known there")
    config = make_config(16, 128, 256)
    assert estimate(config, "gpu", 6).update == pytest.approx(analysed_bytes(config, "gpu"), rel=0.25)


def test_parts_of_the_estimate():
    one = estimate(make_config(16, 128, 256), "cpu", 6)
    assert one.weights == 4 * 1_687_719  # the published number of parameters
    assert one.optimizer == 2 * one.weights
    assert 1 <= one.rollout / (128 * 16 * 84 * 84) < 1.1  # each frame once
    assert one.overhead >= 128 * 16 * 84 * 84  # the rollout being filled
    assert one.total == one.update + one.overhead
    halves = estimate(make_config(16, 128, 256, data_parallel=2), "cpu", 6)
    assert one.minibatch / 2 < halves.minibatch < 0.7 * one.minibatch  # each device has chunks of its own
    assert halves.rollout * 2 == one.rollout
    assert halves.weights == one.weights
    overlap = dataclasses.replace(make_config(16, 128, 256), overlap="update")
    assert estimate(overlap, "cpu", 6).overhead == one.overhead + one.weights


def test_report_names_the_larger_part_first():
    large_minibatch = Estimate(1, 1, 1, rollout=5, minibatch=2**31, overhead=0)
    assert "what reduces it: ppo.minibatch_size, then env.num_envs" in report(large_minibatch)
    assert "does not fit into the 1.00 GiB" in report(large_minibatch, limit=2**30)
    large_rollout = Estimate(1, 1, 1, rollout=2**20, minibatch=5, overhead=0)
    assert "what reduces it: env.num_envs, then ppo.minibatch_size" in report(large_rollout, limit=2**30)
    assert "  fits into the 1.00 GiB" in report(large_rollout, limit=2**30)


@pytest.mark.parametrize(
    ("backend", "more"), [("cpu", r" \(--resume continues a run\)"), ("gpu", ", or raise devices.memory_fraction")]
)
def test_out_of_memory_becomes_advice(backend, more, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    advice = r"ppo.minibatch_size \(now 256\) or env.num_envs \(now 16\)" + more
    with pytest.raises(UserError, match=advice), out_of_memory_advice(Config()):
        jax.block_until_ready(jax.jit(lambda: jnp.zeros((1 << 50,), jnp.uint8))())  # a petabyte

    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"), out_of_memory_advice(Config()):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")
