"""PPO as Schulman et al. 2017 describe it for Atari (arXiv:1707.06347, table 5), by reading.

    python -m jaxrl_atari.train --config configs/dialects/paper.py --env.game Pong

No test compares it, because the paper has no code. OpenAI Baselines came later, and its updates differ from the
paper. The paper has 3 epochs, learning rate 2.5e-4 and clip range 0.1, both annealed, and c1 = 1 before a squared
error that is not clipped, which is `value_coef` 2 here. What the paper does not say is as in the published spec:

- Advantages are normalised over each minibatch, and gradients clipped to norm 0.5.
- Adam's epsilon is 1e-5, and there is no weight decay.
- Networks share a torso, and start with gains sqrt(2), 0.01 and 1.
- The end of a cut-off game is bootstrapped with the value of its last observation. Auto-reset steps have weight 0
  in the loss.
- The rules of the games are `classic`, with a lost life as a terminal.

The paper's 40M frames are 10M env steps.
"""

from jaxrl_atari.algorithms.dialects import DIALECTS
from jaxrl_atari.config import Config, EnvConfig


def get_config() -> Config:
    dialect = DIALECTS["paper"]  # the settings: jaxrl_atari/algorithms/dialects.py
    env = EnvConfig(game="Breakout", protocol="classic", num_envs=dialect.num_envs)
    return Config(name="paper", env=env, ppo=dialect.ppo)
