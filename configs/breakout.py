"""Breakout with the published PPO-Atari spec.

    python -m jaxrl_atari.train --config configs/breakout.py

Tuned lambda 0.70. Published return_ma after 1e7 env steps with sticky actions: 326 (SLM Lab's table; 327 in its
tutorial). Random play scores 1. We measured 313 with seed 0 on two threads of an Intel Xeon, in 4.6 hours
(docs/reproduce.md).
"""

from jaxrl_atari.config import Config, EnvConfig


def get_config() -> Config:
    return Config(name="breakout", env=EnvConfig(game="Breakout"))
