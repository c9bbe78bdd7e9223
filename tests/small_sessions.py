"""What the process of a session or a trial calls in tests, in place of training: see `launch.TrainJob`."""

import atexit
import ctypes
import json
import os
import signal
import time
from pathlib import Path


def enough(row):
    """A stop rule: true at every log point."""
    return "enough"


def note(job, text):
    with (job.run_dir / "notes").open("a") as file:
        file.write(f"{text} {job.session}\n")


def wait_for(path):
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def fail(job, *, on_first_update):
    """Each session in its own way; the first and the last one do not."""
    from jaxrl_atari.errors import ConfigError

    print("it begins", flush=True)
    print(f"{job.name}  it goes on", flush=True)
    if job.session == 1:
        raise ConfigError("seed", -1, "another one")
    if job.session == 2:
        raise ValueError("a bug")
    if job.session == 3:
        os.kill(os.getpid(), signal.SIGKILL)


def hang_at_exit(job, *, on_first_update):
    """The exit handler of a library never returns; one of Python is called."""
    atexit.register((job.run_dir / "handler called").touch)
    libc = ctypes.CDLL(None)
    libc.__cxa_atexit(libc.pause, None, None)
    print("the end of a line", end="")


def begin_alone(job, *, on_first_update):
    (job.run_dir / f"begun {job.session}").touch()


def begin_together(job, *, on_first_update):
    """Neither of two sessions gets past its beginning without the other."""
    (job.run_dir / f"begun {job.session}").touch()
    wait_for(job.run_dir / f"begun {1 - job.session}")
    on_first_update()


def train_and_fail(job, *, stop_requested, on_first_update):
    """Each session fails with a `UserError`: session 0 after its first update, session 1 before."""
    from jaxrl_atari.errors import ConfigError

    if job.session == 0:
        on_first_update()
    (job.run_dir / f"described_{job.session}.json").write_text(json.dumps(job.description))
    print("a line of output")
    raise ConfigError("seed", job.session, "another one")


def take_turns(job, *, on_first_update):
    """Notes the slot and how many others train; session 0 ends last of all that have begun beside it."""
    note(job, f"{os.environ['SLOT']} began")
    time.sleep(0.3)
    note(job, f"{os.environ['SLOT']} compiled")
    on_first_update()
    if job.session == 0:
        wait_for(job.run_dir / "2")
    (job.run_dir / str(job.session)).touch()
    note(job, f"{os.environ['SLOT']} ended")


def until_stopped(job, *, on_first_update):
    """Trains until it is asked to stop, which takes a second; `deaf` to everything, if there is such a file."""
    from jaxrl_atari.cli.signals import StopRequest
    from jaxrl_atari.output import say

    with StopRequest(f"session {job.session}") as stop:
        stop.training = True
        on_first_update()
        if (job.run_dir / "deaf").exists():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (job.run_dir / f"ready {job.session}").touch()
        while not stop.requested:
            time.sleep(0.02)
            say("a line")
        time.sleep(1)
    (job.run_dir / f"saved {job.session}").touch()
    raise KeyboardInterrupt


def one_ends(job, *, on_first_update):
    """Session 0 ends when the others train; those train until they are stopped."""
    if job.session:
        until_stopped(job, on_first_update=on_first_update)
    on_first_update()
    wait_for(job.run_dir / "ready 1")
    wait_for(job.run_dir / "ready 2")


def one_trial_ends(directory, share, *, stop_requested, on_first_update):
    """Trial 0 of a search ends when trial 1 trains, which ends once the command has noticed the end of trial 0."""
    if directory.name == "trial_0":
        wait_for(directory.parent / "ready")
        return
    (directory.parent / "ready").touch()
    wait_for(directory.parent / "ended")
    time.sleep(0.5)  # a stop request would arrive in the meantime
    if not stop_requested():
        (directory.parent / "trained").touch()


class CannotBeSent:
    """Something in a job that cannot be sent to the job's process: the disk is full. Removes the file `full`."""

    def __init__(self, folder):
        self.folder = folder

    def __reduce__(self):
        (self.folder / "full").unlink()
        raise OSError(28, "No space left on device")


def main():
    """Two sessions side by side until they are stopped: `python small_sessions.py FOLDER`.

    If FOLDER has a file `full`, a third one ends first, and the process of a fourth one cannot be started.
    """
    import sys

    from jaxrl_atari import cli
    from jaxrl_atari.trials.launch import Job
    from jaxrl_atari.trials.processes import run_processes
    from jaxrl_atari.trials.slots import Slot

    folder = Path(sys.argv[1])
    full = (folder / "full").exists()
    jobs = [Job(None, folder, number, description={}, position=number) for number in range(3 if full else 2)]
    if full:
        jobs.append(Job(None, folder, 3, description={"content": CannotBeSent(folder)}, position=3))

    def on_end(job, failure):
        pass

    def train():
        run_processes(jobs, one_ends if full else until_stopped, on_end, slots=[Slot("here", {})], parallel=3)

    cli.run(train)


if __name__ == "__main__":
    main()
