"""Breakout for 13 minutes on two CPU cores: from 1.2 points, which is random play, to about 4 (BENCHMARKS.md).

    python -m jaxrl_atari.train --config configs/quickstart.py

A short budget makes the learning rate fall faster than in configs/breakout.py, whose published score is 326.
"""

from jaxrl_atari.config import Config, EnvConfig, LogConfig


def get_config() -> Config:
    return Config(
        name="quickstart",
        total_env_steps=500_000,
        env=EnvConfig(game="Breakout"),
        log=LogConfig(checkpoint_every_env_steps=100_000),
    )
