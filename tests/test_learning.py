"""Learning: from pixels to the optimum on a game of seconds, and a real game."""

from functools import partial

import jax
import numpy as np
import pytest
from fake_pools import Corridor
from sample_runs import read_csv

from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, LogConfig, NetworkConfig, PPOConfig
from jaxrl_atari.envs.protocols import PROTOCOLS
from jaxrl_atari.fast.forms import make_network
from jaxrl_atari.networks import init_params
from jaxrl_atari.ppo import Hyperparameters, init_train_state, update
from jaxrl_atari.rollout import EnvGroup, collect
from jaxrl_atari.session import run_session


def test_learns_to_walk_to_the_lamp():
    """Chance reaches the lit end in half of the games after 4 steps on average; the optimum always, in 2 steps."""
    length, num_envs = 16, 8
    config = PPOConfig(rollout_length=length, minibatch_size=32, epochs=4)
    hyper = Hyperparameters(*map(np.float32, (5e-4, 0.99, 0.95, 0.1, 0.01, 0.5)))
    network = make_network(NetworkConfig(), Corridor.num_actions, "cpu")
    state = init_train_state(init_params(NetworkConfig(), Corridor.num_actions, jax.random.key(0)), config)
    learn = jax.jit(partial(update, apply=network.apply, config=config), donate_argnums=0)
    group = EnvGroup(Corridor(num_envs, seed=0), network, length, jax.devices("cpu")[0], PROTOCOLS["v5"])
    means = []
    for number in range(16):
        act_key, update_key = jax.random.split(jax.random.fold_in(jax.random.key(1), number))
        collected = collect([[group]], [state.params], act_key)
        state, _ = learn(state, collected.rollouts[0], hyper, update_key)
        means.append(np.mean(collected.games, axis=0))
    returns, lengths = np.array(means).T
    assert returns[:2].mean() < 0.75
    assert returns[-5:].mean() > 0.9
    assert lengths[-5:].mean() < 3.0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_learns_a_real_game(tmp_path):
    """Qbert, default spec: after 40,000 env steps clearly better than random play, 164 ± 15.5 over 100 games."""
    config = Config(
        env=EnvConfig(game="Qbert"),
        total_env_steps=40_000,
        devices=DevicesConfig(gpu=False),
        log=LogConfig(graphs=False, tensorboard=False),
    )
    run_session(config, tmp_path / "session_0")
    last = read_csv(tmp_path / "session_0" / "metrics.csv")[-1]
    assert float(last["return_mean"]) > 164 + 3 * 15.5
