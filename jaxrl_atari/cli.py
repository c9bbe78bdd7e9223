"""The top of every command: what a user can put right is one line on stderr, and no traceback."""

import contextlib
import io
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import tyro

from jaxrl_atari.errors import UserError

Options = TypeVar("Options")

INTERRUPTED = 130  # 128 + SIGINT, as shells count


def run(main: Callable[[], object]) -> NoReturn:
    """Calls `main` and exits: 0 when it returns, its status (2, or 1) after a `UserError`, 130 after Ctrl-C.

    Any other exception is a bug of ours and passes through with its traceback.
    """
    try:
        main()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    sys.exit(0)


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
        raise UserError(f"{words.partition(' Argument helptext')[0]}; --help shows all options") from None
