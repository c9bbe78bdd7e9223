"""Qbert with the published PPO-Atari spec.

    python -m jaxrl_atari.train --config configs/qbert.py

Tuned lambda 0.95. Published return_ma after 1e7 env steps with sticky actions: 15,460 (SLM Lab's table; 15,094 in
its tutorial); a random player: 164. Seen on two CPU cores (BENCHMARKS.md): 14,295 with seed 1; 13,154 with seed 0
and without weight decay.
"""

from jaxrl_atari.config import Config, EnvConfig


def get_config() -> Config:
    return Config(name="qbert", env=EnvConfig(game="Qbert"))
