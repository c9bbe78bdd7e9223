"""Directories of runs: making, locking and removing them, and keeping the user's code in a run.

`layout.py` has the names of what is in them.
"""

import contextlib
import glob
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError
from jaxrl_atari.imports import imported_files
from jaxrl_atari.runs.files import only_writer, unused, write_file
from jaxrl_atari.runs.layout import CODE_FOLDER, has_session, held_kind


@contextlib.contextmanager
def claim_run_dir(config: Config, wanted: Path | None, is_new: bool) -> Iterator[Path]:
    """Makes the directory of a new run, suite or search, or takes the one that is resumed, and locks it.

    The directory is locked until the block ends. If it was made here and every session was refused, it is then
    removed; not after a stop request, because it may be resumed.

    Args:
        config: names the new directory.
        wanted: the directory that is resumed, or in which a new run is to be. None: a new one; see `make_run_dir`.
        is_new: whether the run, suite or search is new.

    Yields:
        The directory.

    Raises:
        UserError: the directory cannot be used, or another process is training there.
    """
    is_made = wanted is None or not wanted.exists()
    directory = wanted
    if is_new or directory is None:
        directory = make_run_dir(config, wanted)
    with only_writer(directory):
        try:
            yield directory
        except KeyboardInterrupt:
            is_made = False
            raise
        finally:
            if is_made and not has_session(directory):
                shutil.rmtree(directory, ignore_errors=True)


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
        other = next((path.name for path in run_dir.iterdir() if not path.name.startswith(".")), None)
    except OSError as error:
        raise UserError(f"{run_dir}: {error.strerror}; choose a folder that can be written to") from error
    if other is not None:
        kind = held_kind(run_dir)
        found = f"a {kind}" if kind else f"{other}, and no run"
        raise UserError(f"{run_dir}: holds {found}; choose another folder or an empty one")
    return run_dir


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
        if content in [copy.read_bytes() for copy in folder.glob(f"{glob.escape(path.stem)}*.py")]:
            continue
        folder.mkdir(exist_ok=True)
        kept = unused(folder / path.name)
        write_file(kept, content)  # another session, at the same time, writes the same
        if kept.name != path.name:
            lines.append(f"{path} differs from the copies of that name, and is kept as {kept}")
    return lines
