"""PPO of stable-baselines3 with the RL Zoo's settings for Atari: the same update on the same rollout.

    python -m jaxrl_atari.train --config configs/dialects/sb3.py --env.game Pong

Proven against stable-baselines3 2.9.2, which is unmodified (tests/long/test_originals.py). It differs from the
published spec in 8 environments, Adam, the unbiased std of advantages, minibatches that are not stratified, a
value loss that is not clipped and weighs twice as much, and an annealed clip range. What is not the same:

- The learning rate and the clip range of SB3 are one update ahead, because SB3 counts a rollout before it computes
  them. In the last of 9,766 updates, the learning rate is -9.6e-9 and the clip range -3.8e-6. Here both stay
  above 0.
- The clipped gradient: torch scales by 0.5 / (norm + 1e-6), ours by 0.5 / norm.
- After a lost life SB3's wrappers play a hidden NOOP, press FIRE and action 2 in games that start with FIRE, and
  start the stack of frames anew. Here the game goes on.
- SB3 resets at once. Here the step after the end of a game is an auto-reset step of weight 0, so that a rollout
  has fewer samples, and the same budget takes a few more updates.
- If the minibatch size does not divide the rollout, SB3 also trains on a last, smaller minibatch. Here the size
  must divide the rollout.
- SB3 checks its `target_kl` before each gradient step, and stops at 1.5 times that value. `ppo.target_kl` is
  checked after each epoch, and stops at the value itself. Both are off.
- Heads start with gains 0.01 and 1, as here. The parameters of SB3 are other random draws, as with another seed.
"""

from jaxrl_atari.algorithms.dialects import DIALECTS
from jaxrl_atari.config import Config, EnvConfig


def get_config() -> Config:
    dialect = DIALECTS["sb3"]  # the settings: jaxrl_atari/algorithms/dialects.py
    env = EnvConfig(game="Breakout", protocol="classic", num_envs=dialect.num_envs)
    return Config(name="sb3", env=env, ppo=dialect.ppo)
