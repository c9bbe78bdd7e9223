"""The option `--import`, and the import of the modules and files that it names."""

import dataclasses
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jaxrl_atari.errors import UserError
from jaxrl_atari.imports.children import pass_to_children, passed_on
from jaxrl_atari.imports.user_code import errors_name_line, modules_beside_first

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
        # `Path.expanduser` raises an error for an unknown `~user`.
        named = os.path.abspath(os.path.expanduser(name)) if is_file else name
        _import(named)
        pass_to_children(named)  # only after the import: other processes need not try what has failed here


def import_module_of(environment: str) -> None:
    """Imports the module in the id of an environment that the user has named, such as `pkg` in `pkg:Env-v0`.

    Raises:
        UserError: as `import_named`.
    """
    module, colon, _ = environment.rpartition(":")
    if colon:
        import_named([module])


def import_inherited() -> None:
    """Imports what the process that started this one passes on. `cli.run` calls it, before a command starts.

    Raises:
        UserError: as `import_named`.
    """
    for name in passed_on():
        _import(name)


def pass_on_config_file(path: Path) -> None:
    """Makes the processes that this one starts import a config file, which this process has run already.

    Args:
        path: its absolute path.
    """
    pass_to_children(str(path))
    _imported.add(str(path))


def pass_on_script() -> None:
    """Makes the processes that this one starts import the script `python FILE` that this process runs, if any."""
    main = sys.modules["__main__"]
    file = Path(getattr(main, "__file__", None) or "").absolute()
    if main.__spec__ is None and file.suffix == ".py":
        pass_to_children(str(file))


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

    The file can import modules that lie beside it (`modules_beside_first`), also later, from inside a function.
    """
    if path.suffix != ".py":
        raise UserError(f"--import {path}: expected a Python file (.py)")
    if not path.is_file():
        raise UserError(f"--import {path}: no such file")
    module_name = _module_name(path)
    if module_name in sys.modules:  # other code has imported the file
        return
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


def _module_name(path: Path) -> str:
    """The name of the file at `path` as a module: that of the file, or a longer one if another module has it."""
    stem = path.stem.replace(".", "_")
    name = stem
    others = 0
    while _is_taken(name, path):
        others += 1
        name = f"{stem}_{others}_named_by_import"
    return name


def _is_taken(module_name: str, path: Path) -> bool:
    """Whether a module of this name exists that is not the file at `path`."""
    if module_name in sys.modules:
        return getattr(sys.modules[module_name], "__file__", None) != str(path)
    spec = importlib.util.find_spec(module_name)
    return spec is not None and spec.origin != str(path)
