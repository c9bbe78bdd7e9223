"""The context in which user code runs: modules beside a file are found, and errors name a line of the code."""

import contextlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from jaxrl_atari.errors import UserError, reason


@contextlib.contextmanager
def errors_name_line(option: str, code: str | Path) -> Iterator[None]:
    """Context in which code of the user runs. Its errors become one line, which names the line of that code.

    A `UserError` is raised as it is: it names the option or the value that is wrong.

    An error may come from a library that the user's code calls, or from a module that it imports. The line is the
    last one of the traceback that lies in the folder of the file, or in the package of the module.

    Args:
        option: the option that names the code.
        code: a module, or the path of a Python file.

    Raises:
        UserError: the code raised an error.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        lines = [
            (Path(frame.f_code.co_filename), number)
            for frame, number in traceback.walk_tb(error.__traceback__)
            if _is_part_of(code, frame)
        ]
        where = f"{option} {code}"
        if lines:
            file, number = lines[-1]
            where += f", line {number}" if file == code else f": {file}, line {number}"
        hint = "fix the file"
        if isinstance(error, ImportError):
            hint += ", or install what it imports"
        if isinstance(code, str) and not lines:  # the module itself was not found
            hint = "expected a module that can be imported, or the path of a Python file"
        raise UserError(f"{where}: {reason(error)}; {hint}") from error


def _is_part_of(code: str | Path, frame: FrameType) -> bool:
    """Whether a function, or a module that is imported, belongs to a module or file that the user has named."""
    if isinstance(code, Path):
        return Path(frame.f_code.co_filename).absolute().parent == code.absolute().parent
    return frame.f_globals.get("__name__", "").partition(".")[0] == code.partition(".")[0]


@contextlib.contextmanager
def modules_beside_first(file: Path) -> Iterator[None]:
    """Context in which a file of the user finds modules beside it before installed ones, as with `python FILE`.

    A module that was imported before stays the one of its name: of two files in different folders that import a
    `utils.py` beside them, the second gets that of the first.
    """
    folder = str(file.absolute().parent)
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:  # the file may change the path too
            sys.path.remove(folder)


def modules_beside(path: Path) -> list[str]:
    """The modules and packages of this process that lie beside a file, from where it can import them.

    A run keeps no copies of them. This package is left out: a run keeps its commit.
    """
    own = __name__.partition(".")[0]
    found = []
    for name, module in list(sys.modules.items()):  # a lazy module may import others
        if "." in name or name == own:
            continue
        places = [*(getattr(module, "__path__", None) or [getattr(module, "__file__", None)])]
        if any(place and Path(place) != path and Path(place).parent == path.parent for place in places):
            found.append(name)
    return sorted(found)
