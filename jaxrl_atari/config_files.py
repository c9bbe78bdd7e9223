"""Configs in files: those that people write, and those that a run keeps.

configs/NAME.py      Python: `get_config()` returns the `Config`
RUN_DIR/config.json  the config, nested, under "config", among what else is needed to run it again
"""

import dataclasses
import importlib.util
import json
import traceback
from pathlib import Path
from typing import Any

from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError

CONFIG_FILE = "config.json"


def load_config_file(path: str | Path) -> Config:
    """Runs a Python config file and returns what its `get_config()` returns.

    Raises:
        UserError: no such file, it does not run, or it has no `get_config()` that returns a `Config`.
    """
    (config,) = call_config_file(path, get_config=Config)
    return config


def call_config_file(path: str | Path, **functions: type) -> list[Any]:
    """Runs a Python config file and returns what its functions return.

    Args:
        functions: names of functions without arguments, each with the type of what it has to return.

    Raises:
        UserError: no such file, it does not run, or a function is missing or returns something else.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise UserError(f"--config {path}: no such file; for example configs/qbert.py")
    spec = importlib.util.spec_from_file_location(f"jaxrl_atari_config_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise UserError(f"--config {path}: not a Python file; expected one that defines {' and '.join(functions)}")
    module = importlib.util.module_from_spec(spec)
    returned = []
    try:
        spec.loader.exec_module(module)
        for name, kind in functions.items():
            if not hasattr(module, name):
                wanted = f"{name}() -> {kind.__module__}.{kind.__name__}"
                raise UserError(f"--config {path}: has no {name}(); define {wanted}")
            returned.append(value := getattr(module, name)())
            if not isinstance(value, kind):
                got = type(value).__name__
                raise UserError(f"--config {path}: {name}() returned {got}; expected a {kind.__name__}")
    except UserError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's file can raise, told in one line
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).resolve() == path.resolve()
        ]
        where = f"{path}, line {lines[-1]}" if lines else path
        raise UserError(f"--config {where}: {type(error).__name__}: {error}; mend the file") from error
    return returned


def read_config(run_dir: str | Path) -> Config:
    """The config of a run directory.

    Raises:
        UserError: it is no run directory, or its config.json cannot be used.
    """
    path = Path(run_dir) / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{run_dir}: not a run directory (it has no {CONFIG_FILE}); expected data/NAME_TIMESTAMP")
    try:
        return config_from_dict(json.loads(path.read_text(encoding="utf-8"))["config"])
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path}: damaged ({type(error).__name__}: {error}); restore it from the session's copy"
        ) from error


def config_from_dict(values: dict[str, Any]) -> Config:
    """The inverse of `Config.to_dict`; raises `UserError` for fields that this version does not know."""

    def build(cls: Any, values: dict[str, Any], prefix: str) -> Any:
        fields = {f.name: f for f in dataclasses.fields(cls)}
        for key in values:
            if key not in fields:
                raise UserError(
                    f"{prefix}{key}: this version of jaxrl_atari has no such field; use the version that saved it"
                )
        return cls(
            **{
                key: build(fields[key].type, value, f"{prefix}{key}.")
                if dataclasses.is_dataclass(fields[key].type)
                else value
                for key, value in values.items()
            }
        )

    return build(Config, values, "")
