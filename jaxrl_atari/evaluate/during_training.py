"""Evaluation during training: full games with a snapshot of the parameters, on a device of their own."""

import csv
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_atari.config import Config
from jaxrl_atari.evaluate.play import EvaluationResult, run_evaluation
from jaxrl_atari.evaluate.policy import Policy, evaluation_network
from jaxrl_atari.runs.reading import EVALUATIONS_FILE, EVALUATIONS_HEADER


class Evaluator:
    """Plays games in a thread, one evaluation at a time, while the learner trains.

    Each result is appended to SESSION_DIR/evaluations.csv and passed on.

    Args:
        say: receives lines for the user.
        write: receives each result: env steps, mean and standard deviation of the returns.
    """

    def __init__(
        self,
        config: Config,
        seed: int,
        num_actions: int,
        device: jax.Device,
        session_dir: Path,
        say: Callable[[str], None],
        write: Callable[[int, float, float], None],
    ):
        self._config, self._seed, self._device, self._dir = config, seed, device, session_dir
        self._say, self._write = say, write
        self._network = evaluation_network(config.network, num_actions, device)
        self._table = session_dir / EVALUATIONS_FILE
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, "evaluator")
        self._running: Future[EvaluationResult] | None = None
        self.at = 0  # env steps of the newest evaluation

    def start(self, params: Any, env_steps: int) -> None:
        """Starts an evaluation of `params`, which are copied first. None may be running."""
        snapshot = jax.tree.map(lambda x: x.copy(), jax.device_put(params, self._device))
        policy = Policy(self._config, self._network, snapshot, self._device, self._dir, env_steps)
        options = self._config.evaluation
        self.at = env_steps
        # Other games at each evaluation: their means can then be averaged.
        seed = int(np.random.SeedSequence([self._seed, env_steps]).generate_state(1)[0])
        self._running = self._thread.submit(
            run_evaluation, policy, options.episodes, seed, options.greedy, options.num_envs,
            cancelled=self._closed.is_set,
        )  # fmt: skip

    def poll(self) -> bool:
        """Writes the result of an evaluation that has ended since the last call. Returns whether one is running."""
        if self._running is not None and self._running.done():
            self.settle()
        return self._running is not None

    def settle(self, stop_requested: Callable[[], bool] = lambda: False) -> None:
        """Waits for the running evaluation, if there is one, and writes its result; gives it up on a stop request."""
        running, self._running = self._running, None
        while running is not None and not running.done() and not stop_requested():
            wait([running], timeout=0.2)
        if running is None:
            return
        if not running.done():
            self._say(f"evaluation at {self.at:,} env steps: given up, because the session is asked to stop")
            return
        result = running.result()
        with self._table.open("a", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            if file.tell() == 0:
                writer.writerow(EVALUATIONS_HEADER)
            writer.writerow([self.at, len(result.games), result.mean, result.std])
        self._write(self.at, result.mean, result.std)
        self._say(
            f"evaluation at {self.at:,} env steps: mean return {result.mean:,.1f} ± {result.std:,.1f} over"
            f" {len(result.games)} full games on {self._device}"
        )

    def close(self) -> None:
        """Abandons the running evaluation, if there is one."""
        self._closed.set()
        self._thread.shutdown(wait=True, cancel_futures=True)
