"""Dialects of PPO: the settings with which `update.update` computes the update of another implementation.

`tests/long/test_originals.py` compares CleanRL's scripts and stable-baselines3 with this package on one rollout.
`slm_lab` and `paper` were read, not run. `configs/dialects/` has a config file for each dialect, whose header
lists the remaining differences, and `docs/dialects.md` compares the dialects.
"""

from dataclasses import asdict, replace
from typing import Any, NamedTuple

from jaxrl_atari.config import Config, PPOConfig, value_text


class Dialect(NamedTuple):
    """The settings of another implementation for Atari. A `gae_lambda` of None means that of the game."""

    ppo: PPOConfig
    num_envs: int = 8


_COMMON = PPOConfig(
    rollout_length=128,
    epochs=4,
    minibatch_size=256,
    learning_rate=2.5e-4,
    gae_lambda=0.95,
    adam_epsilon=1e-5,
    weight_decay=0.0,  # Adam
    minibatches="uniform",
)
"""The settings that CleanRL, stable-baselines3 and the paper share."""

_CLEANRL = replace(_COMMON, value_coef=0.5, unbiased_std=True, truncation_is_terminal=True)

DIALECTS = {
    "cleanrl": Dialect(_CLEANRL),
    "cleanrl_envpool": Dialect(replace(_CLEANRL, learn_from_auto_resets=True)),
    "cleanrl_xla": Dialect(
        replace(_CLEANRL, learn_from_auto_resets=True, unbiased_std=False, clip_value_loss=False)
    ),
    "sb3": Dialect(
        replace(
            _COMMON,
            value_coef=1.0,  # SB3 adds 0.5 mean((V - R)^2), where 0.5 is vf_coef; we add value_coef mean(...) / 2
            clip_value_loss=False,
            anneal_clip_epsilon=True,
            unbiased_std=True,
        )
    ),
    "slm_lab": Dialect(
        PPOConfig(unbiased_std=True, learn_from_auto_resets=True, minibatches="uniform"), num_envs=16
    ),
    "paper": Dialect(
        replace(
            _COMMON,
            epochs=3,
            value_coef=2.0,  # c1 = 1 of the squared error; our value loss is half of it
            clip_value_loss=False,
            anneal_clip_epsilon=True,
        )
    ),
}
"""Name -> settings."""

MAX_LISTED = 3
"""A config keeps the name of a dialect if at most this many settings differ."""


def dialect_text(config: Config) -> str:
    """The dialect of a config, as it is shown beside a score: `sb3`, or `sb3, gamma=0.9` if a setting differs.

    The fields of `ppo`, the number of environments, the algorithm and the network are compared, so that the text
    holds however the config was made. Lambda is left out, because it is shown on its own.

    Returns:
        The name of the dialect with the fewest differences, and the differences. The dialect of the defaults is
        `published spec`. With more than `MAX_LISTED` differences, the text is `own settings`.
    """
    default = Config()
    own = _settings(config)
    known = {"published spec": _settings(default)}
    for name, dialect in DIALECTS.items():
        env = replace(default.env, num_envs=dialect.num_envs)
        known[name] = _settings(replace(default, env=env, ppo=dialect.ppo))
    differences = {
        name: [f"{field}={value_text(value)}" for field, value in own.items() if value != settings[field]]
        for name, settings in known.items()
    }
    name = min(differences, key=lambda each: len(differences[each]))  # among equals, the first
    if len(differences[name]) > MAX_LISTED:
        return "own settings"
    return ", ".join([name, *differences[name]])


def _settings(config: Config) -> dict[str, Any]:
    """The fields that `dialect_text` compares: name -> value."""
    fields = asdict(replace(config.ppo, gae_lambda=None))
    return fields | {
        "num_envs": config.env.num_envs,
        "algorithm": config.algorithm,
        "network": config.network.name,
    }
