"""User code that registers environments, networks or algorithms: `--import MODULE_OR_FILE`.

Only the user chooses what is imported: on the command line, or in a config file named there. A stored run names
environments, networks and algorithms, never modules, and they must have been registered.

The processes that a command starts on this machine (sessions, workers of vector environments) import the same.
They find it in the variable `IMPORTS_VARIABLE`, which a process sets for those that it starts. Ray's workers may
be on other machines, which do not have the user's files, and are sent the code; see `code_to_send`.
"""

import atexit
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import shutil
import socket
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, NamedTuple

import tyro

from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.registry import ALGORITHMS, NETWORKS

IMPORTS_VARIABLE = "JAXRL_ATARI_IMPORT"
"""Environment variable for the processes that this one starts: a JSON list of modules and absolute file paths."""

_imported: set[str] = set()
"""The modules and files that this process has imported."""

ImportNames = Annotated[
    tuple[str, ...], tyro.conf.arg(name="import", metavar="MODULE|FILE"), tyro.conf.UseAppendAction
]
"""Type of the option `--import`, which may occur several times."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithImports:
    """The option `--import` of a command."""

    imports: ImportNames = ()
    """Module, or path of a Python file, that registers environments, networks or algorithms."""


def import_named(names: Sequence[str]) -> None:
    """Imports modules and files that the user has named, here and in the processes that this one starts.

    Args:
        names: modules, such as `minigrid` or `my_package.envs`, or paths of files, such as `my_envs.py`.

    Raises:
        UserError: a module or file does not exist, or raises an error.
    """
    for name in names:
        is_file = name.endswith(".py") or os.sep in name
        named = str(Path(name).expanduser().absolute()) if is_file else name
        _import(named)
        pass_to_children(named)  # only after the import: other processes need not try what has failed here


def import_inherited() -> None:
    """Imports what the process that started this one passes on. `cli.run` calls it, before a command starts.

    Raises:
        UserError: as `import_named`.
    """
    for name in _passed_on():
        _import(name)


def pass_to_children(name: str, already_imported: bool = False) -> None:
    """Makes the processes that this one starts import a module or a file.

    Args:
        name: a module, or the absolute path of a file.
        already_imported: whether this process has run the file already, as it has run a config file.
    """
    names = _passed_on()
    if name not in names:
        os.environ[IMPORTS_VARIABLE] = json.dumps([*names, name])
    if already_imported:
        _imported.add(name)


def _passed_on() -> list[str]:
    """The modules and files in `IMPORTS_VARIABLE`."""
    return json.loads(os.environ.get(IMPORTS_VARIABLE, "[]"))


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
    for name in _passed_on():
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
    os.environ[IMPORTS_VARIABLE] = "[]"  # Ray's processes may have inherited the paths of another command
    for name, content in sent:
        path = Path(name)
        if content is not None and not (path.is_file() and path.read_bytes() == content):
            folder = Path(tempfile.mkdtemp(prefix="jaxrl_atari_import_"))
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
            path = folder / path.name
            path.write_bytes(content)
        try:
            import_named([name if content is None else str(path)])
        except UserError as error:
            hint = "install it there"
            if content is not None:
                hint = "only this file was sent, so put it into a folder that all machines share"
            raise UserError(f"on {socket.gethostname()}: {error}; {hint}") from error


def _import(name: str) -> None:
    """Imports a module, or a file by its absolute path, once."""
    if name in _imported:
        return
    code = Path(name) if Path(name).is_absolute() else name
    with errors_name_line("--import", code):
        if isinstance(code, Path):
            _import_file(code)
        else:
            importlib.import_module(code)
    _imported.add(name)


def _import_file(path: Path) -> None:
    """Imports a file as a module, so that other processes can unpickle what it defines.

    The module has the name of the file, or a longer one if another module has that name. The file can import
    modules that lie beside it (`modules_beside_first`), also later, from inside a function.
    """
    if not path.is_file():
        raise UserError(f"--import {path}: no such file")
    if path.suffix != ".py":
        raise UserError(f"--import {path}: expected a Python file (.py)")
    module_name = path.stem.replace(".", "_")
    others = 0
    while _is_taken(module_name, path):
        others += 1
        module_name = f"{path.stem.replace('.', '_')}_{others}_named_by_import"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        # importlib would write `__pycache__` beside the file, perhaps in a run directory, and would trust what is
        # there.
        with modules_beside_first(path):
            exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[module_name]
        raise
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))


@contextlib.contextmanager
def errors_name_line(option: str, code: str | Path) -> Iterator[None]:
    """Context in which code of the user runs. Its errors become one line, which names the line of that code.

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
        if isinstance(error, ModuleNotFoundError) and not lines:  # the module itself was not found
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


def _is_taken(module_name: str, path: Path) -> bool:
    """Whether a module of this name exists that is not the file at `path`."""
    if module_name in sys.modules:
        return getattr(sys.modules[module_name], "__file__", None) != str(path)
    spec = importlib.util.find_spec(module_name)
    return spec is not None and spec.origin != str(path)


def registered_names() -> set[str]:
    """The names of all registered environments, networks and algorithms. User code can add to them."""
    gymnasium = sys.modules.get("gymnasium")
    names = set(gymnasium.registry) if gymnasium else set()
    for registry in (NETWORKS, ALGORITHMS):
        names |= {f"{registry.field} = {name}" for name in registry.names()}
    return names


def imported_files() -> list[Path]:
    """The files that the user has named for this process and those that it starts. A run keeps copies of them."""
    return [Path(name) for name in _passed_on() if Path(name).is_absolute()]


def imported_modules() -> list[str]:
    """The modules, other than files, that the user has named for this process and those that it starts."""
    return [name for name in _passed_on() if not Path(name).is_absolute()]


def modules_beside(path: Path) -> list[str]:
    """The modules and packages of this process that lie beside a file, from where it can import them.

    A run keeps no copies of them. This package is left out: a run keeps its commit.
    """
    found = []
    for name, module in sys.modules.items():
        if "." in name or name == __package__:
            continue
        places = [*(getattr(module, "__path__", None) or [getattr(module, "__file__", None)])]
        if any(place and Path(place) != path and Path(place).parent == path.parent for place in places):
            found.append(name)
    return sorted(found)


def import_module_of(environment: str) -> None:
    """Imports the module in the id of an environment that the user has named, such as `pkg` in `pkg:Env-v0`.

    Raises:
        UserError: as `import_named`.
    """
    module, colon, _ = environment.rpartition(":")
    if colon:
        import_named([module])
