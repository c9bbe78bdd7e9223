"""Settings of the whole process for a fast start and little memory, made once at the start by `configure()`.

They never override a setting of the user, and `JAXRL_ATARI_NO_TUNING=1` turns them off.
"""

import contextlib
import ctypes
import os
import re
import sys
from functools import cache
from pathlib import Path

import jax
from jax._src import xla_bridge  # JAX has no public way to ask whether its back end has started

from jaxrl_atari.errors import ConfigError
from jaxrl_atari.hardware.cpu import usable_cores

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
"""XLA's flag for the same bits in every run on a GPU: no atomic additions, and no kernel chosen by timing."""

# glibc's <malloc.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -2, -3, -8
_MALLOC_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_ARENA_MAX")


def jax_has_started() -> bool:
    """Whether JAX has started its back ends: from then on it keeps its devices and their memory."""
    return xla_bridge.backends_are_initialized()


@cache
def configure() -> tuple[str, ...]:
    """Makes the settings. Later calls change nothing.

    Returns:
        One line for the user per setting.
    """
    if os.environ.get("JAXRL_ATARI_NO_TUNING", "0") not in ("", "0"):
        return ("process tuning off (JAXRL_ATARI_NO_TUNING)",)
    return tuple(line for line in (_keep_freed_memory(), _cache_compiled_programs()) if line)


def _keep_freed_memory() -> str | None:
    """Lets glibc keep freed memory for the next allocation.

    One arena serves all threads: training reuses the memory that the compiler's threads have freed, which lowers the
    peak by a third. By default glibc returns large scratch buffers to the system at each step, and page faults bring
    them back; the thresholds keep them. Blocks of 32 MiB and more, allocated once per update, are still returned: if
    kept, they leave gaps into which the next rollout does not fit.
    """
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _MALLOC_VARIABLES):
        return None
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 (absent from other C libraries)
        mallopt = libc.mallopt
    except (OSError, AttributeError):
        return None
    settings = {_M_MMAP_THRESHOLD: 32 << 20, _M_TRIM_THRESHOLD: (1 << 31) - 1, _M_TOP_PAD: 64 << 20, _M_ARENA_MAX: 1}
    return "malloc keeps freed memory" if all(mallopt(*setting) for setting in settings.items()) else None


def _cache_compiled_programs() -> str | None:
    """Keeps compiled programs on disk, so that the next start does not compile them again.

    Each number of XLA's threads has a folder of its own: programs depend on it, and JAX's cache key leaves it out.
    """
    if _cache_dir() == "":
        return "compiled programs are not kept: JAX_COMPILATION_CACHE_DIR is empty"
    if _cache_dir() is None:  # JAX_COMPILATION_CACHE_DIR is not set either
        threads = os.environ.get("NPROC") or usable_cores()
        try:
            caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
            folder = caches / "jaxrl_atari" / "xla" / f"threads_{threads}"
        except RuntimeError:  # as in a container whose user has neither HOME nor an entry in /etc/passwd
            return "compiled programs are not kept: this user has no home; set HOME or JAX_COMPILATION_CACHE_DIR"
        if not _can_write(folder):
            return f"compiled programs are not kept: {folder} cannot be written to"
        jax.config.update("jax_compilation_cache_dir", str(folder))
    elif "://" not in str(_cache_dir()) and not _can_write(Path(str(_cache_dir()))):
        jax.config.update("jax_enable_compilation_cache", False)
        return f"compiled programs are not kept: {_cache_dir()} cannot be written to"
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    return f"compiled programs are kept in {_cache_dir()}"


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return os.access(folder, os.W_OK)
    except OSError:
        return False


def use_deterministic_kernels() -> None:
    """Puts `DETERMINISTIC` at the front of XLA_FLAGS, in place of another value. Call before JAX starts.

    At the end, a quotation or a comment in the user's flags could swallow it.

    Raises:
        ConfigError: JAX has already started on a GPU, without this flag.
    """
    # XLA's cache of timed choices is read before the flag is, and has it in no key.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    own = os.environ.get("XLA_FLAGS", "").strip()
    if own.startswith(DETERMINISTIC):
        return
    if own and not own.startswith("-"):  # XLA takes it as the name of a file
        with contextlib.suppress(OSError, ValueError):
            own = Path(own).read_text()
    own = re.sub(rf"{DETERMINISTIC.partition('=')[0]}\S*", "", own)
    if not jax_has_started():
        os.environ["XLA_FLAGS"] = f"{DETERMINISTIC} {own}".strip()
    elif jax.default_backend() != "cpu":
        raise ConfigError(
            "devices.deterministic", True, "to be set before JAX starts", "train in a fresh process, or leave it out"
        )


def _cache_dir() -> str | None:
    return getattr(jax.config, "jax_compilation_cache_dir")  # noqa: B009 (the type checker knows no such attribute)
