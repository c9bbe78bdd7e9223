"""Tasks on a Ray cluster: sessions of a suite, or trials of a search, each in a process of its own.

`run_tasks` runs them, and `run_on_ray` is the launcher that makes a task of each job. Import this module after
`ray_cluster.set_ray_variables`, because it imports Ray.
"""

import math
import pickle
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError, TaskCancelledError

from jaxrl_atari.cli.signals import StopRequest
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import reason
from jaxrl_atari.imports.cluster import Code, code_to_send
from jaxrl_atari.output import say
from jaxrl_atari.runs.description import describe_here
from jaxrl_atari.runs.layout import OUTPUT_FILE, latest_env_steps, session_path
from jaxrl_atari.trials.launch import POLL_SECONDS, STOPPING, Failure, Job, OnEnd, TrainJob, poll_until_done
from jaxrl_atari.trials.ray_cluster import connected
from jaxrl_atari.trials.ray_worker import STOP_NOTE, PackedTask, RunTask, TaskEnd, run_packed
from jaxrl_atari.trials.resources import MachineShare, ResourcesConfig

SECONDS_BETWEEN_NEWS = 30
"""How often the command says how far the running tasks are, until it is to stop."""

KILLED = "its process was killed, by hand or for lack of memory, or did not start"
"""The reason of the failure of a task whose process is gone."""


class RayTask(NamedTuple):
    """A task, with what the command does about it."""

    name: str  # of its process, and before the line that says that it starts
    folder: Path  # with its output in output.txt
    run: RunTask  # runs it, in its process: a function that can be imported, or a `functools.partial` of one
    progress: Callable[[], str]  # one line on how far it is, printed every `SECONDS_BETWEEN_NEWS`
    on_end: Callable[[Failure | None], object]
    """Called when it has ended, with its failure, if any. After a stop request, called only if it has finished."""


def run_tasks(
    tasks: Sequence[RayTask],
    kind: str,
    *,
    directory: Path,
    address: str,
    devices: DevicesConfig,
    resources: ResourcesConfig,
) -> None:
    """Runs tasks on a Ray cluster, as many at a time as there is room for.

    Args:
        tasks: the tasks, in the order in which they are started.
        kind: the word for a task in a printed line: `session` or `trial`.
        directory: directory of the suite or the search, which the machines share. The notes of `ray_worker.py` are
            in its folder `ray`.
        address: address of the cluster; empty: this machine alone.
        devices: devices of the config.
        resources: resources of each task.

    Raises:
        UserError: the cluster cannot be used, or a task needs more than any machine has.
        KeyboardInterrupt: a stop was requested and passed on, and every running task has ended. A second Ctrl-C
            kills the tasks.
        Exception: the first error of an `on_end`, once all tasks have ended.
    """
    if not tasks:
        return
    code = code_to_send()  # first of all, because the user may edit or move these files
    notes = directory.absolute() / "ray"
    shutil.rmtree(notes, ignore_errors=True)  # left by a process that was killed
    notes.mkdir()
    try:
        with (
            connected(address, devices, resources, kind) as share,
            StopRequest(quick=False, answer=STOPPING) as request,  # last: Ray handles SIGTERM too
        ):
            poll_until_done(_Tasks(tasks, share, notes, code), request, _call_on_end)
    finally:
        shutil.rmtree(notes, ignore_errors=True)


class _EndedTask(NamedTuple):
    """A task that has ended, and how."""

    task: RayTask
    end: TaskEnd


def _call_on_end(ended: _EndedTask, stopping: bool) -> None:
    """Calls `on_end` of a task that has ended; after a stop request, only if the task has finished."""
    # After a stop request, a failure may only mean that the cluster sent a signal to all.
    if not stopping or ended.end == TaskEnd():
        ended.task.on_end(ended.end.failure)


class _Tasks:
    """The tasks of `run_tasks`, a `launch.JobQueue`: those that wait for room on the cluster, and those that run.

    Args:
        share: the share of a machine that each task gets.
        notes: the folder of the notes.
        code: the modules and files that each process imports first.
    """

    def __init__(self, tasks: Sequence[RayTask], share: MachineShare, notes: Path, code: Sequence[Code]):
        remote = ray.remote(num_gpus=share.gpu, num_cpus=share.cpu, max_calls=1, max_retries=0)(run_packed)
        self._waiting: dict[ray.ObjectRef, RayTask] = {}
        self._running: dict[ray.ObjectRef, RayTask] = {}
        self._numbers: dict[ray.ObjectRef, int] = {}  # `PackedTask.number`
        self._notes = notes
        self._next_news = time.monotonic() + SECONDS_BETWEEN_NEWS
        for number, task in enumerate(tasks):
            packed = PackedTask(number, task.folder.absolute(), pickle.dumps(task.run))
            reference = remote.options(name=task.name).remote(packed, share, notes, code)
            self._waiting[reference] = task
            self._numbers[reference] = number

    def is_done(self) -> bool:
        return not self._waiting and not self._running

    def poll(self) -> list[_EndedTask]:
        """Prints which tasks have started and how far the running ones are, and returns those that have ended."""
        references = [*self._running, *self._waiting]
        ended, _ = ray.wait(references, num_returns=len(references), timeout=POLL_SECONDS)
        self._say_started()
        for reference in ended:
            if reference in self._waiting:  # cancelled by `stop`, or its process did not start
                self._running[reference] = self._waiting.pop(reference)
        ended_tasks = [_EndedTask(self._running.pop(reference), _end_of(reference)) for reference in ended]
        if time.monotonic() > self._next_news:
            self._next_news = time.monotonic() + SECONDS_BETWEEN_NEWS
            for task in self._running.values():
                say(task.progress())
        return ended_tasks

    def stop(self) -> None:
        self._next_news = math.inf
        (self._notes / STOP_NOTE).touch()
        self._say_started()  # those that have started since the last look end by themselves
        for reference in self._waiting:
            ray.cancel(reference)

    def _say_started(self) -> None:
        """Finds the tasks whose processes have started, and prints their names."""
        notes = {path.name for path in self._notes.iterdir()}
        for reference, task in list(self._waiting.items()):
            if str(self._numbers[reference]) in notes:
                self._running[reference] = self._waiting.pop(reference)
                say(f"{task.name}  starts; its output is in {task.folder / OUTPUT_FILE}")


def _end_of(reference: ray.ObjectRef) -> TaskEnd:
    """How a task has ended."""
    try:
        return ray.get(reference)
    except TaskCancelledError:
        return TaskEnd(was_stopped=True)
    except RayTaskError as error:  # before it ran, for example because a note cannot be written
        return TaskEnd(failure=Failure(reason(error.cause)))
    except RayError:
        return TaskEnd(failure=Failure(KILLED))


def run_on_ray(
    jobs: Sequence[Job],
    train: TrainJob,
    on_end: OnEnd,
    *,
    directory: Path,
    address: str,
    devices: DevicesConfig,
    resources: ResourcesConfig,
) -> None:
    """Trains jobs on a Ray cluster, as tasks of `run_tasks`. This is a `Launcher`.

    The output of a session goes to output.txt in its directory.

    Args:
        jobs: the sessions, in the order in which they are started.
        train: trains one of them: a function that can be imported, or a `functools.partial` of one.
        on_end: called for each job that has finished or failed.
        directory: directory of the suite, which the machines share.
        address: address of the cluster; empty: this machine alone.
        devices: devices of the config.
        resources: resources of each session.

    Raises:
        UserError: the cluster cannot be used, or a session needs more than any machine has.
        KeyboardInterrupt: a stop was requested and passed on, and every running session has ended.
    """
    tasks = [
        RayTask(
            name=job.name,
            folder=session_path(job.run_dir, job.session),
            run=partial(_train_with_share, train, job._replace(run_dir=job.run_dir.absolute())),
            progress=partial(_progress, job),
            on_end=partial(on_end, job),
        )
        for job in jobs
    ]
    run_tasks(tasks, "session", directory=directory, address=address, devices=devices, resources=resources)


def _progress(job: Job) -> str:
    """How far the session of a job was at its newest checkpoint."""
    saved = latest_env_steps(session_path(job.run_dir, job.session))
    return f"{job.name}  at {saved:,} env steps"


def _train_with_share(
    train: TrainJob,
    job: Job,
    share: MachineShare,
    *,
    stop_requested: Callable[[], bool],
    on_first_update: Callable[[], object],
) -> None:
    """Trains a job in its process with a share of a machine, and describes that in config.json. A `RunTask`."""
    config = share.configure(job.config)
    job = job._replace(config=config, description=describe_here(config, job.description))
    train(job, stop_requested=stop_requested, on_first_update=on_first_update)
