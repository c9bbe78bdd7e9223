"""A trial: several sessions of one config, with seeds `seed`, `seed + 1`, ..., in one run directory.

A suite (`suite.py`) lists and trains the sessions of its games in the same way: `unfinished`, `choose_launcher`,
`train_item`.
"""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

from jaxrl_atari.cli import StopRequest, resume_command, say
from jaxrl_atari.cli.options import say_changes
from jaxrl_atari.config import TRACED, Config, PPOConfig
from jaxrl_atari.envs import THREADS, describe_environment
from jaxrl_atari.errors import SessionsFailed, UserError, reason, require
from jaxrl_atari.hardware import distributed
from jaxrl_atari.hardware.choice import session_gpus
from jaxrl_atari.hardware.cpu import emulator_cores
from jaxrl_atari.hardware.gpus import visible
from jaxrl_atari.hardware.memory import FRACTION, memory_fraction
from jaxrl_atari.learner import check_update
from jaxrl_atari.report.page import try_report
from jaxrl_atari.report.summary import read_run, summary_table, trial_summary
from jaxrl_atari.runs.files import only_writer, write_json
from jaxrl_atari.runs.reading import STOPPED_FILE, is_finished
from jaxrl_atari.runs.run_dir import (
    CONFIG_FILE,
    describe,
    is_run,
    keep_code,
    make_run_dir,
    read_config,
    removed_if_unused,
    require_resumable,
    require_same_run,
    session_dir,
    session_dirs,
)
from jaxrl_atari.runs.writers import Row, Writer
from jaxrl_atari.session import run_session
from jaxrl_atari.suite.launch import Failure, Item, Launcher, Slot, Train, never, nothing, run_here
from jaxrl_atari.suite.processes import check_processes, in_session_process, run_processes


class TrainingResult(NamedTuple):
    """What `run_training` leaves."""

    run_dir: Path
    """The run directory."""
    summary: dict[str, Any]
    """The content of trial.json: `score`, `session_scores`, `complete`, `mean` and others. Empty in the followers
    of `devices.distributed`."""


Stop = Callable[[Row], object]
"""Called with each log point of a session. The session ends once the result is true; a text is the reason."""


def run_training(
    config: Config, run_dir: str | Path | None = None, writers: Sequence[Writer] = (), stop: Stop | None = None
) -> TrainingResult:
    """Runs a trial, prints its summary, and draws its graphs and its report.

    With `devices.distributed` every process calls it; process 0 writes.

    Args:
        config: the options of the trial. Its sessions have the seeds `config.seed`, `config.seed + 1`, ...
        run_dir: where to train: a run in it is resumed. None: a new run directory.
        writers: receive the log points of each session, besides the writers of `config.log`. Each row has
            `session` and `seed`. They are not closed. Sessions that have processes of their own get copies, by
            pickle, which are closed at the session's end.
        stop: called with each log point of a session, a row as a writer receives it. If its result is true, the
            session ends as if its budget were spent, and trial.json says so under `stopped`; a text is the reason
            given there. `stop=lambda row: row["return_mean"] > 400`. Before the first finished game, `return_mean`
            is NaN. It must be a function of a module where sessions have processes of their own.

    Returns:
        The run directory and the summary, which are complete even where trial.json could not be written.

    Raises:
        UserError: `run_dir` holds a run of another game, protocol or seed, or one that has come further than a
            lowered budget; sessions need processes of their own, which this process cannot start; the only session
            failed.
        SessionsFailed: some sessions of several failed; the others have finished.
        KeyboardInterrupt: after a stop request, once every session has written its last checkpoint.
    """
    if in_session_process():
        raise UserError(
            "a session's process imports this script: call run_training under if __name__ == '__main__'"
        )
    # Everything that can be refused is refused before a run directory is made.
    check_update(config)
    if plan_slots(config, config.sessions).needs_processes:
        check_processes(partial(train_in_process, writers=writers, stop=stop))
        hint = "or use env.vectorization_mode = sync"
        can_start = config.env.vectorization_mode == "sync"  # the process of a session can start none
        require(can_start, "trial.parallel", config.trial.parallel, "1 with env.vectorization_mode = async", hint)
    env = config.env
    notes = [describe_environment(env.backend, env.game_name, env.rules, env.gymnasium)]
    if env.resume_note:
        notes.append(f"note: {env.resume_note}")
    run_dir = None if run_dir is None else Path(run_dir).expanduser()
    before = None
    if run_dir and is_run(run_dir):
        before = read_config(run_dir)
        require_resumable(run_dir)
        require_same_run(config, before, run_dir)

    if config.devices.distributed:
        distributed.join_processes(config.devices)
    leads = distributed.is_leader()
    was_there = run_dir is not None and run_dir.is_dir()
    if leads and before is None:
        run_dir = make_run_dir(config, run_dir)
    run_dir = Path(distributed.agree(str(run_dir)))  # the followers' is not known before
    if not leads:  # a follower trains with the leader, and writes nothing
        for item in unfinished(config, run_dir):
            train_item(item, stop=stop)
        distributed.wait_for_all()
        return TrainingResult(run_dir, {})

    say(f"{'resuming' if before else 'run directory:'} {run_dir}")
    for note in filter(None, notes):
        say(note)
    failures: list[tuple[Item, Failure]] = []

    def on_end(item: Item, failure: Failure | None) -> None:
        if failure is not None:
            item.say(f"failed: {failure.reason}")
            failures.append((item, failure))

    try:
        with only_writer(run_dir), removed_if_unused(run_dir, before is None, was_there):
            items = _begin(config, before, run_dir)
            if items:
                launch, train = choose_launcher(items, writers, stop)
                launch(items, train, on_end)
    except KeyboardInterrupt:
        with contextlib.suppress(UserError):  # no session has a log point
            _save_summary(run_dir, trial_summary(read_run(run_dir)))
        raise KeyboardInterrupt(f"stopped; go on with {resume_command('train', run_dir)}") from None
    if failures and not session_dirs(run_dir):  # all were refused
        raise UserError(failures[0][1].reason)
    if failures and config.sessions == 1 and failures[0][1].correctable:
        raise UserError(failures[0][1].reason)  # as if it had run in this process
    summary = _summarise(config, run_dir, bool(failures))
    if failures:
        reasons = "; ".join(f"session {item.session}: {failure.reason}" for item, failure in failures)
        raise SessionsFailed(
            f"{len(failures)} of {config.sessions} sessions failed ({reasons});"
            f" {resume_command('train', run_dir)} runs what is missing"
        )
    distributed.wait_for_all()
    return TrainingResult(run_dir, summary)


def _begin(config: Config, before: Config | None, run_dir: Path) -> list[Item]:
    """Writes config.json, and says what has changed and which sessions are finished.

    Args:
        before: config of the run that is resumed; None for a new run.

    Returns:
        The sessions that are not finished.
    """
    items = unfinished(config, run_dir)
    if before and not items:  # keep the config it was trained with
        kept = {"sessions": config.sessions, "total_env_steps": config.total_env_steps, "log": config.log}
        wanted = config
        config = dataclasses.replace(before, **kept)
        say_changes("the run has finished, and keeps its own values", wanted, config)
    if before is None or (not items and config != before):
        write_json(run_dir / CONFIG_FILE, describe(config, run_dir))
        keep_code(run_dir)
    say_changes("changed", before or config, config)
    for session in {*range(config.sessions)} - {item.session for item in items}:
        say(f"session {session}  finished already")
    return items


def _summarise(config: Config, run_dir: Path, failed: bool) -> dict[str, Any]:
    """Prints the summary of a trial, then saves it and writes the report. Empty if no session has a log point.

    Args:
        failed: whether a session has failed. Otherwise, a trial without a log point is an error.
    """
    try:
        summary = trial_summary(read_run(run_dir))
    except UserError:  # no session has a log point
        if not failed:
            raise
        return {}
    say(f"\n{summary_table(summary)}")
    _save_summary(run_dir, summary)
    if config.log.graphs:
        try_report(run_dir)
    return summary


def _save_summary(run_dir: Path, summary: dict[str, Any]) -> None:
    """Writes trial.json, or says why it could not be written: the metrics, from which it is made, are there."""
    try:
        write_json(run_dir / "trial.json", summary)
    except OSError as error:
        say(
            f"trial.json is not saved: {reason(error)}; python -m jaxrl_atari.train --resume {run_dir} tries again"
        )


# --- Sessions ----------------------------------------------------------------------------------------------------


def unfinished(config: Config, run_dir: Path, first: int = 0, game: str = "", setting: str = "") -> list[Item]:
    """Lists the sessions of a trial that have not trained to their end.

    Args:
        config: config of the trial.
        run_dir: its run directory.
        first: number of the trial's first session in its suite.
        game: its game in a suite.
        setting: its setting in a sweep.
    """
    description = describe(config, run_dir)
    program = program_number(config)
    return [
        Item(config, run_dir, session, description, first + session, game, setting, program)
        for session in range(config.sessions)
        if not is_finished(config, session_dir(run_dir, session))
    ]


def program_number(config: Config) -> int:
    """A number that is equal for configs with the same compiled programs, such as those of other learning
    rates."""
    values = config.to_dict()
    for name in ("name", "seed", "sessions", "total_env_steps", "output_dir", "trial", "evaluation", "log"):
        del values[name]
    for name, annotation in get_type_hints(PPOConfig, include_extras=True).items():
        if TRACED in getattr(annotation, "__metadata__", ()):
            del values["ppo"][name]
    return hash(json.dumps(values))


def train_item(
    item: Item,
    *,
    writers: Sequence[Writer] = (),
    stop: Stop | None = None,
    stop_requested: Callable[[], bool] = never,
    on_first_update: Callable[[], object] = nothing,
) -> None:
    """Trains a session from its newest checkpoint, if it has one. config.json of the run is written once it
    trains.

    Args:
        writers: receive the log points, with `session` and `seed` in each row; they are not closed.
        stop: ends the session early; see `run_training`.
        stop_requested: another way to stop it than a signal.
        on_first_update: called after the first update.

    Raises:
        UserError, KeyboardInterrupt: as `run_session`.
    """
    config = item.config
    directory = session_dir(item.run_dir, item.session)
    rule = StopRule(stop)
    with StopRequest(f"session {item.session}", not config.devices.distributed) as requested:

        def began() -> None:
            requested.training = True
            if distributed.is_leader():
                write_json(item.run_dir / CONFIG_FILE, item.description)
                for line in keep_code(item.run_dir):
                    item.say(line)
            on_first_update()

        run_session(
            config,
            directory,
            item.session,
            resume=True,
            writers=[
                SessionWriter(writer, item.session, config.seed + item.session) for writer in (*writers, rule)
            ],
            on_first_update=began,
            stop_requested=lambda: requested.requested or stop_requested(),
            is_enough=rule.is_met if stop else None,
        )
    if rule.reason is not None and distributed.is_leader():
        ended = {"env_steps": rule.env_steps, "total_env_steps": config.total_env_steps, "reason": rule.reason}
        write_json(directory / STOPPED_FILE, ended)


def train_in_process(
    item: Item,
    *,
    writers: Sequence[Writer] = (),
    stop: Stop | None = None,
    stop_requested: Callable[[], bool] = never,
    on_first_update: Callable[[], object] = nothing,
) -> None:
    """`train_item` in a process of the session's own: it closes its copies of the writers."""
    with contextlib.ExitStack() as exits:
        for writer in writers:
            exits.callback(writer.close)
        train_item(
            item, writers=writers, stop=stop, stop_requested=stop_requested, on_first_update=on_first_update
        )


class SessionWriter(Writer):
    """Passes what a session writes on to a caller's writer, with `session` and `seed` in each row."""

    def __init__(self, writer: Writer, session: int, seed: int):
        self._writer = writer
        self._own = {"session": session, "seed": seed}

    def write(self, row: Row) -> None:
        self._writer.write(self._own | dict(row))

    def evaluation(self, row: Row) -> None:
        self._writer.evaluation(self._own | dict(row))

    def progress(self, env_steps: int, row: Row) -> None:
        self._writer.progress(env_steps, self._own | dict(row) if row else row)

    def message(self, text: str) -> None:
        self._writer.message(text)


class StopRule(Writer):
    """Asks the caller's `stop` about each log point, until it says that the session is to end.

    An unknown number is NaN in the row that it is asked about, so that comparisons are false.
    """

    def __init__(self, stop: Stop | None):
        self._stop = stop
        self.env_steps = 0  # of the log point at which the session ends
        self.reason: str | None = None  # None while the session goes on

    def is_met(self) -> bool:
        """Whether the session is to end."""
        return self.reason is not None

    def write(self, row: Row) -> None:
        if self._stop is None or self.is_met():
            return
        answer = self._stop({name: math.nan if value is None else value for name, value in row.items()})
        if answer:
            self.env_steps = row["env_steps"]
            self.reason = answer if isinstance(answer, str) else "stop(row) was true at this log point"


# --- Slots -------------------------------------------------------------------------------------------------------


class SlotPlan(NamedTuple):
    """The devices that sessions take in turn, and how many of them train at a time."""

    slots: list[Slot]
    parallel: int

    @property
    def needs_processes(self) -> bool:
        """Whether sessions run side by side, or see one of several GPUs: then each has a process of its own."""
        return self.parallel > 1 or bool(self.slots[0].environment)


def plan_slots(config: Config, sessions: int, waiting: int | None = None) -> SlotPlan:
    """Plans where sessions are trained: on the GPUs in turn, or on the CPU.

    Args:
        sessions: number of sessions in the trial or suite.
        waiting: sessions that remain to be trained. None: all.

    Raises:
        ConfigError: the machine does not have the devices, or sessions that share a GPU would take more memory
            than it has.
    """
    places = list(dict.fromkeys(session_gpus(config.devices, number) for number in range(sessions)))
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
            if sharing > 1:
                fraction = memory_fraction(config.devices, sharing, min(found.memory for found in gpus))
                if fraction:
                    where += f", {fraction:.0%} of its memory"
                    environment[FRACTION] = str(fraction)
        if parallel > 1:
            environment[THREADS] = str(max(1, emulator_cores() // parallel))
        slots.append(Slot(f"on {where} ({why})", environment))
    return SlotPlan(slots, parallel)


def choose_launcher(
    items: Sequence[Item], writers: Sequence[Writer] = (), stop: Stop | None = None
) -> tuple[Launcher, Train]:
    """Chooses the launcher of sessions on this machine, and the function that trains each of them.

    The sessions of a suite have processes of their own. In this process, the only session of a trial raises its
    error, and so does any session with `devices.distributed`: a follower cannot see that the leader's session
    failed, and would wait for it.

    Args:
        items: at least one.
        writers, stop: see `run_training`.
    """
    config = items[0].config
    plan = plan_slots(config, 1 + max(item.number for item in items), len(items))
    if items[0].game or plan.needs_processes:
        launch = partial(run_processes, slots=plan.slots, parallel=plan.parallel)
        return launch, partial(train_in_process, writers=writers, stop=stop)
    alone = config.sessions == 1 or config.devices.distributed
    return partial(run_here, raises=alone), partial(train_item, writers=writers, stop=stop)
