"""Pools of environments: their interface, the steps that they return, and a counter of games.

The back ends are `ale_pool.py`, `envpool_pool.py` and `gymnasium_pool.py`; this file imports no emulator.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_atari.envs.record import GameRecord

FRAME_SIZE = 84
"""Height and width of a preprocessed frame in pixels."""

STACK = 4
"""Frames that a policy sees at a time: the newest one and those before it."""

FRAME_SKIP = 4
STEPS_PER_SECOND = 15
"""Env steps per second of an Atari game at real speed: 60 emulator frames, 4 per env step."""


class EnvStep(NamedTuple):
    """One step of `n` environments.

    The arrays are new at each step, so they may be kept. Do not write to them, because on a CPU, JAX may still
    read `frame`.
    """

    frame: np.ndarray  # uint8 [n, 84, 84], the newest preprocessed frame
    reward: np.ndarray  # float32 [n], raw, not clipped
    terminated: np.ndarray  # bool [n], the game ended (all lives)
    truncated: np.ndarray  # bool [n], the game was cut off by its time limit; never together with `terminated`
    life_lost: np.ndarray  # bool [n], a life was lost and the game continues
    first: np.ndarray  # bool [n], an auto-reset step: `frame` starts a new game, and the action was ignored
    learning_reward: np.ndarray  # float32 [n], what learning sees in place of `reward`: that of `env.wrapper`


class FinishedGame(NamedTuple):
    """One full game, from its start to its end.

    `step` and `env` are numbers in the pool; in what a session collects and logs, they are numbers in the session.
    """

    step: int  # the step that ended it, from 0, auto-reset steps included
    env: int  # its environment
    episode_return: float  # sum of raw rewards over all lives
    length: int  # env steps; auto-reset steps do not count
    truncated: bool = False  # cut off by its time limit; the log of actions does not have it


class EpisodeCounter:
    """Adds up the rewards and env steps of the games in progress in a pool."""

    def __init__(self, num_envs: int):
        self.so_far = np.zeros((num_envs, 2))
        """Return and env steps so far of each game in progress, float64 [n, 2]; a new array at each step."""

    def count(self, step: EnvStep, number: int = 0) -> list[FinishedGame]:
        """Counts one step of the pool and returns the games that it ended, in the order of their environments.

        Args:
            number: number of the step, for `FinishedGame.step`.
        """
        played = np.stack([step.reward, np.ones(len(step.reward))], axis=1)
        self.so_far = np.where(step.first[:, None], 0.0, self.so_far + played)
        return [
            FinishedGame(
                step=number,
                env=int(i),
                episode_return=float(self.so_far[i, 0]),
                length=int(self.so_far[i, 1]),
                truncated=bool(step.truncated[i]),
            )
            for i in np.flatnonzero(step.terminated | step.truncated)
        ]


class RawStep(NamedTuple):
    """A step as every back end returns it; `EnvPool` makes an `EnvStep` of it."""

    frame: np.ndarray  # uint8 [n, 84, 84]
    reward: np.ndarray  # [n], raw
    terminated: np.ndarray  # bool [n], the game ended (all lives)
    truncated: np.ndarray  # bool [n], the game reached its time limit; it may have ended at the same step
    lives: np.ndarray  # int [n]
    learning_reward: np.ndarray | None = None  # [n], of the user's wrapper; None: `reward`


class EnvPool(ABC):
    """`num_envs` copies of one game: `reset` once, then steps. The step after the end of a game starts a new one.

    A back end implements `_reset` and `_recv`. If it can, it also implements `_reseed` and `screen`; and `_send`,
    unless its emulators have a method `send(actions)`.

    Args:
        envs: the emulators.
        record: record of the games, which starts some games from seeds of their own (`record.GameRecord`).
    """

    action_names: Sequence[str] = ()
    """Names of the actions; empty if they are not known, as with the back ends `envpool` and `gymnasium`."""
    steps_per_second = STEPS_PER_SECOND
    """Env steps per second of a video at real speed."""

    def __init__(self, envs: Any, num_envs: int, *, num_actions: int, record: GameRecord | None = None):
        self._envs: Any = envs
        self.num_envs = num_envs
        self.num_actions = num_actions
        self.record = record
        self.lives = np.zeros(num_envs, np.int32)
        """Lives left in the newest step, int [n]."""
        self._ended = np.zeros(num_envs, bool)
        self.logged: dict[str, list[float]] = {}
        """Numbers that `env.wrapper` has given in `info["log"]` since the caller last cleared this."""

    @abstractmethod
    def _reset(self) -> tuple[np.ndarray, np.ndarray]:
        """Starts the first game in every environment; returns the frames and lives."""

    @abstractmethod
    def _recv(self) -> RawStep:
        """Waits for the step that `_send` started."""

    def _send(self, actions: np.ndarray) -> None:
        self._envs.send(actions)

    def _reseed(self, envs: np.ndarray, seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Starts new games in some environments, bool [n]; returns the frames and lives of all."""
        raise NotImplementedError

    def screen(self) -> np.ndarray:
        """The screen of environment 0 after the newest step, uint8 [height, width, 3]."""
        raise NotImplementedError

    def close(self) -> None:
        """Frees the emulators."""
        self._envs = None

    def reset(self) -> EnvStep:
        """Starts the first game in every environment."""
        frame, self.lives = self._reset()
        nothing = np.zeros(self.num_envs, bool)
        reward = np.zeros(self.num_envs, np.float32)
        return EnvStep(frame, reward, nothing, nothing, nothing, ~nothing, reward)

    def send(self, actions: np.ndarray) -> None:
        """Starts a step with `actions`, int [n], and returns at once; `recv` waits for it."""
        actions = np.ascontiguousarray(actions, np.int32)
        # After an action out of range, ale-py's recv() would never return.
        if actions.shape != (self.num_envs,) or actions.min() < 0 or actions.max() >= self.num_actions:
            raise ValueError(f"actions: expected [{self.num_envs}] in 0..{self.num_actions - 1}, got {actions}")
        self._send(actions)
        if self.record is not None:
            self.record.add_step(actions)

    def recv(self) -> EnvStep:
        """Waits for the step that `send` started."""
        step = self._env_step(self._recv())
        if self.record is None:
            return step
        due = self.record.anchors_due(step.first)
        return self.start_games(step, due, self.record.set_anchors(due)) if due.any() else step

    def start_games(self, step: EnvStep, envs: np.ndarray, seeds: np.ndarray) -> EnvStep:
        """Abandons the games of some environments and starts new ones there.

        From then on, the steps of these environments are a function of their seeds and actions.

        Args:
            step: the newest step.
            envs: bool [n], the environments.
            seeds: int [k], the seeds of these k environments, in [0, 2**31).

        Returns:
            The step, with the first frames of the new games.
        """
        frame, self.lives = self._reseed(envs, seeds)
        self._ended = self._ended & ~envs
        return step._replace(frame=frame, first=step.first | envs)

    def step(self, actions: np.ndarray) -> EnvStep:
        """`send`, then `recv`."""
        self.send(actions)
        return self.recv()

    def _env_step(self, raw: RawStep) -> EnvStep:
        first = self._ended
        terminated = raw.terminated & ~first
        truncated = raw.truncated & ~raw.terminated & ~first
        self._ended = terminated | truncated
        # A running game with zero lives shows the death scene of the last life. That is not a lost life, because
        # the end of the game follows and is the terminal. OpenAI Baselines' EpisodicLifeEnv has the same rule.
        life_lost = (raw.lives < self.lives) & (raw.lives > 0) & ~self._ended & ~first
        self.lives = raw.lives
        reward = raw.reward.astype(np.float32)
        learning_reward = reward if raw.learning_reward is None else raw.learning_reward.astype(np.float32)
        return EnvStep(raw.frame, reward, terminated, truncated, life_lost, first, learning_reward)
