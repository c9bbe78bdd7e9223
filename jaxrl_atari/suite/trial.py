"""A trial: several sessions of one config, with seeds `seed`, `seed + 1`, ..., in one run directory.

A suite (`suite.py`) lists and trains the sessions of its games in the same way: `unfinished`, `train_items`.
"""

import contextlib
import dataclasses
import math
import multiprocessing
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_atari.cli import StopRequest, resume_command, say
from jaxrl_atari.cli.options import say_changes
from jaxrl_atari.config import Config
from jaxrl_atari.envs import THREADS
from jaxrl_atari.errors import SessionsFailed, UserError
from jaxrl_atari.hardware import distributed, runtime
from jaxrl_atari.hardware.choice import session_gpus
from jaxrl_atari.hardware.gpus import visible
from jaxrl_atari.hardware.memory import FRACTION, memory_fraction
from jaxrl_atari.report.page import try_report
from jaxrl_atari.report.summary import summary_table, write_trial_summary
from jaxrl_atari.runs.files import only_writer, write_json
from jaxrl_atari.runs.reading import is_finished
from jaxrl_atari.runs.run_dir import (
    CONFIG_FILE,
    describe,
    is_run,
    make_run_dir,
    read_config,
    require_resumable,
    require_same_run,
    session_dir,
)
from jaxrl_atari.runs.writers import Writer
from jaxrl_atari.session import run_session
from jaxrl_atari.suite.processes import Ended, Item, Slot, attempt, run_processes


class TrainingResult(NamedTuple):
    """What `run_training` leaves."""

    run_dir: Path
    summary: dict[str, Any]  # the content of trial.json; empty in the followers of `devices.distributed`


def run_training(config: Config, run_dir: str | Path | None = None, writers: Sequence[Writer] = ()) -> TrainingResult:
    """Runs a trial, prints its summary, and draws its graphs and its report.

    With `devices.distributed` every process calls it; process 0 writes.

    Args:
        run_dir: where to train: a run in it is resumed. None: a new run directory.
        writers: receive the log points of each session, besides the writers of `config.log`. Sessions that have
            processes of their own get copies, by pickle.

    Raises:
        UserError: `run_dir` holds a run of another game, protocol or seed, or one that has come further than a lowered
            budget; the only session failed.
        SessionsFailed: some sessions of several failed; the others have finished.
        KeyboardInterrupt: after a stop request, once every session has written its last checkpoint.
    """
    if multiprocessing.current_process().name.startswith("session "):
        raise UserError("a session's process imports this script: call run_training under if __name__ == '__main__'")
    plan_slots(config, config.sessions)  # raises errors before a run directory is made
    run_dir = None if run_dir is None else Path(run_dir).expanduser()
    before = None
    if run_dir and is_run(run_dir):
        before = read_config(run_dir)
        require_resumable(run_dir)
        require_same_run(config, before, run_dir)
    if config.devices.distributed:
        distributed.join_processes(config.devices)
    leads = distributed.is_leader()
    if leads and before is None:
        run_dir = make_run_dir(config, run_dir)
    run_dir = Path(distributed.agree(str(run_dir)))  # the followers' is not known before
    items = unfinished(config, run_dir)

    # A follower: trains with the leader, and writes nothing.
    if not leads:
        for item in items:
            train_item(item)
        distributed.wait_for_all()
        return TrainingResult(run_dir, {})

    # The leader: trains, summarises, reports.
    say(f"{'resuming' if before else 'run directory:'} {run_dir}")
    command = resume_command("train", run_dir)
    summary = {}
    try:
        with only_writer(run_dir):
            if before and not items:  # keep the config it was trained with
                kept = {"sessions": config.sessions, "total_env_steps": config.total_env_steps, "log": config.log}
                wanted = config
                config = dataclasses.replace(before, **kept)
                say_changes("the run has finished, and keeps its own values", wanted, config)
            if before is None or (not items and config != before):
                write_json(run_dir / CONFIG_FILE, describe(config, run_dir))
            say_changes("changed", before or config, config)
            for session in {*range(config.sessions)} - {item.session for item in items}:
                say(f"session {session}  finished already")
            failures = [(item, failure) for item, failure in train_items(items, writers) if failure]
        if failures and config.sessions == 1 and failures[0][1].correctable:
            raise UserError(failures[0][1].reason)  # as if it had run in this process
        try:
            summary = write_trial_summary(run_dir)
        except UserError:  # no session has a log point
            if not failures:
                raise
        else:
            say(f"\n{summary_table(summary)}")
            if config.log.graphs:
                try_report(run_dir)
    except KeyboardInterrupt:
        with contextlib.suppress(UserError):
            write_trial_summary(run_dir)
        raise KeyboardInterrupt(f"stopped; go on with {command}") from None

    # What failed.
    if failures:
        reasons = "; ".join(f"session {item.session}: {failure.reason}" for item, failure in failures)
        raise SessionsFailed(
            f"{len(failures)} of {config.sessions} sessions failed ({reasons}); {command} runs what is missing"
        )
    distributed.wait_for_all()
    return TrainingResult(run_dir, summary)


def unfinished(config: Config, run_dir: Path, first: int = 0, game: str = "") -> list[Item]:
    """The sessions of a trial that have not spent their budget.

    Args:
        first: number of the trial's first session in its suite.
        game: its name in a suite.
    """
    description = describe(config, run_dir)
    return [
        Item(config, run_dir, session, description, first + session, game)
        for session in range(config.sessions)
        if not is_finished(config, session_dir(run_dir, session))
    ]


def train_item(item: Item, writers: Sequence[Writer] = (), stop_requested: Callable[[], bool] = lambda: False) -> None:
    """Trains a session from its newest checkpoint, if it has one. config.json of the run is written once it trains.

    Args:
        writers: see `run_training`.
        stop_requested: another way to stop it than a signal.

    Raises:
        UserError, KeyboardInterrupt: as `run_session`.
    """
    config = item.config
    directory = session_dir(item.run_dir, item.session)
    with StopRequest(f"session {item.session}", not config.devices.distributed) as stop:

        def began() -> None:
            stop.training = True
            if distributed.is_leader():
                write_json(item.run_dir / CONFIG_FILE, item.description)

        run_session(
            config,
            directory,
            item.session,
            resume=True,
            writers=writers,
            on_first_update=began,
            stop_requested=lambda: stop.requested or stop_requested(),
        )


def train_items(items: Sequence[Item], writers: Sequence[Writer] = ()) -> Ended:
    """Trains sessions: one after the other in this process, or in processes that each see their own GPUs.

    Args:
        writers: see `run_training`.

    Yields:
        Each session that has ended by itself, and why it failed, if it did. In this process, the only session of a
        trial, and any session with `devices.distributed`, raises its error instead.
    """
    if not items:
        return
    config = items[0].config
    train = partial(train_item, writers=writers)
    slots, parallel = plan_slots(config, 1 + max(item.number for item in items), len(items))
    if parallel > 1 or slots[0].environment or items[0].game:
        ended = run_processes(items, train, slots, parallel)
    else:
        # A follower cannot see that the leader's session failed, and would wait for it.
        alone = config.sessions == 1 or config.devices.distributed
        ended = ((item, train(item) if alone else attempt(train, item)) for item in items)
    for item, failure in ended:
        if failure is not None:
            item.say(f"failed: {failure.reason}")
        yield item, failure


def plan_slots(config: Config, sessions: int, waiting: int | None = None) -> tuple[list[Slot], int]:
    """The devices that sessions take in turn, and how many of them train at a time.

    Args:
        sessions: number of sessions in the trial or suite.
        waiting: sessions that remain to be trained. None: all.

    Raises:
        ConfigError: the machine does not have the devices, or sessions that share a GPU would take more memory than it
            has.
    """
    places = list(dict.fromkeys(session_gpus(config, number) for number in range(sessions)))
    parallel = min(config.trial.parallel or len(places), waiting or sessions)
    sharing = math.ceil(parallel / len(places))
    slots = []
    for indices, why in places:
        gpus = [visible().gpus[index] for index in indices]
        where = "CPU"
        environment = {}
        if gpus:
            where = f"GPU {','.join(map(str, indices))}"
            if type(config.devices.gpu) is not int and len(gpus) < len(visible().gpus):  # an index counts all
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(found.name for found in gpus)
            memory = min(found.memory for found in gpus)
            if sharing > 1 and (fraction := memory_fraction(config.devices, sharing, memory)):
                where += f", {fraction:.0%} of its memory"
                environment[FRACTION] = str(fraction)
        if parallel > 1:
            environment[THREADS] = str(max(1, runtime.usable_cores() // parallel))
        slots.append(Slot(f"on {where} ({why})", environment))
    return slots, parallel
