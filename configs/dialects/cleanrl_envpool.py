"""CleanRL's ppo_atari_envpool.py: the same update on the same rollout.

    python -m jaxrl_atari.train --config configs/dialects/cleanrl_envpool.py --env.game Pong

Proven against the unmodified script of cleanrl 1.2.0 (tests/long/test_originals.py). The update is that of
`cleanrl` on EnvPool's rollouts, where auto-reset steps are samples. What is not the same:

- The clipped gradient: torch scales by 0.5 / (norm + 1e-6), ours by 0.5 / norm.
- EnvPool also has a reset step after a lost life. Here the game goes on.
- The script counts auto-reset steps as env steps. Here they do not count, so the same budget takes a few more
  updates.
- `--target-kl` looks at the last minibatch of an epoch, and `ppo.target_kl` at the mean of the epoch. Both are
  off.

By default, ale-py plays the games. `--env.backend envpool` uses EnvPool (pip install 'jaxrl_atari[envpool]').
"""

from jaxrl_atari.algorithms.dialects import DIALECTS
from jaxrl_atari.config import Config, EnvConfig


def get_config() -> Config:
    dialect = DIALECTS["cleanrl_envpool"]  # the settings: jaxrl_atari/algorithms/dialects.py
    env = EnvConfig(game="Breakout", protocol="classic", num_envs=dialect.num_envs)
    return Config(name="cleanrl_envpool", env=env, ppo=dialect.ppo)
