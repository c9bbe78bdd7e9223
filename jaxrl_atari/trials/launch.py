"""Jobs and launchers: a job is a session that is to be trained, and a launcher trains jobs.

There are three launchers: `run_here` trains one job after the other in this process, `processes.run_processes`
several at a time in processes of their own, and `ray_tasks.run_on_ray` on a Ray cluster. `poll_until_done` is the
loop of the last two.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from jaxrl_atari.cli.signals import StopRequest
from jaxrl_atari.config import Config
from jaxrl_atari.errors import SessionsFailed, UserError, correctable, reason
from jaxrl_atari.output import counted, say, say_traceback
from jaxrl_atari.runs.layout import has_session

POLL_SECONDS = 0.1
"""How often launchers look for stop requests, output, and jobs that have ended."""

STOPPING = "stopping: each session that has trained writes a last checkpoint (Ctrl-C again: stop at once)"
"""The line with which a launcher answers the first stop request."""


class Job(NamedTuple):
    """A session that is to be trained. It can be sent to another process or machine."""

    config: Config
    run_dir: Path
    session: int
    description: dict[str, Any]  # content of the run's config.json; on a Ray cluster, its process adapts it
    position: int  # among all sessions of the trial, suite or sweep; chooses the slot
    game: str = ""  # game of a suite
    setting_label: str = ""  # of a setting in a sweep, such as `ppo.gamma=0.9`
    compile_key: str = ""  # two jobs with the same key run the same compiled programs

    @property
    def name(self) -> str:
        """The words before each of the session's lines: `session 0`, in a suite `game Pong  session 0`."""
        game = f"game {self.game}" if self.game else ""
        return "  ".join(filter(None, (game, self.setting_label, f"session {self.session}")))

    def say(self, line: str) -> None:
        """Prints a line with the job's name before it. Lines of the session have it already."""
        say(f"{self.name}  {line.removeprefix(f'{self.name}  ')}")


class Failure(NamedTuple):
    """The failure of a job."""

    reason: str  # one line
    correctable: bool = False  # whether the user can correct it, as a `UserError`


class Failures:
    """The failures of the jobs of one start of a command, and the errors with which it then ends."""

    def __init__(self) -> None:
        self._failures: dict[str, Failure] = {}  # name of a job -> its failure, in the order of their ends

    def __bool__(self) -> bool:
        """Whether a job has failed."""
        return bool(self._failures)

    def on_end(self, job: Job, failure: Failure | None) -> None:
        """Prints and notes the failure of a job, if any. This is an `OnEnd`."""
        if failure is not None:
            job.say(f"failed: {failure.reason}")
            self._failures[job.name] = failure

    def raise_correctable(self) -> None:
        """Raises `UserError` with the failures that the user can correct, if there are any."""
        reasons = [failure.reason for failure in self._failures.values() if failure.correctable]
        if reasons:
            raise UserError("; ".join(reasons))

    def raise_if_none_began(self, directory: Path) -> None:
        """Raises `UserError` with each reason once if jobs have failed and no session has begun in a directory."""
        if self._failures and not has_session(directory):
            reasons = dict.fromkeys(failure.reason for failure in self._failures.values())
            raise UserError(f"no session could begin: {'; '.join(reasons)}")

    def raise_if_any(self, count: int, resume: str) -> None:
        """Raises `SessionsFailed` if a job has failed.

        Args:
            count: number of all jobs, including those of earlier starts.
            resume: the command that runs those that failed again.
        """
        if self._failures:
            reasons = "; ".join(f"{name}: {failure.reason}" for name, failure in self._failures.items())
            sessions = counted(count, "session")
            raise SessionsFailed(
                f"{len(self._failures)} of {sessions} failed ({reasons}); {resume} runs what is missing"
            )


class TrainJob(Protocol):
    """Trains a job to the end of its session, as `sessions.train_job` does.

    Args:
        job: the session.
        stop_requested: asked besides signals, as by `run_session`; if true, the session saves and ends.
        on_first_update: called after the first update, when all programs are compiled.
    """

    def __call__(
        self, job: Job, *, stop_requested: Callable[[], bool] = ..., on_first_update: Callable[[], object] = ...
    ) -> object: ...


OnEnd = Callable[[Job, Failure | None], object]
"""Called for each job that has finished or failed, with its failure, if any. A stopped job has done neither.

After a stop request, a launcher may leave out failures: they may be those of a signal. An error that this function
raises stops no other job; see `LateErrors`.
"""


class Launcher(Protocol):
    """Trains jobs, and returns once all have ended.

    Args:
        jobs: the sessions, in the order in which they are started.
        train: trains one of them.
        on_end: called in this process for each job that has finished or failed.

    Raises:
        KeyboardInterrupt: a stop was requested, and every session that was training has ended.
        Exception: the first error of `on_end`, once all jobs have ended.
    """

    def __call__(self, jobs: Sequence[Job], train: TrainJob, on_end: OnEnd) -> None: ...


class LateErrors:
    """The errors of `on_end`, such as a bug in the code that saves results.

    Each is printed when it occurs. A launcher raises the first one when all jobs have ended. So the other jobs
    train on, and the command still ends with an error.
    """

    def __init__(self) -> None:
        self._first: Exception | None = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Keeps an error of the block, and prints it, with its traceback if it is a bug."""
        try:
            yield
        except Exception as error:
            say_traceback(error)
            say(f"error after the end of a job: {reason(error)}; it stops no other job")
            self._first = self._first or error

    def raise_first(self) -> None:
        """Raises the first error, if there is any."""
        if self._first is not None:
            raise self._first


def attempt(function: Callable[..., object], *arguments: Any, **options: Any) -> Failure | None:
    """Calls a function and returns its failure, if it raises an error. The traceback of a bug is printed.

    A `sys.exit` in the code of a user is a failure, too: the work has not been done, whatever the status.
    """
    try:
        function(*arguments, **options)
    except (Exception, SystemExit) as error:
        say_traceback(error)
        user_error = correctable(error)
        return Failure(reason(user_error or error), correctable=user_error is not None)
    return None


EndT = TypeVar("EndT", covariant=True)
"""What a `JobQueue` says of a job that has ended."""


class JobQueue(Protocol[EndT]):
    """Jobs that run outside this process: some wait for room, others run."""

    def is_done(self) -> bool:
        """Whether no job waits or runs."""
        ...

    def poll(self) -> Sequence[EndT]:
        """Starts jobs where there is room, and returns those that have ended, after about `POLL_SECONDS`."""
        ...

    def stop(self) -> None:
        """Asks each running job to write its last checkpoint and end. No other job is started."""
        ...


def poll_until_done(queue: JobQueue[EndT], request: StopRequest, on_end: Callable[[EndT, bool], object]) -> None:
    """Runs the jobs of a queue until all have ended. A stop request is passed on to them once.

    If the queue raises an error, for example because no process can be started, the jobs first write their last
    checkpoints and end. After an error of `on_end`, they go on.

    Args:
        on_end: called for each job that has ended, with whether a stop was requested before.

    Raises:
        KeyboardInterrupt: after a stop request, once all jobs have ended.
        Exception: otherwise, the first error of `on_end`, once all jobs have ended.
    """
    errors = LateErrors()
    stopping = False
    try:
        while not queue.is_done():
            if request.requested and not stopping:
                stopping = True
                queue.stop()
            for end in queue.poll():
                with errors.kept():
                    on_end(end, stopping)
    except Exception:
        queue.stop()
        while not queue.is_done():
            queue.poll()
        raise
    if stopping:
        raise KeyboardInterrupt
    errors.raise_first()


def run_here(jobs: Sequence[Job], train: TrainJob, on_end: OnEnd, *, raise_errors: bool = False) -> None:
    """Trains jobs one after the other in this process. This is a `Launcher`.

    Args:
        raise_errors: whether the error of a job is raised. Otherwise, `on_end` gets it, and the next job trains.
    """
    errors = LateErrors()
    for job in jobs:
        failure = None
        if raise_errors:
            train(job)
        else:
            failure = attempt(train, job)
        with errors.kept():
            on_end(job, failure)
    errors.raise_first()
