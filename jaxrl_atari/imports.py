"""User code that registers environments, networks or algorithms: `--import MODULE_OR_FILE`, and config files.

Only the user chooses what is imported: on the command line, or in a config file named there. A stored run names
environments, networks and algorithms, never modules, and they must have been registered. The processes that this
one starts import the same: an environment variable lists it.
"""

import importlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from jaxrl_atari.errors import UserError, reason

IMPORTS_VARIABLE = "JAXRL_ATARI_IMPORT"
"""Environment variable for the processes that this one starts: a JSON list of modules and absolute file paths."""


def import_named(names: Sequence[str]) -> None:
    """Imports modules and files that the user has named, here and in the processes that this one starts.

    Args:
        names: modules, such as `minigrid` or `my_package.envs`, or paths of files, such as `my_envs.py`.

    Raises:
        UserError: a module or file does not exist.
        Exception: an error of the user's code, as it is.
    """
    for name in names:
        if name.endswith(".py") or os.sep in name:
            name = os.path.abspath(os.path.expanduser(name))
            if not os.path.isfile(name):
                raise UserError(f"--import {name}: expected a Python file (.py) that exists")
            if name not in sys.modules:
                run_file(Path(name))
        else:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                raise UserError(f"--import {name}: {reason(error)}") from error
        pass_on(name)  # only after the import: other processes need not try what has failed here


def import_inherited() -> None:
    """Imports what the process that started this one passes on. `cli.run` calls it, before a command starts.

    Raises:
        UserError, Exception: as `import_named`.
    """
    import_named(passed_on())


def run_file(path: Path) -> ModuleType:
    """Runs a Python file as a module whose name is its path. As a script, it finds the modules beside it.

    Args:
        path: an absolute path.
    """
    name = str(path)
    module = ModuleType(name)
    module.__file__ = name
    sys.modules[name] = module  # dataclasses look their module up
    sys.path.insert(0, str(path.parent))
    try:
        # importlib would write `__pycache__` beside the file, perhaps in a run directory, and trust what is there.
        exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[name]
        raise
    return module


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
    """The modules and absolute paths of files in `IMPORTS_VARIABLE`."""
    return json.loads(os.environ.get(IMPORTS_VARIABLE, "[]"))


def imported_files() -> list[Path]:
    """The files that the user has named for this process and those that it starts. A run keeps copies of them."""
    return [Path(name) for name in passed_on() if os.path.isabs(name)]
