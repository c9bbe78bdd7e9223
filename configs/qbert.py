"""Qbert with the published PPO-Atari spec.

    python -m jaxrl_atari.train --config configs/qbert.py

Tuned lambda 0.95. Published return_ma after 1e7 env steps with sticky actions: 15,460 (SLM Lab's table; 15,094 in
its tutorial). Random play scores 164. We measured 14,295 with seed 1, and 13,154 with seed 0 and without weight
decay, on two CPU cores (BENCHMARKS.md).
"""

from jaxrl_atari.config import Config, EnvConfig


def get_config() -> Config:
    return Config(name="qbert", env=EnvConfig(game="Qbert"))
