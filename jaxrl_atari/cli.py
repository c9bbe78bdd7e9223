"""The top of every command: what a user can put right is one line on stderr, and no traceback."""

import sys
from collections.abc import Callable
from typing import NoReturn

from jaxrl_atari.errors import UserError

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
