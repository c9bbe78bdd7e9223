"""Evaluations beside training, in a thread."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_atari.config import Config
from jaxrl_atari.errors import reason
from jaxrl_atari.evaluate.play import EvaluationResult, run_evaluation
from jaxrl_atari.evaluate.policy import Policy
from jaxrl_atari.fast.forms import Network
from jaxrl_atari.runs.columns import EVALUATION_COLUMNS
from jaxrl_atari.runs.writers import Row

_log = logging.getLogger(__name__)


class Evaluator:
    """Plays full games with a snapshot of the parameters, on a device of its own, one evaluation at a time.

    Args:
        seed: seed of the session; each evaluation plays other games.
        network: the network, in the form that suits the device.
        say: receives lines for the user.
        write: receives each result, a row of evaluations.csv.
    """

    def __init__(
        self,
        config: Config,
        seed: int,
        network: Network,
        num_actions: int,
        device: jax.Device,
        session_dir: Path,
        say: Callable[[str], None],
        write: Callable[[Row], object],
    ):
        self._config = config
        self._seed = seed
        self._device = device
        self._dir = session_dir
        self._say = say
        self._write = write
        self._num_actions = num_actions
        self._network = network
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, "evaluator")
        self._running: tuple[Policy, Future[EvaluationResult]] | None = None

    def start(self, params: Any, env_steps: int) -> None:
        """Starts an evaluation of `params`, which are copied first. None may be running."""
        snapshot = jax.tree.map(lambda x: x.copy(), jax.device_put(params, self._device))
        policy = Policy(
            self._config, self._network, snapshot, self._device, self._dir, env_steps, self._num_actions
        )
        options = self._config.evaluation
        seed = np.random.SeedSequence([self._seed, env_steps]).generate_state(1)[0]
        result = self._thread.submit(
            run_evaluation, policy, options.episodes, int(seed), options.greedy, options.num_envs,
            cancelled=self._closed.is_set,
        )  # fmt: skip
        self._running = policy, result

    def running(self) -> Policy | None:
        """What is being evaluated; None if nothing is. First writes a result that has come since the last call."""
        self.settle(lambda: True)
        return self._running and self._running[0]

    def settle(self, stop_requested: Callable[[], bool]) -> None:
        """Waits for the evaluation that runs, if one does, and writes its result. A stop request ends the wait."""
        if self._running is None:
            return
        policy, running = self._running
        while not running.done() and not stop_requested():
            wait([running], timeout=0.2)
        if not running.done():
            return
        self._running = None
        at = f"evaluation at {policy.env_steps:,} env steps"
        try:
            result = running.result()
        except Exception as error:  # training goes on
            _log.info("%s failed", at, exc_info=True)
            self._say(f"{at} failed: {reason(error)}")
            return
        values = policy.env_steps, len(result.games), result.mean, result.std, result.cut_off, int(time.time())
        self._write(dict(zip(EVALUATION_COLUMNS, values, strict=True)))
        self._say(
            f"{at}: mean return {result.mean:,.1f} ± {result.std:,.1f} over {len(result.games)} full games,"
            f" {result.cut_off} of them cut off at {self._config.env.time_limit}, on {self._device}"
        )

    def close(self) -> None:
        """Abandons the running evaluation, if there is one."""
        self._closed.set()
        self._thread.shutdown(wait=True, cancel_futures=True)
