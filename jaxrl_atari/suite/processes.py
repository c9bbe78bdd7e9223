"""Runs several sessions, or games of a suite, at a time, each in its own process.

Each session's process leads its own process group, so Ctrl-C on a terminal reaches only the parent, which passes it
on once. The session's standard input is a pipe that carries the task's first line, if there is one. When the parent
ends for any reason, the pipe closes, and the session ends too.
"""

import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from jaxrl_atari.cli import INTERRUPTED, counted, drop_output, say
from jaxrl_atari.cli.stopping import REQUESTS, StopRequest
from jaxrl_atari.errors import reason
from jaxrl_atari.runs.columns import COMPILED

POLL_SECONDS = 0.1


class Task(NamedTuple):
    """A session (or a game) to be run."""

    name: int | str
    arguments: Sequence[str]  # of `python -m`
    environment: Mapping[str, str]  # the whole of it
    gpus: tuple[int, ...]  # that it occupies
    kind: str = "session"
    first_line: str = ""  # written to its standard input
    warms_cache: bool = False  # the first such task compiles what the others then read from the cache

    @property
    def label(self) -> str:
        """Prefix of the lines that it prints: `session 0`."""
        return f"{self.kind} {self.name}"


class Failure(NamedTuple):
    """Why a process failed, in one line, and its exit status (negative: the signal that ended it)."""

    reason: str
    exit_status: int


class _Process:
    """A session's process. Its output is printed line by line after its label; alone, it has the terminal."""

    def __init__(self, task: Task, alone: bool):
        self.name, self.gpus, self.label = task.name, task.gpus, task.label
        self._last = self._error = ""
        self.has_compiled = not task.warms_cache
        self._process = subprocess.Popen(
            [sys.executable, "-m", *task.arguments],
            env=task.environment,
            stdin=subprocess.PIPE,
            stdout=None if alone else subprocess.PIPE,
            stderr=subprocess.PIPE if alone else subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        if task.first_line:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended already, and its status says why
                self._process.stdin.write(task.first_line + "\n")
                self._process.stdin.flush()
        self._reader = threading.Thread(target=self._read, name=self.label, daemon=True)
        try:
            self._reader.start()
        except RuntimeError as error:  # threads count as processes do
            with self._process:  # closes its pipes and waits
                self._process.kill()
            raise OSError(errno.EAGAIN, str(error)) from error

    def _read(self) -> None:
        pipe = self._process.stdout or self._process.stderr
        assert pipe is not None
        for line in pipe:
            line = line.rstrip()
            if line:
                self._last = line
                self._error = line.removeprefix("error: ") if line.startswith("error: ") else self._error
            self.has_compiled = self.has_compiled or COMPILED in line
            with contextlib.suppress(OSError):  # the session must not wait for a reader
                say(line if line.startswith(self.label) else f"{self.label}  {line}")

    def is_running(self) -> bool:
        return self._process.poll() is None

    def send(self, number: int) -> None:
        if self.is_running():
            self._process.send_signal(number)

    def close(self) -> None:
        """Kills the process if it runs."""
        if self.is_running():
            self._process.kill()
        self._process.wait()
        self._reader.join(timeout=5.0)  # longer only if someone else holds the pipe
        pipes = [self._process.stdin]
        if not self._reader.is_alive():  # closing a pipe waits for its reader
            pipes += [self._process.stdout, self._process.stderr]
        for pipe in pipes:
            if pipe is not None:
                pipe.close()

    def was_interrupted(self) -> bool:
        """Whether a signal that asks for a stop ended the process, before it could handle it or after."""
        return self._process.returncode in (INTERRUPTED, *(-number for number in REQUESTS))

    def failure(self) -> Failure | None:
        """Why the process failed; None if it did not."""
        status = self._process.returncode
        if status == 0:
            return None
        if status == INTERRUPTED:
            return Failure("its process was asked to stop", status)
        if status < 0:
            hint = "; does the machine have too little memory?" if -status == signal.SIGKILL else ""
            return Failure(f"its process was ended by {signal.Signals(-status).name}{hint}", status)
        return Failure(self._error or self._last or f"exit status {status}", status)


def run_processes(
    tasks: Sequence[Task],
    parallel: int,
    per_gpu: int = 1,
    on_end: Callable[[int | str, Failure | None], object] = lambda name, failure: None,
) -> dict[int | str, Failure]:
    """Runs all tasks, in their order as far as GPUs are free.

    Args:
        parallel: processes at a time.
        per_gpu: processes at a time on the same GPUs.
        on_end: called with the name of each task that has ended by itself, and why it failed, if it did.

    Returns:
        The failed tasks by name.

    Raises:
        KeyboardInterrupt: a stop was requested and passed on, and all processes have ended. A second Ctrl-C kills them.
    """
    waiting, running, failures = list(tasks), [], {}

    def end(name: int | str, label: str, failure: Failure | None) -> None:
        if failure is not None:
            failures[name] = failure
            say(f"{label}  failed: {failure.reason}")
        on_end(name, failure)

    stopping = compiled = False
    with StopRequest(answer=None) as stop:
        try:
            while running or waiting:
                if stop.requested() and not stopping:
                    stopping = True
                    waiting.clear()
                    what = f"{counted(len(running), tasks[0].kind)} still to write a last checkpoint"
                    say(f"stopping: {what} (Ctrl-C again: stop at once)")
                    for process in running:
                        process.send(signal.SIGTERM)  # not SIGINT: a cluster may have sent that to each of them already
                busy = Counter(process.gpus for process in running)
                startable = (task for task in waiting if not task.gpus or busy[task.gpus] < per_gpu)
                compiled = compiled or any(process.has_compiled for process in running)
                may_start = len(running) < parallel and (compiled or not running)
                task = next(startable, None) if may_start else None
                if task is not None:
                    waiting.remove(task)
                    try:
                        running.append(_Process(task, alone=parallel == 1))
                    except OSError as error:  # too many processes or open files; those that run go on
                        end(task.name, task.label, Failure(f"its process could not be started ({reason(error)})", 1))
                    continue
                time.sleep(POLL_SECONDS)
                for process in [process for process in running if not process.is_running()]:
                    running.remove(process)
                    compiled = compiled or process.has_compiled
                    process.close()
                    if not (stopping and process.was_interrupted()):
                        end(process.name, process.label, process.failure())
        finally:
            for process in running:
                process.close()
    if stopping:
        raise KeyboardInterrupt
    return failures


def end_with_parent() -> None:
    """In a session's process: when its parent is gone, ends it as SIGTERM does, with a last checkpoint."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):
            pass
        drop_output()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
