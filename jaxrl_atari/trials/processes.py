"""The launcher of processes: each job has a process of its own, and several run at a time, each on a slot.

`multiprocessing` starts a fresh interpreter for each job ("spawn") and passes the job on by pickle. The processes
of sessions ignore Ctrl-C: their parent, which runs `run_processes`, passes each stop request on once, as SIGTERM.
When the parent ends for any other reason than a second Ctrl-C, the sessions write their last checkpoints and end.
"""

import atexit
import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NoReturn

from jaxrl_atari import cli
from jaxrl_atari.cli.signals import StopRequest
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.hardware.jax_settings import environment_variables, jax_config, write_variable
from jaxrl_atari.imports.named import import_inherited
from jaxrl_atari.output import counted
from jaxrl_atari.process_tuning import tune_process
from jaxrl_atari.trials.launch import (
    POLL_SECONDS,
    STOPPING,
    Failure,
    Job,
    OnEnd,
    TrainJob,
    attempt,
    poll_until_done,
)
from jaxrl_atari.trials.slots import Slot

_SPAWN = multiprocessing.get_context("spawn")

_PROCESS_NAME = "jaxrl_atari session"
"""The beginning of the name of a session's process. The process has it before it imports the user's script."""


class Message(Enum):
    """What the process of a session says to its parent. It also sends the `Failure` of its session."""

    KEEPS_PROGRAMS = "it keeps the programs that it compiles, in the cache of `tune_process`"
    NOTHING_TO_WAIT_FOR = "it has compiled its programs, in its first update, or keeps none"


def in_session_process() -> bool:
    """Whether the code runs in the process of a session."""
    return multiprocessing.current_process().name.startswith(_PROCESS_NAME)


def require_can_start_processes(train: TrainJob) -> None:
    """Checks that this process can start processes that train.

    Raises:
        UserError: this process is the worker of a pool, or runs a script from standard input; this is not the main
            thread; or something in `train`, such as a writer, cannot be sent to another process.
    """
    why = "sessions that run side by side, or use one of several GPUs, are processes of their own"
    if multiprocessing.current_process().daemon:
        raise UserError(
            f"{why}: this is a daemonic process, such as a worker of multiprocessing.Pool, and may start none;"
            " call run_training in the main process"
        )
    if threading.current_thread() is not threading.main_thread():
        raise UserError(f"{why}: only the main thread can pass signals on to them; call run_training there")
    main: Any = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if main.__spec__ is None and file is not None and not Path(file).is_file():
        raise UserError(
            f"{why}, and import the script again: it comes from {file}, where they cannot read it; save it as a"
            " file"
        )
    hint = "give writers and stop as functions and classes of a module, without open files"
    try:
        pickled = bytes(ForkingPickler.dumps(train))
    except Exception as error:  # pickle has several, and an object may raise its own
        raise UserError(
            f"{why}: they get copies by pickle, and this cannot be copied: {reason(error)}; {hint}"
        ) from error
    if file is None and b"__main__" in pickled:
        raise UserError(f"{why}: a name of this notebook or command line does not exist in them; {hint}")


def run_processes(
    jobs: Sequence[Job], train: TrainJob, on_end: OnEnd, *, slots: Sequence[Slot], parallel: int
) -> None:
    """Trains each job in a process of its own, on the least busy slot. This is a `Launcher`.

    Of several slots that are equally busy, a job gets slot `job.position % len(slots)` if it is one of them.

    Where several sessions run the same compiled programs, the first one compiles them while the others wait. The
    others then read them from the cache of compiled programs. Without a cache, none waits.

    The output of a process is printed line by line after the name of its session; if `parallel` is 1, the process
    writes to the terminal itself.

    Args:
        jobs: the sessions, in the order in which they are started.
        train: trains one of them. It must be picklable.
        on_end: called for each job that has finished or failed.
        slots: the devices.
        parallel: number of processes at a time. At most `ceil(parallel / len(slots))` share a slot.

    Raises:
        ValueError: called outside the main thread, where Python sets no signal handlers.
        KeyboardInterrupt: a stop was requested and passed on, and all processes have ended. A second Ctrl-C kills
            the processes.
    """

    def call_on_end(child: _Child, stopping: bool) -> None:
        failure = child.failure_at_end(stopping)
        if failure or child.process.exitcode == 0:
            on_end(child.job, failure)

    processes = _Processes(jobs, train, slots, parallel)
    with StopRequest(quick=False, answer=STOPPING) as request, processes.killed_by_ctrl_c():
        poll_until_done(processes, request, call_on_end)


class _Processes:
    """The jobs of `run_processes`, a `launch.JobQueue`: those that wait for a process, and those that have one."""

    def __init__(self, jobs: Sequence[Job], train: TrainJob, slots: Sequence[Slot], parallel: int):
        self._waiting = list(jobs)
        self._running: list[_Child] = []
        self._train = train
        self._slots = slots
        self._parallel = parallel
        self._announced: set[str] = set()  # keys of the programs whose compiler has been named
        self._available: set[str] = set()  # keys of the programs for which no session need wait

    def is_done(self) -> bool:
        return not self._waiting and not self._running

    def poll(self) -> list["_Child"]:
        """Starts the next job that can start. If none can, reads all processes, and returns those that ended."""
        if self._start_next():
            return []  # a stop request is noticed before the next start
        time.sleep(POLL_SECONDS)
        return self._read()

    def stop(self) -> None:
        self._waiting.clear()
        for child in self._running:
            child.process.terminate()

    def _start_next(self) -> bool:
        """Starts the first job whose programs no other session is compiling, if there is room for a process.

        Returns:
            Whether a job was started.
        """
        compiling = {child.job.compile_key for child in self._running} - self._available
        job = next((job for job in self._waiting if job.compile_key not in compiling), None)
        if job is None or len(self._running) == self._parallel:
            return False
        self._waiting.remove(job)
        index = self._least_busy_slot(job)
        slot = self._slots[index]
        job.say(slot.text)
        self._running.append(_Child(job, index, self._train, slot.variables, captured=self._parallel > 1))
        return True

    def _least_busy_slot(self, job: Job) -> int:
        """The index of the slot on which the fewest sessions train; of several, the one that the job prefers."""
        busy = Counter(child.slot_index for child in self._running)
        preferred = job.position % len(self._slots)
        return min(range(len(self._slots)), key=lambda index: (busy[index], index != preferred))

    def _read(self) -> list["_Child"]:
        """Reads the output and messages of all processes, and returns the processes that have ended."""
        ended = [child for child in self._running if child.read()]
        for child in self._running:
            if Message.KEEPS_PROGRAMS in child.messages:
                self._announce(child.job)
            if Message.NOTHING_TO_WAIT_FOR in child.messages:
                self._available.add(child.job.compile_key)
        self._running = [child for child in self._running if child not in ended]
        return ended

    def _announce(self, job: Job) -> None:
        """Prints, once for each program, which session compiles it and how many wait for that."""
        others = sum(job.compile_key == other.compile_key for other in self._waiting)
        if self._parallel > 1 and others and job.compile_key not in self._announced:
            self._announced.add(job.compile_key)
            job.say(f"compiles first; {counted(others, 'session')} with the same programs will read them")

    @contextlib.contextmanager
    def killed_by_ctrl_c(self) -> Iterator[None]:
        """Kills all processes if a `KeyboardInterrupt` ends the block."""
        try:
            yield
        except KeyboardInterrupt:
            for child in self._running:
                child.process.kill()
            raise


class _SessionProcess(SpawnProcess):
    """A process that ends without the exit handlers of C libraries, after those of Python.

    At exit, OpenBLAS waits for its threads. With OpenBLAS 0.3.30 (scipy 1.17.1, which JAX 0.10.2 imports when it
    compiles the first parameters), a session that was refused soon after that sometimes waited forever on two busy
    cores, and with it the parent. The main thread was in `gotoblas_quit`, `blas_thread_shutdown_`, `pthread_join`,
    and the thread of OpenBLAS in `pthread_cond_wait`.

    `_bootstrap` and `atexit._run_exitfuncs` are private to CPython. A test in tests/test_trial.py fails on a
    version that lacks them.
    """

    def _bootstrap(self, parent_sentinel: int | None = None) -> NoReturn:
        status = super()._bootstrap(parent_sentinel=parent_sentinel)  # pyright: ignore[reportAttributeAccessIssue]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # the terminal or the parent is gone, or it is closed
                stream.flush()
        os._exit(status)


class _Child:
    """The process of a session, with its output and messages.

    Args:
        slot_index: index of its slot.
        variables: environment variables of the slot.
        captured: whether its output is read here. Otherwise, the process prints it itself.
    """

    def __init__(self, job: Job, slot_index: int, train: TrainJob, variables: Mapping[str, str], captured: bool):
        self.job = job
        self.slot_index = slot_index
        self.failure: Failure | None = None
        self.messages: set[Message] = set()  # that it has sent
        self._line = b""  # the beginning of a line whose end has not been read yet
        self._pipe, write_messages = _SPAWN.Pipe(duplex=False)
        self._output, write_output = _SPAWN.Pipe(duplex=False) if captured else (None, None)
        # The ends for writing stay open here too: without a writer, `poll` would announce an end of file.
        self._kept_open = write_messages, write_output
        # Without what an earlier session of this process has set for JAX.
        variables = {**environment_variables.before_sessions(), **variables}
        arguments = (train, job, variables, write_messages, write_output)
        self.process = _SessionProcess(
            target=_run, args=arguments, name=f"{_PROCESS_NAME} {job.session}", daemon=True
        )
        # The new process inherits the block, and lifts it once it ignores SIGINT. If a SIGINT arrives here in the
        # meantime, this process answers it after the block.
        resource_tracker.ensure_running()  # it would be started below, which unblocks SIGINT
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def read(self) -> bool:
        """Prints the output of the process, receives its messages, and returns whether it has ended."""
        # Asked before reading: a process that has ended then writes no more, and all its output is read below.
        has_ended = self.process.exitcode is not None
        while self._pipe.poll():
            message: Message | Failure = self._pipe.recv()
            if isinstance(message, Failure):
                self.failure = message
            else:
                self.messages.add(message)
        output = self._output
        while output is not None and output.poll():
            *lines, self._line = (self._line + os.read(output.fileno(), 1 << 16)).split(b"\n")
            for line in lines:
                self.job.say(line.decode(errors="replace"))
        if has_ended and self._line:  # cut short by the end of the process
            self.job.say(self._line.decode(errors="replace"))
        return has_ended

    def failure_at_end(self, stopping: bool) -> Failure | None:
        """The failure of a process that has ended; None if it did not fail.

        Args:
            stopping: whether a stop was requested. Then a status other than 0 is expected.
        """
        status = self.process.exitcode
        if self.failure or status == 0 or stopping:
            return self.failure
        if status == -signal.SIGKILL:
            return Failure(f"exit status {status} (killed; does the machine have too little memory?)")
        if status is not None and status < 0:
            return Failure(f"exit status {status} (killed by {_signal_name(-status)})")
        return Failure(f"exit status {status}")


def _signal_name(number: int) -> str:
    """The name of a signal, such as `SIGSEGV`; `signal 35` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _run(
    train: TrainJob, job: Job, variables: Mapping[str, str | None], messages: Connection, output: Connection | None
) -> None:
    """Trains a job in its process. JAX has been imported, but has not started.

    Args:
        variables: environment variables; None removes one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for name, value in variables.items():
        write_variable(name, value)
    if output is not None:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
        # New streams, because the former ones may be buffered in blocks, as for a file.
        sys.stdout = open(1, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    def send(message: Message | Failure) -> None:
        with contextlib.suppress(OSError):  # the parent has ended, and the last checkpoint is still to be written
            messages.send(message)

    def main() -> None:
        tune_process()
        keeps_programs = jax_config.jax_enable_compilation_cache and jax_config.jax_compilation_cache_dir
        send(Message.KEEPS_PROGRAMS if keeps_programs else Message.NOTHING_TO_WAIT_FOR)
        failure = attempt(train, job, on_first_update=lambda: send(Message.NOTHING_TO_WAIT_FOR))
        if failure is not None:
            send(failure)
            sys.exit(1)

    threading.Thread(target=end_with_parent, name="end with parent", daemon=True).start()
    failure = attempt(import_inherited)  # before `cli.run` does it, so that the parent gets the reason
    if failure is not None:
        send(failure)
        sys.exit(1)
    cli.run(main)
