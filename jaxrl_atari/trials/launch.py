"""Jobs and launchers: a job is a session that is to be trained, and a launcher trains jobs.

There are three launchers: `run_here` trains one job after the other in this process, `processes.run_processes`
several at a time in processes of their own, and `ray_tasks.run_on_ray` on a Ray cluster.
"""

import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxrl_atari.config import Config
from jaxrl_atari.errors import correctable, reason
from jaxrl_atari.output import say

POLL_SECONDS = 0.1
"""How often launchers look for stop requests, output, and jobs that have ended."""

STOPPING = "stopping: each session that has trained writes a last checkpoint (Ctrl-C again: stop at once)"
"""The line with which a launcher answers the first stop request."""


class Job(NamedTuple):
    """A session that is to be trained. It can be sent to another process or machine."""

    config: Config
    run_dir: Path
    session: int
    description: dict[str, Any]  # content of the run's config.json; on a Ray cluster, see `describe_here`
    position: int  # among all sessions of the trial, suite or sweep; chooses the slot
    game: str = ""  # game of a suite
    setting: str = ""  # setting of a sweep, such as `ppo.gamma=0.9`
    program: int = 0  # two jobs with one number run the same compiled programs; see `sessions.program_number`

    @property
    def name(self) -> str:
        """The words before each of the session's lines: `session 0`, in a suite `game Pong  session 0`."""
        game = f"game {self.game}" if self.game else ""
        return "  ".join(filter(None, (game, self.setting, f"session {self.session}")))

    def say(self, line: str) -> None:
        """Prints a line with the job's name before it. Lines of the session have it already."""
        say(f"{self.name}  {line.removeprefix(f'{self.name}  ')}")


class Failure(NamedTuple):
    """The failure of a job."""

    reason: str  # one line
    correctable: bool = False  # whether the user can correct it, as a `UserError`


class Train(Protocol):
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

After a stop request, a launcher may leave out failures: they may be those of a signal.
"""


class Launcher(Protocol):
    """Trains jobs, and returns once all have ended.

    Args:
        jobs: the sessions, in the order in which they are started.
        train: trains one of them.
        on_end: called in this process for each job that has finished or failed; see `OnEnd`.

    Raises:
        KeyboardInterrupt: a stop was requested, and every session that was training has ended.
    """

    def __call__(self, jobs: Sequence[Job], train: Train, on_end: OnEnd) -> None: ...


def attempt(function: Callable[..., object], *arguments: Any, **options: Any) -> Failure | None:
    """Calls a function and returns its failure, if it raises an error. The traceback of a bug is printed."""
    try:
        function(*arguments, **options)
    except Exception as error:
        user_error = correctable(error)
        if user_error is None:
            say("".join(traceback.format_exception(error)).rstrip(), sys.stderr)
        return Failure(reason(user_error or error), correctable=user_error is not None)
    return None


def run_here(jobs: Sequence[Job], train: Train, on_end: OnEnd, *, raises: bool = False) -> None:
    """Trains jobs one after the other in this process; see `Launcher`.

    Args:
        raises: whether the error of a job is raised. Otherwise, `on_end` gets it, and the next job is trained.
    """
    for job in jobs:
        failure = None
        if raises:
            train(job)
        else:
            failure = attempt(train, job)
        on_end(job, failure)
