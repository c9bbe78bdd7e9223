"""Playing recorded games again, up to the step of a checkpoint."""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from jaxrl_atari.envs.pool import STACK, EnvPool, EnvStep, EpisodeCounter
from jaxrl_atari.envs.record import GamesInProgress
from jaxrl_atari.errors import UserError
from jaxrl_atari.output import tracked

PAST = STACK - 1
"""Frames of a stack before the newest one."""


def play_again(
    pool: EnvPool, seeds: np.ndarray, actions: Sequence[np.ndarray]
) -> Iterator[tuple[np.ndarray, EnvStep]]:
    """Plays games from seeds and actions. All environments end together; one with fewer actions starts later.

    Args:
        pool: a pool before its first step.
        seeds: int [n], the seed of each environment.
        actions: for each environment, its actions, int [steps].

    Yields:
        After the start and after each step: the number of steps left, int [n], all equal; and the step. Ignore the
        steps of an environment that has fewer actions than steps are left: its game has not started.
    """
    lengths = np.array(list(map(len, actions)))
    left = np.full(len(lengths), lengths.max())
    step = pool.reset()
    while True:
        starts = left == lengths
        if starts.any():
            step = pool.start_games(step, starts, seeds[starts])
        yield left, step
        if not left[0]:
            return
        remaining = int(left[0])
        step = pool.step(np.array([each[-remaining] if remaining <= len(each) else 0 for each in actions]))
        left = left - 1


def replay(pool: EnvPool, games: GamesInProgress) -> tuple[EnvStep, np.ndarray, np.ndarray, EpisodeCounter]:
    """Plays the games of a checkpoint again in a new pool, which then continues their record. Shows progress.

    Returns:
        The newest step; the frames before it, uint8 [3, n, 84, 84], the oldest first; the age of the last of these
        frames, int32 [n] (earlier frames of the same game, at most 3); and the counter of the games in progress.

    Raises:
        UserError: the games do not end as in the checkpoint, which is damaged or of another emulator or game.
    """
    record = pool.record
    pool.record = None
    since = games.steps - games.anchor_step
    actions = [each[len(each) - n :] for each, n in zip(games.actions, since.tolist(), strict=True)]
    episodes = EpisodeCounter(pool.num_envs)
    newest = deque(maxlen=PAST + 1)
    steps = play_again(pool, games.anchor_seed, actions)
    for _, step in tracked(steps, "playing the games of the checkpoint again", since.max() + 1, transient=True):
        episodes.count(step)
        newest.append(step)
    step = newest.pop()
    found = (step.frame, pool.lives, episodes.in_progress)
    if not all(map(np.array_equal, found, (games.frame, games.lives, games.in_progress))):
        raise UserError("the games do not end in the frames, lives and returns that the checkpoint has")
    frames = np.zeros((PAST, *games.frame.shape), np.uint8)
    age = np.full(pool.num_envs, PAST, np.int32)
    for place, each in enumerate(newest, start=PAST - len(newest)):
        frames[place] = each.frame
        age = np.where(each.first, 0, np.minimum(age + 1, PAST))  # `frames.next_age`
    if record is not None:
        record.restore(games)
    pool.record = record
    return step, frames, age, episodes
