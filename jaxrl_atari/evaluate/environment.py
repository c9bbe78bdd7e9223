"""A Gymnasium environment with the protocol, preprocessing and frame stacks of a training run."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces, wrappers
from gymnasium.envs.registration import EnvSpec

from jaxrl_atari.config import Config, EnvConfig
from jaxrl_atari.envs import EnvPool, make_pool
from jaxrl_atari.envs.pool import FRAME_SIZE, STACK, STEPS_PER_SECOND
from jaxrl_atari.evaluate.play import FrameStacks


def make_env(config: Config, render_mode: str | None = None) -> gymnasium.Env[np.ndarray, np.int64]:
    """The environment of a run with Gymnasium's interface: `make_env(policy.config)`.

    An observation is the frame stack that the policy sees. Rewards are raw, not clipped. An episode is a full
    game, which a lost life does not end.

    Args:
        render_mode: what `render` returns. None: nothing; "rgb_array": the colour screen or, with the back end
            `gymnasium`, what the environment renders.

    Raises:
        UserError: the game cannot be played; see `envs.make_pool`.
    """
    return wrappers.OrderEnforcing(RunEnv(config.env, render_mode))


KEYS = {"UP": "w", "DOWN": "s", "LEFT": "a", "RIGHT": "d", "FIRE": " "}
"""Words in the names of ALE's actions -> keys of a person who plays, as ale-py has them."""


class RunEnv(gymnasium.Env[np.ndarray, np.int64]):
    """One environment of a run; see `make_env`.

    `reset(seed=s)` starts the first game of environment 0 in an evaluation with that seed. After the end of a
    game, `reset()` starts the next game of that evaluation. At first, and in the middle of a game, it starts one
    with a random seed.
    """

    # A class attribute, as Gymnasium declares it; each instance has its own frames per second.
    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": STEPS_PER_SECOND}  # noqa: RUF012

    def __init__(self, env: EnvConfig, render_mode: str | None = None):
        if render_mode not in (None, "rgb_array"):
            raise ValueError(f"render_mode: expected None or 'rgb_array', got {render_mode!r}")
        self.render_mode = render_mode
        self._env = env
        name = env.game_name.split("/")[-1]
        self.spec = EnvSpec(f"jaxrl_atari/{name}-v0", f"{__name__}:RunEnv", kwargs={"env": env})
        self._pool = self._make_pool(0)  # each game that is started with a seed has a pool of its own
        self._over = False
        self._stacks = FrameStacks(1)
        self.metadata = {**self.metadata, "render_fps": self._pool.steps_per_second}
        self.action_space = spaces.Discrete(self._pool.num_actions)
        self.observation_space = spaces.Box(0, 255, (FRAME_SIZE, FRAME_SIZE, STACK), np.uint8)

    def _make_pool(self, seed: int) -> EnvPool:
        return make_pool(self._env, 1, seed=seed, screens=self.render_mode is not None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        """Starts a game.

        Args:
            seed: from 0 to 4294967295. None: see `RunEnv`.
            options: not used.

        Returns:
            The frame stack, uint8 [84, 84, 4], and a dictionary with the `lives`.

        Raises:
            gymnasium.error.Error, ConfigError: the seed is below 0, or too large.
        """
        super().reset(seed=seed)
        if seed is None and self._over:
            step = self._pool.step(np.zeros(1, np.int32))  # an auto-reset step, which ignores its action
        else:
            pool = self._make_pool(int(self.np_random.integers(2**31)) if seed is None else seed)
            self._pool.close()
            self._pool = pool
            step = pool.reset()
        self._over = False
        return self._stacks.push(step.frame, step.first)[0], {"lives": int(self._pool.lives[0])}

    def step(self, action: np.int64 | int) -> tuple[np.ndarray, float, bool, bool, dict]:
        """Makes an env step.

        Returns:
            The frame stack, the raw reward, whether the game ended, whether its time limit cut it off, and a
            dictionary with the `lives`.

        Raises:
            gymnasium.error.ResetNeeded: after the end of a game.
        """
        if self._over:
            raise gymnasium.error.ResetNeeded("step: the game is over; call reset first")
        step = self._pool.step(np.array([action]))
        stacks = self._stacks.push(step.frame, step.first)
        terminated, truncated = bool(step.terminated[0]), bool(step.truncated[0])
        self._over = terminated or truncated
        info = {"lives": int(self._pool.lives[0])}
        return stacks[0], float(step.reward[0]), terminated, truncated, info

    def render(self) -> np.ndarray | None:
        """The newest screen, uint8 [height, width, 3]; None without a render mode."""
        return self._pool.screen() if self.render_mode else None

    def get_keys_to_action(self) -> dict[tuple[int, ...], int]:
        """Keys -> action, for `gymnasium.utils.play.play`; empty without the names of the actions."""
        mapping = {}
        for action, name in enumerate(self._pool.action_names):
            keys = [ord(key) for word, key in KEYS.items() if word in name]
            mapping[tuple(sorted(keys))] = action
        return mapping

    def close(self) -> None:
        """Frees the emulator."""
        self._pool.close()
