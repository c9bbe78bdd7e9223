"""Crazy Climber in 20 minutes on two CPU cores: the mean of 100 games passes a human's score (BENCHMARKS.md).

    python -m jaxrl_atari.train --config configs/quickstart.py

Of the games tried, this one shows the most progress in that time. The short budget makes the learning rate fall
fast; the published score after 10M env steps is 112,094.
"""

from jaxrl_atari.config import Config, EnvConfig, LogConfig


def get_config() -> Config:
    return Config(
        name="quickstart",
        total_env_steps=500_000,
        env=EnvConfig(game="CrazyClimber"),
        log=LogConfig(checkpoint_every_env_steps=100_000),
    )
