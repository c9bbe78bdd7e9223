"""Measurements in this process: training as a whole, and its parts.

Everything is timed in the steady state, once nothing is compiled any more. A repeat times each part once, for some
seconds. The parts take turns, so that slow moments of the machine affect all of them. Work on a device is
asynchronous, so a clock stops only when all work that was started is done.
"""

import contextlib
import dataclasses
import itertools
import math
import resource
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_atari.config import Config
from jaxrl_atari.envs import make_pool
from jaxrl_atari.hardware.cpu import process_threads
from jaxrl_atari.output import say, write
from jaxrl_atari.rollout import Collected, collect
from jaxrl_atari.runs.columns import MACHINE_COLUMNS
from jaxrl_atari.session import Session, iterations, open_session
from jaxrl_atari.update import current_options, learning_rate


class Training(NamedTuple):
    """A session that trains one iteration at a time."""

    session: Session
    iterations: Iterator[Any]  # an iteration ends when its update has been started

    def wait(self) -> None:
        """Waits until the newest update has ended."""
        jax.block_until_ready(self.session.learner.state)

    def collect(self) -> Collected:
        """Collects a rollout that training does not learn from."""
        session = self.session
        return collect(
            session.environments.groups,
            session.learner.acting_params(),
            session.keys(0)[0],
            length=session.config.ppo.rollout_length,
        )

    def log_point(self) -> dict[str, Any]:
        """The log point at the newest env step, which is written if it was not due."""
        self.session.log.last_point(learning_rate(self.session.config, self.session.progress.env_steps))
        return self.session.log.row


@contextlib.contextmanager
def open_training(config: Config) -> Iterator[Training]:
    """Trains in a temporary folder until the end of the block. Starts JAX's back end.

    The block starts after two iterations, when everything is compiled.
    """
    say("compiling")
    log = dataclasses.replace(config.log, wandb=False)
    config = dataclasses.replace(config, total_env_steps=10**12, log=log)  # never ends by itself
    with (
        tempfile.TemporaryDirectory(prefix="jaxrl_atari_benchmark_") as folder,
        open_session(config, Path(folder, "session_0")) as session,
    ):
        training = Training(session, iterations(session))
        next(training.iterations)
        next(training.iterations)
        training.wait()
        yield training


# --- Parts -------------------------------------------------------------------------------------------------------


def per_second(work: Callable[[], float], seconds: float) -> float:
    """Calls `work` for at least `seconds` and returns the amount of work per second.

    Args:
        work: does some work and returns its amount.
        seconds: minimum time.
    """
    amount = 0.0
    start = time.perf_counter()
    passed = 0.0
    while passed < seconds:
        amount += work()
        passed = time.perf_counter() - start
    return amount / passed


def measure_training(training: Training, seconds: float) -> dict[str, float]:
    """Env steps per second of training, with log points and checkpoints as often as the config has them.

    One update is under way when the clock starts, and one when it stops, so that whole updates are counted.

    Returns:
        `end_to_end_sps`, and `MACHINE_COLUMNS` over the time since the last log point, if one was due meanwhile.
    """
    progress = training.session.progress
    training.log_point()  # the columns of the next one cover the time from here on
    next(training.iterations)

    def iterate() -> int:
        before = progress.env_steps
        next(training.iterations)
        return progress.env_steps - before

    figures = {"end_to_end_sps": per_second(iterate, seconds)}
    row = training.log_point()
    return figures | {name: float(row[name]) for name in MACHINE_COLUMNS}


def measure_emulators(training: Training, seconds: float) -> dict[str, float]:
    """Env steps per second of the emulators alone, with random actions: the limit on this machine."""
    training.wait()
    config = training.session.config.env
    groups = sum(map(len, training.session.environments.groups))
    threads = config.num_threads or process_threads()  # of each group, as in training
    env = dataclasses.replace(config, num_threads=threads * groups)
    with contextlib.closing(make_pool(env, config.num_envs, seed=0)) as pool:
        pool.reset()
        actions = np.random.default_rng(0).integers(0, pool.num_actions, (1024, pool.num_envs), dtype=np.int32)
        steps = itertools.cycle(actions)
        return {"env_sps": per_second(lambda: int((~pool.step(next(steps)).first).sum()), seconds)}


def measure_acting(training: Training, seconds: float) -> dict[str, float]:
    """Env steps per second of `rollout.collect`: policy, emulators, and transfer of the rollout to the device."""
    training.wait()
    return {"acting_sps": per_second(lambda: jax.block_until_ready(training.collect()).env_steps, seconds)}


def measure_updates(training: Training, seconds: float) -> dict[str, float]:
    """Samples per second of updates on one rollout. An update has T x B x epochs samples.

    Gradient steps that `ppo.target_kl` leaves out do not count.
    """
    training.wait()
    learner = training.session.learner
    config = training.session.config
    rollouts = training.collect().rollouts
    key = training.session.keys(0)[1]
    # Without a learning rate, these updates change no parameter of the session that the other parts measure.
    options = dataclasses.replace(current_options(config, 0), learning_rate=np.float32(0.0))

    def learn() -> float:
        skipped_steps = learner.update(rollouts, options, key)().get("skipped_steps", 0.0)
        return config.rollout_size * config.ppo.epochs - skipped_steps * config.ppo.minibatch_size

    return {"update_samples_per_second": per_second(learn, seconds)}


class Part(NamedTuple):
    """A part of training that is timed."""

    rate: str  # the figure that is its speed
    measure: Callable[[Training, float], dict[str, float]]  # (training, seconds) -> its figures


PARTS = {
    "end_to_end": Part("end_to_end_sps", measure_training),
    "env": Part("env_sps", measure_emulators),
    "acting": Part("acting_sps", measure_acting),
    "update": Part("update_samples_per_second", measure_updates),
}
"""The parts by their names, in the order of a repeat."""


# --- All parts ---------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> dict[str, Any]:
    """A figure over the repeats: its `median`, `min`, `max` and all `values`."""
    return {
        "median": statistics.median(values), "min": min(values), "max": max(values), "values": list(values)
    }  # fmt: skip


def measure(config: Config, parts: Sequence[str], *, repeats: int, seconds: float) -> dict[str, Any]:
    """Times parts of training in this process and prints its progress. Starts JAX's back end.

    Args:
        config: the config that is trained with.
        parts: some of `PARTS`.
        repeats: number of repeats.
        seconds: minimum time of each part in each repeat; its last iteration is completed.

    Returns:
        JSON values: the `figures`, name -> `spread`; `start_peak_rss_gib`, the peak memory of compilation and the
        first iterations; `start_seconds`, with compilation; and the `devices` and the arithmetic.
    """
    figures = defaultdict(list)
    started = time.perf_counter()
    with open_training(config) as training:
        seconds_to_start = time.perf_counter() - started
        # Before the parts, because they need memory of their own.
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 2**10)
        for repeat in range(repeats):
            measured: dict[str, float] = {}
            write(f"repeat {repeat + 1} of {repeats}")
            for name, part in PARTS.items():
                if name not in parts:
                    continue
                measured |= part.measure(training, seconds)
                write(f"  {name} {measured[part.rate]:,.0f}")
            say("")
            if {"env", "end_to_end"} <= {*parts}:
                measured["share_of_limit"] = measured["end_to_end_sps"] / measured["env_sps"]
            for name, value in measured.items():
                if math.isfinite(value):
                    figures[name].append(value)
        return {
            "figures": {name: spread(values) for name, values in figures.items()},
            "start_peak_rss_gib": rss / 2**30,
            "start_seconds": seconds_to_start,
            "devices": training.session.describe_devices(),
        }


def trace(config: Config, folder: Path, count: int) -> list[str]:
    """Writes a `jax.profiler` trace of `count` iterations in the steady state; returns its files."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # Python's calls would be most of the file
    with open_training(config) as training, jax.profiler.trace(folder, profiler_options=options):
        for number in range(count):
            with jax.profiler.StepTraceAnnotation("iteration", step_num=number):
                next(training.iterations)
        training.wait()  # the trace has the whole of the last update
    return sorted(map(str, max(folder.glob("plugins/profile/*")).iterdir()))
