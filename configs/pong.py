"""Pong with the published PPO-Atari spec.

    python -m jaxrl_atari.train --config configs/pong.py

Tuned lambda 0.85. Published return_ma after 1e7 env steps with sticky actions: 16.7 (SLM Lab); a random player: -20.
"""

from jaxrl_atari.config import Config, EnvConfig


def get_config() -> Config:
    return Config(name="pong", env=EnvConfig(game="Pong"))
