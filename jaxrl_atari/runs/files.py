"""File operations: atomic writes, unused file names, new folders, and a lock on a directory."""

import contextlib
import fcntl
import itertools
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.runs.layout import LOCK_FILE


def write_file(path: Path, content: str | bytes) -> None:
    """Writes a file atomically: after a crash it holds the old content or the new content, never a part of either.

    Several processes may write the same file at the same time; the last one wins.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        error.filename = str(path)  # an error of a write to an open file names none, others name the partial file
        raise
    finally:
        with contextlib.suppress(OSError):
            partial.unlink()


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Writes a JSON file atomically. Raises `ValueError` for NaN and infinities, which JSON does not have."""
    write_file(path, json.dumps(values, indent=2, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds something else, or is damaged.
    """
    try:
        values = json.loads(path.read_bytes())
    except RecursionError as error:  # a hostile file
        raise ValueError("nested too deeply") from error
    if not isinstance(values, dict):
        raise ValueError(f"expected a JSON object, found {type(values).__name__}")
    return values


def read_result(path: Path, **types: type) -> dict[str, Any]:
    """Reads the JSON file of a result, such as verified.json.

    Args:
        types: name of a value that is needed -> its type. `float` takes a whole number, too.

    Raises:
        UserError: the file is damaged, or lacks a value.
    """
    try:
        values = read_json(path)
        for name, expected in types.items():
            accepted = (int, float) if expected is float else expected
            if not isinstance(values.get(name), accepted):
                raise ValueError(f"{name} is {values.get(name)!r:.40}, expected {expected.__name__}")
    except ValueError as error:
        raise UserError(
            f"{path}: cannot be used ({reason(error)}); restore it from a copy, or move it away"
        ) from error
    return values


def unused(path: Path) -> Path:
    """Returns `path`, or the first of NAME_2, NAME_3, ... that does not exist if `path` does.

    The number comes before the suffix of a file, such as `.csv`, and at the end of the name of a directory.
    """
    stem, suffix = (path.name, "") if path.is_dir() else (path.stem, path.suffix)
    numbered = (path.with_name(f"{stem}_{number}{suffix}") for number in itertools.count(2))
    return next(candidate for candidate in itertools.chain([path], numbered) if not candidate.exists())


def require_new_folder(path: Path) -> None:
    """Raises `UserError` unless a folder can be made at `path`: it does not exist, or is an empty folder."""
    if path.is_file() or any(path.glob("*")):
        raise UserError(f"{path}: exists already; choose another folder, or remove it")


@contextlib.contextmanager
def only_writer(directory: Path) -> Iterator[None]:
    """Locks a directory until the block ends or the process dies, by its file `.lock`, which stays.

    The lock holds on other machines too, over NFS. On a file system without locks, this does nothing.

    Raises:
        UserError: another process holds the lock, or the directory cannot be written to.
    """
    try:
        descriptor = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        hint = "copy it to a folder that can be written to"
        raise UserError(f"{directory}: cannot be written to ({error.strerror}); {hint}") from error
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{directory}: another process is training there; wait until it ends, or stop it (Ctrl-C,"
                    " SIGTERM) and then use --resume"
                ) from None
        yield
    finally:
        os.close(descriptor)
