"""What the pools of games have in common, whichever emulator plays: their interface, and what each step says.

No emulator is imported here. The back ends are in `envs.py`.
"""

from typing import NamedTuple, Protocol

import numpy as np


class EnvStep(NamedTuple):
    """What `n` environments returned. Fresh arrays: they stay valid, and may be kept or written to."""

    frame: np.ndarray  # uint8 [n, 84, 84], the newest preprocessed frame
    reward: np.ndarray  # float32 [n], raw, not clipped
    terminated: np.ndarray  # bool [n], the game ended (all lives)
    truncated: np.ndarray  # bool [n], the game was cut off at `max_frames`; never together with `terminated`
    life_lost: np.ndarray  # bool [n], a life was lost and the game goes on: a terminal for learning only
    first: np.ndarray  # bool [n], `frame` starts a new game; the step that returned it ignored its action


class EnvPool(Protocol):
    """`num_envs` copies of one game. The step after the end of a game starts a new one."""

    num_envs: int
    num_actions: int
    action_meanings: tuple[str, ...]

    def reset(self) -> EnvStep: ...
    def send(self, actions: np.ndarray) -> None: ...
    def recv(self) -> EnvStep: ...
    def step(self, actions: np.ndarray) -> EnvStep: ...
    def close(self) -> None: ...


class RawStep(NamedTuple):
    """What both emulators can tell, before the marks that they disagree on."""

    frame: np.ndarray  # uint8 [n, 84, 84]
    reward: np.ndarray  # [n], raw
    game_over: np.ndarray  # bool [n]
    cut_off: np.ndarray  # bool [n]
    lives: np.ndarray  # int [n]


class BasePool:
    """What the back ends share: checks, and the marks `life_lost` and `first`."""

    def __init__(self, num_envs: int, action_meanings: tuple[str, ...]):
        self.num_envs = num_envs
        self.num_actions = len(action_meanings)
        self.action_meanings = action_meanings
        self._lives = np.zeros(num_envs, np.int32)
        self._ended = np.ones(num_envs, bool)
        self._started = self._pending = self._closed = False

    def _reset(self) -> RawStep:
        raise NotImplementedError

    def _send(self, actions: np.ndarray) -> None:
        raise NotImplementedError

    def _recv(self) -> RawStep:
        raise NotImplementedError

    def _free(self) -> None:
        raise NotImplementedError

    def reset(self) -> EnvStep:
        """Starts a new game everywhere. Only the first reset uses the seeds; later ones go on from there."""
        self._check_open()
        if self._pending:
            self.recv()
        self._started = True
        self._ended = np.ones(self.num_envs, bool)
        return self._mark(self._reset())

    def send(self, actions: np.ndarray) -> None:
        """Starts a step with `actions`, int [n], and returns at once; `recv` waits for it."""
        self._check_open()
        if not self._started or self._pending:
            raise RuntimeError("EnvPool.send: call reset() first, then send() and recv() in turn")
        actions = np.ascontiguousarray(actions, np.int32)
        # Checked here because ale-py's recv() never returns after an action out of range.
        if actions.shape != (self.num_envs,) or actions.min() < 0 or actions.max() >= self.num_actions:
            raise ValueError(f"actions: expected [{self.num_envs}] in 0..{self.num_actions - 1}, got {actions}")
        self._send(actions)
        self._pending = True

    def recv(self) -> EnvStep:
        """Waits for the step that `send` started."""
        self._check_open()
        if not self._pending:
            raise RuntimeError("EnvPool.recv: nothing was sent")
        self._pending = False
        return self._mark(self._recv())

    def step(self, actions: np.ndarray) -> EnvStep:
        """`send`, then `recv`."""
        self.send(actions)
        return self.recv()

    def close(self) -> None:
        """Frees the emulators. May be called again."""
        if not self._closed:
            self._closed = True
            self._free()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("EnvPool: used after close()")

    def _mark(self, raw: RawStep) -> EnvStep:
        first = self._ended
        terminated = raw.game_over & ~first
        truncated = raw.cut_off & ~raw.game_over & ~first
        self._ended = terminated | truncated
        # No lives while the game goes on (the last life's death scene) is not a life lost: the end of the game is
        # about to come and is the terminal. The rule of OpenAI Baselines' EpisodicLifeEnv.
        life_lost = (raw.lives < self._lives) & (raw.lives > 0) & ~self._ended & ~first
        self._lives = raw.lives
        return EnvStep(raw.frame, raw.reward.astype(np.float32), terminated, truncated, life_lost, first)
