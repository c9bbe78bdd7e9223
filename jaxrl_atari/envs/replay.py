"""Playing recorded games again, up to the step at which a checkpoint was written."""

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from jaxrl_atari.envs.pool import EnvPool, EnvStep, EpisodeCounter
from jaxrl_atari.envs.record import GamesInProgress
from jaxrl_atari.errors import UserError
from jaxrl_atari.output import tracked

PAST = 3
"""Frames before the newest one that a stack can hold."""


def play_again(
    pool: EnvPool, seeds: np.ndarray, actions: Sequence[np.ndarray]
) -> Iterator[tuple[np.ndarray, EnvStep]]:
    """Plays games that started from seeds, in environments that end together: those with fewer actions start
    later.

    Args:
        pool: before its first step.
        seeds: int [n], of each environment.
        actions: for each environment, int [its steps].

    Yields:
        After the start and after each step: the actions that each environment still has to take, int [n], and the
        step. An environment that has not started yet (more steps are left than it has actions) plays something
            else.
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
        step = pool.step(
            np.array([each[-n] if n <= len(each) else 0 for each, n in zip(actions, left, strict=True)])
        )
        left = left - 1


def replay(pool: EnvPool, games: GamesInProgress) -> tuple[EnvStep, np.ndarray, np.ndarray, EpisodeCounter]:
    """Plays the games of a checkpoint again in a new pool, with a progress bar, and continues their record in it.

    Returns:
        The newest step; the frames before it, uint8 [3, n, 84, 84], the oldest first; the age of the last of these
        frames, int32 [n] (earlier frames of the same game, at most 3); and the counter of the games in progress.

    Raises:
        UserError: the games do not end as the checkpoint says: it is of another emulator or game, or damaged.
    """
    record = pool.record
    pool.record = None
    since = games.steps - games.anchor_step
    actions = [each[len(each) - n :] for each, n in zip(games.actions, since.tolist(), strict=True)]
    episodes = EpisodeCounter(pool.num_envs)
    newest = deque(maxlen=PAST + 1)
    steps = play_again(pool, games.anchor_seed, actions)
    for _, step in tracked(steps, "playing the games of the checkpoint again", since.max() + 1, transient=True):
        episodes.count(step)  # starts anew where a game does
        newest.append(step)
    step = newest.pop()
    found = (step.frame, pool.lives, episodes.in_progress)
    if not all(map(np.array_equal, found, (games.frame, games.lives, games.in_progress))):
        raise UserError("the games do not end in the frames, lives and returns that the checkpoint has")
    frames = np.zeros((PAST, *games.frame.shape), np.uint8)
    age = np.full(pool.num_envs, PAST, np.int32)
    for place, each in enumerate(newest, start=PAST - len(newest)):
        frames[place] = each.frame
        age = np.where(each.first, 0, np.minimum(age + 1, PAST))
    if record is not None:
        record.restore(games)
    pool.record = record
    return step, frames, age, episodes
