"""Imports of the processes that this one starts on this machine: an environment variable lists them."""

import json
import os
from pathlib import Path

from jaxrl_atari.errors import ConfigError

IMPORTS_VARIABLE = "JAXRL_ATARI_IMPORT"
"""Environment variable for the processes that this one starts: a JSON list of modules and absolute file paths."""


def pass_to_children(name: str) -> None:
    """Makes the processes that this one starts import a module or a file.

    Args:
        name: a module, or the absolute path of a file.
    """
    names = passed_on()
    if name not in names:
        os.environ[IMPORTS_VARIABLE] = json.dumps([*names, name])


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


def imported_modules() -> list[str]:
    """The modules, other than files, that the user has named for this process and those that it starts."""
    return [name for name in passed_on() if not Path(name).is_absolute()]
