"""The CPU, and settings of the whole process for a fast start and little memory.

`configure()` makes the settings once, at the start. They never override a setting of the user, and
`JAXRL_ATARI_NO_TUNING=1` turns them off.
"""

import contextlib
import ctypes
import importlib
import itertools
import math
import os
import platform
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import jax

from jaxrl_atari.envs import THREADS
from jaxrl_atari.errors import require

jax_config: Any = jax.config  # the type checker does not know its attributes

DETERMINISTIC = "--xla_gpu_deterministic_ops=true"
"""XLA's flag for the same bits in every run on a GPU: no atomic additions, and no kernel chosen by timing."""

# glibc's <malloc.h>: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD, M_ARENA_MAX
MALLOC = {-3: 32 << 20, -1: (1 << 31) - 1, -2: 64 << 20, -8: 1}

NUMERIC = {
    "jax_enable_x64": False,
    "jax_default_matmul_precision": None,
    "jax_numpy_dtype_promotion": "standard",
    "jax_threefry_partitionable": True,
    "jax_random_seed_offset": 0,
    "jax_disable_jit": False,
}
"""JAX's settings that change numbers, and their defaults."""

INSTRUCTION_SETS = {"AVX2": "avx2", "AVX-512": "avx512f", "BF16": "avx512_bf16", "AMX": "amx_tile"}
"""Instruction sets that decide the speed of matrix products, and their flags in /proc/cpuinfo."""


class Cpu(NamedTuple):
    """The CPU of this machine."""

    model: str
    instruction_sets: tuple[str, ...]  # some of `INSTRUCTION_SETS`; none where there is no /proc/cpuinfo
    cores: int  # usable by this process


def usable_cores() -> int:
    """Number of cores that this process may use, without a container's CPU quota, which XLA does not see
    either."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """The CPUs that a container's quota gives this process, such as 0.5; infinity without a quota.

    It is the smallest of the process's control group and those above it, of cgroup v2 (`cpu.max`) or v1
    (`cpu.cfs_quota_us`). A quota does not show in the number of cores: `docker run --cpus 1` sees all of them.

    Args:
        root: where control groups are mounted.
        own: the groups of this process: lines `0::/path` (v2) or `4:cpu,cpuacct:/path` (v1).
    """
    quotas = [math.inf]
    with contextlib.suppress(OSError):  # not on Linux
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            mounts = [root / "cpu", root / "cpu,cpuacct", root] if controllers else [root, root / "unified"]
            group = PurePosixPath(path.lstrip("/"))
            for mount, each in itertools.product(mounts, (group, *group.parents)):
                quotas.append(_quota(mount / each))
    return min(quotas)


def _quota(group: Path) -> float:
    """The quota of one control group in CPUs; infinity if it has none."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text().split()  # "50000 100000", or "max 100000"
        return math.inf if quota == "max" else int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota = int((group / "cpu.cfs_quota_us").read_text())  # -1: none
        return quota / int((group / "cpu.cfs_period_us").read_text()) if quota > 0 else math.inf
    return math.inf


def emulator_cores() -> int:
    """Cores for emulator threads: those that this process may use, no more than its CPU quota (rounded up)."""
    return max(1, math.ceil(min(usable_cores(), cpu_quota())))


def read_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Cpu:
    """The CPU of the first entry of /proc/cpuinfo."""
    text = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""

    def field(name: str) -> str:
        found = re.search(rf"^{name}\s*: (.+)", text, re.MULTILINE)
        return found[1] if found else ""

    sets = tuple(name for name, flag in INSTRUCTION_SETS.items() if flag in field("flags").split())
    return Cpu(field("model name") or platform.machine(), sets, usable_cores())


# --- Settings ----------------------------------------------------------------------------------------------------


def require_not_started(field: str, value: Any) -> None:
    """Raises `ConfigError` if JAX has started on a GPU: then it is too late for an option.

    JAX has no public way to ask whether it has started. It refuses this setting once it has.
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
    """Adds `DETERMINISTIC` to XLA_FLAGS. Raises `ConfigError` if JAX has started on a GPU, without this flag."""
    # XLA reads its autotuning cache before this flag, and the cache key does not include it.
    jax_config.update("jax_persistent_cache_enable_xla_caches", "none")
    flags = os.environ.get("XLA_FLAGS", "")
    if DETERMINISTIC not in flags:
        require_not_started("devices.deterministic", True)
        os.environ["XLA_FLAGS"] = f"{flags} {DETERMINISTIC}"  # if a flag appears twice, the last one wins


def xla_threads() -> int:
    """Number of XLA's threads on a CPU, among which it divides long sums: NPROC, or the cores of this process."""
    return int(os.environ.get("NPROC") or usable_cores())


def numeric_settings() -> dict[str, Any]:
    """Settings that change numbers and differ from their defaults, and the number of XLA's threads."""
    settings = {name: getattr(jax_config, name) for name in NUMERIC}
    settings |= {name: os.environ.get(name) for name in ("XLA_FLAGS", "NVIDIA_TF32_OVERRIDE")}
    changed = {name: value for name, value in settings.items() if value != NUMERIC.get(name)}
    return {"xla_threads": xla_threads(), **changed}


@cache
def configure() -> tuple[str, ...]:
    """Makes the settings. Later calls change nothing.

    Returns:
        One line for the user per setting.
    """
    if os.environ.get("JAXRL_ATARI_NO_TUNING", "0") not in ("", "0"):
        return ("process tuning off (JAXRL_ATARI_NO_TUNING)",)
    _keep_freed_memory()
    return (*_limit_emulator_threads(), *_cache_compiled_programs())


def _limit_emulator_threads() -> list[str]:
    """One thread per CPU of a quota, unless the user has chosen: more would wait in turns for the same CPU
    time."""
    cores = emulator_cores()
    if cores == usable_cores() or THREADS in os.environ:
        return []
    os.environ[THREADS] = str(cores)
    return [f"this process may use {cpu_quota():g} CPUs (a quota): emulator threads: {cores}"]


@cache
def compile_clock() -> Callable[[], float]:
    """A function that returns the seconds that XLA has spent compiling in this process, from the first call on."""
    total = [0.0]

    def count(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            total[0] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(count)
    return lambda: total[0]


def _keep_freed_memory() -> None:
    """Lets glibc keep freed memory for the next allocation.

    One arena serves all threads: training reuses the memory that the compiler's threads have freed, which lowers
    the peak by a third. By default glibc returns large scratch buffers to the system at each step, and page faults
    bring them back; the thresholds keep them. Blocks of 32 MiB and more, allocated once per update, are still
    returned: if kept, they leave gaps into which the next rollout does not fit.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ)
    library = ctypes.CDLL(None)
    if not chosen and hasattr(library, "gnu_get_libc_version"):
        for setting in MALLOC.items():
            library.mallopt(*setting)


def _cache_compiled_programs() -> list[str]:
    """Keeps compiled programs on disk, so that the next start does not compile them again.

    Each number of XLA's threads has a folder of its own: programs depend on it, and JAX's cache key leaves it out.
    """
    folder = jax_config.jax_compilation_cache_dir  # JAX_COMPILATION_CACHE_DIR
    lines = []
    try:
        if folder is None:
            caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
            folder = f"{caches}/jaxrl_atari/xla/threads_{xla_threads()}"
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
    """Removes the programs that cannot be read, of those written since the last start.

    A full disk leaves truncated ones. JAX warns of them and compiles again, but never replaces a file that exists.
    """
    for name in ("compression.zstd", "zstandard", "zlib"):  # JAX compresses with the first that there is
        with contextlib.suppress(ImportError):
            decompress = importlib.import_module(name).decompress
            break
    checked = folder / "checked"
    since = checked.stat().st_mtime if checked.exists() else 0.0
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
