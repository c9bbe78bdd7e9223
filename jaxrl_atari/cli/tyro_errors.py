"""The errors of tyro, which it prints in boxes, as one line each."""

import contextlib
import io
import re
import sys
from collections.abc import Iterator

from jaxrl_atari.errors import UserError
from jaxrl_atari.output import SafeStream, write


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turns the error that tyro prints in a box, before it exits, into a `UserError`."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(SafeStream(sys.stdout)):
            yield
    except SystemExit as end:
        if not end.code:  # --help
            raise
        raise UserError(_text_of_box(printed.getvalue())) from None
    write(printed.getvalue(), sys.stderr)  # such as a warning


def _text_of_box(box: str) -> str:
    """The message in one of tyro's boxes, without the title above it and the hints below it.

    Where standard output is not UTF-8, the box is drawn with spaces and hyphens, and its title is underlined.
    """
    lines = [line.strip("│ ") for line in re.sub(r"\x1b\[[0-9;]*m", "", box).splitlines()]
    boxed = bool(lines) and lines[0].startswith("╭")
    parts: list[list[str]] = [[]]
    for line in lines:
        if re.fullmatch("[─-]{8,}", line):
            parts.append([])
        elif not line.startswith(("╭", "╰")):
            parts[-1].append(line)
    message = parts[0] if boxed or len(parts) == 1 else parts[1]
    if not any(message):  # tyro has changed the form of its box: show all of it
        message = [line for part in parts for line in part]
    text = " ".join(" ".join(message).split())
    if text.startswith("Missing from "):
        return _missing_arguments(text)
    return re.sub(r"^Error parsing [A-Z]\w*: ", "", text)  # the name of a class, which says nothing to the user


def _missing_arguments(text: str) -> str:
    """One sentence for each argument in tyro's list, such as `RUN_DIR is missing: Directory of a run.`

    Args:
        text: `Missing from PROGRAM: RUN_DIR Directory of a run. (required) USER/REPO ... (required)`.
    """
    arguments = [each.split(maxsplit=1) for each in text.partition(": ")[2].split("(required)") if each.strip()]
    return " ".join(f"{name} is missing: {description.strip()}" for name, description in arguments)
