"""The machine: its CPU, memory and GPUs."""

from typing import Any

import psutil

from jaxrl_atari.hardware import gpus
from jaxrl_atari.hardware.cpu import read_cpu


def describe_machine(asks_driver: bool = True) -> dict[str, Any]:
    """The machine, ready for JSON; None: it does not report that. Does not start JAX's back end.

    Args:
        asks_driver: call the CUDA driver; without it, GPUs are not reported.
    """
    cpu = read_cpu()
    return {
        "cpu": cpu.model,
        "instruction_sets": cpu.instruction_sets and list(cpu.instruction_sets),
        "cores": cpu.cores,
        "threads_per_core": cpu.threads_per_core,
        "virtual": cpu.virtual,
        "memory_gib": psutil.virtual_memory().total / 2**30,
        "gpus": [gpu.model for gpu in gpus.visible().gpus] if asks_driver else None,
        "driver": gpus.driver_version() if asks_driver else None,
    }
