"""The back end `gymnasium`: any registered Gymnasium environment with discrete actions and image observations.

Gymnasium's vector environments step the environment, and Gymnasium's wrappers turn its images into 84x84 grey
frames. There are two kinds of environments:

- A game of ALE whose id implies a protocol (`ALE/Breakout-v5`, `BreakoutNoFrameskip-v4`) is played by the rules of
  that protocol, through `AtariPreprocessing`. `options` may choose a mode or a difficulty of the game.
- Any other environment is played as it is registered: an env step is one of its steps, a game one of its episodes.

An id imports nothing. When a pool is made, the environment must have been registered: by Gymnasium, by ale-py, or
by modules that the user has named (`jaxrl_atari/imports.py`).
"""

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ale_py
import gymnasium
import numpy as np
from gymnasium import spaces, wrappers
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from jaxrl_atari.config import EnvConfig
from jaxrl_atari.envs import WRAPPERS
from jaxrl_atari.envs.pool import FRAME_SIZE, FRAME_SKIP, STEPS_PER_SECOND, EnvPool, RawStep
from jaxrl_atari.envs.protocols import Rules
from jaxrl_atari.errors import UserError, reason, require
from jaxrl_atari.imports import IMPORTS_VARIABLE, import_inherited

gymnasium.register_envs(ale_py)


class FireOnReset(gymnasium.Wrapper):
    """Presses FIRE for one emulator frame at the start of a game."""

    def reset(self, **arguments: Any) -> tuple[Any, dict[str, Any]]:
        """Starts a game, as `gymnasium.Env.reset`."""
        self.env.reset(**arguments)
        fire = self.env.unwrapped.get_action_meanings().index("FIRE")  # type: ignore[attr-defined]
        observation, _, _, _, info = self.env.step(fire)
        return observation, info


class KeepReward(gymnasium.Wrapper):
    """Puts the environment's own reward into `info["raw_reward"]`, whatever the user's wrapper makes of it.

    The wrapper may make several steps of the environment in one of its own.
    """

    _total = 0.0

    def __init__(self, env: gymnasium.Env, wrap: Callable[[gymnasium.Env], gymnasium.Env]):
        super().__init__(wrap(wrappers.TransformReward(env, lambda reward: self._add(reward))))

    def _add(self, reward: Any) -> Any:
        self._total += float(reward)
        return reward

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Steps, as `gymnasium.Env.step`."""
        self._total = 0.0
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, info | {"raw_reward": self._total}


def make_single(env: EnvConfig, render: bool = False) -> gymnasium.Env:
    """One environment with discrete actions, whose observations are frames, uint8 [84, 84].

    Args:
        env: the id, the rules of ALE's games, and the options of the environment.
        render: `render()` returns images, if the environment can.

    Raises:
        UserError: the environment is not registered, cannot be made, or has actions or observations that a policy
            cannot use; or OpenCV is missing.
    """
    game = env.game_name
    if env.wrapper is not None:
        known = ", ".join(WRAPPERS) or "none"
        require(env.wrapper in WRAPPERS, "env.wrapper", env.wrapper, f"a registered wrapper; there are: {known}")
    try:
        made = _make(env, render)
        if env.wrapper is not None:
            made = KeepReward(made, WRAPPERS[env.wrapper])
        made = _as_frames(made, game, env.image_key)
    except gymnasium.error.UnregisteredEnv as error:
        raise UserError(
            f"env.game = {game!r}: no such environment is registered ({error}); "
            "--import names the module or the file that registers it"
        ) from error
    except UserError:
        raise
    except Exception as error:  # an environment may raise anything
        chosen = f"with env.options = {env.options}"
        raise UserError(
            f"env.game = {game!r}: the environment cannot be made {chosen} ({reason(error)})"
        ) from error
    expected = f"discrete actions, and it has {made.action_space}"
    require(isinstance(made.action_space, spaces.Discrete), "env.game", game, expected)
    return made


def _make(env: EnvConfig, render: bool) -> gymnasium.Env:
    """The environment as it is registered; a game of ALE under its protocol. Arguments: as `make_single`."""
    make = partial(gymnasium.make, env.game_name)
    if env.atari_game is not None:
        make = partial(_make_atari, f"ALE/{env.atari_game}-v5", rules=env.rules)
    made = make(**env.options)
    if render and "rgb_array" in (made.metadata.get("render_modes") or ()):
        with contextlib.suppress(TypeError):  # a function of the user's takes no `render_mode`
            rendered = make(render_mode="rgb_array", **env.options)
            made.close()
            made = rendered
    return made


def _make_atari(game: str, *, rules: Rules, **options: Any) -> gymnasium.Env:
    """A game of ALE under the rules of its protocol; `options` are other arguments of the environment."""
    env = gymnasium.make(
        game,
        frameskip=1,
        repeat_action_probability=rules.sticky_actions,
        full_action_space=rules.full_action_space,
        max_num_frames_per_episode=rules.max_frames,
        max_episode_steps=-1,  # no time limit by Gymnasium
        disable_env_checker=True,
        **options,
    )
    if rules.fire_on_reset and "FIRE" in env.unwrapped.get_action_meanings():  # type: ignore[attr-defined]
        env = FireOnReset(env)  # before the no-ops, as with the back end `ale`
    return wrappers.AtariPreprocessing(env, noop_max=rules.noop_max, frame_skip=FRAME_SKIP, screen_size=FRAME_SIZE)


def _as_frames(env: gymnasium.Env, game: str, image_key: str | None) -> gymnasium.Env:
    """Turns observations into frames: the entry `image_key` of dictionaries, in grey, resized.

    Gymnasium's wrappers refuse spaces that are not of images, uint8 from 0 to 255. An observation of another type
    than its space, such as float32 from 0 to 1, would become a black frame.
    """
    space = env.observation_space
    key = image_key if isinstance(space, spaces.Dict) else None
    if isinstance(space, spaces.Dict):
        expected = f"a key of the observations of {game}: {', '.join(space)}"
        require(key in space.spaces, "env.image_key", image_key, expected)
        space = space[str(key)]

    def image(observation: Any) -> np.ndarray:
        chosen = np.asarray(observation if key is None else observation[key])
        expected = f"images of {space.dtype}, as its observation_space declares, and it returns {chosen.dtype}"
        require(chosen.dtype == space.dtype, "env.game", game, expected)
        return chosen

    env = wrappers.TransformObservation(env, image, space)
    shape = env.observation_space.shape or ()
    if len(shape) == 3:
        grey = shape[-1] != 3
        env = wrappers.ReshapeObservation(env, shape[:2]) if grey else wrappers.GrayscaleObservation(env)
    return wrappers.ResizeObservation(env, (FRAME_SIZE, FRAME_SIZE))


def _make_in_worker(imports: str, make: Callable[[], gymnasium.Env]) -> gymnasium.Env:
    """Makes an environment in a process of an `AsyncVectorEnv`.

    Args:
        imports: what the main process has imported (`IMPORTS_VARIABLE`), which is imported first.
    """
    os.environ[IMPORTS_VARIABLE] = imports
    import_inherited()
    return make()


class GymnasiumPool(EnvPool):
    """A pool on Gymnasium's vector environments. It copies no arrays, because they return new ones at every step.

    With `sync`, the environments step one after the other in this process; with `async`, each has its own process.
    Only ALE's games report lost lives.

    Args:
        screens: `screen` will be called.
    """

    def __init__(self, env: EnvConfig, seeds: Sequence[int], screens: bool):
        make = partial(make_single, env, screens)
        if env.vectorization_mode == "async":
            # A fork of a process that runs JAX can deadlock, and "spawn" imports everything in each process.
            context = "forkserver"
            multiprocessing.get_context(context).set_forkserver_preload([__name__])
            make = partial(_make_in_worker, os.environ.get(IMPORTS_VARIABLE, "[]"), make)
            envs = AsyncVectorEnv([make] * len(seeds), context=context, autoreset_mode=AutoresetMode.NEXT_STEP)
        else:
            envs = SyncVectorEnv([make] * len(seeds), autoreset_mode=AutoresetMode.NEXT_STEP)
        space = envs.single_action_space
        assert isinstance(space, spaces.Discrete)
        self._first_action = int(space.start)
        self._is_atari = env.atari_game is not None
        self._is_wrapped = env.wrapper is not None
        self._seeds = list(seeds)
        self._steps = 0
        self._actions = np.zeros(len(seeds), np.int64)
        self._frame = np.zeros((len(seeds), FRAME_SIZE, FRAME_SIZE), np.uint8)  # of the newest step
        super().__init__(envs, len(seeds), num_actions=int(space.n))
        if not self._is_atari:
            self.steps_per_second = int(envs.metadata.get("render_fps") or STEPS_PER_SECOND)

    def _reset(self) -> tuple[np.ndarray, np.ndarray]:
        self._frame, info = self._envs.reset(seed=self._seeds)
        return self._frame, self._lives(info)

    def _send(self, actions: np.ndarray) -> None:
        self._actions = actions + self._first_action
        if isinstance(self._envs, AsyncVectorEnv):
            self._envs.step_async(self._actions)

    def _recv(self) -> RawStep:
        is_async = isinstance(self._envs, AsyncVectorEnv)
        result = self._envs.step_wait() if is_async else self._envs.step(self._actions)
        self._frame, reward, terminated, truncated, info = result
        self._steps += 1
        for i in np.flatnonzero(~np.isfinite(reward)):
            raise UserError(
                f"env.game: environment {i} returned the reward {reward[i]} in its step {self._steps:,}"
            )
        if not self._is_wrapped:
            return RawStep(self._frame, reward, terminated, truncated, self._lives(info))
        for name, values in info.get("log", {}).items():
            if not name.startswith("_"):  # `_name` says which environments have given a value
                self.logged.setdefault(name, []).extend(values[info["log"][f"_{name}"]].tolist())
        raw = info.get("raw_reward", np.zeros(self.num_envs))  # 0 where a game was reset
        return RawStep(self._frame, raw, terminated, truncated, self._lives(info), reward)

    def _lives(self, info: dict[str, Any]) -> np.ndarray:
        """The lives of each environment, int32 [n]."""
        if not self._is_atari:
            return self.lives
        if not np.all(info.get("_lives", False)):
            raise UserError("env.wrapper: it loses `info`; it has to return that of the environment")
        return info["lives"].astype(np.int32)

    def screen(self) -> np.ndarray:
        """The image that environment 0 renders, uint8 [height, width, 3]; its grey frame if it renders none."""
        image = self._envs.render()[0] if self._envs.render_mode == "rgb_array" else None
        if image is None:
            image = np.repeat(self._frame[0][..., None], 3, axis=-1)
        return np.asarray(image, np.uint8)

    def close(self) -> None:
        """Closes the environments."""
        self._envs.close(terminate=True)  # the processes of `async`; `sync` ignores it
