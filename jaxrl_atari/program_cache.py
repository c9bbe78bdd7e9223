"""Compiled programs on disk (JAX's persistent compilation cache), and the time that this process spends compiling.

`process_tuning.tune_process` calls `keep_compiled_programs` when a command starts.
"""

import contextlib
import importlib
import os
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax

from jaxrl_atari.errors import os_reason
from jaxrl_atari.hardware import cpu
from jaxrl_atari.hardware.jax_settings import jax_config, jax_options

ZSTD = b"\x28\xb5\x2f\xfd"
"""The bytes with which data in zstd begin (RFC 8878)."""

SECONDS_TO_WRITE = 10.0
"""A program that has changed within this time may be incomplete: JAX writes it under its final name."""


def keep_compiled_programs() -> list[str]:
    """Keeps compiled programs on disk, so that the next start does not compile them again.

    Programs depend on the number of XLA's threads, which JAX's cache key leaves out, so each number has a folder.

    The folder has no maximum size. With `jax_compilation_cache_max_size`, JAX needs the package filelock, locks
    the folder to read a program, and adds nothing to a folder with programs that were written without this option.

    Returns:
        Lines for the user: where the programs are, or why they are not kept, and how many were damaged.
    """
    if not jax_config.jax_enable_compilation_cache:
        return ["compiled programs are not kept: JAX_ENABLE_COMPILATION_CACHE is false"]
    folder = jax_config.jax_compilation_cache_dir  # JAX_COMPILATION_CACHE_DIR
    lines = []
    try:
        if folder is None:
            caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            folder = f"{caches}/jaxrl_atari/xla"
        if not folder:
            return ["compiled programs are not kept: JAX_COMPILATION_CACHE_DIR is empty"]
        name = f"threads_{cpu.xla_threads()}"
        # The user may have copied the folder from the line that is returned below: it then ends with the name.
        folder = f"{folder.removesuffix(f'/{name}')}/{name}"
        if "://" not in folder:  # a bucket is left to JAX
            Path(folder).mkdir(parents=True, exist_ok=True)
            lines = _remove_damaged_programs(Path(folder))
    except RuntimeError:  # neither HOME nor an entry in /etc/passwd
        return ["compiled programs are not kept: this user has no home; set HOME or JAX_COMPILATION_CACHE_DIR"]
    except OSError as error:
        jax_options.set_for_process("jax_enable_compilation_cache", False)
        return [f"compiled programs are not kept: {folder} cannot be written to ({os_reason(error)})"]
    jax_options.set_for_process("jax_compilation_cache_dir", folder)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax_options.set_for_process("jax_persistent_cache_min_compile_time_secs", 0)
    return [*lines, f"compiled programs are kept in {folder}"]


def _remove_damaged_programs(folder: Path) -> list[str]:
    """Removes programs that cannot be read, of those written since the last start. Returns a line if it found any.

    A full disk truncates programs. JAX warns of a damaged one and compiles it again, but never replaces the file.
    Programs that another process may still be writing are left to the next start. If several users share the
    folder, only the owner of the file `checked` removes programs.
    """
    checked = folder / "checked"
    since = checked.stat().st_mtime if checked.exists() else 0.0
    try:
        checked.touch()
        now = checked.stat().st_mtime  # on the clock of the file system
        until = now - SECONDS_TO_WRITE
        os.utime(checked, (until, until))  # the next start checks what is newer
    except PermissionError:
        if os.access(folder, os.W_OK) and checked.exists():  # another user owns it
            return []
        raise
    if since > now:  # the clock was set back, so newer files look older
        since = 0.0
    damaged = []
    for path in folder.glob("*-cache"):
        # Another process that starts has removed it, or it cannot be read, as that of another user or a folder.
        with contextlib.suppress(OSError):
            if not since <= path.stat().st_mtime < until:
                continue
            if _is_damaged(path.read_bytes()):
                path.unlink()
                damaged.append(path)
    return [f"damaged programs removed from the cache, to be compiled again: {len(damaged)}"] if damaged else []


def _is_damaged(program: bytes) -> bool:
    """Whether a compiled program cannot be read in the compression in which it was written.

    JAX writes zstd if Python has it, and otherwise zlib. A program in zstd that another Python has written counts
    as sound where this Python cannot tell.
    """
    decompress = _zstd_decompress() if program.startswith(ZSTD) else zlib.decompress
    if decompress is None:
        return False
    try:
        decompress(program)
    except Exception:  # each library has an error of its own
        return True
    return False


def _zstd_decompress() -> Callable[[bytes], bytes] | None:
    """The function of this Python that decompresses zstd; None if it has none."""
    for module in ("compression.zstd", "zstandard"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(module).decompress
    return None


@cache
def compile_clock() -> Callable[[], float]:
    """Starts counting the seconds that XLA spends compiling in this process. Returns a function with the count."""
    total = [0.0]

    def count(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            total[0] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(count)
    return lambda: total[0]
