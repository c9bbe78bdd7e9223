"""What the process of a session calls in tests, in place of training: see `launch.Train`."""

import os
import signal
import time
from pathlib import Path


def enough(row):
    """A stop rule: true at every log point."""
    return "enough"


def note(item, text):
    with (item.run_dir / "notes").open("a") as file:
        file.write(f"{text} {item.session}\n")


def wait_for(path):
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end
        time.sleep(0.02)


def fail(item, *, on_first_update):
    """Each session in its own way; the first and the last one do not."""
    from jaxrl_atari.errors import ConfigError

    print("it begins", flush=True)
    print(f"session {item.session}  it goes on", flush=True)
    if item.session == 1:
        raise ConfigError("seed", -1, "another one")
    if item.session == 2:
        raise ValueError("a bug")
    if item.session == 3:
        os.kill(os.getpid(), signal.SIGKILL)


def take_turns(item, *, on_first_update):
    """Notes the slot and how many others train; session 0 ends last of all that have begun beside it."""
    note(item, f"{os.environ['SLOT']} began")
    time.sleep(0.3)
    note(item, f"{os.environ['SLOT']} compiled")
    on_first_update()
    if item.session == 0:
        wait_for(item.run_dir / "2")
    (item.run_dir / str(item.session)).touch()
    note(item, f"{os.environ['SLOT']} ended")


def until_stopped(item, *, on_first_update):
    """Trains until it is asked to stop, which takes a second; `deaf` to everything, if there is such a file."""
    from jaxrl_atari import cli
    from jaxrl_atari.cli import StopRequest

    with StopRequest(f"session {item.session}") as stop:
        stop.training = True
        on_first_update()
        if (item.run_dir / "deaf").exists():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (item.run_dir / f"ready {item.session}").touch()
        while not stop.requested:
            time.sleep(0.02)
            cli.say("a line")
        time.sleep(1)
    (item.run_dir / f"saved {item.session}").touch()
    raise KeyboardInterrupt


def one_ends(item, *, on_first_update):
    """Session 0 ends when the others train; those train until they are stopped."""
    if item.session:
        until_stopped(item, on_first_update=on_first_update)
    on_first_update()
    wait_for(item.run_dir / "ready 1")
    wait_for(item.run_dir / "ready 2")


def main():
    """Two sessions side by side until they are stopped: `python small_sessions.py FOLDER`.

    If FOLDER has a file `full`, a third one ends first, and what comes of it cannot be written.
    """
    import sys

    from jaxrl_atari import cli
    from jaxrl_atari.suite.launch import Item, Slot
    from jaxrl_atari.suite.processes import run_processes

    folder = Path(sys.argv[1])
    full = (folder / "full").exists()
    items = [Item(None, folder, number, {}, number) for number in range(3 if full else 2)]

    def on_end(item, failure):
        raise OSError(28, "No space left on device")

    def train():
        run_processes(items, one_ends if full else until_stopped, on_end, slots=[Slot("here", {})], parallel=3)

    cli.run(train)


if __name__ == "__main__":
    main()
