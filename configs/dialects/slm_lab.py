"""SLM Lab's published PPO-Atari spec with the conventions of its code, by reading.

    python -m jaxrl_atari.train --config configs/dialects/slm_lab.py --env.game Pong

No test runs SLM Lab: these are the settings of v5.3.0 (commit 96be3938) as docs/parity.md reads them. It differs
from the defaults, which have the same spec, in the unbiased std of advantages, minibatches that are not
stratified, and auto-reset steps, which are samples. What is not the same:

- SLM Lab starts both heads with gain sqrt(2); ours have 0.01 and 1.
- At a cut-off game SLM Lab's sum of GAE runs on into the next game; here it stops.
- The clipped gradient: torch scales by 0.5 / (norm + 1e-6), ours by 0.5 / norm.
- SLM Lab clamps the log ratio to [-20, 20], and counts auto-reset steps as env steps.
- The stack at the start of a game has zeros before its first frame; ours has the first frame four times.

Lambda is the one tuned for the game, as in the published runs.
"""

from jaxrl_atari.algorithms.dialects import DIALECTS
from jaxrl_atari.config import Config, EnvConfig


def get_config() -> Config:
    dialect = DIALECTS["slm_lab"]  # the settings: jaxrl_atari/algorithms/dialects.py
    env = EnvConfig(game="Breakout", num_envs=dialect.num_envs)
    return Config(name="slm_lab", env=env, ppo=dialect.ppo)
