"""User code that registers environments, networks or algorithms: `--import MODULE_OR_FILE`, and config files.

Only the user chooses what is imported: on the command line, or in a config file named there. A stored run names
environments, networks and algorithms, never modules, and they must have been registered. The processes that this
one starts import the same: an environment variable lists it.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, ModuleType

from jaxrl_atari.errors import ConfigError, UserError, reason

IMPORTS_VARIABLE = "JAXRL_ATARI_IMPORT"
"""Environment variable for the processes that this one starts: a JSON list of modules and absolute file paths."""


def import_named(names: Sequence[str]) -> None:
    """Imports modules and files that the user has named, here and in the processes that this one starts.

    Args:
        names: modules, such as `minigrid` or `my_package.envs`, or paths of files, such as `my_envs.py`.

    Raises:
        UserError: a module or file does not exist, or raises an error.
    """
    for name in names:
        is_file = name.endswith(".py") or os.sep in name
        # `Path.expanduser` raises an error for an unknown `~user`.
        named = os.path.abspath(os.path.expanduser(name)) if is_file else name
        _import(named)
        pass_on(named)  # only after the import: other processes need not try what has failed here


def import_inherited() -> None:
    """Imports what the process that started this one passes on. `cli.run` calls it, before a command starts.

    Raises:
        UserError: as `import_named`.
    """
    for name in passed_on():
        _import(name)


def _import(name: str) -> None:
    """Imports a module, or a file by its absolute path, unless this process has imported it."""
    path = Path(name)
    if not path.is_absolute():
        with errors_name_line("--import", name):
            importlib.import_module(name)
    elif path.suffix != ".py" or not path.is_file():
        raise UserError(f"--import {path}: expected a Python file (.py) that exists")
    elif _module_name(path) not in sys.modules:
        run_file(path, "--import")


def run_file(path: Path, option: str) -> ModuleType:
    """Runs a Python file as a module. It finds modules that lie beside it before installed ones.

    A module that was imported before stays the one of its name: of two files in different folders that import a
    `utils.py` beside them, the second gets that of the first.

    Args:
        path: an absolute path.
        option: the option that names the file.

    Raises:
        UserError: the file raises an error.
    """
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    folder = str(path.parent)
    sys.path.insert(0, folder)
    try:
        # importlib would write `__pycache__` beside the file, perhaps in a run directory, and trust what is there.
        with errors_name_line(option, path):
            exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        if folder in sys.path:  # the file may change the path too
            sys.path.remove(folder)
    if folder not in sys.path:
        sys.path.append(folder)  # for imports from inside functions
    return module


def _module_name(path: Path) -> str:
    """The name of a file as a module: that of the file, or a longer one if another module has it."""
    name = path.stem.replace(".", "_")
    while True:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin == str(path):
            return name
        name += "_"


# --- Processes that this one starts ------------------------------------------------------------------------------


def pass_on(name: str) -> None:
    """Makes the processes that this one starts import a module, or a file by its absolute path."""
    names = passed_on()
    if name not in names:
        os.environ[IMPORTS_VARIABLE] = json.dumps([*names, name])


def pass_on_script() -> None:
    """Makes the processes that this one starts import the script `python FILE` that this process runs, if any."""
    main = sys.modules["__main__"]
    file = Path(getattr(main, "__file__", None) or "").absolute()
    if main.__spec__ is None and file.suffix == ".py":
        pass_on(str(file))


def passed_on() -> list[str]:
    """The modules and absolute paths of files in `IMPORTS_VARIABLE`.

    Raises:
        ConfigError: it holds something else.
    """
    text = os.environ.get(IMPORTS_VARIABLE, "").strip()
    if not text:
        return []
    try:
        names = json.loads(text)
    except ValueError:
        names = None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        expected = "a JSON list of modules and paths of files"
        raise ConfigError(IMPORTS_VARIABLE, text, expected, "or unset it")
    return names


def imported_files() -> list[Path]:
    """The files that the user has named for this process and those that it starts. A run keeps copies of them."""
    return [Path(name) for name in passed_on() if Path(name).is_absolute()]


# --- Errors ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def errors_name_line(option: str, code: str | Path) -> Iterator[None]:
    """Context in which code of the user runs. Its errors become one line, which names the line of that code.

    A `UserError` is raised as it is: it names the option or the value that is wrong.

    An error may come from a library that the user's code calls, or from a module that it imports. The line is the
    last one of the traceback that lies in the folder of the file, or in the package of the module.

    Args:
        option: the option that names the code.
        code: a module, or the absolute path of a Python file.

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
        raise UserError(f"{where}: {reason(error)}") from error


def _is_part_of(code: str | Path, frame: FrameType) -> bool:
    """Whether a function, or a module that is imported, belongs to a module or file that the user has named."""
    if isinstance(code, Path):
        return Path(frame.f_code.co_filename).parent == code.parent
    return frame.f_globals.get("__name__", "").partition(".")[0] == code.partition(".")[0]
