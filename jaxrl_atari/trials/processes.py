"""The launcher of processes: each job has one of its own, several run at a time, each on a slot of the machine.

`multiprocessing` starts a fresh interpreter for each job ("spawn") and passes the job on by pickle. Sessions
ignore Ctrl-C; the parent passes each stop request on once, as SIGTERM. When the parent ends for any other reason
than a second Ctrl-C, its sessions write their last checkpoints and end.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from jaxrl_atari import cli
from jaxrl_atari.cli.signals import StopRequest
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.hardware.tuning import tune_process
from jaxrl_atari.output import counted
from jaxrl_atari.trials.launch import POLL_SECONDS, STOPPING, Failure, Job, OnEnd, Slot, Train, attempt

KILLED = " (killed; does the machine have too little memory?)"
COMPILED = "compiled"
"""What the process of a session sends after the first update. It also sends its `Failure`."""

_SPAWN = multiprocessing.get_context("spawn")


def in_session_process() -> bool:
    """Whether this is the process of a session."""
    return multiprocessing.current_process().name.startswith("session ")


def check_processes(train: Train) -> None:
    """Checks that this process can start processes that train.

    Raises:
        UserError: it is the worker of a pool, another thread than the main one, or a script from standard input;
            or what `train` holds, such as a writer, cannot be sent to another process.
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
    jobs: Sequence[Job], train: Train, on_end: OnEnd, *, slots: Sequence[Slot], parallel: int
) -> None:
    """Trains each job in a process of its own, on the least busy slot; of several, on slot `number % len(slots)`.

    Where several sessions run the same compiled programs, the first one compiles them while the others wait; these
    read them from the cache of compiled programs. Output is printed line by line after the session's name; a
    process that is alone has the terminal.

    Args:
        jobs, train, on_end: see `Launcher`. `train` must be picklable.
        slots: the devices.
        parallel: processes at a time. At most `ceil(parallel / len(slots))` share a slot.

    Raises:
        ValueError: called outside the main thread, where Python sets no signal handlers.
        KeyboardInterrupt: a stop was requested and passed on, and all processes have ended. A second Ctrl-C kills
            them.
    """
    processes = _Processes(jobs, train, slots, parallel)
    stopping = False
    with StopRequest(quick=False, answer=STOPPING) as stop:
        try:
            while processes.waiting or processes.running:
                if stop.requested and not stopping:
                    stopping = True
                    processes.stop()
                if processes.start_next():
                    continue
                time.sleep(POLL_SECONDS)
                for child in processes.read():
                    failure = child.failure_at_end(stopping)
                    if failure or child.process.exitcode == 0:
                        on_end(child.job, failure)
        except KeyboardInterrupt:
            processes.kill()
            raise
        except Exception:  # of `on_end`, for example: the others save their last checkpoints first
            processes.stop()
            while processes.running:
                time.sleep(POLL_SECONDS)
                processes.read()
            raise
    if stopping:
        raise KeyboardInterrupt


class _Processes:
    """The jobs of `run_processes`: those that wait for a process, and those that have one."""

    def __init__(self, jobs: Sequence[Job], train: Train, slots: Sequence[Slot], parallel: int):
        self.waiting = list(jobs)
        self.running: list[_Child] = []
        self._train = train
        self._slots = slots
        self._parallel = parallel
        self._compiled: set[int] = set()  # programs that a session has compiled

    def start_next(self) -> bool:
        """Starts the first job whose programs no other session is compiling, if there is room for a process.

        Returns:
            Whether one was started.
        """
        compiling = {child.job.program for child in self.running} - self._compiled
        job = next((job for job in self.waiting if job.program not in compiling), None)
        if job is None or len(self.running) == self._parallel:
            return False
        self.waiting.remove(job)
        number = self._least_busy_slot(job)
        slot = self._slots[number]
        job.say(slot.text)
        followers = sum(job.program == other.program for other in self.waiting)
        if self._parallel > 1 and followers and job.program not in self._compiled:
            same = counted(followers, "session")
            job.say(f"compiles first; {same} with the same programs will read them")
        self.running.append(_Child(job, number, self._train, slot.variables, captured=self._parallel > 1))
        return True

    def _least_busy_slot(self, job: Job) -> int:
        """The number of the slot on which the fewest sessions train; of several, the job's own."""
        busy = Counter(child.slot for child in self.running)
        own = job.number % len(self._slots)
        return min(range(len(self._slots)), key=lambda number: (busy[number], number != own))

    def read(self) -> list["_Child"]:
        """Reads what all processes have said, and returns those that have ended, which run no longer."""
        ended = [child for child in self.running if child.read()]
        self._compiled |= {child.job.program for child in self.running if child.has_compiled}
        self.running = [child for child in self.running if child not in ended]
        return ended

    def stop(self) -> None:
        """Asks each process to stop, and starts no other."""
        self.waiting.clear()
        for child in self.running:
            child.process.terminate()

    def kill(self) -> None:
        """Ends all processes at once."""
        for child in self.running:
            child.process.kill()


class _Child:
    """The process of a session, with what it has printed and sent.

    Args:
        slot: number of its slot.
        variables: environment variables of its slot.
        captured: its output is read here, not printed by itself.
    """

    def __init__(self, job: Job, slot: int, train: Train, variables: Mapping[str, str], captured: bool):
        self.job = job
        self.slot = slot
        self.failure: Failure | None = None
        self.has_compiled = False
        self.line = b""  # the beginning of a line
        self._messages, write_messages = _SPAWN.Pipe(duplex=False)
        self._output, write_output = _SPAWN.Pipe(duplex=False) if captured else (None, None)
        # Kept open here, too: without a writer, `poll` would announce an end of file.
        self._kept_open = write_messages, write_output
        arguments = (train, job, variables, write_messages, write_output)
        self.process = _SPAWN.Process(target=_run, args=arguments, name=f"session {job.session}", daemon=True)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the process inherits it
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, before)

    def read(self) -> bool:
        """Prints what the process has printed, receives what it has sent, and returns whether it has ended."""
        has_ended = self.process.exitcode is not None  # asked before reading: whatever it has said is there
        while self._messages.poll():
            message = self._messages.recv()
            if isinstance(message, Failure):
                self.failure = message
            else:
                self.has_compiled = True
        output = self._output
        while output is not None and output.poll():
            *lines, self.line = (self.line + os.read(output.fileno(), 1 << 16)).split(b"\n")
            for line in lines:
                self.job.say(line.decode(errors="replace"))
        if has_ended and self.line:  # cut short by the end of the process
            self.job.say(self.line.decode(errors="replace"))
        return has_ended

    def failure_at_end(self, stopping: bool) -> Failure | None:
        """Why the process failed; None if it did not.

        Args:
            stopping: whether a stop was requested. Then a status other than 0 is expected.
        """
        status = self.process.exitcode
        if self.failure or status == 0 or stopping:
            return self.failure
        return Failure(f"exit status {status}{KILLED if status == -signal.SIGKILL else ''}")


def _run(
    train: Train, job: Job, variables: Mapping[str, str], messages: Connection, output: Connection | None
) -> None:
    """What the process of a session does. JAX has been imported, but has not started."""
    os.environ.update(variables)
    if output is not None:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
        # New streams: those of before may be buffered in blocks, as for a file.
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, encoding="utf-8") for number in (1, 2))  # noqa: SIM115
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    def send(message: Failure | str) -> None:
        with contextlib.suppress(OSError):  # the parent has ended; the last checkpoint is still to be written
            messages.send(message)

    def main() -> None:
        tune_process()
        failure = attempt(train, job, on_first_update=lambda: send(COMPILED))
        if failure is not None:
            send(failure)
            sys.exit(1)

    threading.Thread(target=end_with_parent, name="end with parent", daemon=True).start()
    cli.run(main)
