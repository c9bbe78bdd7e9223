"""Session log: a session's progress, its log points, and the graphs that are drawn while it trains.

The log receives values; it knows neither the learner nor the environments.
"""

import math
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil

from jaxrl_atari.cli.errors import UserError
from jaxrl_atari.config import LogConfig
from jaxrl_atari.run_dir.columns import COMPILED, TIME_COLUMNS
from jaxrl_atari.run_dir.writers import Writer

Metrics = Mapping[str, Any]


class NonFiniteError(UserError):
    """A loss that is not a number: training cannot continue."""


class EpisodeStatistics:
    """Returns of full games and their moving averages; `return_ma` is the figure that scores are quoted in."""

    WINDOW = 100

    def __init__(self) -> None:
        self.episodes = 0
        self.returns: deque[float] = deque(maxlen=self.WINDOW)  # of the last 100 finished games
        self.lengths: deque[float] = deque(maxlen=self.WINDOW)
        self.points: deque[float] = deque(maxlen=self.WINDOW)  # of the last 100 log points

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

    def score(self) -> float:
        """The score by which the best checkpoint is kept: the mean return of the last 100 games. Updates the best."""
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
        """Whether an interval ended since the last time that this was true."""
        if env_steps < self._next:
            return False
        self._next = self._after(env_steps)
        return True


class SessionLog:
    """Messages, log points and progress of a session. SPS leave out the first iteration, which compiles.

    Args:
        settle: waits for an update under way, if there is one, and returns its metrics.
    """

    def __init__(
        self,
        writers: Sequence[Writer],
        config: LogConfig,
        progress: Progress,
        session: int,
        session_dir: Path,
        settle: Callable[[], Metrics | None],
    ):
        self._writers, self._progress, self._settle = writers, progress, settle
        self.monitor: Callable[[], Mapping[str, float]] = dict  # the machine's figures for a log point
        self._session, self._dir, self._draws_graphs = session, session_dir, config.graphs
        self._every = Every(config.every_env_steps, progress.env_steps)
        self._began_at = time.time()
        self._start = (time.monotonic(), progress.env_steps)
        self._point: tuple[float, int] | None = None  # start of the next log point's SPS
        self.compiling = True
        self._pending: Metrics | None = None  # of the newest update, still on the device
        self._checked = progress.updates  # updates whose metrics were read and are finite
        self._metrics: list[dict[str, float]] = []  # of the updates since the last log point
        self._acting = np.zeros(2)  # seconds since the last log point: waiting for the emulators, the policy
        self._graphs: subprocess.Popen | None = None
        self.row: dict[str, float] = {}

    def message(self, text: str) -> None:
        """A line for the user."""
        for writer in self._writers:
            writer.message(text)

    def wall_seconds(self) -> float:
        """Seconds of training, those before a resume included, the first iteration's not."""
        return self._progress.earlier_seconds + (0.0 if self.compiling else time.monotonic() - self._start[0])

    def sps(self) -> float:
        """Mean SPS since the first iteration."""
        return (self._progress.env_steps - self._start[1]) / (time.monotonic() - self._start[0])

    def after_update(
        self,
        metrics: Metrics | None,
        learning_rate: float,
        first_step_at: float,
        acting: tuple[float, float] = (0.0, 0.0),
    ) -> None:
        """Writes a log point where one is due.

        Args:
            metrics: of an update that may still be running; they are read at the next call.
            learning_rate: of the next update.
            first_step_at: when the rollout made its first env step, as `time.time()`.
            acting: seconds of the rollout that went to waiting for the emulators, and to the policy.
        """
        self._read(self._pending)
        self._pending = metrics
        if self.compiling:
            self.flush()
            now = time.monotonic()
            self.message(
                f"first env step {self._since_start(first_step_at)}; first rollout and update took"
                f" {now - self._start[0]:.1f} s, {COMPILED}"
            )
            self._start = (now, self._progress.env_steps)
            self.compiling = False
        else:
            # Each of these calls comes while an update is running, so that between two of them there are as many
            # updates as rollouts. Between the first call, which waits, and the second there is one rollout more.
            if self._point is None:
                self._point = time.monotonic(), self._progress.env_steps
            else:
                self._acting += acting
            for writer in self._writers:
                writer.progress(self._progress.env_steps, self.row)
        if self._every.due(self._progress.env_steps):
            self._log_point(time.monotonic(), learning_rate, keep=True)

    def _since_start(self, at: float) -> str:
        text = f"{at - psutil.Process().create_time():.1f} s after the start of the process"
        return text if self._session == 0 else f"{text}, {at - self._began_at:.1f} s after that of the session"

    def flush(self) -> None:
        """Waits for the newest update and checks its metrics."""
        for metrics in (self._pending, self._settle()):
            self._read(metrics)
        self._pending = None

    def _read(self, metrics: Metrics | None) -> None:
        if metrics is None:
            return
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not all(map(math.isfinite, values.values())):
            bad = ", ".join(f"{name} = {value}" for name, value in values.items() if not math.isfinite(value))
            raise NonFiniteError(
                f"update {self._checked + 1:,}: {bad}; training stopped at {self._progress.env_steps:,} env steps, and"
                " the last checkpoint is kept: lower ppo.learning_rate or ppo.max_grad_norm and use --resume"
            )
        self._checked += 1
        self._progress.optimizer_steps -= round(values.pop("skipped_steps", 0.0))  # `count` has counted them
        self._metrics.append(values)

    def _log_point(self, now: float, learning_rate: float, keep: bool) -> None:
        progress, sps, shares = self._progress, math.nan, {}
        if self._point is not None and progress.env_steps > self._point[1]:
            elapsed = now - self._point[0]
            sps = (progress.env_steps - self._point[1]) / elapsed
            emulators, policy = (100.0 * self._acting / elapsed).tolist()
            shares = dict(zip(TIME_COLUMNS, (emulators, policy, 100.0 - emulators - policy), strict=True))
            self._point = (now, progress.env_steps)
            self._acting[:] = 0.0
        self.row = {
            "env_steps": progress.env_steps,
            "updates": progress.updates,
            "optimizer_steps": progress.optimizer_steps,
            "wall_seconds": self.wall_seconds(),
            "sps": sps,
            **progress.statistics.log_point(keep),
            "learning_rate": learning_rate,
            **_means(self._metrics),
            **self.monitor(),
            **shares,
        }
        self._metrics.clear()
        try:
            for writer in self._writers:
                writer.write(self.row)
        except OSError as error:
            error.filename = error.filename or str(self._dir)  # a full disk: writing to an open file names no file
            raise

    def last_point(self, learning_rate: float) -> None:
        """Writes what came after the last log point."""
        now = time.monotonic()
        self.flush()
        if self._metrics and self._progress.env_steps != self.row.get("env_steps"):
            self._log_point(now, learning_rate, keep=False)

    def draw_graphs(self, wait: bool = False) -> None:
        """Draws the graphs of the whole trial in a process of its own, because drawing takes seconds.

        Args:
            wait: return when they are drawn.
        """
        busy = self._graphs is not None and self._graphs.poll() is None
        run_dir = self._dir.parent
        if self._draws_graphs and self.row and not busy and (run_dir / "config.json").is_file():
            command = [sys.executable, "-m", "jaxrl_atari.plots", str(run_dir)]
            quiet = subprocess.DEVNULL
            self._graphs = subprocess.Popen(
                command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
            )  # a session of its own, which Ctrl-C does not reach
        if wait and self._graphs is not None:
            self._graphs.wait()


def _means(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each metric over updates; empty where there was none."""
    return {name: float(np.mean([values[name] for values in metrics])) for name in (metrics[0] if metrics else ())}
