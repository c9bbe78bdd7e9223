"""CleanRL's ppo_atari_envpool_xla_jax.py: the same update on the same rollout.

    python -m jaxrl_atari.train --config configs/dialects/cleanrl_xla.py --env.game Pong

Proven against the script of cleanrl 1.2.0 (tests/long/test_originals.py); flax 0.12 needs a replacement of its
TrainState. It differs from `cleanrl_envpool` in the std of advantages, which is not the unbiased one, and in the
value loss, which is not clipped. Its scores are the first reference of `classic`. What is not the same:

- EnvPool also has a reset step after a lost life. Here the game goes on.
- The script counts auto-reset steps as env steps. Here they do not count, so the same budget takes a few more
  updates.
- The script computes the learning rate in float32.

By default, ale-py plays the games. `--env.backend envpool` uses EnvPool (pip install 'jaxrl_atari[envpool]').
"""

from jaxrl_atari.algorithms.dialects import DIALECTS
from jaxrl_atari.config import Config, EnvConfig


def get_config() -> Config:
    dialect = DIALECTS["cleanrl_xla"]  # the settings: jaxrl_atari/algorithms/dialects.py
    env = EnvConfig(game="Breakout", protocol="classic", num_envs=dialect.num_envs)
    return Config(name="cleanrl_xla", env=env, ppo=dialect.ppo)
