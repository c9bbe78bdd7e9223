"""A fast start and little memory: settings of a process that change no numbers, and the time spent compiling.

The commands call `tune_process` when they start.
"""

import contextlib
import ctypes
import importlib
import os
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax

from jaxrl_atari.envs import DEFAULT_THREADS_VARIABLE, process_threads
from jaxrl_atari.hardware import cpu
from jaxrl_atari.hardware.jax_settings import jax_config
from jaxrl_atari.output import counted

MALLOC = {
    "mmap_threshold": (-3, 32 << 20),
    "trim_threshold": (-1, (1 << 31) - 1),
    "top_pad": (-2, 64 << 20),
    "arena_max": (-8, 1),
}
"""Parameters of glibc's malloc: name in `GLIBC_TUNABLES` -> number for `mallopt`, from <malloc.h>, and value."""

ZSTD = b"\x28\xb5\x2f\xfd"
"""The bytes with which data in zstd begin (RFC 8878)."""

SECONDS_TO_WRITE = 10.0
"""A program that has changed within this time may be incomplete: JAX writes it under its final name."""


@cache
def tune_process() -> tuple[str, ...]:
    """Tunes this process: memory, emulator threads, and the cache of compiled programs.

    A setting that the user has made stays. `JAXRL_ATARI_NO_TUNING=1` turns all of this off.
    Later calls only return the same lines.

    Returns:
        Lines for the user on what was set.

    Raises:
        ConfigError: NPROC or JAXRL_ATARI_THREADS has an unusable value.
    """
    # Both are read again where they count. Here, an unusable value is an error before anything is written.
    cpu.xla_threads()
    process_threads()
    if os.environ.get("JAXRL_ATARI_NO_TUNING", "0") not in ("", "0"):
        return ("process tuning off (JAXRL_ATARI_NO_TUNING)",)
    _keep_freed_memory()
    return (*_limit_emulator_threads(), *_cache_compiled_programs())


def _limit_emulator_threads() -> list[str]:
    """Sets one emulator thread per CPU of a quota, unless the user has chosen. More threads would take turns."""
    cores = cpu.emulator_cores()
    if process_threads() is not None or cores == cpu.usable_cores():
        return []
    os.environ[DEFAULT_THREADS_VARIABLE] = str(cores)
    cpus = counted(cpu.cpu_quota(), "CPU")
    return [f"a quota limits this process to {cpus}, so each pool has {counted(cores, 'emulator thread')}"]


def _keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next allocation.

    One arena serves all threads, so that training reuses the memory that the compiler's threads have freed. By
    default, glibc returns large scratch buffers to the system at each step, and page faults bring them back; the
    thresholds keep them in the process.

    Blocks of 32 MiB and more, which are allocated once per update, are still returned, as glibc gives each block
    above `mmap_threshold` pages of its own. Memory that is kept would have gaps into which the next rollout does
    not fit. The measurements are in benchmarks/NOTES.md, "Process settings (malloc)".

    A parameter that `GLIBC_TUNABLES` names stays as it is, and all of them do with a variable such as
    `MALLOC_ARENA_MAX`.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    library = ctypes.CDLL(None)
    if not chosen and hasattr(library, "gnu_get_libc_version"):
        for name, (number, value) in MALLOC.items():
            if f"glibc.malloc.{name}=" not in tunables:
                library.mallopt(number, value)


def _cache_compiled_programs() -> list[str]:
    """Keeps compiled programs on disk, so that the next start does not compile them again.

    Programs depend on the number of XLA's threads, which JAX's cache key leaves out, so each number has a folder.

    The folder has no maximum size. With `jax_compilation_cache_max_size`, JAX needs the package filelock, locks
    the folder to read a program, and adds nothing to a folder with programs that were written without this option.
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
        folder = f"{folder.removesuffix(f'/{name}')}/{name}"  # the variable may name the folder of an earlier line
        if "://" not in folder:  # a bucket is left to JAX
            Path(folder).mkdir(parents=True, exist_ok=True)
            lines = _remove_damaged_programs(Path(folder))
    except RuntimeError:  # neither HOME nor an entry in /etc/passwd
        return ["compiled programs are not kept: this user has no home; set HOME or JAX_COMPILATION_CACHE_DIR"]
    except OSError:
        jax_config.update("jax_enable_compilation_cache", False)
        return [f"compiled programs are not kept: {folder} cannot be written to"]
    jax_config.update("jax_compilation_cache_dir", folder)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax_config.update("jax_persistent_cache_min_compile_time_secs", 0)
    return [*lines, f"compiled programs are kept in {folder}"]


def _remove_damaged_programs(folder: Path) -> list[str]:
    """Removes programs that cannot be read, of those written since the last start. Returns a line if it found any.

    A full disk truncates programs. JAX warns of a damaged one and compiles it again, but never replaces the file.
    Programs that another process may still be writing are left to the next start. In a folder that several users
    share, the owner of the file `checked` does this.
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
        # Removed by another process that starts, or of another user, who keeps it to himself.
        with contextlib.suppress(FileNotFoundError, PermissionError):
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
