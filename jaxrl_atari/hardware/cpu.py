"""The CPU: model, instruction sets and cores."""

import os
import platform
import re
from pathlib import Path
from typing import NamedTuple

INSTRUCTION_SETS = {"AVX2": "avx2", "AVX-512": "avx512f", "BF16": "avx512_bf16", "AMX": "amx_tile"}
"""Instruction sets that decide the speed of matrix products, and their flags in /proc/cpuinfo."""


class Cpu(NamedTuple):
    """The CPU of this machine."""

    model: str
    instruction_sets: tuple[str, ...]  # some of `INSTRUCTION_SETS`; none where there is no /proc/cpuinfo
    cores: int  # usable by this process


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> Cpu:
    """The CPU of the first entry of /proc/cpuinfo."""
    text = cpuinfo.read_text(errors="replace") if cpuinfo.exists() else ""

    def field(name: str) -> str:
        found = re.search(rf"^{name}\s*: (.+)", text, re.MULTILINE)
        return found[1] if found else ""

    sets = tuple(name for name, flag in INSTRUCTION_SETS.items() if flag in field("flags").split())
    return Cpu(field("model name") or platform.machine(), sets, usable_cores())
