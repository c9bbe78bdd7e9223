"""Running a command: exit statuses, and errors as one line on stderr.

cli.run(main)       calls the function of a command; every command ends with it
signals.py          what a signal does: it interrupts a command, or asks a session to stop
commands.py         the list of the commands
options.py          from the words of a command line to a dataclass of options
  config_files.py   --config: runs the Python file that it names
  option_names.py   which option was meant by one that does not exist
  tyro_errors.py    tyro's errors, which it prints in boxes, as one line
"""

import io
import logging
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from jaxrl_atari.cli.signals import INTERRUPTED, SIGNALS, interrupt, keep_interrupts, received
from jaxrl_atari.errors import correctable
from jaxrl_atari.imports.named import import_inherited
from jaxrl_atari.output import say, write


def run(main: Callable[[], object]) -> NoReturn:
    """Calls `main` and exits with status 0, or with 1 or 2 after an error that the user can correct.

    - User code that the process which started this one passes on is imported first (`imports/`).
    - An exception that `correctable` recognises is printed in one line. Any other keeps its traceback: a bug.
    - The `SIGNALS`, such as Ctrl-C, SIGTERM and that of a closed terminal, raise `KeyboardInterrupt` in `main`,
      also where Python swallows it at first. Its message is printed, and the status is 130. A second signal ends
      the process at once.
    """
    _open_streams()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    received.clear()
    keep_interrupts()
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:  # as SIGINT is in the background of a script
            signal.signal(number, interrupt)
    status = 0
    try:
        import_inherited()
        main()
        if received:
            raise KeyboardInterrupt
    except KeyboardInterrupt as stop:
        say(str(stop) or "interrupted", sys.stderr)
        status = INTERRUPTED
    except Exception as error:
        user_error = correctable(error)
        if received:  # an extension module whose import is interrupted raises an error of its own
            say("interrupted", sys.stderr)
            status = INTERRUPTED
        elif user_error is None:
            raise
        else:
            say(f"error: {user_error}", sys.stderr)
            status = user_error.exit_status
    write("")  # drops text that a closed pipe has not taken; otherwise Python would report it at exit
    if status == INTERRUPTED:
        os._exit(status)  # a normal exit would crash while XLA runs a computation whose start was interrupted
    sys.exit(status)


def _open_streams() -> None:
    """Opens standard streams that the shell has closed (`>&-`), and lets an ASCII terminal show "?" for "±"."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # the next file to be opened would become the output
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
