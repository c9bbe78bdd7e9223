"""User code for processes on other machines of a Ray cluster, which do not have the user's files."""

import atexit
import shutil
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxrl_atari.errors import UserError
from jaxrl_atari.imports.children import pass_on_nothing, passed_on
from jaxrl_atari.imports.named import import_named


class Code(NamedTuple):
    """A module or file that the user has named, for a process on another machine."""

    name: str  # a module, or the absolute path of a file on the machine of the command
    content: bytes | None  # of the file; None for a module


def code_to_send() -> list[Code]:
    """What the user has named, with the content of the files: `import_sent` takes it.

    Raises:
        UserError: a file cannot be read any more.
    """
    sent = []
    for name in passed_on():
        path = Path(name)
        try:
            sent.append(Code(name, path.read_bytes() if path.is_absolute() else None))
        except OSError as error:
            hint = "the processes on the cluster need it"
            raise UserError(f"--import {name}: {error.strerror}; {hint}") from error
    return sent


def import_sent(sent: Sequence[Code]) -> None:
    """Imports what another process has sent, here and in the processes that this one starts.

    A file that lies at the same path with the same content, as in a folder that the machines share, is imported
    from there, so that it finds the modules beside it. Otherwise it is written to a folder of its own, which is
    removed when this process ends.

    Raises:
        UserError: a module is not installed on this machine, or a file raises an error.
    """
    pass_on_nothing()  # Ray's processes may have inherited the paths of another command
    for name, content in sent:
        path = Path(name)
        is_alone = False  # without the files beside it
        if content is not None and not (path.is_file() and path.read_bytes() == content):
            is_alone = True
            folder = Path(tempfile.mkdtemp(prefix="jaxrl_atari_import_"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            path = folder / path.name
            path.write_bytes(content)
        try:
            import_named([name if content is None else str(path)])
        except UserError as error:
            hint = ""
            if is_alone and isinstance(error.__cause__, ImportError | OSError):
                hint = "; only this file was sent, so put it into a folder that all machines share"
            elif content is None and isinstance(error.__cause__, ModuleNotFoundError):
                hint = "; install it there"
            raise UserError(f"on {socket.gethostname()}: {error}{hint}") from error
