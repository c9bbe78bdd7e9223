"""A job: a command that another one starts and watches, such as `train --resume RUN_DIR --session 0`.

A job needs nothing but its directory. Its exit status says how it has ended, and its last line `error: ...` why.
"""

import os
import signal
import threading
import time

ERROR = "error: "
"""The beginning of the line with which a command names its error."""

NAME_VARIABLE = "JAXRL_ATARI_JOB"
"""Environment variable of a job: its name, with which its lines begin."""

PARENT_VARIABLE = "JAXRL_ATARI_PARENT"
"""Environment variable of a job: the id of the process that has started it."""


def job_name() -> str:
    """The name of the job that this process is; empty if it is none."""
    return os.environ.get(NAME_VARIABLE, "")


def job_variables(name: str) -> dict[str, str]:
    """The environment variables of a job of this process.

    Args:
        name: stands before each of its lines.
    """
    return {NAME_VARIABLE: name, PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"}


def begin_job() -> bool:
    """Prepares this process if it is a job, and returns whether it is one.

    When its parent has died, a job saves and ends, as after SIGTERM.
    """
    parent = os.environ.pop(PARENT_VARIABLE, "")
    if not parent:
        return False

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
    return True
