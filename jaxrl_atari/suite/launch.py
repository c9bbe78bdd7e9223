"""Launchers: they train sessions on slots, and report each session that has ended.

There are three, with one interface (`Launcher`): `run_here` trains one session after the other in this process,
`processes.run_processes` several at a time in processes of their own, and `ray_tasks.run_on_ray` on a Ray cluster.
"""

import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxrl_atari import cli
from jaxrl_atari.config import Config
from jaxrl_atari.errors import reason
from jaxrl_atari.output import say

POLL_SECONDS = 0.1
"""How often launchers look for stop requests, output, and sessions that have ended."""

STOPPING = "stopping: each session that has trained writes a last checkpoint (Ctrl-C again: stop at once)"
"""The line with which a launcher answers the first stop request."""


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
    number: int  # among all sessions of the trial, suite or sweep: chooses the slot
    game: str = ""  # game of a suite
    setting: str = ""  # setting of a sweep, such as `ppo.gamma=0.9`
    program: int = 0  # sessions with the same number run the same compiled programs; see `sessions.program_number`

    @property
    def name(self) -> str:
        """What stands before the session's lines: `session 0`, in a suite `game Pong  session 0`."""
        game = f"game {self.game}" if self.game else ""
        return "  ".join(filter(None, (game, self.setting, f"session {self.session}")))

    def say(self, line: str) -> None:
        """Prints a line after the item's name. The session's own lines begin with its number already."""
        say(f"{self.name}  {line.removeprefix(f'session {self.session}  ')}")


def never() -> bool:
    """The default of `stop_requested`: no stop request."""
    return False


def nothing() -> None:
    """The default of `on_first_update`."""


class Train(Protocol):
    """Trains a session to its end, as `sessions.train_item` does.

    Args:
        item: the session.
        stop_requested: asked besides signals, as by `run_session`; if true, the session saves and ends.
        on_first_update: called after the first update, when all programs are compiled.
    """

    def __call__(
        self,
        item: Item,
        *,
        stop_requested: Callable[[], bool] = never,
        on_first_update: Callable[[], object] = nothing,
    ) -> object: ...


OnEnd = Callable[[Item, Failure | None], object]
"""Called for each session that has ended by itself, with the reason if it failed."""


class Launcher(Protocol):
    """Trains sessions, and returns once all have ended.

    Args:
        items: the sessions, in the order in which they are started.
        train: trains one of them.
        on_end: called in this process for each session that has ended by itself.

    Raises:
        KeyboardInterrupt: a stop was requested, and every session that had begun has ended.
    """

    def __call__(self, items: Sequence[Item], train: Train, on_end: OnEnd) -> None: ...


def attempt(function: Callable[..., object], *arguments: Any, **options: Any) -> Failure | None:
    """Calls a function and returns why it failed, if it did. The traceback of a bug is printed."""
    try:
        function(*arguments, **options)
    except Exception as error:
        known = cli.correctable(error)
        if known is None:
            say("".join(traceback.format_exception(error)).rstrip(), sys.stderr)
        return Failure(reason(known or error), known is not None)
    return None


def run_here(items: Sequence[Item], train: Train, on_end: OnEnd, *, raises: bool = False) -> None:
    """Trains sessions one after the other in this process; see `Launcher`.

    Args:
        raises: the error of a session is raised instead of passed to `on_end`.
    """
    for item in items:
        failure = None
        if raises:
            train(item)
        else:
            failure = attempt(train, item)
        on_end(item, failure)
