"""One training run: collect -> update -> log -> checkpoint, with one seed, until its budget is spent."""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_atari.config import Config, PPOConfig
from jaxrl_atari.devices import Placement, place
from jaxrl_atari.evaluate.during_training import Evaluator
from jaxrl_atari.hardware.distributed import is_leader, sum_over_processes
from jaxrl_atari.hardware.jax_gpus import limit_jax
from jaxrl_atari.hardware.memory import out_of_memory_advice
from jaxrl_atari.hardware.monitor import Monitor
from jaxrl_atari.learner import Learner, OverlappedLearner, abstract_arrays, first_arrays
from jaxrl_atari.ppo import Metrics
from jaxrl_atari.rollout import EnvGroup, collect, make_groups
from jaxrl_atari.runs.checkpoint_writer import CheckpointWriter
from jaxrl_atari.runs.files import only_writer
from jaxrl_atari.runs.progress import Every, Progress
from jaxrl_atari.runs.reading import cut_evaluations
from jaxrl_atari.runs.resume import restore_session, set_aside_logs
from jaxrl_atari.runs.session_log import SessionLog
from jaxrl_atari.runs.writers import Writer, make_writers


def run_session(
    config: Config,
    session_dir: Path,
    session: int = 0,
    *,
    resume: bool = False,
    writers: Sequence[Writer] = (),
    stop_requested: Callable[[], bool] = lambda: False,
    on_first_update: Callable[[], None] = lambda: None,
) -> None:
    """Trains session `session` of a trial, with seed `config.seed + session`, and writes all its files.

    Args:
        session_dir: where metrics, events and checkpoints go; made if it does not exist.
        resume: continue from the newest sound checkpoint, if there is one.
        writers: receive the log points too, besides the writers of `config.log`; one that raises ends the session.
        stop_requested: asked before each rollout and during the last evaluations; if true, the session writes its last
            checkpoint and ends.
        on_first_update: called after the first update.

    Raises:
        UserError: a loss or a parameter became non-finite (the last checkpoint is kept), a file cannot be used,
            or another process is training in `session_dir`.
        KeyboardInterrupt: stopped on request, after the last checkpoint was written.
    """
    with prepare(config, session_dir, session, resume, writers) as run:
        for number, _ in enumerate(train(run, stop_requested)):
            if number == 0:
                on_first_update()
        run.finish(stop_requested)
        # Several processes leave a session together, although the leader alone evaluates at its end.
        if not config.is_spent(run.progress.env_steps) or sum_over_processes(stop_requested()) > 0:
            raise KeyboardInterrupt


def train(run: "Session", stop_requested: Callable[[], bool] = lambda: False) -> Iterator[Metrics | None]:
    """The loop: collect, update, log, checkpoint. After each iteration it yields what `Learner.update` returned."""
    config, progress, learner = run.config, run.progress, run.learner
    while not config.is_spent(progress.env_steps):
        if sum_over_processes(stop_requested()) > 0:  # in any process
            return
        with run.guard_transfers():
            ppo = current_options(config, progress.env_steps)
            actor_key, update_key = run.keys(progress.updates)
            collected = collect(run.groups, learner.acting_params(), actor_key)
            metrics = learner.update(collected.rollouts, ppo, update_key)
        progress.count(collected.env_steps, collected.games, config.ppo.epochs * config.num_minibatches)
        acting = collected.emulator_seconds, collected.policy_seconds
        run.log.after_update(metrics, learning_rate(config, progress.env_steps), collected.first_step_at, acting)
        del collected  # the memory of the rollout, before the next one is filled
        run.checkpoint_if_due()
        run.evaluate_if_due()
        yield metrics


def learning_rate(config: Config, env_steps: int) -> float:
    """The rate of the next update: linear in env steps, to 0 at total_env_steps, unless it is not annealed."""
    remaining = max(0.0, 1.0 - env_steps / config.total_env_steps)
    return config.ppo.learning_rate * (remaining if config.ppo.anneal_learning_rate else 1.0)


def current_options(config: Config, env_steps: int) -> PPOConfig:
    """The options of the next update, its numbers as NumPy scalars. To schedule one of them, compute it here."""
    rate, gae_lambda = learning_rate(config, env_steps), config.resolved_gae_lambda
    return jax.tree.map(np.float32, replace(config.ppo, learning_rate=rate, gae_lambda=gae_lambda))


@jax.jit
def _keys_of_update(key: jax.Array, update: jax.Array) -> tuple[jax.Array, jax.Array]:
    actor_key, update_key = jax.random.split(jax.random.fold_in(key, update))
    return actor_key, update_key


# --- What surrounds the loop -----------------------------------------------------------------------------------------


class Session:
    """State and parts of the loop of `run_session`; made and closed by `prepare`.

    Everything random derives from the seed. Update u takes its keys from `fold_in(key(seed), u)`, so a resumed session
    draws what an uninterrupted one would have drawn; the games it plays after a resume are new ones.

    Args:
        session: its number in the trial.
        key: of everything that JAX draws.
        checkpoints: where to save; None in a process that is not the leader.
        evaluator: plays games during training; None where there are no evaluations.
    """

    def __init__(
        self,
        config: Config,
        session: int,
        placement: Placement,
        progress: Progress,
        groups: list[list[EnvGroup]],
        learner: Learner,
        key: jax.Array,
        log: SessionLog,
        checkpoints: CheckpointWriter | None,
        evaluator: Evaluator | None,
    ):
        self.config, self.session, self.placement, self.progress = config, session, placement, progress
        self.groups, self.learner, self.log, self.evaluator = groups, learner, log, evaluator
        self._key, self._checkpoints = key, checkpoints
        self._save_every = Every(config.log.checkpoint_every_env_steps, progress.env_steps)
        self._evaluate_every = Every(config.evaluation.every_env_steps, progress.env_steps)

    def keys(self, update: int) -> tuple[jax.Array, jax.Array]:
        """The keys of an update: for acting and for its minibatches."""
        return _keys_of_update(self._key, jax.device_put(np.uint32(update), self.placement.home))

    def guard_transfers(self) -> contextlib.AbstractContextManager:
        """With `devices.check`, forbids implicit transfers between host and devices once everything is compiled."""
        forbidden = self.config.devices.check and not self.log.compiling
        return jax.transfer_guard("disallow" if forbidden else "allow")

    def evaluate_if_due(self) -> None:
        """Reports an evaluation that has ended, and starts one where one is due and none is running."""
        if self.evaluator is None or self.evaluator.poll():
            return
        if self._evaluate_every.due(self.progress.env_steps):
            self.log.flush()
            self.evaluator.start(self.learner.state.params, self.progress.env_steps)

    def checkpoint_if_due(self) -> None:
        """Saves everything and draws the graphs where a checkpoint is due."""
        if self._save_every.due(self.progress.env_steps):
            self._save()
            if self._checkpoints is not None:
                self.log.draw_graphs()

    def _save(self) -> None:
        """Saves once the newest update is known to be sound. Does not wait for the files to be written."""
        self.log.flush()
        # An update's metrics do not show what its last gradient step has done.
        self.log.require_finite(self.progress.updates, {"parameter_norm": self.learner.parameter_norm()})
        if self._checkpoints is None:
            return
        score = self.progress.record_score()
        arrays = {"train_state": self.learner.state, "key": self._key}
        self._checkpoints.save(self.progress.env_steps, arrays, self._meta(), score)

    def device_text(self) -> str:
        """The devices, why they were chosen, and the arithmetic."""
        placement = self.placement
        text = f"{', '.join(map(str, placement.learner))} ({placement.reason})"
        actors = list(dict.fromkeys(placement.actors))
        if not set(actors) <= set(placement.learner):
            text += f"; acts on {', '.join(map(str, actors))}"
        if self.config.evaluation.every_env_steps:
            text += f"; evaluates on {placement.evaluator}"
        return f"{text}; computes in {self.learner.compute_dtype.name}"

    def _meta(self) -> dict[str, Any]:
        """Content of a checkpoint other than the arrays, as JSON values."""
        return {
            "config": self.config.to_dict(),
            "game": self.config.env.game_name,
            "protocol": self.config.env.resolved_protocol,
            "num_actions": self.groups[0][0].pool.num_actions,
            "device": self.device_text(),
            "compute_dtype": self.learner.compute_dtype.name,
            "seed": self.config.seed + self.session,
            "session": self.session,
            "env_steps": self.progress.env_steps,
            "updates": self.progress.updates,
            "statistics": self.progress.statistics.to_dict(),
            "wall_seconds": self.log.wall_seconds(),
            "best_score": self.progress.best_score,
        }

    def finish(self, stop_requested: Callable[[], bool] = lambda: False) -> None:
        """Writes the last log point and checkpoint; once these are on disk, finishes the evaluations and the graphs."""
        if self.progress.updates == 0:  # stopped before the first update: there is nothing to save
            return
        self.log.last_point(learning_rate(self.config, self.progress.env_steps))
        self._save()
        if self._checkpoints is None:
            return
        self._checkpoints.wait()
        if self.evaluator is not None:
            self.evaluator.settle(stop_requested)
            # The last update may end just before the budget, where an evaluation is due.
            reached = max(self.progress.env_steps, self.config.total_env_steps)
            due = self._evaluate_every.due(reached) and self.evaluator.at != self.progress.env_steps
            if due and self.config.is_spent(self.progress.env_steps):
                self.evaluator.start(self.learner.state.params, self.progress.env_steps)
                self.evaluator.settle(stop_requested)
        self.log.draw_graphs(wait=True)


@contextlib.contextmanager
def prepare(
    config: Config,
    session_dir: Path,
    session: int = 0,
    resume: bool = False,
    writers: Sequence[Writer] = (),
    quiet: bool = False,
) -> Iterator[Session]:
    """Chooses the devices, restores the newest sound checkpoint if asked to, and makes what the loop uses.

    Args:
        quiet: print nothing.
    """

    def target(meta: dict[str, Any]) -> dict[str, Any]:
        return abstract_arrays(config, meta["num_actions"], placement.home)

    limit_jax(config.devices)
    placement = place(config.devices)
    config.check_split(len(placement.learner))
    leader = is_leader()  # of several processes, only the leader writes
    with contextlib.ExitStack() as exits:
        exits.enter_context(out_of_memory_advice(config))
        checkpoints, restored, evaluator = None, None, None
        notes: list[str] = []
        outputs: list[Writer] = []
        if leader:
            session_dir.mkdir(parents=True, exist_ok=True)
            exits.enter_context(only_writer(session_dir))
            checkpoints = CheckpointWriter(session_dir)
            exits.callback(checkpoints.close)
        if resume:
            restored, notes = restore_session(config, session_dir, checkpoints, target)
        meta = restored.meta if restored else None
        progress = Progress(meta, int(restored.arrays["train_state"].optimizer_steps) if restored else 0)

        # The emulators cannot be saved: a resumed session plays new games.
        seed = config.seed + session
        game_seed = int(np.random.SeedSequence([seed, progress.updates]).generate_state(1)[0] >> 1)
        groups = make_groups(config, placement, game_seed)
        for group in itertools.chain(*groups):
            exits.callback(group.pool.close)
        num_actions = groups[0][0].pool.num_actions
        arrays = restored.arrays if restored else first_arrays(config, num_actions, seed, placement.home)
        kind = OverlappedLearner if config.overlap == "update" else Learner
        learner = kind(config, placement, num_actions, arrays["train_state"])
        exits.callback(learner.close)

        if leader:  # only now are the logs cut back to the checkpoint: whatever is missing has been reported
            if resume and restored is None:
                notes += set_aside_logs(session_dir)
            cut_evaluations(session_dir, progress.env_steps)
            label = f"session {session}"
            made = make_writers(config, session_dir, label=label, start_env_steps=progress.env_steps, quiet=quiet)
            outputs = [*made, *writers]
        for writer in outputs:
            exits.callback(writer.close)
        log = SessionLog(outputs, config.log, progress, session, session_dir, learner.settle)
        if leader and config.evaluation.every_env_steps:
            evaluator = Evaluator(
                config, seed, num_actions, placement.evaluator, session_dir, log.message, log.evaluation
            )
            exits.callback(evaluator.close)
        run = Session(config, session, placement, progress, groups, learner, arrays["key"], log, checkpoints, evaluator)
        if meta is not None:
            notes.append(_resume_message(config, progress, meta, learner.compute_dtype.name))
        for note in (f"device: {run.device_text()}", *notes):
            log.message(note)
        log.monitor = exits.enter_context(Monitor(placement.devices, log.message)).read
        yield run


def _resume_message(config: Config, progress: Progress, meta: dict[str, Any], dtype: str) -> str:
    text = f"resumed at {progress.env_steps:,} env steps (update {progress.updates:,}); new games are started"
    if (earlier := meta.get("compute_dtype", dtype)) != dtype:
        text += f"; arithmetic {earlier} -> {dtype}: --network.compute-dtype {earlier} keeps what it was"
    before = meta["config"]["total_env_steps"]
    if before != config.total_env_steps:
        text += f"; budget {before:,} -> {config.total_env_steps:,} env steps"
        if config.ppo.anneal_learning_rate:
            rate = learning_rate(config, progress.env_steps)
            text += f": the learning rate continues at {rate:.3g}, on the line that reaches zero at the new budget"
    return text
