"""A trial: several sessions of one config, with seeds `seed`, `seed + 1`, ..., in one run directory."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_atari.algorithm import check_config
from jaxrl_atari.cli.job import job_name
from jaxrl_atari.config import Config, changed_fields
from jaxrl_atari.envs import check_environment
from jaxrl_atari.errors import SessionsFailed, Stopped, UserError, correctable, reason, require
from jaxrl_atari.hardware import distributed
from jaxrl_atari.imports import pass_on_script
from jaxrl_atari.output import say, say_changes, say_traceback
from jaxrl_atari.report.page import try_report
from jaxrl_atari.report.summary import TrialSummary, read_run
from jaxrl_atari.report.text import summary_table
from jaxrl_atari.runs.description import describe, read_config, require_same_run
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.runs.layout import CONFIG_FILE, TRIAL_SUMMARY_FILE, held_kind, resume_command
from jaxrl_atari.runs.run_dir import claim_run_dir
from jaxrl_atari.runs.writers import Writer
from jaxrl_atari.trials.launch import raise_failures, run_jobs
from jaxrl_atari.trials.sessions import (
    StopFunction,
    begin_run,
    described_for_jobs,
    session_jobs,
    train_session,
    unfinished_sessions,
)
from jaxrl_atari.trials.slots import SlotPlan, plan_slots


class TrainingResult(NamedTuple):
    """The result of `run_training`."""

    run_dir: Path
    """The run directory."""
    summary: Mapping[str, Any]
    """The `TrialSummary`, as in trial.json: `score`, `session_scores`, `complete`, `mean` and others. Empty in the
    followers of `devices.distributed`."""


def run_training(
    config: Config,
    run_dir: str | Path | None = None,
    writers: Sequence[Writer] = (),
    stop: StopFunction | None = None,
) -> TrainingResult:
    """Runs a trial, prints its summary, and draws its graphs and its report.

    Sessions that run side by side, or that take several GPUs in turn, are jobs (`launch.py`). Others train in this
    process, one after the other. With `devices.distributed` every process calls it, and process 0 writes.

    Args:
        config: the options of the trial. Its sessions have the seeds `config.seed`, `config.seed + 1`, ...
        run_dir: where to train: a run in it is resumed. None: a new run directory. `devices.distributed` needs one
            that all processes share.
        writers: receive the log points of each session, besides the writers of `config.log`. Each row has
            `session` and `seed`. They are not closed. Only where the sessions train in this process.
        stop: called with each log point of a session, which is a row as a writer receives it; for example
            `lambda row: row["return_mean"] > 400`. Once its result is true, the session ends as if its budget
            were spent, and trial.json says so under `stopped`. A result that is a text is the reason given there.
            Before the first finished game, `return_mean` is NaN. Only where the sessions train in this process.

    Returns:
        The run directory and the summary.

    Raises:
        UserError: `run_dir` holds a run of another game, protocol or seed, or one that has come further than a
            lowered budget; writers or `stop` are given, and sessions need processes of their own; no session could
            begin; the only session, in this process, failed for a reason that the user can correct.
        SessionsFailed: sessions failed otherwise. What they wrote is kept, and those that did not fail have
            finished.
        KeyboardInterrupt: after a stop request, once every session has written its last checkpoint.
        Exception: a bug, from the only session of a trial that trains in this process, or from any session with
            `devices.distributed`.
    """
    if job_name():  # this process imports the script that has started it
        raise UserError("a session imports this script: call run_training under if __name__ == '__main__'")
    # What can be refused without starting JAX is refused before a run directory is made. If every session is
    # refused later, `claim_run_dir` removes the directory again.
    check_config(config)
    wanted = None if run_dir is None else Path(run_dir).expanduser()
    if wanted is None and config.devices.distributed:
        raise UserError(
            "devices.distributed: expected --run-dir or --resume too, a directory that all processes share"
        )
    before = config_to_resume(config, wanted)
    left = [*range(config.sessions)] if wanted is None else unfinished_sessions(config, wanted)
    plan = plan_slots(config, config.sessions, len(left)) if left else None
    if plan and plan.needs_processes and (writers or stop):
        raise UserError(
            "writers and stop need sessions that train in this process: set trial.parallel = 1, and devices.gpu to"
            " the number of a GPU or to false"
        )
    note = check_environment(config.env)
    if config.devices.distributed:
        distributed.join_processes(config.devices)
    if not distributed.is_leader():
        assert wanted is not None
        with _ending_together():
            for session in left:
                train_session(config, wanted, session, stop=stop)
        return TrainingResult(wanted, {})
    with _ending_together():
        with (
            claim_run_dir(config, wanted, is_new=before is None) as directory,
            _summary_if_stopped(config, directory),
        ):
            say(f"{'resuming' if before else 'run directory:'} {directory}")
            if note:
                say(note)
            if config.resume_note:
                say(f"note: {config.resume_note}")
            if before is not None and left:
                say_changes("changed", changed_fields(before.to_dict(), config.to_dict()))
            for session in sorted({*range(config.sessions)} - {*left}):
                say(f"session {session}  finished already")
            failures: dict[str, UserError] = {}
            if plan is not None:
                failures = _train_sessions(config, directory, left, plan, writers, stop)
            elif before is not None and config.sessions != before.sessions:
                # A finished run keeps the rest of the config that it was trained with.
                kept = dataclasses.replace(before, sessions=config.sessions)
                write_json(directory / CONFIG_FILE, describe(kept, directory))
        return TrainingResult(directory, _summarise_or_raise(config, directory, failures))


def _train_sessions(
    config: Config,
    run_dir: Path,
    left: Sequence[int],
    plan: SlotPlan,
    writers: Sequence[Writer],
    stop: StopFunction | None,
) -> dict[str, UserError]:
    """Trains the sessions of a trial that are left, as jobs or in this process.

    Returns:
        The errors of those that have failed: `session 0` -> error.

    Raises:
        KeyboardInterrupt: after a stop request.
        Exception: an error of the only session, or with `devices.distributed`, in this process.
    """
    failures: dict[str, UserError] = {}

    def note_end(name: str, failure: UserError | None) -> None:
        if failure is not None:
            say(f"{name}  failed: {failure}")
            failures[name] = failure

    if plan.needs_processes:
        pass_on_script()
        jobs = session_jobs(config, run_dir)
        with described_for_jobs(config, run_dir):
            run_jobs(
                jobs,
                lambda job, failure: note_end(job.name, failure),
                slots=plan.slots,
                parallel=plan.parallel,
            )
        return failures
    config = begin_run(config, run_dir)
    for session in left:
        try:
            train_session(config, run_dir, session, writers=writers, stop=stop)
        except Exception as error:
            # With `devices.distributed`, a follower cannot see that the leader's session has failed, and would
            # wait for it.
            if config.sessions == 1 or config.devices.distributed:
                raise
            say_traceback(error)
            note_end(f"session {session}", correctable(error) or SessionsFailed(reason(error)))
    return failures


def config_to_resume(config: Config, run_dir: Path | None) -> Config | None:
    """The config of the run in a directory; None if it holds none. Raises `UserError` if it cannot be resumed."""
    if run_dir is None or held_kind(run_dir) != "run":
        return None
    before = read_config(run_dir)
    require_same_run(config, before, run_dir)
    return before


def train_alone(config: Config, run_dir: Path, session: int) -> None:
    """Trains one session of a trial, as one of several commands that a cluster runs: `train --session`.

    The first command makes the run directory, and the last one writes the summary.

    Raises:
        UserError: the run cannot be resumed, or as `train_session`.
    """
    require(0 <= session < config.sessions, "--session", session, f"0 to {config.sessions - 1}")
    require(not config.devices.distributed, "devices.distributed", True, "false with --session")
    config_to_resume(config, run_dir)
    config = begin_run(config, run_dir)
    train_session(config, run_dir, session)
    if not unfinished_sessions(config, run_dir):
        _summarise_or_raise(config, run_dir, {})


@contextlib.contextmanager
def _ending_together() -> Iterator[None]:
    """Context of each process of `devices.distributed`: it waits for the others at its end, and after a stop.

    Otherwise the exit of process 0 would abort the others.
    """
    try:
        yield
    except Stopped:  # in every process
        distributed.wait_for_all()
        raise
    distributed.wait_for_all()


@contextlib.contextmanager
def _summary_if_stopped(config: Config, run_dir: Path) -> Iterator[None]:
    """Writes trial.json after a stop request, and raises `KeyboardInterrupt` with the command that goes on."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        with contextlib.suppress(OSError, UserError):  # no session has a log point, or the metrics cannot be read
            write_json(run_dir / TRIAL_SUMMARY_FILE, read_run(run_dir).summary)
        text = "stopped; every session has finished"
        if unfinished_sessions(config, run_dir):
            text = f"stopped; go on with {resume_command('train', run_dir)}"
        raise type(interrupt)(text) from None


def _summarise_or_raise(config: Config, run_dir: Path, failures: Mapping[str, UserError]) -> TrialSummary:
    """Prints and saves the summary of a trial, and writes the report, even where some sessions have failed.

    Raises:
        UserError: no session could begin or has a log point. Then there is no summary.
        SessionsFailed: sessions failed otherwise.
    """
    resume = resume_command("train", run_dir)
    try:
        run = read_run(run_dir)
    except UserError:
        raise_failures(failures, config.sessions, run_dir, resume)
        raise
    say(f"\n{summary_table(run)}")
    write_json(run_dir / TRIAL_SUMMARY_FILE, run.summary)
    if config.log.graphs:
        try_report(run_dir)
    raise_failures(failures, config.sessions, run_dir, resume)
    return run.summary
