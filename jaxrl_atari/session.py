"""One session: act -> update -> log -> checkpoint, with one seed, until its budget is spent."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxrl_atari.config import Config
from jaxrl_atari.devices import Placement, is_leader, place, sum_over_processes
from jaxrl_atari.evaluate.during_training import Evaluator
from jaxrl_atari.hardware.monitor import Monitor
from jaxrl_atari.hardware.runtime import multiplies_bfloat16
from jaxrl_atari.run_dir.checkpoints import Checkpoints
from jaxrl_atari.run_dir.files import unused
from jaxrl_atari.run_dir.lock import only_writer
from jaxrl_atari.run_dir.session_log import SessionLog, SessionResult
from jaxrl_atari.run_dir.writers import Writer, make_writers
from jaxrl_atari.trainer import Trainer, abstract_arrays
from jaxrl_atari.trial.stopping import StopRequest


def run_session(
    config: Config,
    session_dir: Path,
    session: int = 0,
    *,
    resume: bool = False,
    writers: Sequence[Writer] = (),
    stop: StopRequest | None = None,
) -> SessionResult:
    """Trains session `session` of a trial, with seed `config.seed + session`, and writes all its files.

    Args:
        session_dir: where metrics, events and checkpoints go; made if it is not there.
        resume: go on from the latest checkpoint, if there is one.
        writers: take the log points beside those that `config.log` asks for; one that raises ends the session.
        stop: where the wish to stop may come from; left out, from signals.

    Raises:
        UserError: the loss became non-finite (the last checkpoint before is kept), a file cannot be used, or another
            process is training there.
        KeyboardInterrupt: told to stop, once the last checkpoint is written.
    """
    if not is_leader():
        return _run(config, session_dir, session, resume, (), stop)
    session_dir.mkdir(parents=True, exist_ok=True)
    with only_writer(session_dir):
        return _run(config, session_dir, session, resume, writers, stop)


def _run(
    config: Config, session_dir: Path, session: int, resume: bool, writers: Sequence[Writer], stop: StopRequest | None
) -> SessionResult:
    seed, began_at = config.seed + session, time.time()
    placement = place(config.devices)
    checkpoints = Checkpoints(session_dir, read_only=not is_leader()) if is_leader() or resume else None
    latest = checkpoints.latest_step() if checkpoints and resume else None
    restored = meta = None
    if checkpoints and latest is not None:
        meta = checkpoints.read_meta(latest)
        restored = (checkpoints.restore(latest, abstract_arrays(config, meta["num_actions"], placement.home)), meta)

    trainer = Trainer(config, seed, placement, restored)
    label = f"session {session}"
    aside = _set_aside(session_dir) if resume and restored is None and is_leader() else None
    if is_leader():
        writers = [*make_writers(config, session_dir, label=label, start_env_steps=trainer.env_steps), *writers]
    log = SessionLog(writers, checkpoints if is_leader() else None, trainer, session, session_dir, began_at, meta)
    log.message(_device_message(config, placement))
    if config.network.compute_dtype == "auto" and placement.home.platform == "cpu" and multiplies_bfloat16():
        log.message("this CPU multiplies bfloat16: with --network.compute-dtype bfloat16 it trains faster")
    if resume:
        log.message(_resume_message(config, trainer, meta) + (f"; {aside}" if aside else ""))
    try:
        with Monitor(sorted({*placement.learner, *placement.actors}, key=str), log.message) as log.monitor:
            if config.evaluation.every_env_steps and is_leader():
                log.evaluator = Evaluator(trainer, placement.evaluator, session_dir, log.message)
            _train(trainer, log, stop or StopRequest())
        return log.result()
    finally:
        trainer.close()
        if log.evaluator is not None:
            log.evaluator.close()
        if checkpoints is not None:
            checkpoints.close()
        for writer in writers:
            writer.close()


def _set_aside(session_dir: Path) -> str | None:
    """Renames the log points of a session that has no checkpoint and starts anew; returns what to say of it."""
    table = session_dir / "metrics.csv"
    if not table.is_file() or len(table.read_bytes().splitlines()) < 2:
        return None
    return f"the log points before are in {table.rename(unused(table)).name}"


def _train(trainer: Trainer, log: SessionLog, stop: StopRequest) -> None:
    """The loop. With `devices.check` nothing moves between host and devices that was not told to, once compiled."""
    guard = "disallow" if trainer.config.devices.check else "allow"
    with stop:
        told_to_stop = False  # this process, or one that learns with it
        while not trainer.config.is_spent(trainer.env_steps):
            told_to_stop = sum_over_processes(stop.wanted()) > 0
            if told_to_stop:
                break
            with jax.transfer_guard("allow" if log.compiling else guard):
                metrics = trainer.iterate()
            log.after_update(metrics)
        log.finish()
        if told_to_stop or stop.wanted():
            raise KeyboardInterrupt


def _device_message(config: Config, placement: Placement) -> str:
    text = f"device: {', '.join(map(str, placement.learner))} ({placement.reason})"
    actors = list(dict.fromkeys(placement.actors))
    if not set(actors) <= set(placement.learner):
        text += f"; acts on {', '.join(map(str, actors))}"
    if config.evaluation.every_env_steps:
        text += f"; evaluates on {placement.evaluator}"
    return text


def _resume_message(config: Config, trainer: Trainer, meta: dict[str, Any] | None) -> str:
    if meta is None:
        return "there is no checkpoint to resume from yet: the session starts at 0 env steps"
    text = f"resumed at {trainer.env_steps:,} env steps (update {trainer.updates:,}); the games start anew"
    before = meta["config"]["total_env_steps"]
    if before != config.total_env_steps:
        text += (
            f"; budget {before:,} -> {config.total_env_steps:,} env steps: the learning rate goes on at"
            f" {trainer.learning_rate:.3g}, on the line that reaches zero at the new budget"
        )
    return text
