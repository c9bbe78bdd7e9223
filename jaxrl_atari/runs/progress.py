"""How far a session has come: counters, and the returns of its games.

How the return of a game reaches the table of results: an `EnvGroup` (`rollout.py`) counts the rewards of a game
and gives a `FinishedGame` at its end; `EpisodeStatistics` makes `return_mean` and `return_ma` of these;
`SessionLog` writes them into metrics.csv; and the score of a trial (`report/summary.py`) is the mean over its
sessions of the last `return_ma`.
"""

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxrl_atari.config import Config
from jaxrl_atari.envs.pool import FinishedGame

RETURN_MA_ENV_STEPS = 1_000_000
"""`return_ma` is a mean over at most so many env steps."""


def return_ma_window(total_env_steps: int) -> int:
    """The env steps over which `return_ma` is a mean: the last tenth of the budget, at most the last 1M."""
    return min(max(total_env_steps // 10, 1), RETURN_MA_ENV_STEPS)


def point_interval(env_steps: int) -> int:
    """The intervals of env steps that give a point each to the integral of `return_ma`.

    They are a hundredth to a thousandth of the env steps so far, at most 10,000: fine enough for the window of any
    budget, and the same for all, so that a run can go on with another budget.
    """
    return min(max(10 ** (len(str(env_steps)) - 3), 1), 10_000)


def due(interval: int, before: int, now: int) -> bool:
    """Whether a multiple of `interval` lies in (before, now], all in env steps. False with an interval of 0."""
    return interval > 0 and now // interval > before // interval


def evaluation_due(config: Config, evaluated_env_steps: int, env_steps: int) -> bool:
    """Whether an evaluation is due after `env_steps`, if the newest one started after `evaluated_env_steps`.

    An evaluation at the end of the budget is due, although the last update may end just before it.
    """
    reached = max(env_steps, config.total_env_steps) if config.is_spent(env_steps) else env_steps
    return env_steps > evaluated_env_steps and due(config.evaluation.every_env_steps, evaluated_env_steps, reached)


class EpisodeStatistics:
    """Returns of full games and their moving averages; `return_ma` is the figure that scores are quoted in.

    `return_mean` is the mean return of the last 100 finished games. `return_ma` is the mean of `return_mean` over
    a window of env steps, or since the first finished game if that is less: an integral over env steps. The points
    of the integral are the first end of an update in each `point_interval`, and the newest end. Between points,
    `return_mean` is taken as linear. So `return_ma` depends neither on how often metrics are logged nor on the
    number of environments.

    Args:
        window: env steps of the window, as of `return_ma_window`.
        episodes, returns, lengths, points: what `state` returned; for a new session, those of no game.
    """

    def __init__(
        self,
        window: int = RETURN_MA_ENV_STEPS,
        *,
        episodes: int = 0,
        returns: Iterable[float] = (),
        lengths: Iterable[float] = (),
        points: Iterable[tuple[int, float]] = (),
    ):
        self.window = window
        self.episodes = episodes
        self.returns = deque(returns, maxlen=100)  # returns of the last 100 finished games
        self.lengths = deque(lengths, maxlen=100)
        self.points = deque(points)  # env steps and return_mean, for the largest window

    def count(self, games: Iterable[FinishedGame], env_steps: int) -> None:
        """Counts an update: the games that ended in its rollout, and the env steps so far."""
        for game in games:
            self.episodes += 1
            self.returns.append(game.episode_return)
            self.lengths.append(game.length)
        if not self.returns:
            return
        if len(self.points) > 1:
            interval = point_interval(self.points[-1][0])
            if self.points[-1][0] // interval == self.points[-2][0] // interval:
                self.points.pop()  # a point stays only if it is the first of its interval
        self.points.append((env_steps, self.mean_return()))
        while len(self.points) > 1 and self.points[1][0] <= env_steps - RETURN_MA_ENV_STEPS:
            self.points.popleft()

    def mean_return(self) -> float:
        """Mean return of the last 100 finished games; NaN before the first."""
        return float(np.mean(self.returns)) if self.returns else math.nan

    def return_ma(self) -> float:
        """`return_ma` after the newest update; NaN before the first finished game."""
        if not self.points:
            return math.nan
        steps, means = np.array(self.points, np.float64).T
        start = max(steps[0], steps[-1] - self.window)
        if start == steps[-1]:
            return means[-1].item()
        inside = np.append(start, steps[steps > start])
        return float(np.trapezoid(np.interp(inside, steps, means), inside) / (steps[-1] - start))

    def to_row(self) -> dict[str, float]:
        """Columns of a log point."""
        return {
            "episodes": self.episodes,
            "return_mean": self.mean_return(),
            "return_ma": self.return_ma(),
            "episode_length": float(np.mean(self.lengths)) if self.lengths else math.nan,
        }

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON values."""
        return {
            "episodes": self.episodes,
            "returns": list(self.returns),
            "lengths": list(self.lengths),
            "points": list(self.points),
        }


class Progress:
    """How far a session has come.

    Args:
        meta: meta of the checkpoint that the session resumes from; empty for a new session.
        window: env steps of the window of `return_ma`.
    """

    def __init__(self, meta: dict[str, Any], window: int = RETURN_MA_ENV_STEPS):
        self.env_steps: int = meta.get("env_steps", 0)
        self.updates: int = meta.get("updates", 0)
        self.steps_per_env: int = meta.get("steps", 0)  # with auto-reset steps
        self.saved_env_steps = self.env_steps  # of the newest checkpoint
        self.logged_env_steps: int = meta.get("logged_env_steps", 0)  # of the newest log point
        self.evaluated_env_steps: int = meta.get("evaluated_env_steps", 0)  # when the newest evaluation started
        self.earlier_seconds: float = meta.get("wall_seconds", 0.0)  # of training, before this start
        self.statistics = EpisodeStatistics(window, **meta.get("statistics", {}))

    def count(self, env_steps: int, games: Iterable[FinishedGame], steps_per_env: int) -> None:
        """Counts a rollout and its update.

        Args:
            env_steps: its env steps.
            games: the games that ended in it.
            steps_per_env: its steps of each environment, with auto-reset steps.
        """
        self.env_steps += env_steps
        self.updates += 1
        self.steps_per_env += steps_per_env
        self.statistics.count(games, self.env_steps)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON values."""
        return {
            "env_steps": self.env_steps,
            "updates": self.updates,
            "steps": self.steps_per_env,
            "statistics": self.statistics.state(),
            "logged_env_steps": self.logged_env_steps,
            "evaluated_env_steps": self.evaluated_env_steps,
        }
