"""One session: act -> update -> log -> checkpoint, with one seed, until its budget is spent."""

import math
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_atari.checkpoint import Checkpoints
from jaxrl_atari.config import Config
from jaxrl_atari.devices import place
from jaxrl_atari.errors import UserError
from jaxrl_atari.loggers import Writer, make_writers
from jaxrl_atari.monitor import Monitor
from jaxrl_atari.ppo import Metrics
from jaxrl_atari.trainer import Trainer, abstract_arrays


class NonFiniteError(UserError):
    """A loss that is not a number: training cannot go on."""


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a wish to stop after the update under way; a second one ends at once."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def __enter__(self) -> "StopRequest":
        self._before = {}
        if threading.current_thread() is threading.main_thread():  # elsewhere Python takes no signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def _handle(self, number: int, frame: Any) -> None:
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class SessionResult:
    """How a session ended."""

    session_dir: Path
    env_steps: int
    return_ma: float  # NaN before the first finished game
    sps: float  # mean, without the first iteration


def run_session(config: Config, session_dir: Path, session: int = 0, *, resume: bool = False) -> SessionResult:
    """Trains session `session` of a trial, with seed `config.seed + session`, and writes all its files.

    Args:
        session_dir: where metrics, events and checkpoints go; made if it is not there.
        resume: go on from the latest checkpoint, if there is one.

    Raises:
        UserError: the loss became non-finite (the last checkpoint before is kept), or a file cannot be used.
        KeyboardInterrupt: after SIGINT or SIGTERM, once the last checkpoint is written.
    """
    seed = config.seed + session
    placement = place(config.devices)
    checkpoints = Checkpoints(session_dir)
    latest = checkpoints.latest_step() if resume else None
    restored = meta = None
    if latest is not None:
        meta = checkpoints.read_meta(latest)
        restored = (checkpoints.restore(latest, abstract_arrays(config, meta["num_actions"], placement.home)), meta)

    trainer = Trainer(config, seed, placement, restored)
    writers = make_writers(config, session_dir, label=f"session {session}", start_env_steps=trainer.env_steps)
    log = SessionLog(writers, checkpoints, trainer, session, session_dir, meta)
    log.message(f"device: {placement.learner[0]} ({placement.reason})")
    if meta is not None:
        log.message(_resume_message(config, trainer, meta))
    try:
        with Monitor(sorted({*placement.learner, *placement.actors}, key=str), log.message) as log.monitor:
            _train(trainer, log)
        return log.result()
    finally:
        trainer.close()
        checkpoints.close()
        for writer in writers:
            writer.close()


def _train(trainer: Trainer, log: "SessionLog") -> None:
    """The loop. With `devices.check` nothing moves between host and devices that was not told to, once compiled."""
    guard = "disallow" if trainer.config.devices.check else "allow"
    with StopRequest() as stop:
        while not trainer.config.is_spent(trainer.env_steps) and stop.signal is None:
            with jax.transfer_guard("allow" if log.compiling else guard):
                metrics = trainer.iterate()
            log.after_update(metrics)
        log.finish()
        if stop.signal is not None:
            raise KeyboardInterrupt


def _resume_message(config: Config, trainer: Trainer, meta: dict[str, Any]) -> str:
    text = f"resumed at {trainer.env_steps:,} env steps (update {trainer.updates:,}); the games start anew"
    before = meta["config"]["total_env_steps"]
    if before != config.total_env_steps:
        text += (
            f"; budget {before:,} -> {config.total_env_steps:,} env steps: the learning rate goes on at"
            f" {trainer.learning_rate:.3g}, on the line that reaches zero at the new budget"
        )
    return text


class SessionLog:
    """Log points, progress and checkpoints of a session. SPS leave out the first iteration, which compiles."""

    def __init__(
        self,
        writers: list[Writer],
        checkpoints: Checkpoints,
        trainer: Trainer,
        session: int,
        session_dir: Path,
        meta: dict[str, Any] | None,
    ):
        self._writers, self._checkpoints, self._trainer = writers, checkpoints, trainer
        self._session, self._dir = session, session_dir
        self.monitor: Monitor | None = None
        self._graphs: subprocess.Popen | None = None
        self._log = trainer.config.log
        self.best_score: float | None = meta["best_score"] if meta else None
        self._earlier_seconds: float = meta["wall_seconds"] if meta else 0.0
        self._start = self._point = (time.monotonic(), trainer.env_steps)
        self.compiling = True
        self._pending: Metrics | None = None  # metrics of the newest update, still on the device
        self._metrics: list[dict[str, float]] = []  # of the updates since the last log point
        self.row: dict[str, float] = {}
        self._saved_at = trainer.env_steps if meta else None
        self._next_log = _next_multiple(trainer.env_steps, self._log.every_env_steps)
        self._next_checkpoint = _next_multiple(trainer.env_steps, self._log.checkpoint_every_env_steps)

    def message(self, text: str) -> None:
        """A line for the user."""
        for writer in self._writers:
            writer.message(text)

    def wall_seconds(self) -> float:
        """Seconds of training, those before a resume included, the first iteration's not."""
        return self._earlier_seconds + (0.0 if self.compiling else time.monotonic() - self._start[0])

    def after_update(self, metrics: Metrics | None) -> None:
        """Takes the metrics of an update that may still be running; those of the one before are read now."""
        trainer = self._trainer
        self._read(self._pending)
        self._pending = metrics
        if self.compiling:
            jax.block_until_ready(metrics)
            now = time.monotonic()
            self.message(f"first rollout and update after {now - self._start[0]:.1f} s, compilation included")
            self._start = self._point = (now, trainer.env_steps)
            self.compiling = False
        for writer in self._writers:
            writer.progress(trainer.env_steps, self.row)
        if trainer.env_steps >= self._next_log and self._metrics:
            self._next_log = _next_multiple(trainer.env_steps, self._log.every_env_steps)
            self._log_point()
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
                f"update {self._trainer.updates:,} at {self._trainer.env_steps:,} env steps: {bad}; training stopped and"
                " the last checkpoint is kept: lower ppo.learning_rate or ppo.max_grad_norm and go on with --resume"
            )
        self._metrics.append(values)

    def _log_point(self) -> None:
        trainer, now = self._trainer, time.monotonic()
        seconds, env_steps = now - self._point[0], trainer.env_steps - self._point[1]
        self._point = (now, trainer.env_steps)
        self.row = {
            "env_steps": trainer.env_steps,
            "updates": trainer.updates,
            "optimizer_steps": trainer.updates * trainer.config.ppo.epochs * trainer.config.num_minibatches,
            "wall_seconds": self.wall_seconds(),
            "sps": env_steps / seconds if env_steps else math.nan,
            **trainer.statistics.log_point(),
            "learning_rate": trainer.learning_rate,
            **{name: float(np.mean([metrics[name] for metrics in self._metrics])) for name in self._metrics[0]},
            **(self.monitor.read() if self.monitor else {}),
        }
        self._metrics.clear()
        for writer in self._writers:
            writer.write(self.row)

    def finish(self) -> None:
        """The end: a last log point and a last checkpoint."""
        self._flush()
        if self._metrics:
            self._log_point()
        self.checkpoint()
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


def _next_multiple(value: int, interval: int) -> int:
    return (value // interval + 1) * interval
