"""Qbert with A2C, the synchronous form of A3C (Mnih et al. 2016, arXiv:1602.01783).

    python -m jaxrl_atari.train --config configs/a2c_qbert.py

A2C is PPO with one epoch, one minibatch, and no normalisation of advantages (Huang et al. 2022, arXiv:2205.09123):
the ratio is then 1, so clipping has no effect, and lambda 1 makes the targets n-step returns.
tests/fast/test_ppo.py compares the update with an A2C gradient. What differs from A2C in OpenAI Baselines:

- Adam instead of RMSprop (alpha 0.99, epsilon 1e-5), at Baselines' learning rate of 7e-4.
- Truncated games bootstrap from their last observation; auto-reset steps have weight 0.

value_coef 1 equals Baselines' 0.5, because our value loss has a factor of 1/2.
"""

from jaxrl_atari.config import Config, EnvConfig, PPOConfig


def get_config() -> Config:
    return Config(
        name="a2c_qbert",
        env=EnvConfig(game="Qbert", num_envs=16),
        ppo=PPOConfig(
            rollout_length=5,
            epochs=1,
            minibatch_size=5 * 16,
            learning_rate=7e-4,
            weight_decay=0.0,
            gae_lambda=1.0,
            value_coef=1.0,
            normalize_advantages=False,
            clip_value_loss=False,
        ),
    )
