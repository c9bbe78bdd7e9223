"""The numbers of the default spec, which are those of every version so far."""

import pytest
from small_training import Lines

from jaxrl_atari.config import Config, DevicesConfig, LogConfig, NetworkConfig, PPOConfig
from jaxrl_atari.session import run_session


def test_the_numbers_of_the_default_spec(tmp_path):
    """Seed 0 without weight decay in float32, to the first log point."""
    config = Config(
        ppo=PPOConfig(weight_decay=0.0),
        network=NetworkConfig(compute_dtype="float32"),
        devices=DevicesConfig(gpu=False),
        log=LogConfig(graphs=False, tensorboard=False),
    )
    log = Lines()
    with pytest.raises(KeyboardInterrupt):
        run_session(config, tmp_path, 0, writers=[log], stop_requested=lambda: bool(log.rows))
    first = log.rows[0]
    assert (first["env_steps"], first["episodes"]) == (10_217, 23)
    assert first["return_mean"] == pytest.approx(164.130435, abs=1e-6)
