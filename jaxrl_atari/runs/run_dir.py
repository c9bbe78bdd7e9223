"""Run directories: making, locking and removing one, and config.json, from which a run can be repeated.

`layout.py` has the names of what is in a run directory. config.json has the config, versions, git revision,
machine, and every resume.
"""

import contextlib
import os
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from jaxrl_atari.config import Config, changed_fields, config_from_dict
from jaxrl_atari.errors import ParametersOnly, UserError, reason, require
from jaxrl_atari.hardware import gpus
from jaxrl_atari.hardware.cpu import read_cpu
from jaxrl_atari.hardware.runtime import numeric_settings
from jaxrl_atari.imports import imported_files
from jaxrl_atari.runs.files import create_file, only_writer, read_json, read_result, unused
from jaxrl_atari.runs.layout import (
    CODE_FOLDER,
    CONFIG_FILE,
    SEARCH_FILE,
    SUITE_FILE,
    SWEEP_FILE,
    checkpoint_steps,
    has_session,
    meta_file,
    session_dirs,
    session_files,
)
from jaxrl_atari.runs.progress import RETURN_MA_ENV_STEPS

PACKAGES = ("jaxrl_atari", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "ale-py", "envpool", "numpy")


def require_unused(session_dir: Path) -> None:
    """Raises `UserError` if a directory holds what a session has written: a new one would mix with it."""
    for name in session_files(session_dir):
        raise UserError(
            f"{session_dir}: holds a session already (its {name}); resume it (`resume=True`, or --resume), or"
            " train in another folder"
        )


@contextlib.contextmanager
def claim_session_dir(session_dir: Path, resume: bool) -> Iterator[Callable[[], None]]:
    """Makes the directory of a session and locks it until the block ends.

    Yields the function `keep`. If the block ends with an error and has not called it, a new directory is removed
    again, because nothing was trained in it.

    Raises:
        UserError: another process trains there; the directory holds a session, and `resume` is false.
    """
    is_new = not session_dir.exists()
    is_kept = False

    def keep() -> None:
        nonlocal is_kept
        is_kept = True

    try:
        session_dir.mkdir(parents=True, exist_ok=True)
        with only_writer(session_dir):
            if not resume:
                require_unused(session_dir)
            yield keep
    except Exception:
        if is_new and not is_kept:
            shutil.rmtree(session_dir, ignore_errors=True)
        raise


def latest_meta(session_dir: Path) -> dict[str, Any]:
    """The meta of a session's latest checkpoint, unchecked; empty if there is none, or if it cannot be read."""
    try:
        return read_json(meta_file(session_dir, max(checkpoint_steps(session_dir), default=0)))
    except (OSError, ValueError):
        return {}


def require_resumable(run_dir: Path) -> None:
    """Raises `ParametersOnly` if a run is a published copy, whose checkpoints lack the optimiser state."""
    for path in session_dirs(run_dir):
        if latest_meta(path).get("parameters_only"):
            raise ParametersOnly(run_dir)


def make_run_dir(config: Config, wanted: Path | None = None) -> Path:
    """Makes the directory of a new run: `OUTPUT_DIR/NAME_TIMESTAMP`, never one that exists already.

    Args:
        wanted: the directory to make instead. It may exist if it is empty.

    Raises:
        UserError: the folder cannot be written to, or is not empty.
    """
    new = Path(config.output_dir).expanduser() / f"{config.name}_{time.strftime('%Y%m%d_%H%M%S')}"
    run_dir = wanted or unused(new)
    try:
        run_dir.mkdir(parents=True, exist_ok=run_dir == wanted)
        if other := next((path.name for path in run_dir.iterdir() if not path.name.startswith(".")), None):
            raise UserError(f"{run_dir}: holds {other}, and no run; choose another folder or an empty one")
        (run_dir / ".lock").touch()
    except OSError as error:
        raise UserError(f"{run_dir}: {error.strerror}; choose a folder that can be written to") from error
    return run_dir


def keep_code(run_dir: Path) -> list[str]:
    """Copies the user's own files that the run imports (`imports.py`) to `code/`, from where they can be loaded.

    A file that was edited since an earlier start is kept beside the earlier copy, as NAME_2.py: the newest copy
    has the highest number.

    Returns:
        A line for each file that was edited, or cannot be read any more.
    """
    lines = []
    folder = run_dir / CODE_FOLDER
    for path in imported_files():
        try:
            content = path.read_bytes()
        except OSError as error:  # what was imported is in memory, and trains on
            lines.append(f"{path} is not kept: {error.strerror}")
            continue
        folder.mkdir(exist_ok=True)
        kept = _keep_copy(folder, path.name, content)
        if kept is not None and kept.name != path.name:
            lines.append(f"{path.name} was edited since this run began, and is kept as {kept}")
    return lines


def _keep_copy(folder: Path, name: str, content: bytes) -> Path | None:
    """Writes a copy NAME.py, NAME_2.py, ... of a file, and returns it; None if there is a copy with this content.

    Several sessions may do this at the same time. The name is chosen before the copies are read. So the copy of a
    faster session is among those that are read, or has this name.
    """
    copy_name = re.compile(rf"{re.escape(Path(name).stem)}(_\d+)?\.py")
    while True:
        new = unused(folder / name)
        copies = [path for path in folder.glob("*.py") if copy_name.fullmatch(path.name)]
        if content in [path.read_bytes() for path in copies]:
            return None
        if create_file(new, content):
            return new


@contextlib.contextmanager
def removed_if_refused(directory: Path, is_new: bool, was_there: bool = False) -> Iterator[None]:
    """Removes the new directory of a run, suite or search at the end of the block if it has no session.

    After a stop request it stays, because it may be resumed.

    Args:
        is_new: whether the directory is that of a new run, suite or search. Otherwise it stays.
        was_there: whether the directory is the user's own, as with `--run-dir` and an empty folder. It stays with
            its hidden files, and what was written into it is removed.
    """
    was_stopped = False
    try:
        yield
    except KeyboardInterrupt:
        was_stopped = True
        raise
    finally:
        if is_new and not was_stopped and not has_session(directory):
            _remove(directory, was_there)


def _remove(directory: Path, was_there: bool) -> None:
    """Removes a directory. One that `was_there` stays with its hidden files, and loses all others."""
    if not was_there:
        shutil.rmtree(directory, ignore_errors=True)
        return
    for path in directory.iterdir():
        if path.name.startswith(".") and path.name != ".lock":
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


# --- config.json -------------------------------------------------------------------------------------------------


def read_config(directory: Path, file: str = CONFIG_FILE) -> Config:
    """Reads the config of a run from config.json, or that of a suite, sweep or search from another file.

    Raises:
        UserError: it is not such a directory, or its file cannot be used.
    """
    path = directory / file
    kinds = {SUITE_FILE: "suite", SEARCH_FILE: "search", SWEEP_FILE: "sweep"}
    if not path.is_file():
        found = [kind for name, kind in kinds.items() if (directory / name).is_file()]
        hint = f"it holds a {found[0]}: name a directory in it" if found else "expected data/NAME_TIMESTAMP"
        raise UserError(f"{directory}: not a {kinds.get(file, 'run')} directory (it has no {file}); {hint}")
    try:
        described = read_json(path)
        config = config_from_dict(described["config"])
        stored = described.get("gae_lambda")
        if config.ppo.gae_lambda is None and stored not in (None, config.resolved_gae_lambda):
            # The default for this game has changed since the run began. The run goes on with its own lambda.
            return replace(config, ppo=replace(config.ppo, gae_lambda=stored))
        return config
    except UserError as error:  # with its own advice, such as for a field of another version
        raise UserError(f"{path}: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: cannot be used ({reason(error)}); restore it from a copy") from error


def read_games(directory: Path, file: str = SUITE_FILE) -> list[str]:
    """The names of the games in suite.json or sweep.json, as they stand there.

    Raises:
        UserError: the file has no list of names.
    """
    path = directory / file
    games = read_result(path, games=list)["games"]
    if not all(isinstance(game, str) for game in games):
        raise UserError(f"{path}: cannot be used (games is {games!r:.60}); restore it from a copy")
    return games


def require_same_run(config: Config, before: Config, run_dir: Path) -> None:
    """Refuses to resume a run as another one, or with a budget that a session has passed.

    Raises:
        ConfigError: another game, protocol or seed, or a budget that a session has passed by at least a rollout.
    """
    for name, was, wanted in (
        ("env.game", before.env.game_name, config.env.game_name),
        ("env.protocol", before.env.resolved_protocol, config.env.resolved_protocol),
        ("seed", before.seed, config.seed),
    ):
        require(
            wanted == was, name, wanted, f"{was}, with which the run began", "leave it out, or start a new run"
        )
    if config.total_env_steps < before.total_env_steps:
        reached = max((steps for path in session_dirs(run_dir) for steps in checkpoint_steps(path)), default=0)
        expected = f"at least {reached}, the env steps of a session"
        passed = config.is_spent(reached - config.rollout_size)
        require(
            not passed, "total_env_steps", config.total_env_steps, expected, "start a new run for a smaller budget"
        )


def describe(config: Config, directory: Path | None = None, file: str = CONFIG_FILE) -> dict[str, Any]:
    """The content of config.json: config, seed, protocol, and the `surroundings` of the run.

    Args:
        directory: of a run that is resumed. The `surroundings` in its `file` stay, and `resumed` gets an entry
            with those of today and the fields that the resume changes: name -> [before, after].
        file: has the description, such as suite.json in a suite.
    """
    today = surroundings(config)
    described = {
        "config": config.to_dict(),
        "seed": config.seed,
        "game": config.env.game_name,
        "protocol": config.env.resolved_protocol,
        "gae_lambda": config.resolved_gae_lambda,
        "resume_note": config.env.resume_note,
        "return_ma_env_steps": RETURN_MA_ENV_STEPS,
        **today,
    }
    if directory is None or not (directory / file).is_file():
        return described
    before = read_json(directory / file)
    changed = changed_fields(before["config"], described["config"])
    date = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    entry = {"date": date, **today, "changed": changed}
    kept = {name: before.get(name) for name in (*today, "return_ma_env_steps")}
    return described | kept | {"resumed": [*before.get("resumed", ()), entry]}


def surroundings(config: Config) -> dict[str, Any]:
    """Versions of Python and of the packages that matter, git revision, JAX's numeric settings, and the machine.

    With `devices.gpu = false` nothing asks the machine for its GPUs, and they are None.
    """
    asks_for_gpus = config.devices.gpu is not False
    cpu = read_cpu()
    return {
        "python": platform.python_version(),
        "versions": {name: found for name in PACKAGES if (found := _version(name))},
        "git_revision": _git_revision(),
        "numeric_settings": numeric_settings(),
        "hardware": {
            "cpu": cpu.model,
            "instruction_sets": list(cpu.instruction_sets),
            "cores": cpu.cores,
            "memory_gib": psutil.virtual_memory().total / 2**30,
            "gpus": [gpu.model for gpu in gpus.visible().gpus] if asks_for_gpus else None,
            "driver": gpus.driver_version() if asks_for_gpus else None,
        },
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def _git_revision() -> str | None:
    """The commit of this package's own checkout, with `+` where files differ from it; None without a checkout.

    A package that is installed inside some other repository, as in a virtual environment there, has none.
    """
    root = Path(__file__).resolve().parents[2]
    # Git sets variables in its hooks, which name the repository of the hook.
    variables = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", f"--git-dir={root}/.git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        found = subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, check=False)
    except OSError:  # Git is not installed
        return None
    return found.stdout.strip() or None
