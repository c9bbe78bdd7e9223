"""How every command runs: errors as one line on stderr, exit statuses, output to pipes that may close."""

import errno
import io
import logging
import os
import signal
import stat
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TextIO

from jaxrl_atari.errors import UserError

INTERRUPTED = 130  # 128 + SIGINT, as in shells: stopped on request, by whatever signal; nothing failed

DISK_ADVICE = {
    errno.ENOSPC: "free some space, then run the command again (--resume continues a run)",
    errno.EDQUOT: "free some space, then run the command again (--resume continues a run)",
    errno.EROFS: "choose a writable folder",
    errno.EACCES: "change its permissions, or choose another folder",
}


def run(main: Callable[[], object]) -> NoReturn:
    """Calls `main` and exits: with 0 when it returns, the error's status (2 or 1) on a `UserError`.

    Ctrl-C, SIGTERM, SIGUSR1 and SIGUSR2 end it with status 130 and a message.

    A full or read-only disk, a quota or a missing permission is also an error of one line (2). A reader that closes the
    pipe, as in `... | head`, ends the command silently (1). Any other exception is a bug and passes through with its
    traceback.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal shows "?" for "±"
    logging.basicConfig()
    for handler in logging.getLogger().handlers:  # perhaps absl's, which names the module in each warning
        handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    ended = False

    def end(number: int, frame: Any) -> NoReturn:
        nonlocal ended
        ended = True
        write("interrupted\n", sys.stderr)
        sys.exit(INTERRUPTED)

    requests = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    ignored = [number for number in requests if signal.getsignal(number) == signal.SIG_IGN]  # SIGINT, by a shell's `&`
    before = {number: signal.signal(number, end) for number in requests if number not in ignored}
    _running.append(main)
    try:
        try:
            main()
        except Exception:
            if ended:  # an import may have replaced the `SystemExit`
                sys.exit(INTERRUPTED)
            raise
    except UserError as error:
        write(f"error: {error}\n", sys.stderr)
        sys.exit(error.exit_status)
    except BrokenPipeError:
        drop_output()
        sys.exit(1)
    except OSError as error:
        if error.errno not in DISK_ADVICE:
            raise
        where = f"{error.filename}: " if error.filename else ""
        write(f"error: {where}{error.strerror}; {DISK_ADVICE[error.errno]}\n", sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        write("interrupted\n", sys.stderr)
        sys.exit(INTERRUPTED)
    finally:
        _running.pop()
        for number, handler in before.items():
            signal.signal(number, handler)
    sys.exit(0)


_running: list[Callable[[], object]] = []


def is_command() -> bool:
    """Whether this process runs a command of this package, and not a user's script."""
    return bool(_running)


def write(text: str, stream: TextIO | None = None) -> None:
    """Writes text to standard output, or another stream, at once and in one piece.

    If the pipe or the terminal behind it is closed, or the disk is full, output goes nowhere from then on: that must
    not end a training run, whose own files are elsewhere. Where a terminal takes no more for now, the text is lost.
    """
    output = stream or sys.stdout
    if output is None:  # closed before the process began: `>&-`
        return
    try:
        output.write(text)
        output.flush()
    except BlockingIOError:
        pass
    except OSError as error:
        if error.errno in (errno.EPIPE, errno.EIO):  # EIO: the terminal is gone
            drop_output()
        else:
            _drop(output.fileno())


def say(line: str) -> None:
    """Prints a line; see `write`."""
    write(line + "\n")


def drop_output() -> None:
    """Redirects stdout and stderr to nowhere, except to regular files: the terminal or pipe behind them is closed."""
    for number, stream in enumerate((sys.__stdout__, sys.__stderr__), start=1):
        if stream is not None and not stat.S_ISREG(os.fstat(number).st_mode):  # None: closed before the process began
            _drop(number)


def _drop(descriptor: int) -> None:
    """Redirects a file descriptor to nowhere; what Python still holds for it goes there, too."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
