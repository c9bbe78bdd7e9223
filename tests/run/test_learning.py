"""Learning: from pixels to the optimum on a game of seconds; the numbers of the default spec; and a real game."""

import dataclasses
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
from fake_pools import Corridor, group_of
from small_networks import FeedForward, make

from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.config import Config, DevicesConfig, LogConfig, NetworkConfig, PPOConfig
from jaxrl_atari.network_forms import make_network
from jaxrl_atari.ppo import PPO
from jaxrl_atari.rollout import collect
from jaxrl_atari.runs.writers import Writer
from jaxrl_atari.session import run_session
from jaxrl_atari.update import init_train_state, update


def nature(num_actions):
    network = make_network(NetworkConfig(), num_actions, "cpu")
    return network.init(jax.random.key(0)), network


@pytest.mark.parametrize(
    "make_first",
    [
        pytest.param(partial(make, FeedForward), id="a small network"),
        pytest.param(nature, id="nature", marks=pytest.mark.slow),
    ],
)
def test_learns_to_walk_to_the_lamp(make_first):
    """Chance reaches the lit end in half of the games after 4 steps on average; the optimum always, in 2 steps."""
    length, num_envs = 16, 8
    config = PPOConfig(rollout_length=length, minibatch_size=32, learning_rate=2.5e-4, gae_lambda=0.95)
    params, network = make_first(Corridor.num_actions)
    state = init_train_state(params, config, PPO, jax.random.key(0))
    learn = jax.jit(partial(update, apply=network.apply, algorithm=PPO), donate_argnums=0)
    group = group_of(Corridor(num_envs, seed=0), network)
    means = []
    for number in range(20):
        act_key, update_key = jax.random.split(jax.random.fold_in(jax.random.key(1), number))
        collected = collect([[group]], [state.params], act_key, length)
        state, _ = learn(state, collected.rollouts[0], config, update_key)
        means.append(np.mean(collected.games, axis=0))
    _, _, returns, lengths, _ = np.array(means).T
    assert returns[:2].mean() < 0.75
    assert returns[-5:].mean() > 0.9
    assert lengths[-5:].mean() < 3.0


QUIET = LogConfig(graphs=False, tensorboard=False)


class Rows(Writer):
    """The log points of a session."""

    def __init__(self):
        self.rows = []

    def write(self, row):
        self.rows.append(row)


@pytest.mark.long
def test_the_numbers_of_the_default_spec(tmp_path):
    """Seed 0 without weight decay in float32, to the first log point. They are those of every version so far."""
    config = Config(
        ppo=PPOConfig(weight_decay=0.0),
        network=NetworkConfig(compute_dtype="float32"),
        devices=DevicesConfig(gpu=False),
        log=QUIET,
    )
    log = Rows()
    with pytest.raises(KeyboardInterrupt):
        run_session(config, tmp_path, 0, writers=[log], stop_requested=lambda: bool(log.rows))
    first = log.rows[0]
    assert (first["env_steps"], first["episodes"]) == (10_217, 23)
    assert first["return_mean"] == pytest.approx(164.130435, abs=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_learns_a_real_game(tmp_path):
    """Qbert, default spec: after 40,000 env steps clearly better than random play, 164 ± 15.5 over 100 games."""
    config = Config(total_env_steps=40_000, devices=DevicesConfig(gpu=False), log=QUIET)
    log = Rows()
    run_session(config, tmp_path, 0, writers=[log])
    assert log.rows[-1]["return_mean"] > 164 + 3 * 15.5


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_learns_an_environment_of_ones_own_from_pixels(tmp_path):
    """MiniGrid's Empty-5x5, as configs/minigrid_empty.py has it. The shortest way scores 0.955, random play
    0.3."""
    pytest.importorskip("minigrid", reason="needs MiniGrid: pip install minigrid")
    pytest.importorskip("cv2", reason="needs OpenCV: pip install 'jaxrl_atari[gymnasium]'")
    config = load_config(Path(__file__).parents[2] / "configs" / "minigrid_empty.py")
    config = dataclasses.replace(config, devices=DevicesConfig(gpu=False), log=QUIET)
    log = Rows()
    run_session(config, tmp_path, 0, writers=[log])
    assert log.rows[-1]["return_mean"] > 0.9
