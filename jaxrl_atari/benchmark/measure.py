"""Measurements in this process: the whole of training, and its parts one by one.

Everything is timed in the steady state, after an iteration that compiled nothing. A repeat times each part once, for
some seconds, and the parts take turns, so that all of them see the machine's good and bad moments.

Device work is asynchronous, so the host may wait for it in a later part than the one that started it. The figures are:

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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_atari.benchmark.instruments import Compilations, SectionTimer, peak_device_gib, peak_rss_gib, wrapped
from jaxrl_atari.config import Config
from jaxrl_atari.envs import make_pool
from jaxrl_atari.envs.pool import EnvPool
from jaxrl_atari.hardware.monitor import monitor
from jaxrl_atari.rollout import Collected, collect
from jaxrl_atari.session import Session, current_options, prepare, train

RATES = {
    "end_to_end": "end_to_end_sps",
    "env": "env_sps",
    "acting": "acting_sps",
    "update": "update_samples_per_second",
}
"""Part -> the name of its rate, in the order of a repeat: training first, so that the peak memory is its own."""

SECTIONS = {
    "env_wait": "waiting for the emulators",
    "inference": "the policy: frames to the device, actions back",
    "transfer": "rewards to the device",
    "update": "waiting for the learner",
    "logging": "metrics, files, checkpoints",
    "other": "bookkeeping",
}
"""The sections of an iteration, see `breakdown`."""

MAX_WARM_UP = 20  # iterations


class Training:
    """A session that trains one iteration at a time; `open_training` makes it."""

    def __init__(self, run: Session, compilations: Compilations):
        self.run, self.config, self.compilations = run, run.config, compilations
        self._iterations = train(run)
        self.overlap = run.config.overlap == "update"
        self._groups = [group for shard in run.groups for group in shard]
        self.pools: list[EnvPool] = []  # of `env`
        self._rng = np.random.default_rng(run.config.seed)

    def iterate(self) -> Any:
        """One iteration of training with its log; returns the newest metrics, being computed."""
        return next(self._iterations)

    def warm_up(self) -> None:
        """Iterates until nothing is compiled any more."""
        for _ in range(MAX_WARM_UP):
            before = self.compilations.count[Compilations.COMPILE]
            jax.block_until_ready(self.iterate())
            if self.compilations.count[Compilations.COMPILE] == before and not self.run.log.compiling:
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
        if not self.pools:
            first_env = 0
            for group in self._groups:
                self.pools.append(make_pool(
                    env.backend, env.game_name, group.pool.num_envs,
                    seed=self.config.seed, first_env=first_env, num_threads=env.num_threads,
                    rules=env.rules,
                ))  # fmt: skip
                first_env += group.pool.num_envs
                self.pools[-1].reset()
        return random_play(self.pools, seconds, self._rng)

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
        options, key = current_options(self.config, 0), self._key()
        updates, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            metrics = learner.update(rollouts, options, key)
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
        timer = SectionTimer()

        def until_done(update: Callable) -> Callable:
            return lambda *args: jax.block_until_ready(update(*args))

        with wrapped(self.run.learner, "update", until_done), self._sections(timer.timed):
            timer.seconds.clear()
            iterations, start = 0, time.perf_counter()
            timer.enter("other")
            while time.perf_counter() - start < seconds:
                self.iterate()
                iterations += 1
            timer.enter("other")
        return {section: timer.seconds[section] / iterations for section in SECTIONS}

    @contextlib.contextmanager
    def _sections(self, wrap: Callable[[str], Callable[[Callable], Callable]]) -> Iterator[None]:
        """Wraps the calls of each section by `wrap(section)` inside the block."""
        calls: list[tuple[Any, str, str]] = [
            (jax, "device_put", "transfer"),
            (self.run.learner, "update", "update"),
            (self.run.log, "settle", "update"),
            (self.run.log, "after_update", "logging"),
            (self.run, "checkpoint_if_due", "logging"),
        ]
        for group in self._groups:
            calls += [
                (group.pool, "send", "env_wait"),
                (group.pool, "recv", "env_wait"),
                (group, "choose", "inference"),
                (group, "send", "inference"),
            ]
        with contextlib.ExitStack() as probes:
            for owner, name, section in calls:
                probes.enter_context(wrapped(owner, name, wrap(section)))
            yield

    def trace(self, folder: Path, iterations: int) -> dict[str, Any]:
        """Writes a trace of some iterations with `jax.profiler`; its events are named after the sections above.

        Returns:
            JSON values: the files, the number of iterations, and `compiled`: programs that were compiled meanwhile.
        """
        jax.block_until_ready(self.iterate())
        before, known = self.compilations.count[Compilations.COMPILE], set(folder.rglob("*"))
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # without every call of Python, which would be most of the file
        named = lambda section: partial(jax.profiler.annotate_function, name=section)  # noqa: E731
        with self._sections(named), jax.profiler.trace(folder, profiler_options=options):
            for number in range(iterations):
                with jax.profiler.StepTraceAnnotation("iteration", step_num=number):
                    metrics = self.iterate()
            jax.block_until_ready(metrics)
        compiled = self.compilations.count[Compilations.COMPILE] - before
        files = sorted(str(path) for path in set(folder.rglob("*")) - known if path.is_file())
        return {"trace": files, "iterations": iterations, "compiled": compiled}


@contextlib.contextmanager
def open_training(config: Config) -> Iterator[Training]:
    """Training in a temporary folder, which ends with the block; starts JAX's back end."""
    log = dataclasses.replace(config.log, wandb=False)  # a benchmark is no run
    config = dataclasses.replace(config, total_env_steps=10**12, log=log)  # so that it never ends by itself
    with (
        Compilations() as compilations,
        tempfile.TemporaryDirectory(prefix="jaxrl_atari_benchmark_") as folder,
        prepare(config, Path(folder) / "session_0", quiet=True) as run,
    ):
        training = Training(run, compilations)
        try:
            yield training
        finally:
            for pool in training.pools:
                pool.close()


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
        JSON values: `figures` (rates and columns of the monitor) and `iteration_seconds` (section -> seconds an
        iteration), with one value a repeat; `memory`, the peak of training; `process`: its devices and its start.
        Sections and the monitor's columns come with end_to_end.
    """
    figures: defaultdict[str, list[float]] = defaultdict(list)
    sections: defaultdict[str, list[float]] = defaultdict(list)
    memory: dict[str, float | None] = {}
    with open_training(config) as training:
        training.iterate()  # the first one waits for its update
        first_update_at = time.time()
        compilations = training.compilations
        process = {
            "devices": [f"{device} ({device.device_kind})" for device in training.run.placement.devices],
            "reason": training.run.placement.reason,
            "compute_dtype": training.run.learner.compute_dtype.name,
            "first_env_step_at": training.run.log.first_step_at,
            "first_update_at": first_update_at,
            "compile_seconds": compilations.compile_seconds,
            "programs": compilations.count[Compilations.COMPILE],
            "cache_hits": compilations.count[Compilations.CACHE_HIT],
        }
        if repeats:
            training.warm_up()
        for _ in range(repeats):
            for part, name in RATES.items():
                if part == "end_to_end" and part in parts:
                    with monitor(training.run.placement.devices, say=lambda line: None) as read:
                        figures[name].append(training.end_to_end(seconds))
                        _append(figures, read())
                    memory = memory or _memory(training)
                    _append(sections, training.breakdown(seconds))
                elif part in parts:
                    figures[name].append(getattr(training, part)(seconds))
        memory = memory or _memory(training)
    return {"figures": figures, "iteration_seconds": sections, "memory": memory, "process": process}


def _append(lists: dict[str, list[float]], values: dict[str, float]) -> None:
    for name, value in values.items():
        lists[name].append(value)


def _memory(training: Training) -> dict[str, float | None]:
    return {"peak_rss_gib": peak_rss_gib(), "peak_device_gib": peak_device_gib(training.run.placement.devices)}
