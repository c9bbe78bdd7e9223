"""What makes training fast, without a clock: what is compiled, and what is moved."""

import contextlib
import dataclasses
import re
from collections import defaultdict
from functools import partial

import jax
import numpy as np
import pytest

from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, NetworkConfig, PPOConfig
from jaxrl_atari.learner import compiled_update, random_rollout
from jaxrl_atari.networks import make_network
from jaxrl_atari.ppo import PPO
from jaxrl_atari.session import iterations, open_session
from jaxrl_atari.update import init_train_state, update

ENVS, GROUPS, LENGTH = 4, 2, 8
COMPILED = "/jax/core/compile/backend_compile_duration"


@contextlib.contextmanager
def jax_events():
    """What JAX traces and compiles inside the block: names of events -> seconds of each, as they come."""
    events = defaultdict(list)

    def listen(event, duration_secs, **_):
        events[event].append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def small(**values):
    return Config(
        env=EnvConfig(num_envs=ENVS, num_groups=GROUPS, num_threads=1),
        ppo=PPOConfig(rollout_length=LENGTH, minibatch_size=32, epochs=2, gae_lambda=0.9),
        devices=DevicesConfig(gpu=False),
        **values,
    )


def iterate(run, times):
    trained = iterations(run)
    for _ in range(times):
        next(trained)
    jax.block_until_ready(run.learner.state)


@pytest.mark.parametrize(("overlap", "devices"), [("none", 1), ("update", 1), ("none", 2)])
def test_everything_is_compiled_once(overlap, devices, tmp_path):
    config = dataclasses.replace(small(overlap=overlap), devices=DevicesConfig(gpu=False, data_parallel=devices))
    compiled_update.cache_clear()  # other sessions of this process may have compiled it already
    with jax_events() as events, open_session(config, tmp_path / "session_0") as run:
        iterate(run, 2)
        assert events[COMPILED]
        before = run.learner.state.params["dense"]["kernel"]
        events.clear()
        iterate(run, 3)
        assert not events  # nothing is traced either
        assert devices > 1 or before.is_deleted()  # an update reuses the memory of the state
        run.finish()
    # Another session, in which all that enters the update as a number is another one.
    other = dataclasses.replace(config, ppo=jax.tree.map(lambda x: 0.9 * x, config.ppo))
    with (
        jax_events() as events,
        open_session(other, tmp_path / "session_1", session_number=1) as run,
    ):
        iterate(run, 2)
        run.finish()
    assert not events[COMPILED]


def test_the_update_of_nature_makes_no_images():
    """Frames are stored in the blocks that its first layer reads: XLA cancels the moves to images and back."""
    options = jax.tree.map(np.float32, PPOConfig(rollout_length=32, minibatch_size=64, epochs=1, gae_lambda=0.95))
    network = make_network(NetworkConfig(), 6, "cpu")

    def arguments(key):
        rollout = random_rollout(key, network, length=32, num_envs=ENVS)
        return init_train_state(network.init(key), options, PPO, key), rollout, options, key

    shapes = jax.eval_shape(arguments, jax.random.key(0))
    compiled = jax.jit(partial(update, apply=network.apply, algorithm=PPO)).lower(*shapes).compile()
    assert f"u8[36,{ENVS},21,21,16]" in compiled.as_text()
    assert not re.findall(r"u8\[[\d,]*84,84", compiled.as_text())
