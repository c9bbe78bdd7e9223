"""A run's config file, RUN_DIR/config.json: the `Config`, nested, under "config", and the versions the run used."""

import contextlib
import dataclasses
import logging
import shutil
from pathlib import Path

from jaxrl_atari.config import Config, config_from_dict
from jaxrl_atari.errors import UserError, require
from jaxrl_atari.runs.files import read_json, unused, write_json
from jaxrl_atari.runs.reading import session_dirs, session_number

_log = logging.getLogger(__name__)

CONFIG_FILE, SUITE_FILE, SEARCH_FILE = "config.json", "suite.json", "search.json"


def is_search(directory: str | Path) -> bool:
    """Whether a directory is that of a search."""
    return (Path(directory) / SEARCH_FILE).is_file()


def read_config(run_dir: str | Path, restore: bool = True) -> Config:
    """Reads the config of a run directory. A damaged config.json is restored from a session's copy, with a warning.

    Args:
        restore: if false, the session's copy is used, and nothing is written.

    Raises:
        UserError: `run_dir` is not a run directory, or its config.json is not usable and no session has a usable copy.
    """
    path = Path(run_dir) / CONFIG_FILE
    try:
        return config_from_dict(read_json(path)["config"])
    except (OSError, ValueError, KeyError, UserError) as error:
        if (config := _restore_from_session(path, error, restore)) is not None:
            return config
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            raise UserError(
                f"{run_dir}: not a run directory (it has no {CONFIG_FILE}); expected data/NAME_TIMESTAMP"
            ) from error
        if isinstance(error, UserError):
            raise UserError(f"{path}: {error}") from error
        raise UserError(
            f"{path}: damaged ({type(error).__name__}: {error}), and no session has a copy that can be used; restore "
            "it by hand"
        ) from error


def require_same_run(config: Config, before: Config) -> None:
    """Raises `ConfigError` if a config asks for another game, protocol or seed than the one with which a run began."""
    for name, was, wanted in (
        ("env.game", before.env.game_name, config.env.game_name),
        ("env.protocol", before.env.resolved_protocol, config.env.resolved_protocol),
        ("seed", before.seed, config.seed),
    ):
        hint = "leave it out, or start a new run"
        require(wanted == was, name, wanted, f"{was}, with which the run began", hint)


def same_budget(config: Config, other: Config) -> bool:
    """Whether two configs ask for as many sessions and as many env steps."""
    return (config.sessions, config.total_env_steps) == (other.sessions, other.total_env_steps)


def with_budget(config: Config, other: Config) -> Config:
    """A config with the number of sessions and the env steps of another one."""
    return dataclasses.replace(config, sessions=other.sessions, total_env_steps=other.total_env_steps)


def _restore_from_session(path: Path, error: Exception, restore: bool) -> Config | None:
    """The newest usable copy of a run's config.json that a session has. Restores the file and keeps the damaged one."""
    copies = [found for found in session_dirs(path.parent) if (found / CONFIG_FILE).is_file()]
    for session_dir in sorted(copies, key=lambda found: (found / CONFIG_FILE).stat().st_mtime, reverse=True):
        number = session_number(session_dir)
        try:
            values = read_json(session_dir / CONFIG_FILE)
            own = config_from_dict(values["config"])
            config = dataclasses.replace(own, seed=own.seed - number)  # session i of a trial has seed + i
        except (OSError, ValueError, KeyError, UserError):
            continue
        done = "using the copy"
        if restore:
            with contextlib.suppress(OSError, ValueError):
                kept = ""
                if path.exists():
                    shutil.copyfile(path, aside := unused(path.with_stem("config_damaged")))
                    kept = f"the damaged file is now {aside.name}, "
                write_json(path, values | {"config": config.to_dict(), "seed": config.seed})
                done = f"{kept}restored"
        _log.warning("%s: damaged (%s: %s); %s from %s", path, type(error).__name__, error, done,
                     session_dir / CONFIG_FILE)  # fmt: skip
        return config
    return None
