"""A trial: several sessions of one config, with seeds `seed`, `seed + 1`, ..., in one run directory."""

import contextlib
import dataclasses
import json
import math
import os
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_atari.cli import say
from jaxrl_atari.cli.options import say_changes
from jaxrl_atari.cli.stopping import StopRequest
from jaxrl_atari.config import Config
from jaxrl_atari.errors import SessionsFailed, UserError, reason
from jaxrl_atari.hardware import distributed
from jaxrl_atari.hardware.cpu import usable_cores
from jaxrl_atari.hardware.gpus import visible
from jaxrl_atari.hardware.memory_share import memory_fraction, set_memory_fraction
from jaxrl_atari.hardware.rotation import Place, place_session
from jaxrl_atari.plots import plot_trial
from jaxrl_atari.report.pages import try_report
from jaxrl_atari.report.summary import read_run, summary_table, trial_summary
from jaxrl_atari.runs.config_file import same_budget, with_budget
from jaxrl_atari.runs.description import all_finished, change_budget, require_budget
from jaxrl_atari.runs.files import only_writer, read_json, write_json
from jaxrl_atari.runs.run_dir import (
    describe_resumed,
    is_finished,
    is_run,
    make_run_dir,
    read_config,
    require_same_run,
    session_dir,
    write_description,
)
from jaxrl_atari.session import run_session
from jaxrl_atari.suite.processes import Task, run_processes


def run_training(config: Config, run_dir: Path | None = None) -> Path:
    """Runs a trial, prints a summary and returns the run directory.

    With `devices.distributed` every process calls it; process 0 writes.

    Args:
        run_dir: where to train: a run in it is resumed. None: a new run directory.

    Raises:
        UserError: as `run_trial`; `run_dir` holds a run of another game, protocol or seed, or one that has come further
            than a lowered budget.
    """
    count_processes(config, place_sessions(config))  # raises errors before a run directory is made
    resume, before = run_dir is not None and is_run(run_dir), None
    if run_dir is not None and resume:
        if (run_dir / "checkpoints").is_dir():
            expected = run_dir.absolute().parent
            raise UserError(f"--resume {run_dir}: is a session's directory; expected the run's, {expected}")
        before = read_config(run_dir)
        require_same_run(config, before)
        require_budget(config, before, run_dir)
    if config.devices.distributed:
        distributed.join_processes(config.devices)
    if distributed.is_leader() and not resume:
        run_dir = make_run_dir(config, run_dir)
    run_dir = Path(distributed.agree(str(run_dir or "")))  # the followers' is not known before
    if not distributed.is_leader():
        follow_trial(config, run_dir, resume=resume)
        distributed.wait_for_all()
        return run_dir
    say(f"{'resuming' if resume else 'run directory:'} {run_dir}")
    if before is not None:  # a run that has nothing left to train keeps what it was trained with
        say_changes("changed", before, with_budget(before, config) if all_finished(config, run_dir) else config)
    summarised = resume and _is_summarised(config, run_dir)
    try:
        run_trial(config, run_dir, resume=resume)
    except SessionsFailed:
        with contextlib.suppress(UserError, OSError):  # no session has figures, or the disk is full
            _summarise(config, run_dir)
        raise
    except KeyboardInterrupt:
        with contextlib.suppress(UserError, OSError):
            summary = trial_summary(read_run(run_dir))
            if not summary["complete"]:  # of a complete run, graphs and report are written first
                write_json(run_dir / "trial.json", summary)
        raise
    if not summarised:
        _summarise(config, run_dir)
    distributed.wait_for_all()
    return run_dir


def _is_summarised(config: Config, run_dir: Path) -> bool:
    """Whether every session has spent the run's budget, and the summary was written after that."""
    if not same_budget(config, read_config(run_dir)):
        return False
    if not all_finished(config, run_dir):
        return False
    directories = [session_dir(run_dir, session) for session in range(config.sessions)]
    times = [path.stat().st_mtime if path.exists() else 0.0 for path in
             (run_dir / "trial.json", *(directory / "metrics.csv" for directory in directories))]  # fmt: skip
    return times[0] == max(times) and _is_complete(config, run_dir)


def _is_complete(config: Config, run_dir: Path) -> bool:
    """Whether trial.json is that of a complete run with this budget, and not of an interrupted one."""
    try:
        summary = read_json(run_dir / "trial.json")
        return summary["complete"] is True and summary["planned_env_steps"] == config.total_env_steps
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _summarise(config: Config, run_dir: Path) -> None:
    """Prints a table, and writes the trial's graphs, its report and, last, trial.json: see `_is_summarised`."""
    run = read_run(run_dir)
    summary = trial_summary(run)
    say(f"\n{summary_table(summary)}")
    if config.log.graphs:
        try:
            say("\n".join(map(str, plot_trial(run))))
        except Exception as error:  # training must not fail for its graphs
            say(f"no graphs: {error}; python -m jaxrl_atari.plots {run_dir} tries again")
        try_report(run_dir)
    write_json(run_dir / "trial.json", summary)


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sessions of a trial that remain to be trained, their GPUs, and the config.json files."""

    run_dir: Path
    resume: bool
    places: dict[int, Place]  # of the sessions to train
    descriptions: dict[Path, dict[str, Any]]  # directory -> content of its config.json

    def write_descriptions(self, *sessions: int) -> None:
        """Writes config.json of the run and of some of its sessions."""
        for directory in (self.run_dir, *(session_dir(self.run_dir, session) for session in sessions)):
            write_description(directory, self.descriptions[directory])


def place_sessions(config: Config) -> list[Place]:
    """The GPUs of every session of a trial; see `place_session`."""
    return [place_session(config, session) for session in range(config.sessions)]


def count_processes(config: Config, places: Sequence[Place]) -> tuple[int, int]:
    """Number of sessions at a time, and of processes on each GPU.

    Raises:
        ConfigError: processes that share a GPU would take more memory than it has.
    """
    blocks = {place.gpus for place in places}
    parallel = min(config.trial.parallel or len(blocks), len(places))
    per_gpu = math.ceil(parallel / len(blocks)) if blocks else 1
    if blocks - {()}:
        memory_fraction(config.devices, per_gpu, min(visible().gpus[i].memory for block in blocks for i in block))
    return parallel, per_gpu


def make_plan(config: Config, run_dir: Path, resume: bool, places: list[Place]) -> Plan:
    """The sessions that have not spent their budget; the others are reported."""
    waiting = {}
    for session, place in enumerate(places):
        if resume and is_finished(config, session_dir(run_dir, session)):
            say(f"session {session}  finished already")
        else:
            waiting[session] = place
    descriptions = {run_dir: describe_resumed(config, run_dir)}
    for session in waiting:
        directory = session_dir(run_dir, session)
        own = dataclasses.replace(config, seed=config.seed + session)
        descriptions[directory] = describe_resumed(own, directory)
    return Plan(run_dir, resume, waiting, descriptions)


def run_trial(config: Config, run_dir: Path, *, resume: bool = False, num_threads: int = 0) -> None:
    """Trains all sessions of a trial: in this process one after the other, or each in a process with its own GPUs.

    config.json of a new run is written first; that of a resumed run is replaced once training has begun.

    Args:
        run_dir: made by `make_run_dir`.
        resume: continue what is in `run_dir`: finished sessions are left alone, others resume from their checkpoint.
        num_threads: emulator threads of each session, where not 0; config.json keeps `env.num_threads`.

    Raises:
        SessionsFailed: some sessions of several failed; the others have finished.
        UserError: the only session failed, nothing could be started, or another process is training in `run_dir`.
        KeyboardInterrupt: after a stop request, once every session has written its last checkpoint.
    """
    places = place_sessions(config)
    failures: dict[Any, str] = {}
    with only_writer(run_dir):
        plan = make_plan(config, run_dir, resume, places)
        if resume and not plan.places:
            change_budget(config, run_dir)
        if num_threads:
            config = dataclasses.replace(config, env=dataclasses.replace(config.env, num_threads=num_threads))
        if plan.places and not resume:
            plan.write_descriptions(*plan.places)
        parallel, per_gpu = count_processes(config, list(plan.places.values()))
        if parallel > 1 or any(map(_needs_process, plan.places.values())):
            tasks = [_task(config, plan, session, per_gpu, parallel) for session in plan.places]
            failed = run_processes(tasks, parallel, per_gpu)
            if config.sessions == 1 and any(status == UserError.exit_status for _, status in failed.values()):
                raise UserError(failed[0].reason)  # as if it had run in this process
            failures = {session: failure.reason for session, failure in failed.items()}
        else:
            with StopRequest(quick=not config.devices.distributed) as stop:

                def began(session: int) -> None:
                    stop.training = True
                    plan.write_descriptions(session)

                for session in plan.places:
                    try:
                        run_session(
                            config, session_dir(run_dir, session), session, resume=resume,
                            stop_requested=stop.requested, on_first_update=partial(began, session),
                        )  # fmt: skip
                    except Exception as error:
                        if config.sessions == 1 or config.devices.distributed:  # the other processes go on with it
                            raise
                        failures[session] = _reported(session, error)
        if failures and resume:
            with contextlib.suppress(OSError):  # the disk may be full: the failures say so
                plan.write_descriptions()  # the next --resume runs the sessions that failed before they trained, too
    if failures:
        reasons = "; ".join(f"session {session}: {text}" for session, text in failures.items())
        raise SessionsFailed(
            f"{len(failures)} of {config.sessions} sessions failed ({reasons}); --resume {run_dir} runs what is missing"
        )


def _needs_process(place: Place) -> bool:
    """Whether a session uses some of the visible GPUs and leaves others.

    A process can limit JAX to some GPUs only once, so each such session gets its own.
    """
    return bool(place.gpus) and place.gpus != tuple(range(len(visible().gpus)))


def follow_trial(config: Config, run_dir: Path, *, resume: bool = False) -> None:
    """`run_trial` in a process that is not the leader: trains the same sessions in the same order, writes nothing."""
    with StopRequest(quick=False) as stop:
        for session in range(config.sessions):
            directory = session_dir(run_dir, session)
            if not (resume and is_finished(config, directory)):
                run_session(config, directory, session, resume=resume, stop_requested=stop.requested)


def _reported(session: int, error: Exception) -> str:
    """Prints why a session failed; returns the reason in one line."""
    if not isinstance(error, UserError):
        traceback.print_exception(error)
    say(f"session {session}  failed: {reason(error)}")
    return reason(error)


def _task(config: Config, plan: Plan, session: int, sharing: int, parallel: int) -> Task:
    """The process of a session; its config and its config.json files travel on its standard input.

    Args:
        sharing: processes on its GPU; parallel: sessions at a time, which share the cores.
    """
    place, environment = plan.places[session], dict(os.environ)
    where = "CPU"
    if place.gpus:
        gpus = [visible().gpus[index] for index in place.gpus]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.name for gpu in gpus)
        where = "GPU " + ",".join(map(str, place.gpus))
        fraction = memory_fraction(config.devices, sharing, min(gpu.memory for gpu in gpus))
        if fraction is not None:
            set_memory_fraction(environment, fraction)
            where += f", {fraction:.0%} of its memory"
    say(f"session {session}  on {where} ({place.reason})")
    threads = config.env.num_threads or (max(1, usable_cores() // parallel) if parallel > 1 else 0)
    own = dataclasses.replace(
        config,
        devices=dataclasses.replace(config.devices, gpu=place.gpu),
        env=dataclasses.replace(config.env, num_threads=threads),
    )
    directories = (plan.run_dir, session_dir(plan.run_dir, session))
    descriptions = {str(directory): plan.descriptions[directory] for directory in directories}
    first_line = json.dumps({"config": own.to_dict(), "resume": plan.resume, "descriptions": descriptions})
    arguments = ("jaxrl_atari.suite.session_worker", str(plan.run_dir), str(session))
    return Task(session, arguments, environment, place.gpus, first_line=first_line, warms_cache=True)
