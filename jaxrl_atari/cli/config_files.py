"""Python config files: where they lie, running them, the functions that they define, and writing one."""

import pprint
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError
from jaxrl_atari.imports import pass_on, run_file

PACKAGE = Path(__file__).parents[1]
"""The folder of this package."""

ResultT = TypeVar("ResultT")


def call(file: ModuleType, function: str, kind: type[ResultT]) -> ResultT:
    """The result of a function of a config file, which takes no arguments.

    Raises:
        UserError: the function does not exist, or returns another type than `kind`.
    """
    if not hasattr(file, function):
        raise UserError(f"--config {file.__name__}: the file does not define the function {function}")
    result = getattr(file, function)()
    if not isinstance(result, kind):
        found = f"{function}() returned {type(result).__name__}; expected {kind.__name__}"
        raise UserError(f"--config {file.__name__}: {found}")
    return result


def run_config_file(path: Path) -> ModuleType:
    """Runs a Python config file, such as configs/qbert.py.

    The file can import modules that lie beside it, as with `python FILE`. The processes that this one starts run
    it too, because it may register environments, networks or algorithms.

    Args:
        path: a file, or the name of one in configs/, such as `qbert`, `qbert.py` or `dialects/sb3`.

    Raises:
        UserError: the file does not exist.
        Exception: an error of the file, as it is.
    """
    own = PACKAGE / "configs"  # in a wheel; a checkout has it beside the package
    folders = [Path("configs"), own if own.is_dir() else PACKAGE.parent / "configs"]
    name = f"{path.relative_to('configs') if path.parts[:1] == ('configs',) else path}".removesuffix(".py")
    places = [path, *(folder / f"{name}.py" for folder in folders)]
    file = next(filter(Path.is_file, places), None)
    if file is None:
        names = sorted({path.stem for folder in folders for path in folder.glob("*.py")})
        expected = f"expected a Python file that defines get_config, or one of {', '.join(names)}"
        raise UserError(f"--config {path}: no such file; {expected}")
    module = run_file(file.absolute())
    pass_on(module.__name__)
    return module


def load_config(path: Path | None) -> Config:
    """The config that the `get_config()` of a config file returns; the default config without a file.

    Raises:
        UserError: as `run_config_file` and `call`.
    """
    return Config() if path is None else call(run_config_file(path), "get_config", Config)


def config_source(config: Config, docstring: str) -> str:
    """The text of a config file that defines a config, for `--config`.

    Args:
        docstring: the docstring of the file.
    """
    text = docstring.replace("\\", "\\\\").replace('"""', r"\"\"\"")
    return f'''"""{text}"""

from jaxrl_atari.config import *


def get_config() -> Config:
    return {pprint.pformat(config, width=110)}
'''
