"""A job: a command that another one starts and watches, such as `train --resume RUN_DIR --session 0`.

A job needs nothing but its directory. Its exit status says how it has ended, and its last line `error: ...` why.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_atari.runs.layout import CONFIG_FILE, RESUME_FILE

ERROR = "error: "
"""The beginning of the line with which a command names its error."""

NAME_VARIABLE = "JAXRL_ATARI_JOB"
"""Environment variable of a job: its name, with which its lines begin."""

PARENT_VARIABLE = "JAXRL_ATARI_PARENT"
"""Environment variable of a job: the id of the process that has started it."""


def job_name() -> str:
    """The name of the job that this process is; empty if it is none."""
    return os.environ.get(NAME_VARIABLE, "")


def described_in(run_dir: Path) -> str:
    """The name of the file that describes a run to this process: to a job, that of the resume if there is one."""
    return RESUME_FILE if job_name() and (run_dir / RESUME_FILE).is_file() else CONFIG_FILE


def start_job(
    words: Sequence[str], name: str, variables: Mapping[str, str], **streams: Any
) -> subprocess.Popen[str]:
    """Starts a job with the environment of this process.

    Args:
        words: its command line, after `python -m`.
        name: stands before each of its lines.
        variables: further environment variables.
        streams: `stdout` and `stderr` of `subprocess.Popen`.
    """
    own = {NAME_VARIABLE: name, PARENT_VARIABLE: str(os.getpid()), "PYTHONUNBUFFERED": "1"}
    # In the process group of this process, so that Ctrl-C, Ctrl-Z and `fg` reach it, too.
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        env={**os.environ, **variables, **own},
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
        **streams,
    )


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
