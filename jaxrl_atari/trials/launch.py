"""The launcher of this machine: `run_jobs` runs several jobs at a time."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple, TextIO

from jaxrl_atari.cli.job import ERROR, job_variables
from jaxrl_atari.cli.signals import StopRequest
from jaxrl_atari.errors import SessionsFailed, UserError
from jaxrl_atari.output import counted, say, write
from jaxrl_atari.runs.layout import OUTPUT_FILE, has_session
from jaxrl_atari.trials.slots import SlotPlan

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


def run_jobs(jobs: Sequence[Job], on_end: OnEnd, plan: SlotPlan, *, keeps_output: bool = False) -> None:
    """Runs jobs on this machine, each on the least busy slot.

    Of several slots that are equally busy, a job gets slot `job.position % len(slots)` if it is one of them.

    Args:
        jobs: in the order in which they are started.
        keeps_output: see `JobProcess`.

    Raises:
        KeyboardInterrupt: a stop was requested and passed on, and all jobs have ended. A second Ctrl-C kills them.
        Exception: an error of `on_end`, or no process can be started; the running jobs have saved and ended.
    """
    slots = plan.slots
    waiting = list(jobs)
    running: dict[JobProcess, int] = {}  # -> index of its slot
    is_stopping = False
    with StopRequest(saves=True, answer=STOPPING) as request, _none_left_behind(running):
        while waiting or running:
            if request.requested and not is_stopping:
                is_stopping = True
                waiting.clear()
                for process in running:
                    process.popen.terminate()
            if waiting and len(running) < plan.parallel:
                job = waiting.pop(0)
                busy = Counter(running.values())
                preferred = job.position % len(slots)
                slot = min(range(len(slots)), key=lambda index: (busy[index], index != preferred))
                job.say(slots[slot].text)
                running[JobProcess(job, slots[slot].variables, keeps_output)] = slot
                continue  # a stop request is noticed before the next start
            time.sleep(POLL_SECONDS)
            for process in [each for each in running if each.has_ended()]:
                del running[process]
                failure = process.failure()
                if failure is None or not is_stopping:
                    on_end(process.job, failure)
    if is_stopping:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _none_left_behind(running: Collection["JobProcess"]) -> Iterator[None]:
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


class JobProcess:
    """The process of a job on this machine. Its lines are printed one by one, after the job's name.

    Args:
        variables: environment variables, in addition to those of this process.
        keeps_output: whether its lines are also kept, in output.txt in its folder.
    """

    def __init__(self, job: Job, variables: Mapping[str, str], keeps_output: bool):
        self.job = job
        self._error = ""  # its last line `error: ...`
        output = None
        if keeps_output:
            job.folder.mkdir(parents=True, exist_ok=True)
            output = (job.folder / OUTPUT_FILE).open("a")
        # In the process group of this process, so that Ctrl-C, Ctrl-Z and `fg` reach it, too.
        self.popen = subprocess.Popen(
            [sys.executable, "-m", *job.words],
            env={**os.environ, **variables, **job_variables(job.name)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, args=[self.popen.stdout, output], daemon=True)
        self._reader.start()

    def _read(self, lines: IO[str], output: TextIO | None) -> None:
        with lines, output or contextlib.nullcontext():  # closed in this thread, which alone uses them
            for line in lines:
                if line.startswith(ERROR):
                    self._error = line
                self.job.say(line.rstrip("\n"))
                if output is not None:
                    write(line, output)

    def has_ended(self) -> bool:
        """Whether the process has ended. Then its lines have been printed."""
        if self.popen.poll() is None:
            return False
        self._reader.join(timeout=1)  # longer only if a process that it has started lives on
        return True

    def failure(self) -> UserError | None:
        """The error of a job that has ended; None if it has finished."""
        status = self.popen.returncode
        if status == 0:
            return None
        if status < 0:
            hint = "; does the machine have too little memory?" if status == -signal.SIGKILL else ""
            return SessionsFailed(f"ended by signal {-status} ({signal.strsignal(-status)}){hint}")
        kind = UserError if status == UserError.exit_status else SessionsFailed
        return kind(self._error.removeprefix(ERROR) or f"exit status {status}")


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
