"""Records of games in progress, from which they can be played again exactly.

The state of an emulator cannot be saved. A game that starts from a seed, and every later game reached by
auto-resets, depends only on that seed and the actions. The start of a game from a seed is an anchor.
Seeding an emulator takes 0.1 s, so anchors are rare: each environment gets one at the first end of a game in every
interval of `anchor_steps` steps. The intervals count from the start of the session, also after a resume.
"""

import zlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class GamesInProgress(NamedTuple):
    """The games in progress of n environments, as a checkpoint holds them. Auto-reset steps count as steps."""

    steps: np.ndarray  # int64 [n], steps of each environment since the start of the session; all equal
    anchor_step: np.ndarray  # int64 [n], steps of each environment before its newest anchor
    anchor_seed: np.ndarray  # int64 [n], seeds of these anchors
    actions: np.ndarray  # uint8 [n, L], actions of the L steps since the oldest of these anchors
    frame: np.ndarray  # uint8 [n, 84, 84], the newest frame
    lives: np.ndarray  # int32 [n]
    in_progress: np.ndarray  # float64 [n, 2], return and length so far


class Segment(NamedTuple):
    """A piece of the log of actions, from which scores are recomputed: some steps of n environments."""

    first_step: int
    actions: np.ndarray  # uint8 [steps, n]
    anchors: np.ndarray  # int64 [k, 3], each (step, environment of the session, seed)
    frame_crc: np.ndarray  # uint32 [n], CRC-32 of each environment's frame after these steps


def default_anchor_steps(num_envs: int) -> int:
    """The interval of the anchors, in steps of each environment, if a config chooses none.

    All environments wait while an emulator is seeded. With 16 environments and an interval of 15,625 steps, that
    is 0.8% of the time at 1,200 SPS, and more on a faster machine. The interval doubles at 32 environments,
    triples at 48, and so on, so that 16 to 31 of them are seeded in 15,625 steps.

    Args:
        num_envs: number of environments in the session.
    """
    return 15_625 * max(1, num_envs // 16)


class GameRecord:
    """The seeds and actions of a pool's environments.

    Args:
        game_seed: seed of the games. The seed of an anchor is derived from it, the environment and the step.
        seeds: seeds with which the n environments start.
        first_env: number of the pool's first environment in the session.
        anchor_steps: interval of the anchors, in steps of an environment.
        first_step: steps that each environment has made before this record starts. It is 0, unless a session
            resumes with new games.
    """

    def __init__(
        self, *, game_seed: int, seeds: Sequence[int], first_env: int, anchor_steps: int, first_step: int
    ):
        self._game_seed = game_seed
        self._first_env = first_env
        self._anchor_steps = anchor_steps
        self._steps = self._cut_at = first_step
        self._anchor_step = np.full(len(seeds), first_step)
        self._anchor_seed = np.array(seeds, np.int64)
        self._actions: list[np.ndarray] = []  # actions of the newest steps
        self._new_anchors = [(first_step, first_env + i, seed) for i, seed in enumerate(seeds)]

    def add_step(self, actions: np.ndarray) -> None:
        """Records a step."""
        self._actions.append(actions.astype(np.uint8))
        self._steps += 1

    def anchors_due(self, first: np.ndarray) -> np.ndarray:
        """The environments, bool [n], that get an anchor at this step. `first`: those that start a game."""
        return first & (self._steps // self._anchor_steps > self._anchor_step // self._anchor_steps)

    def set_anchors(self, envs: np.ndarray) -> np.ndarray:
        """Records an anchor in some environments, bool [n], and returns the seeds for them."""
        for i in np.flatnonzero(envs).tolist():
            words = self._game_seed, self._first_env + i, self._steps
            self._anchor_step[i] = self._steps
            self._anchor_seed[i] = np.random.SeedSequence(words).generate_state(1)[0] >> 1
            self._new_anchors.append((self._steps, self._first_env + i, self._anchor_seed[i]))
        return self._anchor_seed[envs]

    def cut_segment(
        self, frame: np.ndarray, lives: np.ndarray, in_progress: np.ndarray
    ) -> tuple[GamesInProgress, Segment]:
        """Returns the games in progress, and the segment of steps since the last call.

        Args:
            frame, lives, in_progress: fields of the result, from the pool's newest step.
        """
        crc = np.array([zlib.crc32(each.tobytes()) for each in frame], np.uint32)
        new_anchors = np.array(self._new_anchors, np.int64).reshape(-1, 3)
        segment = Segment(self._cut_at, self._newest(self._steps - self._cut_at), new_anchors, crc)
        actions = self._newest(self._steps - int(self._anchor_step.min()))
        steps = np.full(len(lives), self._steps)
        self._cut_at = self._steps
        self._new_anchors = []
        self._actions = list(actions)  # older ones are no longer needed
        anchors = self._anchor_step.copy(), self._anchor_seed.copy()
        return GamesInProgress(steps, *anchors, actions.T, frame, lives, in_progress), segment

    def _newest(self, steps: int) -> np.ndarray:
        newest = self._actions[len(self._actions) - steps :]
        return np.array(newest, np.uint8).reshape(steps, len(self._anchor_seed))

    def restore(self, games: GamesInProgress) -> None:
        """Continues the record of a checkpoint. Its segment has been written already."""
        self._steps = self._cut_at = int(games.steps[0])
        self._anchor_step = games.anchor_step.copy()
        self._anchor_seed = games.anchor_seed.copy()
        self._actions = list(games.actions.T)
        self._new_anchors = []


def join(parts: Sequence[GamesInProgress]) -> GamesInProgress:
    """The games of several pools with equal numbers of steps, in the order of their environments."""
    length = max(part.actions.shape[1] for part in parts)
    padded = [np.pad(part.actions, ((0, 0), (length - part.actions.shape[1], 0))) for part in parts]
    aligned = [part._replace(actions=actions) for part, actions in zip(parts, padded, strict=True)]
    return GamesInProgress(*map(np.concatenate, zip(*aligned, strict=True)))


def split(games: GamesInProgress, *, first_env: int, num_envs: int) -> GamesInProgress:
    """The games of some of the environments."""
    return GamesInProgress(*(field[first_env : first_env + num_envs] for field in games))
