"""Directories of runs and sessions: making, locking and removing them, and keeping the user's code in a run.

`layout.py` has the names of what is in them.
"""

import contextlib
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxrl_atari.config import Config
from jaxrl_atari.errors import ParametersOnly, UserError
from jaxrl_atari.imports import imported_files
from jaxrl_atari.runs.files import only_writer, unused
from jaxrl_atari.runs.layout import (
    CODE_FOLDER,
    COMMAND_OF_KIND,
    LOCK_FILE,
    has_session,
    held_kind,
    resume_command,
    session_dirs,
    session_files,
)
from jaxrl_atari.runs.reading import latest_meta

# --- The directory of a run, suite or search ---------------------------------------------------------------------


@contextlib.contextmanager
def claim_run_dir(config: Config, wanted: Path | None, is_new: bool) -> Iterator[Path]:
    """Makes the directory of a new run, suite or search, or takes the one that is resumed, and locks it.

    The directory is locked until the block ends. A new directory is then removed if every session was refused; see
    `removed_if_refused`.

    Args:
        config: names the new directory.
        wanted: the directory that is resumed, or in which a new run is to be. None: a new one; see `make_run_dir`.
        is_new: whether the run, suite or search is new.

    Yields:
        The directory.

    Raises:
        UserError: the directory cannot be used, or another process is training there.
    """
    was_there = wanted is not None and wanted.is_dir()
    directory = wanted
    if is_new or directory is None:
        directory = make_run_dir(config, wanted)
    with only_writer(directory), removed_if_refused(directory, is_new, was_there):
        yield directory


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
        try:
            run_dir.mkdir(parents=True, exist_ok=run_dir == wanted)
        except FileExistsError:
            if wanted is not None:
                raise
            return make_run_dir(config)  # another run has just taken the name
        if other := next((path.name for path in run_dir.iterdir() if not path.name.startswith(".")), None):
            raise UserError(f"{run_dir}: holds {_holding(run_dir, other)}; choose another folder or an empty one")
        (run_dir / LOCK_FILE).touch()
    except OSError as error:
        raise UserError(f"{run_dir}: {error.strerror}; choose a folder that can be written to") from error
    return run_dir


def _holding(directory: Path, file: str) -> str:
    """What a directory holds, as text: a run, suite, sweep or search, or else one of its files."""
    kind = held_kind(directory)
    if kind is None:
        return f"{file}, and no run"
    return f"a {kind}, which `{resume_command(COMMAND_OF_KIND[kind], directory)}` continues"


@contextlib.contextmanager
def removed_if_refused(directory: Path, is_new: bool, was_there: bool = False) -> Iterator[None]:
    """Removes the new directory of a run, suite or search at the end of the block if it has no session.

    After a stop request it stays, because it may be resumed.

    Args:
        is_new: whether the directory was made for a new run, suite or search. Otherwise it stays.
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
    """Removes a directory. If it `was_there`, it stays with its hidden files, and loses all others."""
    if not was_there:
        shutil.rmtree(directory, ignore_errors=True)
        return
    for path in directory.iterdir():
        if path.name.startswith(".") and path.name != LOCK_FILE:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


def require_resumable(run_dir: Path) -> None:
    """Raises `ParametersOnly` if a run is a published copy, whose checkpoints lack the optimiser state."""
    for path in session_dirs(run_dir):
        if latest_meta(path).get("parameters_only"):
            raise ParametersOnly(run_dir)


# --- The directory of a session ----------------------------------------------------------------------------------


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
            if not resume and (files := session_files(session_dir)):
                raise UserError(
                    f"{session_dir}: holds a session already (its {files[0]}); resume it (`resume=True`, or"
                    " --resume), or train in another folder"
                )
            yield keep
    except Exception:
        if is_new and not is_kept:
            shutil.rmtree(session_dir, ignore_errors=True)
        raise


# --- The code of the user ----------------------------------------------------------------------------------------


def keep_code(run_dir: Path) -> list[str]:
    """Copies the user's own files that the run imports (`imports.py`) to `code/`, from where they can be loaded.

    A file that differs from every earlier copy is kept beside them, as NAME_2.py. Each content is kept once, so
    the copy with the highest number need not be the newest code.

    Returns:
        A line for each file that differs from all earlier copies, or cannot be read any more.
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
            lines.append(f"{path} differs from the copies of that name, and is kept as {kept}")
    return lines


def _copies(folder: Path, name: str) -> list[Path]:
    """The copies NAME.py, NAME_2.py, ... of a file in a folder."""
    copy_name = re.compile(rf"{re.escape(Path(name).stem)}(_\d+)?\.py")
    return [path for path in folder.glob("*.py") if copy_name.fullmatch(path.name)]


def _keep_copy(folder: Path, name: str, content: bytes) -> Path | None:
    """Writes a copy NAME.py, NAME_2.py, ... of a file, and returns it; None if there is a copy with this content.

    Several sessions may do this at the same time. The name is chosen before the copies are read. So the copy of a
    faster session is among those that are read, or has this name.
    """
    while True:
        new = unused(folder / name)
        if content in [path.read_bytes() for path in _copies(folder, name)]:
            return None
        with contextlib.suppress(FileExistsError), new.open("xb") as file:
            file.write(content)
            return new
