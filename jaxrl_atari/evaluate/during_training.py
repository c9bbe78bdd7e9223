"""Evaluations during training, in a thread of their own."""

import dataclasses
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np

from jaxrl_atari.errors import reason
from jaxrl_atari.evaluate.play import EvaluationResult, run_evaluation
from jaxrl_atari.evaluate.policy import Policy
from jaxrl_atari.output import counted, say_traceback
from jaxrl_atari.runs.writers import Writer


class Evaluator:
    """Plays full games with a snapshot of the parameters, on its own device, one evaluation at a time.

    Args:
        policy: the policy, whose parameters and env steps each evaluation replaces.
        seed: seed of the session. Each evaluation derives another seed from it.
        writer: receives lines for the user and each result.
    """

    def __init__(self, policy: Policy, *, seed: int, writer: Writer):
        self._policy = policy
        self._seed = seed
        self._writer = writer
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, "evaluator")
        self._running: Future[EvaluationResult] | None = None

    def start(self, params: Any, env_steps: int) -> None:
        """Starts an evaluation of a copy of `params`. No other evaluation may be running."""
        assert self._running is None
        snapshot = jax.tree.map(lambda x: x.copy(), jax.device_put(params, self._policy.device))
        self._policy = dataclasses.replace(self._policy, params=snapshot, env_steps=env_steps)
        options = self._policy.config.evaluation
        self._running = self._thread.submit(
            run_evaluation, self._policy, options.episodes, seed=self._evaluation_seed(), greedy=options.greedy,
            num_envs=options.num_envs, cancelled=self._closed.is_set,
        )  # fmt: skip

    def _evaluation_seed(self) -> int:
        """Seed of the newest evaluation."""
        return int(np.random.SeedSequence([self._seed, self._policy.env_steps]).generate_state(1)[0])

    @property
    def snapshot(self) -> Any | None:
        """The parameters that are being evaluated, which a checkpoint keeps; None once `poll` has the result."""
        return None if self._running is None else self._policy.params

    def settle(self, stop_requested: Callable[[], bool]) -> None:
        """Waits for the running evaluation, if any, and writes its result. Returns early on a stop request."""
        while self._running is not None and not self._running.done() and not stop_requested():
            wait([self._running], timeout=0.2)
        self.poll()

    def poll(self) -> None:
        """Writes the result of the running evaluation, if that has ended."""
        if self._running is None or not self._running.done():
            return
        ended = self._running
        self._running = None
        policy = self._policy
        at = f"evaluation at {policy.env_steps:,} env steps"
        try:
            result = ended.result()
        except Exception as error:  # training goes on
            say_traceback(error)
            self._writer.message(f"{at} failed: {reason(error)}")
            return
        self._writer.evaluation(
            {
                "env_steps": policy.env_steps,
                "episodes": len(result.games),
                "mean": result.mean,
                "std": result.std,
                "cut_off": result.num_truncated,
                "seed": self._evaluation_seed(),
                "unix_time": int(time.time()),
            }
        )
        spread = "" if result.std is None else f" ± {result.std:,.1f}"
        self._writer.message(
            f"{at}: mean return {result.mean:,.1f}{spread} over {counted(len(result.games), 'full game')},"
            f" {result.num_truncated} of them cut off at {policy.config.env.time_limit}, on {policy.device}"
        )

    def close(self) -> None:
        """Cancels the running evaluation, if any."""
        self._closed.set()
        self._thread.shutdown(wait=True, cancel_futures=True)
