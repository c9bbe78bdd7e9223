"""Playing recorded games again, up to the step at which a checkpoint was written."""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from jaxrl_atari.envs.pool import EnvPool, EnvStep, EpisodeCounter
from jaxrl_atari.envs.record import Games

PAST = 3
"""Frames before the newest one that a stack can hold."""


class Replayed(NamedTuple):
    """Where the games of a pool stand after a replay."""

    step: EnvStep  # the newest
    past_frames: np.ndarray  # uint8 [3, n, 84, 84], the frames before it, the oldest first
    past_age: np.ndarray  # int32 [n], age of the frame before it: earlier frames of the same game, at most 3
    episodes: EpisodeCounter


def replay(pool: EnvPool, games: Games, on_step: Callable[[int, int], object] = lambda done, steps: None) -> Replayed:
    """Plays the games of a checkpoint again in a new pool and continues their record in it.

    Each environment plays from its anchor; one that has its anchor later than others plays something else before.

    Args:
        on_step: called with the steps done, and with all steps to do.

    Raises:
        ValueError: the games do not end as the checkpoint says: it is of another emulator or game, or damaged.
    """
    record, pool.record = pool.record, None
    length, since = games.actions.shape[1], games.steps - games.anchor_step
    episodes, step = EpisodeCounter(pool.num_envs), pool.reset()
    newest: deque[EnvStep] = deque(maxlen=PAST + 1)
    for done in range(length + 1):
        starts = since == length - done
        if starts.any():
            step = pool.start_games(step, starts, games.anchor_seed[starts])
            episodes.restart(starts)
        newest.append(step)
        on_step(done, length)
        if done < length:
            step = pool.step(games.actions[:, done])
            episodes.count(step)
    found = (step.frame, pool.lives, episodes.in_progress)
    if not all(map(np.array_equal, found, (games.frame, games.lives, games.in_progress))):
        raise ValueError("the games do not end in the frames, lives and returns that the checkpoint has")
    past = list(newest)[:-1]
    frames, age = np.zeros((PAST, *games.frame.shape), np.uint8), np.full(pool.num_envs, PAST, np.int32)
    for place, each in enumerate(past, start=PAST - len(past)):
        frames[place], age = each.frame, np.where(each.first, 0, np.minimum(age + 1, PAST))
    if record is not None:
        record.restore(games)
    pool.record = record
    return Replayed(step, frames, age, episodes)


def report_replay(say: Callable[[str], object], seconds: float = 10.0) -> Callable[[int, int], None]:
    """A function for `on_step` of `replay` that reports the progress every ten seconds."""
    start = shown = time.monotonic()

    def on_step(done: int, steps: int) -> None:
        nonlocal shown
        if (now := time.monotonic()) - shown >= seconds:
            shown = now
            left = (now - start) / done * (steps - done)
            say(f"playing the games of the checkpoint again: {done / steps:.0%}, {left:.0f} s to go")

    return on_step
