"""Qbert with REINFORCE and a learned baseline (Williams 1992; Sutton & Barto 2018, section 13.4).

    python -m jaxrl_atari.train --config configs/reinforce_qbert.py

PPO with one epoch, one minibatch, lambda 1, no normalisation and no entropy bonus: one gradient step on the policy
gradient of each rollout, with the value as baseline. What differs from the textbook:

- A rollout has 128 steps of 16 games and ends before the games do, so the return of a game that continues is cut
  there and bootstrapped with the value. A longer ppo.rollout_length comes closer to full returns (set
  ppo.minibatch_size to 16 times that length).
- The textbook's factor gamma^t is left out, as usual in practice.
- Adam makes the step, at a rate that falls linearly to zero; a gradient whose norm is above 0.5 is scaled down to
  it.
- Rewards are clipped to [-1, 1], and a lost life is a terminal, as in the Atari literature (options of
  `EnvConfig`).
- Policy and value share the torso, so that the gradient of the value's loss reaches the policy's features.
"""

from jaxrl_atari.config import Config, EnvConfig, PPOConfig


def get_config() -> Config:
    return Config(
        name="reinforce_qbert",
        env=EnvConfig(game="Qbert", num_envs=16),
        ppo=PPOConfig(
            rollout_length=128,
            epochs=1,
            minibatch_size=128 * 16,
            weight_decay=0.0,
            gae_lambda=1.0,
            entropy_coef=0.0,
            normalize_advantages=False,
            clip_value_loss=False,
        ),
    )
