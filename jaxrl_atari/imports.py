"""User code that registers environments, networks or algorithms: `--import MODULE_OR_FILE`.

What is imported is chosen by the user: on the command line, or by the config file that the user names. A stored
run names environments and networks, and never a module: what it names must have been registered.

The processes that a command starts (sessions, workers of vector environments, Ray's on this machine) import the
same. They find it in the variable `IMPORTS`, which only this process sets.
"""

import argparse
import dataclasses
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jaxrl_atari.errors import UserError
from jaxrl_atari.registry import ALGORITHMS, NETWORKS

IMPORTS = "JAXRL_ATARI_IMPORT"
"""Variable with a JSON list of modules and absolute paths of files, for the processes that this one starts."""

_imported: set[str] = set()  # by this process

Names = Annotated[tuple[str, ...], tyro.conf.arg(name="import", metavar="MODULE|FILE"), tyro.conf.UseAppendAction]
"""Type of the option `--import`, which may be given several times."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WithImports:
    """The option `--import` of a command."""

    imports: Names = ()
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
        hand_on(named)
        _import(named)


def import_first(arguments: Sequence[str] | None) -> None:
    """Imports what `--import` names in a command line that is not parsed yet, so that its other options can use
    it."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--import", dest="names", action="append", default=[])
    try:
        found, _ = parser.parse_known_args(arguments)
    except argparse.ArgumentError:  # no value: the command's own parser says so
        return
    import_named(found.names)


def import_inherited() -> None:
    """Imports what the process that started this one has imported. Call it before looking up what may be
    registered.

    Raises:
        UserError: as `import_named`.
    """
    for name in json.loads(os.environ.get(IMPORTS, "[]")):
        _import(name)


def hand_on(name: str, imported: bool = False) -> None:
    """Lets the processes that this one starts import a module, or a file by its absolute path.

    Args:
        imported: this process has run it already, as it does with a config file.
    """
    names = json.loads(os.environ.get(IMPORTS, "[]"))
    if name not in names:
        os.environ[IMPORTS] = json.dumps([*names, name])
    if imported:
        _imported.add(name)


def _import(name: str) -> None:
    if name in _imported:
        return
    try:
        if Path(name).is_absolute():
            _import_file(Path(name))
        else:
            importlib.import_module(name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # a user's code may raise anything
        lines = [f"{each.filename}, line {each.lineno}" for each in traceback.extract_tb(error.__traceback__)]
        own = [
            line for line in lines if not line.startswith((__file__, "<frozen")) and importlib.__file__ not in line
        ]
        where = f" ({own[-1]})" if own else ""
        raise UserError(
            f"--import {name}: {type(error).__name__}: {error}{where}; expected a module that can be "
            "imported, or the"
            " path of a Python file"
        ) from error
    _imported.add(name)


def _import_file(path: Path) -> None:
    """Imports a file as the module of its name, so that other processes can unpickle what it defines.

    Modules beside it can be imported in it, as in `python FILE`. Where an installed module has the name already,
    the file gets a longer one.
    """
    if not path.is_file():
        raise UserError(f"--import {path}: no such file")
    if path.suffix != ".py":
        raise UserError(f"--import {path}: expected a Python file (.py)")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module_name = path.stem
    if "." in module_name or _home(module_name) not in ("", str(path)):
        module_name = f"{module_name.replace('.', '_')}_named_by_import"
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[module_name]
        raise


def _home(module_name: str) -> str:
    """The file that a module of this name comes from; empty if there is no such module."""
    if module_name in sys.modules:
        return str(getattr(sys.modules[module_name], "__file__", None) or "built in")
    spec = importlib.util.find_spec(module_name)
    return "" if spec is None else spec.origin or "a folder"


def registered() -> set[str]:
    """What user code can register: ids of Gymnasium (none where it is not imported), networks and algorithms."""
    gymnasium = sys.modules.get("gymnasium")
    names = set(gymnasium.registry) if gymnasium else set()
    for registry in (NETWORKS, ALGORITHMS):
        names |= {f"{registry.field} = {name}" for name in registry.names()}
    return names


def imported_files() -> list[Path]:
    """The files, not the installed modules, that this process hands on: a run keeps copies of them."""
    return [Path(name) for name in json.loads(os.environ.get(IMPORTS, "[]")) if Path(name).is_absolute()]


def import_module_of(environment: str) -> None:
    """Imports the module in the id of a Gymnasium environment that the user has named: `pkg` of `pkg:Env-v0`.

    Raises:
        UserError: as `import_named`.
    """
    module, colon, _ = environment.rpartition(":")
    if colon:
        import_named([module])
