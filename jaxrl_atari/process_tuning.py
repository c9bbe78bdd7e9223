"""A fast start and little memory: settings of a process that change no numbers.

The commands call `tune_process` when they start.
"""

import ctypes
import os
from functools import cache

from jaxrl_atari.envs import DEFAULT_THREADS_VARIABLE, process_threads
from jaxrl_atari.hardware import cpu
from jaxrl_atari.output import counted
from jaxrl_atari.program_cache import keep_compiled_programs

MALLOC = {
    "mmap_threshold": (-3, 32 << 20),
    "trim_threshold": (-1, (1 << 31) - 1),
    "top_pad": (-2, 64 << 20),
    "arena_max": (-8, 1),
}
"""Parameters of glibc's malloc: name in `GLIBC_TUNABLES` -> number for `mallopt`, from <malloc.h>, and value."""


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
    return (*_limit_emulator_threads(), *keep_compiled_programs())


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
