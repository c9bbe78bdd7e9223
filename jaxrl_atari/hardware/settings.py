"""Settings of JAX and of the process: those that change numbers, and those that only save time and memory.

The commands call `tune_process` when they start.
"""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import jax

from jaxrl_atari.errors import os_reason
from jaxrl_atari.hardware import cpu

jax_config: Any = jax.config  # the type checker does not know its attributes

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
"""XLA's flag for the same bits in every run on a GPU: no atomic additions, no kernel chosen by timing."""

NUMERIC = {
    "jax_enable_x64": False,
    "jax_default_matmul_precision": None,
    "jax_numpy_dtype_promotion": "standard",
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
    "jax_disable_jit": False,
}
"""Settings of JAX that change numbers -> JAX's defaults."""


def has_started() -> bool:
    """Whether JAX has started its back end in this process.

    JAX has no public way to ask, but once it has started, it refuses to change the number of CPU devices.
    """
    count = jax_config.jax_num_cpu_devices
    try:
        jax_config.update("jax_num_cpu_devices", count + 1)
    except RuntimeError:
        return True
    jax_config.update("jax_num_cpu_devices", count)
    return False


def are_kernels_deterministic() -> bool:
    """Whether XLA_FLAGS says so."""
    return DETERMINISTIC in os.environ.get("XLA_FLAGS", "").split()


def use_deterministic_kernels() -> None:
    """Adds `DETERMINISTIC` to XLA_FLAGS. Call it before JAX starts."""
    # XLA reads its autotuning cache before it obeys the flag, and the keys of that cache do not include the flag.
    jax_config.update("jax_persistent_cache_enable_xla_caches", "none")
    if not are_kernels_deterministic():
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DETERMINISTIC}".strip()


def numeric_settings() -> dict[str, Any]:
    """The settings that change numbers and differ from their defaults, and the number of XLA's threads."""
    settings = {name: getattr(jax_config, name) for name in NUMERIC}
    settings |= {name: os.environ.get(name) for name in ("XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")}
    changed = {name: value for name, value in settings.items() if value != NUMERIC.get(name)}
    return {"xla_threads": cpu.xla_threads(), **changed}


# --- Settings that change no numbers -----------------------------------------------------------------------------

MALLOC = {
    "mmap_threshold": (-3, 32 << 20),
    "trim_threshold": (-1, (1 << 31) - 1),
    "top_pad": (-2, 64 << 20),
    "arena_max": (-8, 1),
}
"""Parameters of glibc's malloc: name in `GLIBC_TUNABLES` -> number for `mallopt`, from <malloc.h>, and value."""


@cache
def tune_process() -> str:
    """Tunes this process: memory, and the cache of compiled programs.

    A setting that the user has made stays. `JAXRL_ATARI_NO_TUNING=1` turns all of this off.
    Later calls only return the same line.

    Returns:
        A line for the user: where compiled programs are kept, or why they are not.

    Raises:
        ConfigError: NPROC or JAXRL_ATARI_THREADS has an unusable value.
    """
    # Both are read again where they count. Here, an unusable value is an error before anything is written.
    cpu.xla_threads()
    cpu.process_threads()
    if os.environ.get("JAXRL_ATARI_NO_TUNING", "0") not in ("", "0"):
        return "process tuning off (JAXRL_ATARI_NO_TUNING)"
    _keep_freed_memory()
    return _keep_compiled_programs()


def _keep_freed_memory() -> None:
    """Makes glibc keep freed memory for the next allocation (benchmarks/NOTES.md, "Process settings (malloc)").

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


def _keep_compiled_programs() -> str:
    """Keeps compiled programs on disk (JAX's persistent compilation cache), for the next start.

    Programs depend on the number of XLA's threads, which JAX's cache key leaves out, so each number has a folder.
    The folder has no maximum size: with one, JAX needs the package filelock, and locks the folder to read from it.
    """
    if not jax_config.jax_enable_compilation_cache:
        return "compiled programs are not kept: JAX_ENABLE_COMPILATION_CACHE is false"
    folder = jax_config.jax_compilation_cache_dir  # JAX_COMPILATION_CACHE_DIR
    if not folder:
        caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        folder = f"{caches}/jaxrl_atari/xla"
    name = f"threads_{cpu.xla_threads()}"
    # The user may have copied the folder from the line that is returned below: it then ends with the name.
    folder = f"{folder.removesuffix(f'/{name}')}/{name}"
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        jax_config.update("jax_enable_compilation_cache", False)
        return f"compiled programs are not kept: {os_reason(error)}"
    jax_config.update("jax_compilation_cache_dir", folder)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax_config.update("jax_persistent_cache_min_compile_time_secs", 0)
    return f"compiled programs are kept in {folder}"
