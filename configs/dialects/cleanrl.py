"""CleanRL's ppo_atari.py: the same update on the same rollout.

    python -m jaxrl_atari.train --config configs/dialects/cleanrl.py --env.game Pong

Proven against the script of cleanrl 1.2.0, which is unmodified (tests/long/test_originals.py). It differs from the
published spec in 8 environments, Adam, the unbiased std of advantages, minibatches that are not stratified, and
cut-off games, whose end counts as terminal. What is not the same:

- The clipped gradient: torch scales by 0.5 / (norm + 1e-6), ours by 0.5 / norm.
- After a lost life CleanRL's wrappers play a hidden NOOP, press FIRE and action 2 in games that start with FIRE,
  and start the stack of frames anew. Here the game goes on.
- CleanRL resizes before it turns a frame grey: up to 10.6% of the pixels differ by 1.
- The script resets at once. Here the step after the end of a game is an auto-reset step of weight 0, so that a
  rollout has fewer samples, and the same budget takes a few more updates.
- `--target-kl` looks at the last minibatch of an epoch, and `ppo.target_kl` at the mean of the epoch. Both are
  off.
"""

from jaxrl_atari.algorithms.dialects import DIALECTS
from jaxrl_atari.config import Config, EnvConfig


def get_config() -> Config:
    dialect = DIALECTS["cleanrl"]  # the settings: jaxrl_atari/algorithms/dialects.py
    env = EnvConfig(game="Breakout", protocol="classic", num_envs=dialect.num_envs)
    return Config(name="cleanrl", env=env, ppo=dialect.ppo)
