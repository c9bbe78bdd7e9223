"""Python config files: where they lie, running them, the functions that they define, and writing one."""

import pprint
import sys
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError, did_you_mean
from jaxrl_atari.imports import errors_name_line, pass_on, run_file
from jaxrl_atari.registry import ALGORITHMS, NETWORKS

PACKAGE = Path(__file__).parents[1]
"""The folder of this package."""

ResultT = TypeVar("ResultT")


class ConfigFile(NamedTuple):
    """A Python config file that was run."""

    as_given: Path  # the path as the user wrote it
    file: Path  # its absolute path
    scope: dict[str, Any]  # the names that the file defines

    def call(self, function: str, kind: type[ResultT]) -> ResultT:
        """The result of a function of the file, which takes no arguments.

        Args:
            kind: the type of the result.

        Raises:
            UserError: the function does not exist, fails, or returns another type.
        """
        if function not in self.scope:
            raise UserError(f"--config {self.as_given}: the file does not define the function {function}")
        with errors_name_line("--config", self.file):
            result = self.scope[function]()
        if not isinstance(result, kind):
            returned = type(result).__name__
            raise UserError(
                f"--config {self.as_given}: {function}() returned {returned}; expected {kind.__name__}"
            )
        return result


def run_config_file(path: Path) -> ConfigFile:
    """Runs a Python config file, such as configs/qbert.py.

    The file can import modules that lie beside it, as with `python FILE`.

    Args:
        path: a file, or the name of one in configs/, such as `qbert` or `qbert.py`.

    Raises:
        UserError: the file does not exist, is a JSON file, or raises an error.
    """
    folders = config_folders()
    places = [path, *(folder.parent / path for folder in folders)]  # configs/qbert.py, wherever configs/ is
    if path.name == str(path):
        places += [folder / f"{path.name.removesuffix('.py')}.py" for folder in folders]
    file = next(filter(Path.is_file, places), None)
    if file is None:
        names = config_names()
        expected = f"expected a Python file that defines get_config, or one of {', '.join(names)}"
        raise UserError(f"--config {path}: no such file; {did_you_mean(path.stem, names)}{expected}")
    if file.suffix == ".json":
        raise UserError(
            f"--config {path}: expected a Python file that defines get_config; a run is continued with"
            f" --resume {path.parent}"
        )
    before = _registered_names()
    file = file.absolute()
    scope = vars(run_file(file, "--config"))
    if _registered_names() != before:  # the processes of the sessions need the same registrations
        pass_on(str(file))
    return ConfigFile(path, file, scope)


def _registered_names() -> set[str]:
    """The names of all registered environments, networks and algorithms. User code can add to them."""
    gymnasium = sys.modules.get("gymnasium")
    names = set(gymnasium.registry) if gymnasium else set()
    for registry in (NETWORKS, ALGORITHMS):
        names |= {f"{registry.field} = {name}" for name in registry.names()}
    return names


def load_config(path: Path | None) -> Config:
    """The config that the `get_config()` of a config file returns; the default config without a file.

    Raises:
        UserError: as `run_config_file` and `ConfigFile.call`.
    """
    return Config() if path is None else run_config_file(path).call("get_config", Config)


def config_folders() -> list[Path]:
    """The folders of config files: that of the working directory, and those of this package."""
    own = [PACKAGE / "configs"]  # in a wheel
    if (PACKAGE.parent / "pyproject.toml").is_file():  # in a checkout
        own.append(PACKAGE.parent / "configs")
    return [folder for folder in (Path("configs"), *own) if folder.is_dir()]


def config_names() -> list[str]:
    """The names of the config files in `config_folders`."""
    return sorted({path.stem for folder in config_folders() for path in folder.glob("*.py")})


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
