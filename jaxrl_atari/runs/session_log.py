"""Session log: a session's log points, and the graphs that are drawn while it trains.

It reads the metrics of an update once the update has ended, and stops training if one is not finite.
"""

import contextlib
import math
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import numpy as np
import psutil

from jaxrl_atari.config import LogConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.ppo import Metrics
from jaxrl_atari.runs.columns import COMPILED, TIME_COLUMNS
from jaxrl_atari.runs.progress import Every, Progress
from jaxrl_atari.runs.writers import Writer


class NonFiniteError(UserError):
    """A loss or a parameter that is not finite: training cannot continue."""


class SessionLog:
    """Messages, log points and progress of a session. SPS excludes the first iteration, which may compile.

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
        self._writers, self._progress, self.settle = writers, progress, settle
        self.monitor: Callable[[], Mapping[str, float]] = dict  # the machine's figures for a log point
        self._session, self._dir, self._draws_graphs = session, session_dir, config.graphs
        self._every = Every(config.every_env_steps, progress.env_steps)
        self._began_at = time.time()
        self._start = time.monotonic()
        self._point: tuple[float, int] | None = None  # start of the next log point's SPS
        self.compiling = True
        self.first_step_at = math.nan  # `time.time()` when the first actions were sent
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

    def evaluation(self, env_steps: int, mean: float, std: float) -> None:
        """Writes an evaluation during training."""
        for writer in self._writers:
            writer.evaluation(env_steps, mean, std)

    def wall_seconds(self) -> float:
        """Seconds of training, with those before a resume, without the first iteration's."""
        return self._progress.earlier_seconds + (0.0 if self.compiling else time.monotonic() - self._start)

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
            self.first_step_at = first_step_at
            self.flush()
            now = time.monotonic()
            self.message(
                f"first env step {self._since_start(first_step_at)}; first rollout and update took"
                f" {now - self._start:.1f} s, {COMPILED}"
            )
            self._start = now
            self.compiling = False
        else:
            # The first call waits for its update, each later one returns while its update is running. So only from the
            # second call on is there one rollout and one update between two calls.
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
        for metrics in (self._pending, self.settle()):
            self._read(metrics)
        self._pending = None

    def _read(self, metrics: Metrics | None) -> None:
        if metrics is None:
            return
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        self.require_finite(self._checked + 1, values)
        self._checked += 1
        self._progress.optimizer_steps -= round(values.pop("skipped_steps", 0.0))  # `count` has counted them
        self._metrics.append(values)

    def require_finite(self, update: int, values: Mapping[str, float]) -> None:
        """Raises `NonFiniteError` if a value of update number `update` is not finite."""
        if bad := ", ".join(f"{name} = {value}" for name, value in values.items() if not math.isfinite(value)):
            raise NonFiniteError(
                f"update {update:,}: {bad}; training stopped at {self._progress.env_steps:,} env steps, and the last"
                " checkpoint is kept: lower ppo.learning_rate or ppo.max_grad_norm and use --resume"
            )

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
            wait: return when they are drawn. Otherwise nothing is drawn while an earlier process still draws.
        """
        if wait and self._graphs is not None:
            self._graphs.wait()
        busy = self._graphs is not None and self._graphs.poll() is None
        run_dir = self._dir.parent
        if self._draws_graphs and self.row and not busy and (run_dir / "config.json").is_file():
            command = [sys.executable, "-m", "jaxrl_atari.plots", str(run_dir)]
            quiet = subprocess.DEVNULL
            with contextlib.suppress(OSError):  # too many processes: training must not fail for its graphs
                self._graphs = subprocess.Popen(
                    command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
                )  # a session of its own, which Ctrl-C does not reach
        if wait and self._graphs is not None:
            self._graphs.wait()


def _means(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each metric over updates; empty where there was none."""
    return {name: float(np.mean([values[name] for values in metrics])) for name in (metrics[0] if metrics else ())}
