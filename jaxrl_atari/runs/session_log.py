"""Session log: the log points of a session, and the check that its metrics are finite."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_atari.errors import UserError, require_interface
from jaxrl_atari.runs.columns import COLUMNS, SECTIONS, TIME_COLUMNS
from jaxrl_atari.runs.progress import Progress, due
from jaxrl_atari.runs.writers import Writer

OWN_COLUMNS = COLUMNS.keys() - SECTIONS["losses"]
"""Columns that a log point has anyway. No metric of an update may be named after one."""


class NonFiniteError(UserError):
    """A loss or a parameter is not finite, and training cannot continue."""


class SessionLog:
    """Messages, log points and progress of a session. Its times exclude the first iteration, which may compile.

    A log point has the means of the metrics of all updates since the log point before. The newest update, which
    may still be running, counts in the next log point. So log points do not depend on stops and resumes.

    Args:
        writer: receives messages, log points and progress, such as a `WriterGroup`.
        every_env_steps: env steps between two log points.
        progress: how far the session has come.
        unlogged: metrics of the updates between the newest log point and the checkpoint of a resume.
        optimizer_steps: the train state's counter of gradient steps.
        steps_per_update: gradient steps of an update that skips none.
        monitor: returns the machine's figures for a log point.
        games_so_far: returns the return and env steps of the games in progress, float [B, 2].
    """

    def __init__(
        self,
        writer: Writer,
        every_env_steps: int,
        progress: Progress,
        *,
        unlogged: Sequence[dict[str, float]],
        optimizer_steps: int,
        steps_per_update: int,
        monitor: Callable[[], Mapping[str, float]],
        games_so_far: Callable[[], np.ndarray],
    ):
        self._writer = writer
        self._every_env_steps = every_env_steps
        self._progress = progress
        self._monitor = monitor
        self._games_so_far = games_so_far

        self.is_first_iteration = True  # of this start; it may compile, and its times do not count
        self._start = time.monotonic()  # when this log was made; later, when the first iteration ended

        # Updates.
        self._newest: Callable[[], dict[str, float]] | None = None  # of the newest update; None if it was read
        self._newest_logged: Mapping[str, float] = {}
        self._last_read: dict[str, float] = {}  # metrics of the newest update that was read
        self._unlogged = list(unlogged)  # metrics of the updates that were read since the last log point
        self._optimizer_steps = optimizer_steps  # of all updates that were read
        self._steps_per_update = steps_per_update
        self._skips = False  # whether updates may leave out gradient steps

        # Log points.
        self.row: dict[str, Any] = {}  # the newest of this start
        self._acting_seconds = np.zeros(2)  # since the last one: waiting for the emulators, the policy

    def wall_seconds(self) -> float:
        """Seconds of training, those before a resume included, without the first iteration of each start."""
        since_start = 0.0 if self.is_first_iteration else time.monotonic() - self._start
        return self._progress.earlier_seconds + since_start

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the log, after `read_newest`, as JSON values."""
        return {"wall_seconds": self.wall_seconds(), "unlogged_metrics": self._unlogged}

    def phase(self, name: str) -> None:
        """Says which phase of the first iteration begins. It may compile, which takes seconds or minutes."""
        if self.is_first_iteration:
            self._writer.message(f"{name} ...")

    def after_update(
        self,
        metrics: Callable[[], dict[str, float]],
        learning_rate: float,
        acting: tuple[float, float],
        logged: Mapping[str, float],
    ) -> None:
        """Shows the progress after an update, and writes a log point if one is due.

        Args:
            metrics: metrics of the update, which may still be running; they are read at the next call.
            learning_rate: learning rate of the next update.
            acting: seconds of the rollout that went to waiting for the emulators, and to the policy.
            logged: further columns of the same rollout.
        """
        self.read_newest()
        self._newest = metrics
        self._newest_logged = logged
        if self.is_first_iteration:
            self._skips = "skipped_steps" in metrics()  # waits for the update
            now = time.monotonic()
            self._writer.message(
                f"the first rollout and update took {now - self._start:.1f} s, compilation included"
            )
            self._start = now
            self.is_first_iteration = False
        self._acting_seconds += acting
        self._writer.progress(self._progress.env_steps, self._news())
        if due(self._every_env_steps, self._progress.logged_env_steps, self._progress.env_steps):
            self._progress.logged_env_steps = self._progress.env_steps
            self._write_row(learning_rate)
            self._unlogged = []

    def _news(self) -> dict[str, Any]:
        """What is known now: the newest log point, the games so far, and the newest metrics that were read."""
        return self.row | self._progress.statistics.to_row() | self._games_in_progress() | self._last_read

    def _games_in_progress(self) -> dict[str, float]:
        """The games in progress: number, mean return and mean length; nothing once a game has finished."""
        if self._progress.statistics.episodes:
            return {}
        games = self._games_so_far()
        if not len(games):
            return {}
        mean_return, mean_length = games.mean(axis=0).tolist()
        return {
            "games_in_progress": len(games),
            "return_in_progress": mean_return,
            "length_in_progress": mean_length,
        }

    def read_newest(self) -> None:
        """Waits for the newest update and checks its metrics."""
        if self._newest is None:
            return
        values = self._newest()
        self._optimizer_steps += self._steps_taken(values)
        self._newest = None
        self.require_finite(values)
        values.pop("skipped_steps", None)
        for name in [*values, *self._newest_logged]:
            is_new = name not in OWN_COLUMNS and not (name in values and name in self._newest_logged)
            expected = "another name than those of the columns and metrics that log points have anyway"
            require_interface(is_new, "metric", name, expected, "rename the metric")
        values |= self._newest_logged
        self._unlogged.append(values)
        self._last_read = values

    def require_finite(self, values: Mapping[str, float]) -> None:
        """Raises `NonFiniteError` if a value of the newest update is not finite."""
        if bad := ", ".join(f"{name} = {value}" for name, value in values.items() if not math.isfinite(value)):
            advice = "lower ppo.learning_rate or ppo.max_grad_norm"
            if self._progress.saved_env_steps:
                advice += " and use --resume, which goes on from the last checkpoint"
            raise NonFiniteError(f"{bad}; training stopped at {self._progress.env_steps:,} env steps: {advice}")

    def _write_row(self, learning_rate: float) -> None:
        """Writes a log point at the newest env step."""
        progress = self._progress
        before = self.row
        names = dict.fromkeys(name for each in self._unlogged for name in each)
        counted = {
            "env_steps": progress.env_steps,
            "updates": progress.updates,
            "optimizer_steps": self._optimizer_steps + self._newest_optimizer_steps(),
            "wall_seconds": self.wall_seconds(),
            "unix_time": int(time.time()),
            **progress.statistics.to_row(),
            **self._games_in_progress(),
            "learning_rate": learning_rate,
        }
        means = {name: float(np.mean([each[name] for each in self._unlogged if name in each])) for name in names}
        self.row = {**counted, **means, **self._monitor()}
        if before:
            seconds = self.row["wall_seconds"] - before["wall_seconds"]
            self.row["sps"] = (progress.env_steps - before["env_steps"]) / seconds
            emulators, policy = (100.0 * self._acting_seconds / seconds).tolist()
            shares = (emulators, policy, 100.0 - (emulators + policy))
            self.row |= zip(TIME_COLUMNS, shares, strict=True)
        self._acting_seconds = np.zeros(2)
        self._writer.write(self.row)

    def _newest_optimizer_steps(self) -> int:
        """Gradient steps of the newest update; 0 if it has been read. Waits for an update that may skip some."""
        if self._newest is None:
            return 0
        return self._steps_taken(self._newest() if self._skips else {})

    def _steps_taken(self, metrics: Mapping[str, float]) -> int:
        """Gradient steps of an update with these metrics."""
        return self._steps_per_update - round(metrics.get("skipped_steps", 0))

    def last_point(self, learning_rate: float) -> None:
        """Writes a log point for the steps since the last one. A resumed session drops it."""
        if self._progress.env_steps > self._progress.logged_env_steps:
            self._write_row(learning_rate)
