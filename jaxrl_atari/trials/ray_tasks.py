"""The launcher of a Ray cluster, for suites: each job is a task of Ray, in a process of its own.

The processes may be on other machines, which share the directory of the suite. They and the command therefore
leave notes for each other in SUITE_DIR/ray/: a file for each job whose process has started and, once a stop is
requested, the file `stop`.
"""

import os
import pickle
import shutil
import threading
import time
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError, TaskCancelledError

from jaxrl_atari.cli.signals import StopRequest
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import reason
from jaxrl_atari.imports import Code, code_to_send, import_sent
from jaxrl_atari.runs.description import describe_here
from jaxrl_atari.runs.layout import OUTPUT_FILE, latest_env_steps, session_path
from jaxrl_atari.trials.launch import POLL_SECONDS, STOPPING, Failure, Job, OnEnd, Train
from jaxrl_atari.trials.ray_cluster import (
    KILLED,
    SECONDS_BETWEEN_NEWS,
    TaskEnd,
    connected,
    run_in_worker,
)
from jaxrl_atari.trials.resources import MachineShare, ResourcesConfig


def run_on_ray(
    jobs: Sequence[Job],
    train: Train,
    on_end: OnEnd,
    *,
    directory: Path,
    address: str,
    devices: DevicesConfig,
    resources: ResourcesConfig,
) -> None:
    """Trains jobs on a Ray cluster, as many at a time as there is room for.

    The output of a session goes to output.txt in its directory.

    Args:
        jobs, train, on_end: see `Launcher`. `train` is a function that can be imported, or a `functools.partial`
            of one.
        directory: directory of the suite, which the machines share.
        address: address of the cluster.
        devices: devices of the config.
        resources: resources of each session.

    Raises:
        UserError: the cluster cannot be used, or a session needs more than any machine has.
        KeyboardInterrupt: a stop was requested and passed on, and every running session has ended. A second Ctrl-C
            kills the sessions.
    """
    code = code_to_send()  # first of all, because the user may edit or move these files
    notes = directory.absolute() / "ray"
    shutil.rmtree(notes, ignore_errors=True)  # left by a process that was killed
    notes.mkdir()
    try:
        with (
            connected(address, devices, resources, "session") as share,
            StopRequest(quick=False, answer=STOPPING) as stop,  # last: Ray handles SIGTERM too
        ):
            tasks = _Tasks(jobs, train, share, notes, code)
            stopping = False
            said = time.monotonic()
            try:
                while tasks.waiting or tasks.running:
                    if stop.requested and not stopping:
                        stopping = True
                        tasks.stop()
                    ended = tasks.wait()
                    if time.monotonic() > said + SECONDS_BETWEEN_NEWS:
                        said = time.monotonic()
                        tasks.say_progress()
                    for job, end in ended:
                        # A failure after a stop request may be that of a signal to all processes of a cluster.
                        if not end.was_stopped and not (stopping and end.failure):
                            on_end(job, end.failure)
            except Exception:  # for example from `on_end`; first, the sessions write their last checkpoints
                tasks.stop()
                while tasks.waiting or tasks.running:
                    tasks.wait()
                raise
    finally:
        shutil.rmtree(notes, ignore_errors=True)
    if stopping:
        raise KeyboardInterrupt


class _Tasks:
    """The jobs of `run_on_ray` as tasks of Ray: those that wait for room on the cluster, and those that train.

    Args:
        share: the share of a machine that each task gets.
        notes: the folder SUITE_DIR/ray.
        code: the modules and files that each task imports first.
    """

    def __init__(self, jobs: Sequence[Job], train: Train, share: MachineShare, notes: Path, code: Sequence[Code]):
        task = ray.remote(num_gpus=share.gpu, num_cpus=share.cpu, max_calls=1, max_retries=0)(_train_in_task)
        self.waiting = {task.remote(code, _pack(train, job), share, notes): job for job in jobs}
        self.running: dict[ray.ObjectRef, Job] = {}
        self._notes = notes

    def wait(self) -> list[tuple[Job, TaskEnd]]:
        """Says which jobs have started. Returns those that have ended, and how, after at most `POLL_SECONDS`."""
        tasks = [*self.running, *self.waiting]
        ended, _ = ray.wait(tasks, num_returns=len(tasks), timeout=POLL_SECONDS)
        notes = {path.name for path in self._notes.iterdir()}
        for task, job in list(self.waiting.items()):
            is_started = str(job.position) in notes
            if is_started:
                output = session_path(job.run_dir, job.session) / OUTPUT_FILE
                job.say(f"starts; its output is in {output}")
            if is_started or task in ended:
                self.running[task] = self.waiting.pop(task)
        return [(self.running.pop(task), _end_of(task)) for task in ended]

    def say_progress(self) -> None:
        """Prints how far each running session was at its newest checkpoint."""
        for job in self.running.values():
            saved = latest_env_steps(session_path(job.run_dir, job.session))
            job.say(f"at {saved:,} env steps")

    def stop(self) -> None:
        """Asks each running session to stop. No other session is started."""
        (self._notes / "stop").touch()
        for task in self.waiting:
            ray.cancel(task)


class PackedJob(NamedTuple):
    """A job as it is sent to its process."""

    position: int  # `Job.position`
    folder: Path  # the session's directory, absolute, because the process has another working directory
    pickled: bytes  # `train` and the job, which may be of classes that the user's own code defines


def _pack(train: Train, job: Job) -> PackedJob:
    """Packs a job, with the function that trains it."""
    absolute = job._replace(run_dir=job.run_dir.absolute())
    return PackedJob(job.position, session_path(absolute.run_dir, job.session), pickle.dumps((train, absolute)))


def _end_of(task: ray.ObjectRef) -> TaskEnd:
    """How a task has ended."""
    try:
        return ray.get(task)
    except TaskCancelledError:
        return TaskEnd(was_stopped=True)
    except RayTaskError as error:  # before it trained, for example because a note cannot be written
        return TaskEnd(failure=Failure(reason(error.cause)))
    except RayError:
        return TaskEnd(failure=Failure(KILLED))


def _train_in_task(code: Sequence[Code], packed: PackedJob, share: MachineShare, notes: Path) -> TaskEnd:
    """Trains a job in its process, in a thread, which receives no signals.

    Args:
        code: the modules and files that the user has named with --import. They are imported before the job is
            unpacked.
    """
    (notes / str(packed.position)).write_text(str(os.getpid()))
    stop_requested = (notes / "stop").exists
    updated = threading.Event()  # set after the first update

    def run() -> None:
        import_sent(code)
        train, job = pickle.loads(packed.pickled)
        config = share.configure(job.config)
        job = job._replace(config=config, description=describe_here(config, job.description))
        train(job, stop_requested=stop_requested, on_first_update=updated.set)

    with ThreadPool(1) as thread:
        return thread.apply(run_in_worker, (packed.folder, share, stop_requested, run, updated.is_set))
