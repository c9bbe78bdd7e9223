"""A run's config file, RUN_DIR/config.json: the `Config`, nested, under "config", and the versions the run used."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError

CONFIG_FILE = "config.json"
SUITE_FILE = "suite.json"


def read_config(run_dir: str | Path) -> Config:
    """Reads the config of a run directory.

    Raises:
        UserError: `run_dir` is not a run directory, or its config.json is not usable.
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
    """The inverse of `Config.to_dict`. Raises `UserError` for a field that this version does not have."""

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
