"""How far a session has come: counters, and the returns of its games."""

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from jaxrl_atari.report.metrics import WINDOW


class EpisodeStatistics:
    """Returns of full games and their moving averages; `return_ma` is the figure that scores are quoted in."""

    def __init__(self) -> None:
        self.episodes = 0
        self.returns: deque[float] = deque(maxlen=100)  # of the last 100 finished games
        self.lengths: deque[float] = deque(maxlen=100)
        self.points: deque[float] = deque(maxlen=WINDOW)  # of the last 100 log points

    def game_over(self, episode_return: float, length: int) -> None:
        """Counts a finished game: the sum of its raw rewards, and its length in env steps."""
        self.episodes += 1
        self.returns.append(episode_return)
        self.lengths.append(length)

    def mean_return(self) -> float:
        """Mean return of the last 100 finished games; NaN before the first."""
        return float(np.mean(self.returns)) if self.returns else float("nan")

    def log_point(self, keep: bool = True) -> dict[str, float]:
        """A log point: the mean of the last 100 games; `return_ma` is the mean of the last 100 such points.

        Args:
            keep: False for a point off the interval, which later ones leave out.
        """
        mean, points = self.mean_return(), self.points.copy()
        if self.returns:
            points.append(mean)
        if keep:
            self.points = points
        return {
            "episodes": self.episodes,
            "return_mean": mean,
            "return_ma": float(np.mean(points)) if points else float("nan"),
            "episode_length": float(np.mean(self.lengths)) if self.lengths else float("nan"),
        }

    def to_dict(self) -> dict[str, Any]:
        """The statistics as JSON values, for a checkpoint."""
        return {name: list(v) if isinstance(v, deque) else v for name, v in vars(self).items()}

    def load(self, values: dict[str, Any]) -> None:
        """Restores what `to_dict` returned."""
        self.episodes = values["episodes"]
        for name in ("returns", "lengths", "points"):
            getattr(self, name).extend(values[name])


class Progress:
    """How far a session has come.

    Args:
        meta: of the checkpoint that the session resumes from.
    """

    def __init__(self, meta: dict[str, Any] | None = None, optimizer_steps: int = 0):
        self.env_steps: int = meta["env_steps"] if meta else 0
        self.updates: int = meta["updates"] if meta else 0
        self.optimizer_steps = optimizer_steps
        self.best_score: float | None = meta["best_score"] if meta else None
        self.earlier_seconds: float = meta["wall_seconds"] if meta else 0.0
        self.statistics = EpisodeStatistics()
        if meta:
            self.statistics.load(meta["statistics"])

    def count(self, env_steps: int, games: Iterable[tuple[float, int]], optimizer_steps: int) -> None:
        """Adds a rollout and its update; `games` are the returns and lengths of the games that ended in it."""
        self.env_steps += env_steps
        self.updates += 1
        self.optimizer_steps += optimizer_steps
        for episode_return, length in games:
            self.statistics.game_over(episode_return, length)

    def record_score(self) -> float:
        """The score by which the best checkpoint is kept, the mean return of the last 100 games; updates the best."""
        score = self.statistics.mean_return()
        if not math.isnan(score):
            self.best_score = score if self.best_score is None else max(score, self.best_score)
        return score


class Every:
    """True once per interval: `due(n)` is true at the first n in each new interval of env steps. 0: never."""

    def __init__(self, interval: int, start: int):
        self._interval = interval
        self._next = self._after(start) if interval else math.inf

    def _after(self, env_steps: int) -> int:
        return (env_steps // self._interval + 1) * self._interval

    def due(self, env_steps: int) -> bool:
        """Whether an interval has ended since `due` last returned True."""
        if env_steps < self._next:
            return False
        self._next = self._after(env_steps)
        return True
