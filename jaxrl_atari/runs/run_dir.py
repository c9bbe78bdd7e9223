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
from jaxrl_atari.errors import UserError, reason, require
from jaxrl_atari.hardware import gpus
from jaxrl_atari.hardware.cpu import read_cpu
from jaxrl_atari.hardware.runtime import numeric_settings
from jaxrl_atari.imports import imported_files
from jaxrl_atari.runs.files import only_writer, read_json, read_result, unused, write_file
from jaxrl_atari.runs.layout import (
    CODE_FOLDER,
    CONFIG_FILE,
    SEARCH_FILE,
    SUITE_FILE,
    SWEEP_FILE,
    checkpoint_steps,
    has_begun,
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

    Yields a function that says that the session is prepared. If the block ends with an error before that
    function was called, a new directory is removed again, because nothing was trained in it.

    Raises:
        UserError: another process trains there; the directory holds a session, and `resume` is false.
    """
    is_new = not session_dir.exists()
    began = False

    def begin() -> None:
        nonlocal began
        began = True

    try:
        session_dir.mkdir(parents=True, exist_ok=True)
        with only_writer(session_dir):
            if not resume:
                require_unused(session_dir)
            yield begin
    except Exception:
        if is_new and not began:
            shutil.rmtree(session_dir, ignore_errors=True)
        raise


def latest_meta(session_dir: Path) -> dict[str, Any]:
    """The meta of a session's latest checkpoint, unchecked; empty if there is none, or if it cannot be read."""
    try:
        return read_json(meta_file(session_dir, max(checkpoint_steps(session_dir), default=0)))
    except (OSError, ValueError):
        return {}


def require_resumable(run_dir: Path) -> None:
    """Raises `UserError` if a run is a published copy, whose checkpoints hold the parameters alone."""
    for path in session_dirs(run_dir):
        if latest_meta(path).get("parameters_only"):
            raise UserError(
                f"{run_dir}: holds the parameters alone, without the optimiser state: it can be played and not"
                " resumed; resume the run that it was copied from, or start a new one"
            )


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
        earlier_name = re.compile(rf"{re.escape(path.stem)}(_\d+)?\.py")
        earlier = [kept for kept in folder.glob("*.py") if earlier_name.fullmatch(kept.name)]
        if content not in [kept.read_bytes() for kept in earlier]:
            folder.mkdir(exist_ok=True)
            kept = unused(folder / path.name)
            write_file(kept, content)
            if kept.name != path.name:
                lines.append(f"{path.name} was edited since this run began, and is kept as {kept}")
    return lines


@contextlib.contextmanager
def removed_if_refused(directory: Path, is_new: bool, was_there: bool = False) -> Iterator[None]:
    """Removes the new directory of a run, suite or search at the end of the block if no session has begun in it.

    After a stop request it stays, because it may be resumed.

    Args:
        is_new: whether the directory is that of a new run, suite or search. Otherwise it stays.
        was_there: it is the user's own, as with `--run-dir` and an empty folder. It stays, with its hidden files;
            what was written there is removed.
    """
    was_stopped = False
    try:
        yield
    except KeyboardInterrupt:
        was_stopped = True
        raise
    finally:
        if is_new and not was_stopped and not has_begun(directory):
            _remove(directory, was_there)


def _remove(directory: Path, was_there: bool) -> None:
    """Removes a directory; one that `was_there` only loses what it has, apart from hidden files."""
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
            # Begun by an earlier version, in which a run under `classic` had the lambda tuned under `v5`.
            return replace(config, ppo=replace(config.ppo, gae_lambda=stored))
        return config
    except UserError as error:  # a field of another version, say, with its own advice
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
        directory: where `file` has the history of a run that has begun. Its first `surroundings` stay, and
            `resumed` has those of each resume, with the fields that it changed: name -> [before, after].
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

    With `devices.gpu = false` the machine's GPUs are not among them, because nothing asks for them.
    """
    asks = config.devices.gpu is not False
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
            "gpus": [gpu.model for gpu in gpus.visible().gpus] if asks else None,
            "driver": gpus.driver_version() if asks else None,
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
    own = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # set in Git's hooks
    command = ["git", f"--git-dir={root}/.git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    try:
        found = subprocess.run(command, cwd=root, env=own, capture_output=True, text=True, check=False)
    except OSError:  # Git is not installed
        return None
    return found.stdout.strip() or None
