"""Measurements in this process: the whole of training, and its parts one by one.

Everything is timed in the steady state, after an iteration that compiled nothing. A repeat times each part once, for
some seconds, and the parts take turns, so that all of them see the machine's good and bad moments.

Device work is asynchronous, so time on the host need not be spent where it shows. The figures are:

- end_to_end: iterations of `session.train`, with metrics read, files written and checkpoints. Env steps a second. With
  `overlap = "none"` the clock stops when the last update is done; with `"update"` one update is under way when it
  starts and when it stops.
- env: the emulators alone, with random actions: as many environments, groups and threads as in training, stepped in
  the same way. Env steps a second; the limit on this machine.
- acting: `rollout.collect`: policy, emulators and the bookkeeping of the rollout, until it is on the device.
- update: `Learner.update` on one rollout, until it is done. Samples a second; one update has T x B x epochs.
"""

import contextlib
import dataclasses
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_atari.benchmark.instruments import Compilations, SectionTimer, peak_device_gib, peak_rss_gib, wrapped
from jaxrl_atari.config import Config
from jaxrl_atari.envs import make_pool
from jaxrl_atari.envs.pool import EnvPool
from jaxrl_atari.hardware.monitor import Monitor
from jaxrl_atari.rollout import Collected, collect
from jaxrl_atari.session import hyperparameters, prepare, train

RATES = ("end_to_end", "env", "acting", "update")
"""The parts, in the order of a repeat: training first, so that the peak memory is its own."""

SECTIONS = ("env_wait", "inference", "transfer", "update", "logging", "other")
"""The sections of an iteration, see `breakdown`."""

MAX_WARM_UP = 20  # iterations


class Training:
    """A session that trains in a folder of its own, one iteration at a time.

    Args:
        compilations: listens to JAX already.
    """

    def __init__(self, config: Config, folder: Path, compilations: Compilations):
        self.config = config = dataclasses.replace(config, total_env_steps=10**12)  # so that it never ends
        self._compilations = compilations
        self._exits = contextlib.ExitStack()
        self.run = self._exits.enter_context(prepare(config, folder, quiet=True))
        self._iterations = train(self.run)
        self.overlap = config.overlap == "update"
        self._groups = [group for shard in self.run.groups for group in shard]
        self._pools: list[EnvPool] = []
        self._rng = np.random.default_rng(config.seed)

    @property
    def devices(self) -> list[jax.Device]:
        """All devices that learn or act."""
        return sorted({*self.run.placement.learner, *self.run.placement.actors}, key=str)

    def close(self) -> None:
        """Frees emulators and files."""
        self._exits.close()
        for pool in self._pools:
            pool.close()

    def iterate(self) -> Any:
        """One iteration of training with its log; returns the newest metrics, being computed."""
        return next(self._iterations)

    def first_iteration(self) -> tuple[float, float]:
        """Unix times of the first env step and of the end of the first update."""
        first_step: list[float] = []

        def wrap(recv: Callable) -> Callable:
            def stamped() -> Any:
                step = recv()
                if not first_step:
                    first_step.append(time.time())
                return step

            return stamped

        with wrapped(self._groups[0].pool, "recv", wrap):
            metrics = self.iterate()
        jax.block_until_ready(self.run.learner.settle() if self.overlap else metrics)
        return first_step[0], time.time()

    def warm_up(self) -> None:
        """Iterates until nothing is compiled any more."""
        for _ in range(MAX_WARM_UP):
            before = self._compilations.count[Compilations.COMPILE]
            jax.block_until_ready(self.iterate())
            if self._compilations.count[Compilations.COMPILE] == before and not self.run.log.compiling:
                return
        raise RuntimeError(f"after {MAX_WARM_UP} iterations something is still compiled in each")

    def end_to_end(self, seconds: float) -> float:
        """Env steps a second of training."""
        if self.overlap:
            jax.block_until_ready(self.iterate())  # so that an update is under way
        first, start = self.run.progress.env_steps, time.perf_counter()
        metrics = None
        while time.perf_counter() - start < seconds:
            metrics = self.iterate()
        jax.block_until_ready(metrics)
        return (self.run.progress.env_steps - first) / (time.perf_counter() - start)

    def env(self, seconds: float) -> float:
        """Env steps a second of the emulators alone."""
        env = self.config.env
        if not self._pools:
            first_env = 0
            for group in self._groups:
                self._pools.append(make_pool(
                    env.backend, env.game_name, group.pool.num_envs,
                    seed=self.config.seed, first_env=first_env, num_threads=env.num_threads,
                    rules=env.rules,
                ))  # fmt: skip
                first_env += group.pool.num_envs
                self._pools[-1].reset()
        return random_play(self._pools, seconds, self._rng)

    def _key(self) -> jax.Array:
        with jax.default_device(self.run.placement.home):
            return jax.random.key(self.config.seed)

    def _collect(self) -> Collected:
        return collect(self.run.groups, self.run.learner.acting_params(), self._key())

    def acting(self, seconds: float) -> float:
        """Env steps a second of rollouts that nobody learns from."""
        self.run.learner.settle()
        env_steps, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            collected = self._collect()
            jax.block_until_ready(collected.rollouts)
            env_steps += collected.env_steps
        return env_steps / (time.perf_counter() - start)

    def update(self, seconds: float) -> float:
        """Samples a second of updates on one rollout; training continues from where it was."""
        learner = self.run.learner
        learner.settle()
        rollouts = self._collect().rollouts
        saved = jax.block_until_ready(jax.tree.map(jnp.copy, learner.state))
        hyper, key = hyperparameters(self.config, 0), self._key()
        updates, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            metrics = learner.update(rollouts, hyper, key)
            jax.block_until_ready(learner.settle() if self.overlap else metrics)
            updates += 1
        elapsed = time.perf_counter() - start
        learner.reset(saved)
        return updates * self.config.rollout_size * self.config.ppo.epochs / elapsed

    def breakdown(self, seconds: float) -> dict[str, float]:
        """Seconds of an iteration by section, as this thread spends them; their sum is the whole iteration.

        - env_wait: sending actions to the emulators and waiting for their results.
        - inference: starting the policy and waiting for its actions, with the transfer of frames and actions. Where
          actor and learner share a device and work at the same time, waiting for the learner is part of it.
        - transfer: `jax.device_put`, that is, the rewards of a rollout and small things.
        - update: starting the update and waiting for it. Training itself waits later, when it needs the first
          action of the new parameters. With `overlap = "update"`: waiting for the update in the background.
        - logging: reading metrics, progress, files, checkpoints.
        - other: bookkeeping of rewards and games, keys, joining the rollout.
        """
        jax.block_until_ready(self.iterate())
        learner, log, timer = self.run.learner, self.run.log, SectionTimer()

        def until_done(update: Callable) -> Callable:
            return lambda *args: jax.block_until_ready(update(*args))

        with contextlib.ExitStack() as probes:

            def time_calls(owner: Any, name: str, section: str) -> None:
                probes.enter_context(wrapped(owner, name, timer.timed(section)))

            for group in self._groups:
                time_calls(group.pool, "send", "env_wait")
                time_calls(group.pool, "recv", "env_wait")
                time_calls(group, "choose", "inference")
                time_calls(group, "send", "inference")
            time_calls(jax, "device_put", "transfer")
            probes.enter_context(wrapped(learner, "update", until_done))
            time_calls(learner, "update", "update")
            time_calls(learner, "settle", "update")
            time_calls(log, "after_update", "logging")
            time_calls(self.run, "checkpoint_if_due", "logging")

            timer.seconds.clear()
            iterations, start = 0, time.perf_counter()
            timer.enter("other")
            while time.perf_counter() - start < seconds:
                self.iterate()
                iterations += 1
            timer.enter("other")
        return {section: timer.seconds[section] / iterations for section in SECTIONS}

    def trace(self, folder: Path, iterations: int) -> None:
        """Writes a trace of some iterations with `jax.profiler`; its events are named after the sections above."""
        jax.block_until_ready(self.iterate())

        def named(section: str) -> Callable[[Callable], Callable]:
            def wrap(function: Callable) -> Callable:
                def annotated(*args: Any, **kwargs: Any) -> Any:
                    with jax.profiler.TraceAnnotation(section):
                        return function(*args, **kwargs)

                return annotated

            return wrap

        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # without every call of Python, which would be most of the file
        with contextlib.ExitStack() as probes:
            for group in self._groups:
                probes.enter_context(wrapped(group.pool, "recv", named("env_wait")))
                probes.enter_context(wrapped(group, "choose", named("inference")))
                probes.enter_context(wrapped(group, "send", named("inference")))
            probes.enter_context(wrapped(self.run.learner, "update", named("update")))
            probes.enter_context(wrapped(self.run.log, "after_update", named("logging")))
            with jax.profiler.trace(folder, profiler_options=options):
                for number in range(iterations):
                    with jax.profiler.StepTraceAnnotation("iteration", step_num=number):
                        metrics = self.iterate()
                jax.block_until_ready(metrics)


def random_play(pools: Sequence[EnvPool], seconds: float, rng: np.random.Generator) -> float:
    """Env steps a second of pools of equal size with random actions, all stepping at the same time."""
    size = pools[0].num_envs
    actions = rng.integers(0, pools[0].num_actions, (1024, size), dtype=np.int32)
    transitions, turn = 0, 0
    start = time.perf_counter()
    for pool in pools:
        pool.send(actions[0])
    while time.perf_counter() - start < seconds:
        turn += 1
        for pool in pools:
            transitions += size - int(pool.recv().first.sum())
            pool.send(actions[turn % len(actions)])
    for pool in pools:
        transitions += size - int(pool.recv().first.sum())
    return transitions / (time.perf_counter() - start)


def measure(config: Config, parts: Sequence[str], repeats: int, seconds: float) -> dict[str, Any]:
    """Times `parts`, some of `RATES`, in this process; starts JAX's back end.

    Args:
        repeats: 0 makes the first rollout and update and nothing more.
        seconds: of each part in each repeat, at the least; a part ends with the iteration that it is in.

    Returns:
        JSON values: `rates` (part -> one figure a repeat), `breakdown` (section -> seconds an iteration, one
        figure a repeat, with end_to_end), `busy` (columns of the monitor, one figure a repeat, with end_to_end),
        `peak_rss_gib` and `peak_device_gib` of training, `startup`, `devices`, `device_reason` and `compute_dtype`.
    """
    rates: dict[str, list[float]] = {part: [] for part in RATES if part in parts}
    sections: defaultdict[str, list[float]] = defaultdict(list)
    busy: defaultdict[str, list[float]] = defaultdict(list)
    memory: dict[str, float | None] = {}
    with contextlib.ExitStack() as stack:
        compilations = stack.enter_context(Compilations())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxrl_atari_benchmark_")))
        training = Training(config, folder / "session_0", compilations)
        stack.callback(training.close)

        first_step_at, first_update_at = training.first_iteration()
        startup = {
            "first_env_step_at": first_step_at,
            "first_update_at": first_update_at,
            "compile_seconds": compilations.compile_seconds,
            "programs": compilations.count[Compilations.COMPILE],
            "cache_hits": compilations.count[Compilations.CACHE_HIT],
        }
        if repeats:
            training.warm_up()
        for _ in range(repeats):
            for part in rates:
                if part == "end_to_end":
                    with Monitor(training.devices, say=lambda line: None) as monitor:
                        rates[part].append(training.end_to_end(seconds))
                        monitor.sample()
                        _append(busy, monitor.read())
                    memory = memory or _memory(training)
                    _append(sections, training.breakdown(seconds))
                else:
                    rates[part].append(getattr(training, part)(seconds))
        return {
            "rates": rates,
            "breakdown": dict(sections),
            "busy": dict(busy),
            **(memory or _memory(training)),
            "startup": startup,
            "devices": [f"{device} ({device.device_kind})" for device in training.devices],
            "device_reason": training.run.placement.reason,
            "compute_dtype": training.run.learner.compute_dtype.name,
        }


def write_trace(config: Config, folder: Path, iterations: int) -> dict[str, Any]:
    """Trains until nothing is compiled any more, and traces the next iterations (`Training.trace`).

    Returns:
        JSON values: the files, the number of iterations, and `compiled`: programs that were compiled while tracing.
    """
    with contextlib.ExitStack() as stack:
        compilations = stack.enter_context(Compilations())
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="jaxrl_atari_benchmark_")))
        training = Training(config, scratch / "session_0", compilations)
        stack.callback(training.close)
        training.first_iteration()
        training.warm_up()
        before, known = compilations.count[Compilations.COMPILE], set(folder.rglob("*"))
        training.trace(folder, iterations)
        compiled = compilations.count[Compilations.COMPILE] - before
    files = sorted(str(path) for path in set(folder.rglob("*")) - known if path.is_file())
    return {"trace": files, "iterations": iterations, "compiled": compiled}


def _append(lists: dict[str, list[float]], values: dict[str, float]) -> None:
    for name, value in values.items():
        lists[name].append(value)


def _memory(training: Training) -> dict[str, float | None]:
    return {"peak_rss_gib": peak_rss_gib(), "peak_device_gib": peak_device_gib(training.devices)}
