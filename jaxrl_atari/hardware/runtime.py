"""Settings of the whole process: those that change numbers, and tuning for a fast start and little memory.

`configure()` tunes the process once, when a command starts. It never overrides a setting of the user, and
`JAXRL_ATARI_NO_TUNING=1` turns it off.
"""

import contextlib
import ctypes
import importlib
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax

from jaxrl_atari.envs import THREADS
from jaxrl_atari.errors import require
from jaxrl_atari.hardware import cpu

jax_config: Any = jax.config  # the type checker does not know its attributes

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
"""XLA's flag for the same bits in every run on a GPU: no atomic additions, no kernel chosen by timing."""

MALLOC = {
    -3: 32 << 20,  # M_MMAP_THRESHOLD
    -1: (1 << 31) - 1,  # M_TRIM_THRESHOLD
    -2: 64 << 20,  # M_TOP_PAD
    -8: 1,  # M_ARENA_MAX
}
"""Parameters of glibc's `mallopt`, by their numbers in <malloc.h>, and their values."""

NUMERIC = {
    "jax_enable_x64": False,
    "jax_default_matmul_precision": None,
    "jax_numpy_dtype_promotion": "standard",
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
    "jax_disable_jit": False,
}
"""Settings of JAX that change numbers -> JAX's defaults."""


def require_not_started(field: str, value: Any) -> None:
    """Raises `ConfigError` if JAX has started on a GPU, which is too late for the option `field`.

    JAX has no public way to ask whether it has started, but refuses to change the number of CPU devices once it
    has.
    """
    count = jax_config.jax_num_cpu_devices
    try:
        jax_config.update("jax_num_cpu_devices", count + 1)
        jax_config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        expected = "to be set before JAX starts"
        hint = "train in a fresh process, or leave it out"
        require(jax.default_backend() == "cpu", field, value, expected, hint)


def use_deterministic_kernels() -> None:
    """Adds `DETERMINISTIC` to XLA_FLAGS. Raises `ConfigError` if JAX has started on a GPU without this flag."""
    # XLA reads its autotuning cache before this flag, and the cache key does not include it.
    jax_config.update("jax_persistent_cache_enable_xla_caches", "none")
    flags = os.environ.get("XLA_FLAGS", "")
    if DETERMINISTIC not in flags:
        require_not_started("devices.deterministic", True)
        os.environ["XLA_FLAGS"] = f"{flags} {DETERMINISTIC}"  # if a flag appears twice, the last one wins


def numeric_settings() -> dict[str, Any]:
    """The settings that change numbers and differ from their defaults, and the number of XLA's threads."""
    settings = {name: getattr(jax_config, name) for name in NUMERIC}
    settings |= {name: os.environ.get(name) for name in ("XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")}
    changed = {name: value for name, value in settings.items() if value != NUMERIC.get(name)}
    return {"xla_threads": cpu.xla_threads(), **changed}


@cache
def compile_clock() -> Callable[[], float]:
    """Starts to count the seconds that XLA spends compiling in this process; the result returns the count."""
    total = [0.0]

    def count(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            total[0] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(count)
    return lambda: total[0]


# --- Tuning ------------------------------------------------------------------------------------------------------


@cache
def configure() -> tuple[str, ...]:
    """Tunes this process: memory, emulator threads, and the cache of compiled programs. Later calls do nothing.

    Returns:
        Lines for the user on what was set.
    """
    if os.environ.get("JAXRL_ATARI_NO_TUNING", "0") not in ("", "0"):
        return ("process tuning off (JAXRL_ATARI_NO_TUNING)",)
    _keep_freed_memory()
    return (*_limit_emulator_threads(), *_cache_compiled_programs())


def _limit_emulator_threads() -> list[str]:
    """Sets one emulator thread per CPU of a quota, unless the user has chosen. More would only take turns."""
    cores = cpu.emulator_cores()
    if cores == cpu.usable_cores() or THREADS in os.environ:
        return []
    os.environ[THREADS] = str(cores)
    return [f"this process may use {cpu.cpu_quota():g} CPUs (a quota): emulator threads: {cores}"]


def _keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next allocation.

    One arena serves all threads, so that training reuses the memory that the compiler's threads have freed. This
    lowers the peak by a third. By default, glibc returns large scratch buffers to the system at each step, and
    page faults bring them back; the thresholds keep them in the process. Blocks of 32 MiB and more are allocated
    once per update and still returned: if they were kept, the next rollout would not fit into the gaps.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    library = ctypes.CDLL(None)
    if not chosen and hasattr(library, "gnu_get_libc_version"):
        for parameter, value in MALLOC.items():
            library.mallopt(parameter, value)


def _cache_compiled_programs() -> list[str]:
    """Keeps compiled programs on disk, so that the next start does not compile them again.

    Programs depend on the number of XLA's threads, which JAX's cache key leaves out. So each number has its own
    folder.
    """
    folder = jax_config.jax_compilation_cache_dir  # JAX_COMPILATION_CACHE_DIR
    lines = []
    try:
        if folder is None:
            caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            folder = f"{caches}/jaxrl_atari/xla/threads_{cpu.xla_threads()}"
        if not folder:
            return ["compiled programs are not kept: JAX_COMPILATION_CACHE_DIR is empty"]
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
    """Removes those programs written since the last start that cannot be read. Returns a line if there were any.

    A full disk truncates programs. JAX warns of a damaged one and compiles it again, but never replaces its file.
    """
    for name in ("compression.zstd", "zstandard", "zlib"):  # JAX compresses with the first one installed
        with contextlib.suppress(ImportError):
            decompress = importlib.import_module(name).decompress
            break
    checked = folder / "checked"
    since = checked.stat().st_mtime if checked.exists() else 0.0
    if since > time.time():  # the clock was set back: what was written since then looks older
        since = 0.0
    checked.touch()
    damaged = []
    for path in folder.glob("*-cache"):
        with contextlib.suppress(FileNotFoundError):  # removed by another process that starts
            if path.stat().st_mtime < since:
                continue
            try:
                decompress(path.read_bytes())
            except Exception:  # each library has an error of its own
                path.unlink()
                damaged.append(path)
    return [f"damaged programs removed from the cache, to be compiled again: {len(damaged)}"] if damaged else []
