"""Running a command: exit statuses, and errors as one line on stderr.

cli.run(main)       calls the function of a command; every command ends with it
signals.py          what a signal does: it interrupts a command, or asks a session to stop
job.py              a command that another command starts
options.py          from the words of a command line to a dataclass of options
config_files.py     --config: runs the Python file that it names
device_report.py    the command `devices`
"""

import atexit
import io
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from jaxrl_atari.cli.job import ERROR, begin_job
from jaxrl_atari.cli.signals import INTERRUPTED, SIGNALS, interrupt, received
from jaxrl_atari.errors import UserError, correctable, did_you_mean, reason
from jaxrl_atari.imports import import_inherited
from jaxrl_atari.output import say, say_traceback, write


def run(main: Callable[[], object]) -> NoReturn:
    """Calls `main` and exits with status 0, or with 1 or 2 after an error that the user can correct.

    - User code that the process which started this one passes on is imported first (`imports.py`).
    - An exception that `correctable` recognises is printed in one line. Any other is a bug, and has its
      traceback before that line.
    - The `SIGNALS`, such as Ctrl-C, SIGTERM and that of a closed terminal, raise `KeyboardInterrupt` in `main`.
      Its message is printed, and the status is 130. A second signal ends the process at once.
    """
    status = 1
    if begin_job():
        # Called last of Python's exit handlers, in place of those of C: OpenBLAS may wait for its threads forever.
        atexit.register(lambda: os._exit(status))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an ASCII terminal shows "?" for "±"
    logging.basicConfig(format="%(levelname)s: %(message)s")
    received.clear()
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as SIGINT is in the background of a script
            signal.signal(number, interrupt)
    try:
        import_inherited()
        main()
        if received:  # Python swallows an interrupt in a callback, such as one of the garbage collector
            raise KeyboardInterrupt
        status = 0
    except KeyboardInterrupt as stop:
        say(str(stop) or "interrupted", sys.stderr)
        status = INTERRUPTED
    except Exception as error:
        user_error = correctable(error)
        if received:  # an extension module whose import is interrupted raises an error of its own
            say("interrupted", sys.stderr)
            status = INTERRUPTED
        else:
            say_traceback(error)
            say(f"{ERROR}{reason(user_error or error)}", sys.stderr)
            status = user_error.exit_status if user_error else 1
    write("")  # drops text that a closed pipe has not taken; otherwise Python would report it at exit
    if status == INTERRUPTED:
        os._exit(status)  # a normal exit would crash while XLA runs a computation whose start was interrupted
    sys.exit(status)


def list_commands(words: Sequence[str], purposes: Mapping[str, str], program: str) -> None:
    """Prints all commands, for a command line that begins with none of them.

    Args:
        words: the words of the command line.
        purposes: name of a command -> what it does.
        program: the words before the name of a command, up to a dot or a space: `python -m jaxrl_atari.`.

    Raises:
        UserError: the first word is not `--help`; the message names the command that was probably meant.
    """
    if words and words[0] not in ("--help", "-h"):
        meant = did_you_mean(words[0], purposes)
        raise UserError(f"{words[0]}: no such command; {meant}expected one of {', '.join(purposes)}")
    say(f"usage: {program}COMMAND [--help]\n")
    for name, purpose in purposes.items():
        say(f"  {name:11}{purpose}")
