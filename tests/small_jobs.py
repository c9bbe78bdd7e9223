"""Jobs in place of commands that train, and their parent, without JAX: `python small_jobs.py KIND FOLDER`."""

import atexit
import ctypes
import os
import signal
import sys
import time
from pathlib import Path

from jaxrl_atari import cli
from jaxrl_atari.cli.job import job_name
from jaxrl_atari.cli.signals import StopRequest
from jaxrl_atari.errors import ConfigError
from jaxrl_atari.output import say


def wait_for(path):
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def fail(folder, number):
    """Each job in its own way; the first and the last one do not."""
    print("it begins")
    say(f"{job_name()}  it goes on")
    if number == 1:
        raise ConfigError("seed", -1, "another one")
    if number == 2:
        raise ValueError("a bug")
    if number == 3:
        os.kill(os.getpid(), signal.SIGKILL)


def hang_at_exit(folder, number):
    """The exit handler of a library never returns; one of Python is called."""
    atexit.register((folder / "handler called").touch)
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(libc.pause, None, None)
    print("the end of a line", end="")


def take_turns(folder, number):
    """Notes its slot. Job 0 ends once job 2 has ended."""
    with (folder / "notes").open("a") as notes:
        notes.write(f"{number} on {os.environ['SLOT']}\n")
    if number == 0:
        wait_for(folder / "2")
    (folder / str(number)).touch()


def until_stopped(folder, number):
    """Goes on until it is asked to stop; `deaf` to that if there is such a file."""
    with StopRequest(job_name()) as stop:
        stop.saves = True
        if (folder / "deaf").exists():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (folder / f"ready {number}").touch()
        while not stop.requested:
            time.sleep(0.02)
            say("a line")
        time.sleep(0.5)
    (folder / f"saved {number}").touch()
    raise KeyboardInterrupt


def jobs(kind, folder, count):
    """So many jobs of a kind."""
    from jaxrl_atari.trials.launch import Job

    words = ("small_jobs", kind, str(folder))
    return [Job(f"session {number}", (*words, str(number)), folder, number) for number in range(count)]


def parent(folder):
    """Two jobs side by side until they are stopped."""
    from jaxrl_atari.trials.launch import run_jobs
    from jaxrl_atari.trials.slots import Slot, SlotPlan

    run_jobs(jobs("until_stopped", folder, 2), lambda job, failure: None, SlotPlan([Slot("here", {})], 2))


def main():
    kind, folder, *number = sys.argv[1:]
    globals()[kind](Path(folder), *map(int, number))


if __name__ == "__main__":
    cli.run(main)
