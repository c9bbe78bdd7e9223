"""MiniGrid's smallest room from pixels: an example of an environment of your own.

    python -m jaxrl_atari.train --config configs/minigrid_empty.py

Needs `pip install -e '.[gymnasium]' minigrid`. docs/environments.md explains each part.
"""

import gymnasium
from minigrid.wrappers import RGBImgObsWrapper

from jaxrl_atari.config import Config, EnvConfig, LogConfig, PPOConfig


def make_room(**options):
    """Empty-5x5, whose observations are dictionaries with the picture of the room as `image`."""
    return RGBImgObsWrapper(gymnasium.make("MiniGrid-Empty-5x5-v0", **options))


if "EmptyRoom-v0" not in gymnasium.registry:  # this file may be run several times in a process
    gymnasium.register("EmptyRoom-v0", make_room)


def get_config() -> Config:
    return Config(
        name="minigrid_empty",
        total_env_steps=40_000,
        env=EnvConfig(backend="gymnasium", game="EmptyRoom-v0", image_key="image"),
        ppo=PPOConfig(rollout_length=64, learning_rate=1e-3),
        log=LogConfig(every_env_steps=2_000),
    )
