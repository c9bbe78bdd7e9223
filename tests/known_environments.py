"""A Gymnasium environment whose steps are known, and pools of the back end `gymnasium`."""

import gymnasium
import numpy as np
from gymnasium import spaces

from jaxrl_atari.config import EnvConfig
from jaxrl_atari.envs import make_pool

CLOCK = "JaxrlTest/Clock-v0"


class Clock(gymnasium.Env):
    """Counts its steps; ends at `length`. Pictures show the seed and the time; actions from 1 on are rewards.

    Args:
        length: steps of an episode.
        shape: shape of the pictures.
        key: key of the picture in a dictionary; None: the picture alone.
        high: highest value of a pixel, which is wrong except for 255.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012

    def __init__(self, length=3, shape=(84, 84), key=None, high=255, render_mode=None):
        self.length, self.key, self.render_mode = length, key, render_mode
        self.picture = spaces.Box(0, high, shape, np.uint8)
        self.observation_space = self.picture if key is None else spaces.Dict({key: self.picture})
        self.action_space = spaces.Discrete(3, start=1)

    def _observation(self):
        value = (self.start + self.time) % 256
        picture = np.full(self.picture.shape, value, np.uint8)
        return picture if self.key is None else {self.key: picture}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start, self.time = int(self.np_random.integers(100)), 0
        return self._observation(), {}

    def step(self, action):
        self.time += 1
        return self._observation(), float(action), self.time == self.length, False, {}

    def render(self):
        return np.full((21, 33, 3), self.time, np.uint8)


gymnasium.register(CLOCK, Clock)


def pool_of(num_envs=2, game=CLOCK, seed=3, screens=False, rules=None, **options):
    """A pool of the back end `gymnasium`; `options` are fields of `EnvConfig`."""
    rules = {} if rules is None else rules._asdict()
    env = EnvConfig(game=game, backend="gymnasium", **rules, **options)
    return make_pool(env, num_envs, seed=seed, screens=screens)
