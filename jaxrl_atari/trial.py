"""A trial: several sessions of one config, with seeds `seed`, `seed + 1`, ..., in one run directory."""

import dataclasses
import json
import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from jaxrl_atari.checkpoint import Checkpoints
from jaxrl_atari.config import Config, config_from_dict
from jaxrl_atari.errors import UserError
from jaxrl_atari.session import SessionResult, run_session

CONFIG_FILE = "config.json"
PACKAGES = ("jaxrl_atari", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "ale-py", "envpool", "numpy")


def make_run_dir(config: Config) -> Path:
    """Makes `OUTPUT_DIR/NAME_TIMESTAMP`, never one that is there already.

    Raises:
        UserError: the folder cannot be written to.
    """
    stamp = time.strftime("%Y%m%d_%H%M%S")
    for suffix in ("", *(f"_{i}" for i in range(2, 100))):
        run_dir = Path(config.output_dir) / f"{config.name}_{stamp}{suffix}"
        try:
            run_dir.mkdir(parents=True)
            return run_dir
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(
                f"output_dir = {config.output_dir!r}: {error.strerror or error}; choose a folder that can be written to"
            ) from error
    raise UserError(f"output_dir = {config.output_dir!r}: too many runs named {run_dir.name}; choose another name")


def describe(config: Config, seed: int) -> dict[str, Any]:
    """What is needed to run this again: config, seed, protocol, versions, git revision."""
    return {
        "config": config.to_dict(),
        "seed": seed,
        "game": config.env.game_name,
        "protocol": config.env.resolved_protocol,
        "gae_lambda": config.gae_lambda,
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "git_revision": _git_revision(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_revision() -> str | None:
    """The commit of this package's checkout, with `+` where files differ from it; None outside a checkout."""
    here = Path(__file__).parent
    try:
        revision = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
            cwd=here, capture_output=True, text=True, check=True, timeout=10,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return revision.stdout.strip() or None


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Writes a file that is there whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_config(run_dir: Path) -> Config:
    """The config of a run directory.

    Raises:
        UserError: it is no run directory, or its config.json cannot be used.
    """
    path = Path(run_dir) / CONFIG_FILE
    if not path.is_file():
        raise UserError(f"{run_dir}: not a run directory (it has no {CONFIG_FILE}); expected data/NAME_TIMESTAMP")
    try:
        return config_from_dict(json.loads(path.read_text(encoding="utf-8"))["config"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged ({type(error).__name__}: {error}); restore it from the session's copy") from error


def session_dir(run_dir: Path, session: int) -> Path:
    """Where session `session` of a trial keeps its files."""
    return run_dir / f"session_{session}"


def is_finished(config: Config, directory: Path) -> bool:
    """True if the session in `directory` has spent its budget."""
    if not (directory / "checkpoints").is_dir():
        return False
    latest = Checkpoints(directory, read_only=True).latest_step()
    return latest is not None and config.is_spent(latest)


def run_trial(config: Config, run_dir: Path | None = None, *, resume: bool = False) -> list[SessionResult]:
    """Trains all sessions of a trial, one after the other.

    Args:
        run_dir: made by `make_run_dir` if left out.
        resume: go on with what is in `run_dir`: finished sessions are left alone, others go on from their checkpoint.
    """
    run_dir = make_run_dir(config) if run_dir is None else Path(run_dir)
    write_json(run_dir / CONFIG_FILE, describe(config, config.seed))
    results = []
    for session in range(config.sessions):
        directory = session_dir(run_dir, session)
        if resume and is_finished(config, directory):
            print(f"session {session}: finished already")
            continue
        directory.mkdir(exist_ok=True)
        single = dataclasses.replace(config, seed=config.seed + session)
        write_json(directory / CONFIG_FILE, describe(single, single.seed))
        results.append(run_session(config, directory, session, resume=resume))
    return results
