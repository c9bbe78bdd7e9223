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
    pool: EnvPool, start: EnvStep, seeds: np.ndarray, actions: Sequence[np.ndarray]
) -> Iterator[tuple[int, EnvStep]]:
    """Plays games from seeds and actions. All environments end together; one with fewer actions starts later.

    Args:
        pool: a pool before its first step.
        start: what its `reset` returned.
        seeds: int [n], the seed of each environment.
        actions: for each environment, its actions, int [steps].

    Yields:
        How many steps are left, and the step: first the start. Before an environment's game has started, its part
        of a step means nothing.
    """
    lengths = np.array(list(map(len, actions)))
    step = start
    for remaining in range(lengths.max(), -1, -1):
        starts = lengths == remaining
        if starts.any():
            step = pool.start_games(step, starts, seeds[starts])
        yield remaining, step
        if remaining:
            step = pool.step(np.array([each[-remaining] if remaining <= len(each) else 0 for each in actions]))


def restore_games(
    pool: EnvPool, start: EnvStep, games: GamesInProgress
) -> tuple[EnvStep, np.ndarray, np.ndarray, EpisodeCounter]:
    """Plays the games of a checkpoint again in a new pool, which then continues their record. Shows progress.

    Args:
        pool: a pool before its first step.
        start: what its `reset` returned.
        games: the first part of what `GameRecord.cut_segment` returned.

    Returns:
        The newest step; the frames before it, uint8 [3, n, 84, 84], the oldest first; how many frames of its game
        precede the last of these, at most 3, int32 [n]; returns and lengths so far.

    Raises:
        UserError: the games do not end as in the checkpoint, which is damaged or of another emulator or game.
    """
    record = pool.record
    pool.record = None
    since = games.steps - games.anchor_step
    actions = [each[len(each) - n :] for each, n in zip(games.actions, since.tolist(), strict=True)]
    episodes = EpisodeCounter(pool.num_envs)
    newest = deque(maxlen=PAST + 1)
    steps = play_again(pool, start, games.anchor_seed, actions)
    title = "playing the games of the checkpoint again"
    for _, step in tracked(steps, title, since.max() + 1):
        episodes.count(step)
        newest.append(step)
    step = newest.pop()
    reached = (step.frame, pool.lives, episodes.so_far)
    if not all(map(np.array_equal, reached, (games.frame, games.lives, games.in_progress))):
        raise UserError("the games do not end in the frames, lives and returns that the checkpoint has")
    frames = np.zeros((PAST, *games.frame.shape), np.uint8)
    age = np.full(pool.num_envs, PAST, np.int32)
    for position, each in enumerate(newest, start=PAST - len(newest)):
        frames[position] = each.frame
        age = np.where(each.first, 0, np.minimum(age + 1, PAST))  # `frames.next_age`
    if record is not None:
        record.restore(games)
    pool.record = record
    return step, frames, age, episodes
