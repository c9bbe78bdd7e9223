"""Evaluation while training goes on: full games with a snapshot of the parameters, on a device of their own."""

import csv
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from jaxrl_atari.evaluate.policy import EvaluationResult, Policy, evaluate
from jaxrl_atari.trainer import Trainer, make_network

FILE = "evaluations.csv"
COLUMNS = ["env_steps", "episodes", "mean", "std"]


class Evaluator:
    """Plays in a thread, one evaluation at a time; the learner goes on meanwhile.

    Results go to SESSION_DIR/evaluations.csv (env_steps, episodes, mean, std) and, as a line, to `say`. Rows beyond
    the env steps at which the session goes on are dropped.
    """

    def __init__(self, trainer: Trainer, device: jax.Device, session_dir: Path, say: Callable[[str], None]):
        self._config, self._seed = trainer.config, trainer.seed
        self._device, self._dir, self._say = device, session_dir, say
        self._network = make_network(trainer.config, trainer.num_actions, device.platform)
        self._table = session_dir / FILE
        kept = []
        if self._table.exists():
            with self._table.open(newline="", encoding="utf-8") as file:
                rows = [row for row in csv.reader(file) if len(row) == len(COLUMNS) and row[0].isdecimal()]
            kept = [row for row in rows if int(row[0]) <= trainer.env_steps]
        with self._table.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([COLUMNS, *kept])
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, "evaluator")
        self._running: Future[EvaluationResult] | None = None
        self._at = 0

    @property
    def busy(self) -> bool:
        """True while an evaluation is going on."""
        return self._running is not None and not self._running.done()

    def start(self, params: Any, env_steps: int) -> None:
        """Evaluates `params`, which are copied first. Waits for the evaluation before, if that is still going on."""
        self.settle()
        snapshot = jax.tree.map(lambda x: x.copy(), jax.device_put(params, self._device))
        policy = Policy(self._config, self._network, snapshot, self._device, self._dir, env_steps)
        options = self._config.evaluation
        self._at = env_steps
        self._running = self._thread.submit(
            evaluate, policy, options.episodes, self._seed, options.greedy, options.num_envs,
            cancelled=self._closed.is_set,
        )  # fmt: skip

    def poll(self) -> None:
        """Writes the result of an evaluation that has ended."""
        if self._running is not None and self._running.done():
            self.settle()

    def settle(self) -> None:
        """Waits for the evaluation under way, if there is one, and writes its result."""
        running, self._running = self._running, None
        if running is None:
            return
        result = running.result()
        with self._table.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerow([self._at, len(result.games), result.mean, result.std])
        self._say(
            f"evaluation at {self._at:,} env steps: mean return {result.mean:,.1f} ± {result.std:,.1f} over"
            f" {len(result.games)} full games on {self._device}"
        )

    def close(self) -> None:
        """Drops the evaluation under way, if there is one."""
        self._closed.set()
        self._thread.shutdown(wait=True, cancel_futures=True)
