"""The games of a log of actions, played again and compared with the log.

At an anchor, an environment began a game from a new seed (`envs/record.py`). The steps from one anchor to the next
are a piece. Each piece can be played without the others, so many are played side by side, and a part is enough.
"""

import dataclasses
import itertools
import zlib
from typing import NamedTuple

import numpy as np

from jaxrl_atari.config import Config
from jaxrl_atari.envs import EpisodeCounter, make_pool
from jaxrl_atari.envs.replay import play_again
from jaxrl_atari.errors import VerificationFailed
from jaxrl_atari.output import tracked
from jaxrl_atari.runs.actions import ActionLog

PIECES_AT_ONCE = 32
"""Emulators that play side by side, each a piece of a session's games."""


class Piece(NamedTuple):
    """Steps of an environment from an anchor to the next one."""

    env: int
    start: int
    end: int
    seed: int


def pieces(log: ActionLog) -> list[Piece]:
    """The games of a session, cut at their anchors, the longest pieces first."""
    anchors = sorted((env, step, seed) for step, env, seed in log.anchors.tolist())
    result = []
    for (env, step, seed), (next_env, next_step, _) in itertools.pairwise([*anchors, (-1, 0, 0)]):
        end = next_step if next_env == env else len(log.actions)
        if end > step:
            result.append(Piece(env, step, end, seed))
    return sorted(result, key=lambda piece: piece.start - piece.end)


def check_games(config: Config, name: str, log: ActionLog, chosen: list[Piece]) -> int:
    """Plays pieces of a session again, `PIECES_AT_ONCE` side by side, and compares their games with the log.

    Args:
        name: of the session, for the progress that is shown.
        chosen: some of the `pieces` of the log.

    Returns:
        The number of games that ended in the pieces.

    Raises:
        VerificationFailed: a game has another return or length; or as `replayed_games`.
    """
    games = 0
    batches = [chosen[first : first + PIECES_AT_ONCE] for first in range(0, len(chosen), PIECES_AT_ONCE)]
    for batch in tracked(batches, f"{name}  batches played", len(batches)):
        logged, played = logged_games(log, batch), replayed_games(config, log, batch)
        if different := logged ^ played:
            first = min(different)
            side = "the log" if first in logged else "the replay"
            at, env, episode_return, length = first
            raise VerificationFailed(
                f"{side} alone has a game that ends at step {at:.0f} of environment {env:.0f} with return"
                f" {episode_return:g} after {length:.0f} env steps"
            )
        games += len(played)
    return games


def logged_games(log: ActionLog, batch: list[Piece]) -> set[tuple[float, ...]]:
    """The games of the log that ended in these pieces: step, environment, return, length."""
    steps, envs = log.games[:, :2].T
    here = np.any([(envs == piece.env) & (piece.start <= steps) & (steps < piece.end) for piece in batch], axis=0)
    return {*map(tuple, log.games[here].tolist())}


def replayed_games(config: Config, log: ActionLog, batch: list[Piece]) -> set[tuple[float, ...]]:
    """The games that end when these pieces are played again, side by side: step, environment, return, length.

    Raises:
        VerificationFailed: a frame at the end of a segment differs from the log, or the game has no such action.
    """
    played: set[tuple[float, ...]] = set()
    # `env.num_threads` was the session's share of the cores in training. Here, all usable cores play (0).
    pool = make_pool(dataclasses.replace(config.env, num_threads=0), len(batch), seed=0)
    counter = EpisodeCounter(len(batch))
    try:
        if log.actions.max() >= pool.num_actions:
            raise VerificationFailed(f"the actions cannot be played: the game has no action {log.actions.max()}")
        actions = [log.actions[piece.start : piece.end, piece.env] for piece in batch]
        seeds = np.array([piece.seed for piece in batch])
        for remaining, _, step in play_again(pool, pool.reset(), seeds, actions):
            reached = [piece.end - remaining for piece in batch]
            for game in counter.count(step):
                piece = batch[game.env]
                at = reached[game.env]
                if at > piece.start:  # otherwise the game was played before the piece began
                    played.add((at - 1, piece.env, game.episode_return, game.length))
            for piece, at, frame in zip(batch, reached, step.frame, strict=True):
                # Where a piece ends with an anchor, the frame belongs to the next piece.
                shows = at in log.frame_crc and piece.start < at and (at < piece.end or at == len(log.actions))
                if shows and zlib.crc32(frame.tobytes()) != log.frame_crc[at][piece.env]:
                    raise VerificationFailed(
                        f"environment {piece.env}: the frame after step {at} differs from that of the log"
                    )
    finally:
        pool.close()
    return played
