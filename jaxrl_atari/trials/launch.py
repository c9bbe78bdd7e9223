"""The launcher of this machine: `run_jobs` runs several jobs at a time.

A job is a session of a trial (`train --resume RUN_DIR --session 0`) or a trial of a search. `ray_jobs.py` runs the
same commands on a Ray cluster.
"""

import contextlib
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from jaxrl_atari.cli.job import ERROR, start_job
from jaxrl_atari.cli.signals import StopRequest
from jaxrl_atari.errors import SessionsFailed, UserError
from jaxrl_atari.output import counted, say
from jaxrl_atari.runs.layout import has_session
from jaxrl_atari.trials.slots import Slot

POLL_SECONDS = 0.1
"""How often launchers look for stop requests and for jobs that have ended."""

STOPPING = "stopping: each session that has trained writes a last checkpoint (Ctrl-C again: stop at once)"
"""The line that answers the first stop request."""


class Job(NamedTuple):
    """A command that trains: a session of a trial, or a trial of a search."""

    name: str  # before each of its lines: `session 0`, in a suite `game Pong  session 0`
    words: tuple[str, ...]  # of its command line, after `python -m`
    folder: Path  # the directory of the session, or of the trial of a search
    position: int  # among all sessions or trials of the command; chooses the slot

    def say(self, line: str) -> None:
        """Prints a line with the job's name before it. Most lines of the job itself have it already."""
        say(line if line.startswith(self.name) else f"{self.name}  {line}")


OnEnd = Callable[[Job, UserError | None], object]
"""Called for each job that has finished, or failed with an error. A job that was stopped has done neither."""


def run_jobs(jobs: Sequence[Job], on_end: OnEnd, *, slots: Sequence[Slot], parallel: int) -> None:
    """Runs jobs on this machine, each on the least busy slot.

    Of several slots that are equally busy, a job gets slot `job.position % len(slots)` if it is one of them.

    Args:
        jobs: in the order in which they are started.
        on_end: called for each job that has finished or failed.
        slots: the devices.
        parallel: number of jobs at a time. If it is 1, a job writes to the terminal itself. Otherwise its lines
            are printed one by one, after its name.

    Raises:
        KeyboardInterrupt: a stop was requested and passed on, and all jobs have ended. A second Ctrl-C kills them.
        Exception: an error of `on_end`, or no process can be started; the running jobs have saved and ended.
    """
    waiting = list(jobs)
    running: list[_Process] = []
    is_stopping = False
    with StopRequest(quick=False, answer=STOPPING) as request, _none_left_behind(running):
        while waiting or running:
            if request.requested and not is_stopping:
                is_stopping = True
                waiting.clear()
                for process in running:
                    process.popen.terminate()
            if waiting and len(running) < parallel:
                job = waiting.pop(0)
                running.append(_Process(job, _least_busy_slot(job, slots, running), is_captured=parallel > 1))
                continue  # a stop request is noticed before the next start
            time.sleep(POLL_SECONDS)
            for process in [each for each in running if each.has_ended()]:
                running.remove(process)
                failure = failure_of(process.popen.returncode, process.error)
                if failure is None or not is_stopping:
                    on_end(process.job, failure)
    if is_stopping:
        raise KeyboardInterrupt


class _Process:
    """The process of a job.

    Args:
        is_captured: whether its output is printed here. Otherwise only its errors are.
    """

    def __init__(self, job: Job, slot: Slot, is_captured: bool):
        job.say(slot.text)
        self.job = job
        self.slot = slot
        self.error = ""  # its last line `error: ...`
        pipe = subprocess.PIPE
        streams = {"stdout": pipe, "stderr": subprocess.STDOUT} if is_captured else {"stderr": pipe}
        self.popen = start_job(job.words, job.name, slot.variables, **streams)
        lines = self.popen.stdout or self.popen.stderr
        self._reader = threading.Thread(target=self._print, args=[lines], daemon=True)
        self._reader.start()

    def _print(self, lines: IO[str]) -> None:
        with lines:  # closed in this thread, which alone reads them
            for line in lines:
                if line.startswith(ERROR):
                    self.error = line
                self.job.say(line.rstrip("\n"))

    def has_ended(self) -> bool:
        """Whether the process has ended. Then its lines have been printed."""
        if self.popen.poll() is None:
            return False
        self._reader.join(timeout=1)  # longer only if a process that it has started lives on
        return True


def _least_busy_slot(job: Job, slots: Sequence[Slot], running: Sequence[_Process]) -> Slot:
    """The slot on which the fewest jobs run; of several, the one that the job prefers."""
    busy = Counter(slots.index(process.slot) for process in running)
    preferred = job.position % len(slots)
    return slots[min(range(len(slots)), key=lambda index: (busy[index], index != preferred))]


@contextlib.contextmanager
def _none_left_behind(running: Sequence[_Process]) -> Iterator[None]:
    """Ends the processes that run when an error ends the block: a second Ctrl-C kills them, else they save."""
    try:
        yield
    except BaseException as error:
        is_second_ctrl_c = isinstance(error, KeyboardInterrupt)
        for process in running:
            process.popen.send_signal(signal.SIGKILL if is_second_ctrl_c else signal.SIGTERM)
        for process in running:
            process.popen.wait()
        raise


def failure_of(status: int, error: str) -> UserError | None:
    """The error of a job that has ended; None if it has finished.

    Args:
        status: its exit status.
        error: its last line `error: ...`; empty if there is none.
    """
    if status == 0:
        return None
    if status == -signal.SIGKILL:
        return SessionsFailed("killed; does the machine have too little memory?")
    if status < 0:
        return SessionsFailed(f"killed by signal {-status} ({signal.strsignal(-status)})")
    kind = UserError if status == UserError.exit_status else SessionsFailed
    return kind(error.removeprefix(ERROR) or f"exit status {status}")


def raise_failures(failures: Mapping[str, UserError], count: int, directory: Path, resume: str) -> None:
    """Raises an error if jobs have failed.

    Args:
        failures: name of a job that has failed -> its error.
        count: number of all sessions, including those of earlier starts.
        directory: of the trial, suite or sweep.
        resume: the command that runs those that failed again.

    Raises:
        UserError: the error of the only session; or no session could begin, and the directory has none.
        SessionsFailed: sessions failed otherwise.
    """
    if not failures:
        return
    only = next(iter(failures.values())) if count == 1 else None
    if only is not None and only.exit_status == UserError.exit_status:
        raise only
    if not has_session(directory):
        raise UserError(f"no session could begin: {'; '.join(dict.fromkeys(map(str, failures.values())))}")
    reasons = "; ".join(f"{name}: {error}" for name, error in failures.items())
    sessions = counted(count, "session")
    raise SessionsFailed(f"{len(failures)} of {sessions} failed ({reasons}); {resume} runs what is missing")
