"""The top of every command: what a user can put right is one line on stderr, and no traceback."""

import argparse
import contextlib
import errno
import io
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import tyro

from jaxrl_atari.errors import UserError
from jaxrl_atari.trial.stopping import drop_output

Options = TypeVar("Options")

INTERRUPTED = 130  # 128 + SIGINT, as shells count

DISK = {
    errno.ENOSPC: "free some space; a training then goes on with --resume",
    errno.EDQUOT: "free some space; a training then goes on with --resume",
    errno.EROFS: "choose a folder that can be written to",
    errno.EACCES: "choose a folder that can be written to",
}


# What Python and tyro say of a value of the wrong type, and what a user is told.
PLAIN_WORDS = {
    r"invalid literal for int\(\) with base 10: ('.*?')": r"expected a whole number such as 1000000, got \1",
    r"could not convert string to float: ('.*?')": r"expected a number such as 0.001, got \1",
    r"no type matching (\S+) could be instantiated from \[('.*?')\].*": r"expected \1, got \2",
}


def run(main: Callable[[], object]) -> NoReturn:
    """Calls `main` and exits: 0 when it returns, its status (2, or 1) after a `UserError`, 130 after Ctrl-C.

    A disk that is full or cannot be written to is told in one line, too (2), and a reader that has gone away, as in
    `... | head`, in none (1). Any other exception is a bug of ours and passes through with its traceback.
    """
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except BrokenPipeError:
        drop_output()
        sys.exit(1)
    except OSError as error:
        if error.errno not in DISK:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"error: {where}{error.strerror}; {DISK[error.errno]}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    sys.exit(0)


class Parser(argparse.ArgumentParser):
    """argparse, with what is wrong told in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help shows all options")


def parse(options: type[Options], arguments: Sequence[str], **settings: Any) -> Options:
    """`tyro.cli`, with what is wrong told in one line.

    Args:
        settings: further arguments of `tyro.cli`, such as `default` and `prog`.

    Raises:
        UserError: an option that is not there, or a value that it cannot take.
        SystemExit: after --help.
    """
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(options, args=arguments, **settings)
    except SystemExit as stop:
        if not stop.code:
            raise
        # tyro draws a box of several lines; its last part only says where the help is.
        words = re.sub(r"[\u2500-\u257f]+", " ", complaint.getvalue().partition("For full helptext")[0])
        words = " ".join(words.split())
        words = re.sub(
            r"^(Value error Error parsing \S+: (?=\S+ = )|Value error Error parsing |Unrecognized options (?=U))",
            "",
            words,
        )
        for pattern, plain in PLAIN_WORDS.items():
            words = re.sub(pattern, plain, words)
        raise UserError(f"{words.partition(' Argument helptext')[0]}; --help shows all options") from None
