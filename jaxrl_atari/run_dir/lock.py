"""One process at a time writes into a directory."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from jaxrl_atari.errors import UserError


@contextlib.contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Holds a directory, until the block or the process ends, however it ends. Leaves no file behind.

    Where the file system knows no locks, nothing is held.

    Raises:
        UserError: another process holds it.
    """
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{directory}: another process is training there; wait for its end, or end it (Ctrl-C, SIGTERM) and"
                " then use --resume"
            ) from None
        except OSError:
            pass
        yield
    finally:
        os.close(descriptor)
