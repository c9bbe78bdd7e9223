"""The machine: its CPU, memory and GPUs."""

import platform
from pathlib import Path
from typing import Any

import psutil

from jaxrl_atari.hardware import gpus, runtime


def describe_machine() -> dict[str, Any]:
    """The machine, ready for JSON. Does not start JAX's back end."""
    model = platform.processor() or platform.machine()
    cpu_info = Path("/proc/cpuinfo")
    if cpu_info.is_file():
        lines = cpu_info.read_text(errors="replace").splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return {
        "cpu": model,
        "cores": runtime.usable_cores(),
        "memory_gib": psutil.virtual_memory().total / 2**30,
        "gpus": [gpu.model for gpu in gpus.visible().gpus],
        "driver": gpus.driver_version(),
    }
