"""The CPU: model, instruction sets, and whether its cores are hyperthreads, as far as Linux reports them."""

import os
import platform
from pathlib import Path
from typing import NamedTuple

INSTRUCTION_SETS = {"AVX2": "avx2", "AVX-512": "avx512f", "BF16": "avx512_bf16", "AMX": "amx_tile"}
"""Instruction sets that decide the speed of matrix products, and their flags in /proc/cpuinfo."""

NOT_REPORTED = "not reported"


class Cpu(NamedTuple):
    """The CPU of this machine; None is for what the machine does not report."""

    model: str
    instruction_sets: tuple[str, ...] | None  # some of `INSTRUCTION_SETS`
    cores: int  # usable by this process
    threads_per_core: int | None  # most usable cores that are hyperthreads of one physical core
    virtual: bool  # a virtual machine, whose physical cores are not known unless it shows hyperthreads

    def __str__(self) -> str:
        sets = NOT_REPORTED if self.instruction_sets is None else ", ".join(self.instruction_sets) or "none of these"
        if self.threads_per_core is None:
            threads = f"{NOT_REPORTED} (virtual machine)" if self.virtual else NOT_REPORTED
        else:
            threads = "no" if self.threads_per_core == 1 else f"yes, {self.threads_per_core} to a physical core"
        return f"{self.cores} cores {self.model}; instruction sets: {sets}; hyperthreads: {threads}"


def usable_cpus() -> set[int]:
    """Numbers of the cores that this process may use."""
    return set(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def usable_cores() -> int:
    """Number of cores that this process may use."""
    return len(usable_cpus())


def read_cpu(root: Path = Path("/")) -> Cpu:
    """Reads /proc/cpuinfo and the topology in /sys.

    A virtual machine may show hyperthreads of one core as cores of their own, so without hyperthreads in its topology
    `threads_per_core` is None there.

    Args:
        root: the folder that holds proc and sys.
    """
    fields = _cpuinfo(root / "proc/cpuinfo")
    flags = fields.get("flags", "").split()
    virtual = "hypervisor" in flags
    threads = _threads_per_core(root / "sys/devices/system/cpu")
    return Cpu(
        model=fields.get("model name") or platform.processor() or platform.machine() or NOT_REPORTED,
        instruction_sets=tuple(name for name, flag in INSTRUCTION_SETS.items() if flag in flags) if flags else None,
        cores=usable_cores(),
        threads_per_core=None if virtual and threads == 1 else threads,
        virtual=virtual,
    )


def multiplies_bfloat16(root: Path = Path("/")) -> bool:
    """Whether this CPU has AVX512-BF16, which makes XLA's matrix products faster in bfloat16 than in float32."""
    return "BF16" in (read_cpu(root).instruction_sets or ())


def _cpuinfo(path: Path) -> dict[str, str]:
    """The fields of the first processor; no fields where the file does not exist."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _threads_per_core(folder: Path) -> int | None:
    """The size of the largest group of usable CPUs on one physical core."""
    sizes, usable = [], usable_cpus()
    for cpu in usable:
        try:
            siblings = (folder / f"cpu{cpu}/topology/thread_siblings_list").read_text(encoding="utf-8")
            sizes.append(len(_cpu_numbers(siblings) & usable))
        except (OSError, ValueError):
            return None
    return max(sizes)


def _cpu_numbers(text: str) -> set[int]:
    """`0-1,4` -> {0, 1, 4}"""
    ranges = (part.partition("-") for part in text.strip().split(","))
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}
