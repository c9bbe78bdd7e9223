"""Sessions in processes of their own, several at a time, each on its share of the machine.

`multiprocessing` starts a fresh interpreter for each session ("spawn") and passes the session and its config on by
pickle. Sessions ignore Ctrl-C; the parent passes each stop request on once, as SIGTERM. When the parent ends for any
other reason than a second Ctrl-C, its sessions write their last checkpoints and end.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_atari import cli
from jaxrl_atari.cli import StopRequest
from jaxrl_atari.config import Config
from jaxrl_atari.errors import reason
from jaxrl_atari.hardware import runtime

POLL_SECONDS = 0.1
STOPPING = "stopping: each session that has trained writes a last checkpoint (Ctrl-C again: stop at once)"
KILLED = " (killed; does the machine have too little memory?)"
_SPAWN = multiprocessing.get_context("spawn")


class Failure(NamedTuple):
    """Why a session failed, in one line, and whether that is a `UserError`."""

    reason: str
    correctable: bool = False


class Slot(NamedTuple):
    """Devices for one session, or for several that share them."""

    text: str
    environment: Mapping[str, str]  # variables of its processes, besides those of this one


class Item(NamedTuple):
    """A session to be trained. It can be sent to another process or machine."""

    config: Config
    run_dir: Path
    session: int
    description: dict[str, Any]  # config.json of the run, of the command's machine
    number: int  # among all sessions of the trial or suite: chooses the devices
    game: str = ""  # game of a suite

    def say(self, line: str) -> None:
        """Prints a line after the names of the game and of the session, with which its own lines begin already."""
        game = f"game {self.game}  " if self.game else ""
        session = f"session {self.session}  "
        cli.say(game + session + line.removeprefix(session))


Ended = Iterator[tuple[Item, Failure | None]]
"""Each session that has ended by itself, and why it failed, if it did."""


def attempt(function: Callable, *arguments: Any) -> Failure | None:
    """Calls a function and returns why it failed, if it did. The traceback of a bug is printed."""
    try:
        function(*arguments)
    except Exception as error:
        known = cli.correctable(error)
        if known is None:
            traceback.print_exception(error)
        return Failure(reason(known or error), known is not None)
    return None


def run_processes(
    items: Sequence[Item],
    function: Callable,
    slots: Sequence[Slot],
    parallel: int,
) -> Ended:
    """Trains each session in a process of its own, on one of the least busy slots: if possible number `item.number`.

    Output is printed line by line after the session's label; a process that is alone has the terminal.

    Args:
        function: importable by its name. The process calls it with the item.
        parallel: processes at a time. At most `ceil(parallel / len(slots))` share a slot.

    Yields:
        Each session that has ended by itself, and why it failed, if it did.

    Raises:
        ValueError: called outside the main thread, where Python sets no signal handlers.
        KeyboardInterrupt: a stop was requested and passed on, and all processes have ended. A second Ctrl-C kills them.
    """
    waiting = list(items)
    stopping = False
    running: list[_Session] = []
    with StopRequest(quick=False, answer=STOPPING) as stop:
        try:
            while running or waiting:
                if stop.requested and not stopping:
                    stopping = True
                    waiting.clear()
                    for session in running:
                        session.process.terminate()
                busy = Counter(session.slot for session in running)
                if waiting and len(running) < parallel:
                    item = waiting.pop(0)
                    own = item.number % len(slots)
                    slot = min(range(len(slots)), key=lambda index: (busy[index], index != own))
                    item.say(slots[slot].text)
                    running.append(_Session(item, slot, function, slots[slot].environment, parallel > 1))
                    continue
                time.sleep(POLL_SECONDS)
                for session in list(running):
                    status = session.process.exitcode  # before reading: whatever it has said is there
                    session.read()
                    if status is None:
                        continue
                    running.remove(session)
                    if session.line:  # cut short by the end of the process
                        session.item.say(session.line.decode(errors="replace"))
                    failure = session.failure
                    if status and not (failure or stopping):
                        failure = Failure(f"exit status {status}{KILLED if status == -signal.SIGKILL else ''}")
                    if failure or status == 0:
                        yield session.item, failure
        except KeyboardInterrupt:
            for session in running:
                session.process.kill()
            raise
    if stopping:
        raise KeyboardInterrupt


class _Session:
    """A session that trains in its process."""

    def __init__(self, item: Item, slot: int, function: Callable, environment: Mapping[str, str], captured: bool):
        self.item = item
        self.slot = slot
        self.failure: Failure | None = None
        self.line = b""  # the beginning of a line
        self._failures, write_failures = _SPAWN.Pipe(duplex=False)
        self._output, write_output = _SPAWN.Pipe(duplex=False) if captured else (None, None)
        # Kept open here, too: without a writer, `poll` would announce an end of file.
        self._kept_open = write_failures, write_output
        arguments = (function, item, environment, write_failures, write_output)
        self.process = _SPAWN.Process(target=_run, args=arguments, name=f"session {item.session}", daemon=True)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the process inherits it
        try:
            self.process.start()
        finally:
            signal.signal(signal.SIGINT, before)

    def read(self) -> None:
        """Prints what the process has printed, and receives its failure."""
        output = self._output
        if self._failures.poll():
            self.failure = self._failures.recv()
        while output is not None and output.poll():
            *lines, self.line = (self.line + os.read(output.fileno(), 1 << 16)).split(b"\n")
            for line in lines:
                self.item.say(line.decode(errors="replace"))


def _run(function: Callable, item: Item, environment: Mapping[str, str], failures: Any, output: Any) -> None:
    """What the process of a session does. JAX has been imported, but has not started."""
    os.environ.update(environment)
    if output is not None:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
        # Not those of before: one that was made for a file cannot be reconfigured for a pipe.
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, encoding="utf-8") for number in (1, 2))  # noqa: SIM115
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)

    def main() -> None:
        runtime.configure()
        if failure := attempt(function, item):
            with contextlib.suppress(OSError):  # the parent has ended
                failures.send(failure)
            sys.exit(1)

    threading.Thread(target=end_with_parent, name="end with parent", daemon=True).start()
    cli.run(main)
