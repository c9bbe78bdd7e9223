"""The CPU: its model and instruction sets, and the cores and threads that this process may use."""

import contextlib
import math
import os
import platform
import re
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from jaxrl_atari.errors import whole_number_variable

INSTRUCTION_SETS = {"AVX2": "avx2", "AVX-512": "avx512f", "BF16": "avx512_bf16", "AMX": "amx_tile"}
"""Instruction sets that decide the speed of matrix products -> their flags in /proc/cpuinfo."""

THREADS_VARIABLE = "JAXRL_ATARI_THREADS"
"""Environment variable of the user: number of emulator threads of each pool."""

DEFAULT_THREADS_VARIABLE = "JAXRL_ATARI_DEFAULT_THREADS"
"""Environment variable of this package: the same, in a process with a part of the cores; the user's goes first."""


class Cpu(NamedTuple):
    """The CPU of this machine."""

    model: str
    instruction_sets: tuple[str, ...]  # some of `INSTRUCTION_SETS`; none if /proc/cpuinfo lists none
    cores: int  # usable by this process


def usable_cores() -> int:
    """Number of cores that this process may use. It ignores a container's CPU quota, as XLA does."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """The CPUs that a container's quota gives this process, such as 0.5; infinity without a quota.

    It is the smallest quota (`cpu.max`, cgroup v2) of the process's control group and the groups above it. The
    number of cores does not show the quota: a container under `docker run --cpus 1` sees all cores of the machine.
    """
    quotas = [math.inf]
    with contextlib.suppress(OSError, ValueError):  # not on Linux, or a sandbox with other lines
        group = PurePosixPath(own.read_text().strip().removeprefix("0::/"))
        for each in (group, *group.parents):
            with contextlib.suppress(OSError, ValueError):
                quota, period = (root / each / "cpu.max").read_text().split()  # "50000 100000", or "max 100000"
                quotas.append(math.inf if quota == "max" else int(quota) / int(period))
    return min(quotas)


def emulator_cores() -> int:
    """Number of cores for emulator threads: those usable, but no more than the CPU quota, rounded up."""
    return max(1, math.ceil(min(usable_cores(), cpu_quota())))


def read_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Cpu:
    """The CPU that the first entry of /proc/cpuinfo describes."""
    text = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""

    def field(name: str) -> str:
        match = re.search(rf"^{name}\s*: (.+)", text, re.MULTILINE)
        return match[1] if match else ""

    sets = tuple(name for name, flag in INSTRUCTION_SETS.items() if flag in field("flags").split())
    return Cpu(field("model name") or platform.machine(), sets, usable_cores())


def xla_threads() -> int:
    """Number of threads among which XLA divides long sums on a CPU: NPROC, or the usable cores.

    Raises:
        ConfigError: NPROC is not a whole number. XLA would ignore it.
    """
    return whole_number_variable("NPROC") or usable_cores()


def process_threads() -> int:
    """Emulator threads of a pool, unless `env.num_threads` is set.

    `THREADS_VARIABLE`, else `DEFAULT_THREADS_VARIABLE`, else one per core, or per CPU of a container's quota.

    Raises `ConfigError` if a variable is unusable.
    """
    for name in (THREADS_VARIABLE, DEFAULT_THREADS_VARIABLE):
        threads = whole_number_variable(name)
        if threads:
            return threads
    return emulator_cores()
