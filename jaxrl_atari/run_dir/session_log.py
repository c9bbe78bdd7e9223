"""What a session tells and keeps: log points, progress, checkpoints, graphs, evaluations."""

import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import psutil

from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate.during_training import Evaluator
from jaxrl_atari.hardware.monitor import Monitor
from jaxrl_atari.ppo import Metrics
from jaxrl_atari.run_dir.checkpoints import Checkpoints
from jaxrl_atari.run_dir.writers import Writer
from jaxrl_atari.trainer import Trainer


class NonFiniteError(UserError):
    """A loss that is not a number: training cannot go on."""


@dataclass(frozen=True)
class SessionResult:
    """How a session ended."""

    session_dir: Path
    env_steps: int
    return_ma: float  # NaN before the first finished game
    sps: float  # mean, without the first iteration


class SessionLog:
    """Log points, progress and checkpoints of a session. SPS leave out the first iteration, which compiles.

    Args:
        began_at: when the session began, as `time.time()`.
        meta: of the checkpoint that the session goes on from.
    """

    def __init__(
        self,
        writers: Sequence[Writer],
        checkpoints: Checkpoints | None,
        trainer: Trainer,
        session: int,
        session_dir: Path,
        began_at: float,
        meta: dict[str, Any] | None,
    ):
        self._writers, self._checkpoints, self._trainer = writers, checkpoints, trainer
        self._session, self._dir, self._began_at = session, session_dir, began_at
        self.monitor: Monitor | None = None
        self.evaluator: Evaluator | None = None
        self._graphs: subprocess.Popen | None = None
        self._log = trainer.config.log
        self.best_score: float | None = meta["best_score"] if meta else None
        self._earlier_seconds: float = meta["wall_seconds"] if meta else 0.0
        self._start = (time.monotonic(), trainer.env_steps)
        self._point: tuple[float, int] | None = None  # where the SPS of the next log point begin
        self.compiling = True
        self._pending: Metrics | None = None  # metrics of the newest update, still on the device
        self._checked = trainer.updates  # updates whose metrics were read, and are finite
        self._metrics: list[dict[str, float]] = []  # of the updates since the last log point
        self.row: dict[str, float] = {}
        self._saved_at = trainer.env_steps if meta else None
        self._next_log = _next_multiple(trainer.env_steps, self._log.every_env_steps)
        self._next_checkpoint = _next_multiple(trainer.env_steps, self._log.checkpoint_every_env_steps)
        self._evaluate_every = trainer.config.evaluation.every_env_steps
        self._next_evaluation = _next_multiple(trainer.env_steps, max(self._evaluate_every, 1))

    def message(self, text: str) -> None:
        """A line for the user."""
        for writer in self._writers:
            writer.message(text)

    def wall_seconds(self) -> float:
        """Seconds of training, those before a resume included, the first iteration's not."""
        return self._earlier_seconds + (0.0 if self.compiling else time.monotonic() - self._start[0])

    def _seconds_to_first_step(self) -> str:
        """From the start of the process, and from that of the session where another one came before it."""
        at = self._trainer.first_step_at or math.nan
        text = f"{at - psutil.Process().create_time():.1f} s after the start of the process"
        return text if self._session == 0 else f"{text}, {at - self._began_at:.1f} s after that of the session"

    def after_update(self, metrics: Metrics | None) -> None:
        """Takes the metrics of an update that may still be running; those of the one before are read now."""
        trainer = self._trainer
        self._read(self._pending)
        self._pending = metrics
        if self.compiling:
            self._flush()
            now = time.monotonic()
            self.message(
                f"first env step {self._seconds_to_first_step()}; first rollout and update took"
                f" {now - self._start[0]:.1f} s, compilation included"
            )
            self._start = (now, trainer.env_steps)
            self.compiling = False
        else:
            # Each of these calls comes while an update is running: from one to another there are as many updates as
            # rollouts. From the first call, which waits, to the second there is a rollout more.
            self._point = self._point or (time.monotonic(), trainer.env_steps)
            for writer in self._writers:
                writer.progress(trainer.env_steps, self.row)
        if self.evaluator is not None:
            self.evaluator.poll()
            if trainer.env_steps >= self._next_evaluation and not self.evaluator.busy:
                self._next_evaluation = _next_multiple(trainer.env_steps, self._evaluate_every)
                self._flush()
                self.evaluator.start(trainer.learner.params(), trainer.env_steps)
        if trainer.env_steps >= self._next_log:
            self._next_log = _next_multiple(trainer.env_steps, self._log.every_env_steps)
            self._log_point(time.monotonic(), keep=True)
        if trainer.env_steps >= self._next_checkpoint:
            self._next_checkpoint = _next_multiple(trainer.env_steps, self._log.checkpoint_every_env_steps)
            self.checkpoint()

    def _read(self, metrics: Metrics | None) -> None:
        if metrics is None:
            return
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        if not all(map(math.isfinite, values.values())):
            bad = ", ".join(f"{name} = {value}" for name, value in values.items() if not math.isfinite(value))
            raise NonFiniteError(
                f"update {self._checked + 1:,}: {bad}; training stopped at {self._trainer.env_steps:,} env steps, the"
                " last checkpoint is kept: lower ppo.learning_rate or ppo.max_grad_norm and go on with --resume"
            )
        self._checked += 1
        self._metrics.append(values)

    def _log_point(self, now: float, keep: bool) -> None:
        trainer = self._trainer
        sps = math.nan
        if self._point is not None and trainer.env_steps > self._point[1]:
            sps = (trainer.env_steps - self._point[1]) / (now - self._point[0])
            self._point = (now, trainer.env_steps)
        self.row = {
            "env_steps": trainer.env_steps,
            "updates": trainer.updates,
            "optimizer_steps": trainer.optimizer_steps,
            "wall_seconds": self.wall_seconds(),
            "sps": sps,
            **trainer.statistics.log_point(keep),
            "learning_rate": trainer.learning_rate,
            **_means(self._metrics),
            **(self.monitor.read() if self.monitor else {}),
        }
        self._metrics.clear()
        for writer in self._writers:
            writer.write(self.row)

    def finish(self) -> None:
        """The end: a last log point and a last checkpoint, on disk before anything else is waited for."""
        now = time.monotonic()
        self._flush()
        if self._metrics and self._trainer.env_steps != self.row.get("env_steps"):
            self._log_point(now, keep=False)
        self.checkpoint()
        if self._checkpoints is not None:
            self._checkpoints.wait()
        if self.evaluator is not None:
            self.evaluator.settle()
        if self._graphs is not None:
            self._graphs.wait()

    def checkpoint(self) -> None:
        """Saves everything, once the newest update is known to be sound. Returns while the files are being written."""
        self._flush()
        trainer = self._trainer
        score = trainer.statistics.mean_return()
        if not math.isnan(score):
            self.best_score = score if self.best_score is None else max(score, self.best_score)
        meta = {
            **trainer.meta(),
            "session": self._session,
            "wall_seconds": self.wall_seconds(),
            "best_score": self.best_score,
        }
        if self._checkpoints is None:
            return
        if trainer.env_steps != self._saved_at:
            self._checkpoints.save(trainer.env_steps, trainer.arrays(), meta, score)
            self._saved_at = trainer.env_steps
        self._draw_graphs()

    def _flush(self) -> None:
        """Waits for the newest update and checks its metrics."""
        for metrics in (self._pending, self._trainer.settle()):
            self._read(metrics)
        self._pending = None

    def _draw_graphs(self) -> None:
        """Draws the graphs of the whole trial, in a process of its own: drawing takes seconds."""
        run_dir = self._dir.parent
        busy = self._graphs is not None and self._graphs.poll() is None
        if self._log.graphs and self.row and not busy and (run_dir / "config.json").is_file():
            command = [sys.executable, "-m", "jaxrl_atari.plots", str(run_dir)]
            quiet = subprocess.DEVNULL
            self._graphs = subprocess.Popen(
                command, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
            )  # a session of its own: Ctrl-C is not for it

    def result(self) -> SessionResult:
        """The session as it stands."""
        seconds, env_steps = time.monotonic() - self._start[0], self._trainer.env_steps - self._start[1]
        return SessionResult(
            self._dir, self._trainer.env_steps, self.row.get("return_ma", math.nan), env_steps / seconds
        )


def _means(metrics: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each metric over updates; empty where there was none."""
    return {name: float(np.mean([values[name] for values in metrics])) for name in (metrics[0] if metrics else ())}


def _next_multiple(value: int, interval: int) -> int:
    return (value // interval + 1) * interval
