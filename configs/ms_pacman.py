"""MsPacman with the published PPO-Atari spec.

    python -m jaxrl_atari.train --config configs/ms_pacman.py

Tuned lambda 0.85. Published return_ma after 1e7 env steps with sticky actions: 2,331 (SLM Lab's table; 2,372 in
its tutorial). Random play scores 257. We measured 2,433 with seed 0 on two threads of an Intel Xeon, in 14.1 hours
beside other work (docs/reproduce.md).
"""

from jaxrl_atari.config import Config, EnvConfig


def get_config() -> Config:
    return Config(name="ms_pacman", env=EnvConfig(game="MsPacman"))
