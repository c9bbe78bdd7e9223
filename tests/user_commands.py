"""The commands as a user runs them: in processes, and in the environment of a user's shell."""

import os
import runpy
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

import psutil

ROOT = Path(__file__).parents[1]


def user_environment(**more):
    """The variables of a user's shell; of those that the tests set, only where compiled programs are kept."""
    unwanted = ("XLA_", "JAX_", "JAXRL_ATARI", "CUDA_", "PYTEST_", "COLUMNS", "PYTHONUNBUFFERED")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    path = os.pathsep.join([str(ROOT), *filter(None, [kept.get("PYTHONPATH")])])
    names = (
        "JAX_COMPILATION_CACHE_DIR",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    )  # none without pytest's cache
    cache = {name: os.environ[name] for name in names if name in os.environ}
    return kept | {"PYTHONPATH": path} | cache | more


def python(*arguments, cwd=ROOT, **variables):
    """Runs Python as a user's shell does, with these variables added."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=user_environment(**variables), cwd=cwd, capture_output=True, text=True, timeout=280,
    )  # fmt: skip


def start(arguments, **variables):
    """Starts Python in this checkout as a user's shell does; one pipe has all that it prints."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        env=user_environment(**variables), cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def run_here(module, words):
    """Runs `python -m jaxrl_atari.MODULE WORDS` in this process, in which a test can stop it; it ends in
    SystemExit."""
    with mock.patch.object(sys, "argv", ["jaxrl_atari", *words]), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the module has been imported before
        runpy.run_module(f"jaxrl_atari.{module}", run_name="__main__", alter_sys=True)


def one_error_line(output):
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, output
    assert "Traceback" not in output, output
    assert "Event loop" not in output, output
    return errors[0]


def still_running(processes, seconds):
    """Those of `psutil.Process`es that have not ended within so many seconds.

    A zombie has ended. Where init is slow to collect orphans, as in a container, it can be there for seconds.
    """

    def runs(process):
        try:
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    end = time.monotonic() + seconds
    while (left := [process for process in processes if runs(process)]) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def free_address():
    """HOST:PORT at which nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"
