"""The process of a task on a Ray cluster: it runs the task with a share of a machine, and says how it has ended.

The process may be on another machine than the command, where no signal reaches it. It and the command therefore
leave notes for each other in a folder that the machines share: a file for each task whose process has started and,
once a stop is requested, the file `stop`.
"""

import contextlib
import os
import pickle
import shutil
import threading
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import NamedTuple, Protocol

from jaxrl_atari.errors import Stopped
from jaxrl_atari.imports.cluster import Code, import_sent
from jaxrl_atari.process_tuning import tune_process
from jaxrl_atari.runs.layout import OUTPUT_FILE
from jaxrl_atari.trials.launch import Failure, attempt
from jaxrl_atari.trials.resources import MachineShare

STOP_NOTE = "stop"
"""The note of the command that a stop is requested."""


class RunTask(Protocol):
    """Runs a task to its end, in its process.

    Args:
        share: the share of a machine that the task has.
        stop_requested: returns whether a stop has been requested.
        on_first_update: called after the first update of a session.

    Raises:
        Stopped: by a stop request, or by a rule of the task's own, such as ASHA's.
    """

    def __call__(
        self, share: MachineShare, *, stop_requested: Callable[[], bool], on_first_update: Callable[[], object]
    ) -> object: ...


class PackedTask(NamedTuple):
    """A task as it is sent to its process."""

    number: int  # among the tasks of the command; names the note of its process
    folder: Path  # absolute, because the process has another working directory
    pickled: bytes  # its `RunTask`, which may be of a class that the user's own code defines


class TaskEnd(NamedTuple):
    """How a task has ended in its process. It was stopped, it failed, or else it has finished."""

    was_stopped: bool = False
    failure: Failure | None = None


def run_packed(task: PackedTask, share: MachineShare, notes: Path, code: Sequence[Code]) -> TaskEnd:
    """Runs a task in its process, in a thread, which receives no signals.

    Args:
        notes: the folder of the notes.
        code: the modules and files that the user has named with --import. They are imported before the task is
            unpacked.
    """
    (notes / str(task.number)).write_text(str(os.getpid()))

    def run(*arguments, **options) -> None:
        import_sent(code)
        pickle.loads(task.pickled)(*arguments, **options)

    with ThreadPool(1) as thread:
        return thread.apply(run_in_folder, (task.folder, share, (notes / STOP_NOTE).exists, run))


def run_in_folder(folder: Path, share: MachineShare, stop_requested: Callable[[], bool], run: RunTask) -> TaskEnd:
    """Runs a task, whose output goes to output.txt in a folder. If a stop is requested already, it does nothing.

    Args:
        folder: is made if it does not exist. A new folder is removed again if the task has failed before its first
            update, for a reason that the user can correct: the command prints that reason.
        share: the share of a machine that the task has.
        stop_requested: returns whether a stop has been requested.
        run: runs the task.
    """
    if stop_requested():
        return TaskEnd(was_stopped=True)
    is_new = not folder.exists()
    updated = threading.Event()

    def print_to_folder() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        output = exits.enter_context((folder / OUTPUT_FILE).open("a", buffering=1, encoding="utf-8"))
        exits.enter_context(contextlib.redirect_stdout(output))
        exits.enter_context(contextlib.redirect_stderr(output))

    def tune_and_run() -> None:
        if share.gpu == 0:
            os.environ.setdefault("NPROC", str(share.cpu))  # number of XLA's threads, read when JAX starts
        tune_process()
        run(share, stop_requested=stop_requested, on_first_update=updated.set)

    with contextlib.ExitStack() as exits:
        try:
            failure = attempt(print_to_folder) or attempt(tune_and_run)
        except Stopped:
            return TaskEnd(was_stopped=True)
    if failure and failure.correctable and is_new and not updated.is_set():
        shutil.rmtree(folder, ignore_errors=True)
    return TaskEnd(failure=failure)
