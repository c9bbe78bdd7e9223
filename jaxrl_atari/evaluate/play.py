"""Full games played with a policy, scored by their raw rewards."""

import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import jax
import numpy as np

from jaxrl_atari.algorithm import EVALUATION_STREAM, new_key
from jaxrl_atari.config import EvaluationConfig, check_fields
from jaxrl_atari.envs import EnvPool, EnvStep, EpisodeCounter, FinishedGame, make_pool
from jaxrl_atari.envs.games import GAMES
from jaxrl_atari.envs.pool import FRAME_SIZE, STACK
from jaxrl_atari.evaluate.policy import Decision, Policy

SECONDS_BETWEEN_LINES = 30
"""Seconds between two lines on the progress of an evaluation."""


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """The games of an evaluation and their scores."""

    games: tuple[FinishedGame, ...]  # in the order in which they ended

    @property
    def returns(self) -> np.ndarray:
        """The return of each game, float64 [episodes]."""
        return np.array([game.episode_return for game in self.games])

    @property
    def mean(self) -> float:
        """The mean return."""
        return float(np.mean(self.returns))

    @property
    def std(self) -> float | None:
        """The sample standard deviation of the returns; None for a single game."""
        return float(np.std(self.returns, ddof=1)) if len(self.games) > 1 else None

    @property
    def num_truncated(self) -> int:
        """The number of games that reached their time limit. Their returns count too."""
        return sum(game.truncated for game in self.games)


class FrameStacks:
    """The last four frames of each game; a game's first frame fills its stack."""

    def __init__(self, num_envs: int):
        self._stacks = np.zeros((num_envs, FRAME_SIZE, FRAME_SIZE, STACK), np.uint8)

    def push(self, frame: np.ndarray, first: np.ndarray) -> np.ndarray:
        """Adds frames uint8 `[n, 84, 84]`, which start games where `first` is true, bool `[n]`.

        Returns:
            The stacks, a new array uint8 `[n, 84, 84, 4]`, the oldest frame first.
        """
        self._stacks = np.concatenate([self._stacks[..., 1:], frame[..., None]], axis=-1)
        self._stacks[first] = frame[first][..., None]
        return self._stacks


def play(
    policy: Policy,
    pool: EnvPool,
    *,
    seed: int,
    greedy: bool,
) -> Iterator[tuple[EnvStep, Decision | None]]:
    """Plays game after game in every environment of a pool.

    Args:
        policy: chooses the actions.
        pool: a pool before its first step.
        seed: seed of the actions.
        greedy: take the most probable action instead of sampling.

    Yields:
        The start of the games, with None; then each step, with the decision that led to it.
    """
    stacks = FrameStacks(pool.num_envs)
    with jax.default_device(policy.device):  # keeps an evaluation on the CPU off a GPU that trains
        key = jax.random.fold_in(new_key(seed), EVALUATION_STREAM)
        carry = policy.initial_carry(pool.num_envs)
    step = pool.reset()
    decision = None
    for number in itertools.count():
        yield step, decision
        with jax.default_device(policy.device):
            step_key = jax.random.fold_in(key, number)
            decision = policy.decide(stacks.push(step.frame, step.first), step.first, carry, step_key, greedy)
            carry = decision.outputs.carry
        step = pool.step(decision.actions)


def run_evaluation(
    policy: Policy,
    episodes: int = 32,
    *,
    seed: int = 0,
    greedy: bool = False,
    num_envs: int = 16,
    say: Callable[[str], object] = lambda line: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> EvaluationResult:
    """Plays full games under the protocol of the policy's training, and scores them by their raw rewards.

    Each environment plays a number of games that is fixed beforehand. Taking the first `episodes` games that end
    would favour short games, which are mostly bad ones.

    Args:
        policy: chooses the actions.
        episodes: number of games.
        seed: seed of the games and actions. The same seed, device and number of games at once give the same games.
        greedy: take the most probable action instead of sampling.
        num_envs: number of games played at once, or `episodes` if that is smaller.
        say: receives a line for each game when it ends, and every 30 seconds a line on the games in progress.
        cancelled: asked at each step whether to stop.

    Raises:
        CancelledError: `cancelled()` was true.
        ConfigError: `episodes`, `num_envs` or `seed` is out of range.
    """
    check_fields(EvaluationConfig(episodes=episodes, num_envs=num_envs))
    env = policy.config.env
    if greedy and env.atari_game is not None and GAMES[env.atari_game].waits_for_fire:
        note = "greedy play can stand still: %s may wait for FIRE, for example after a lost life"
        logging.getLogger(__name__).warning(note, env.game_name)
    quota = np.bincount(np.arange(episodes) % num_envs)  # games of each environment
    counter = EpisodeCounter(len(quota))
    games = []
    next_line_at = time.monotonic() + SECONDS_BETWEEN_LINES
    with contextlib.closing(make_pool(env, len(quota), seed=seed)) as pool:
        steps = play(policy, pool, seed=seed, greedy=greedy)
        for number, (step, _) in enumerate(steps, start=-1):  # -1: the start
            if cancelled():
                raise CancelledError
            for game in counter.count(step, number):
                if quota[game.env]:
                    quota[game.env] -= 1
                    games.append(game)
                    line = f"{len(games):>6} {game.episode_return:>12,.1f} {game.length:>10,}"
                    say(f"{line}  cut off at {env.time_limit}" if game.truncated else line)
            if len(games) == episodes:
                break
            if time.monotonic() > next_line_at:
                next_line_at += SECONDS_BETWEEN_LINES
                most = counter.so_far[quota > 0, 1].max()
                say(f"{np.sum(quota > 0)} games in progress, longest {most:,.0f} env steps")
    return EvaluationResult(tuple(games))
