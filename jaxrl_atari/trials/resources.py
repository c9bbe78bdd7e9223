"""The resources of each job of a search, or of a suite on Ray: what the user asks for, and what it gets."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from jaxrl_atari.config import Config, DevicesConfig, Limits, check_fields
from jaxrl_atari.envs import DEFAULT_THREADS_VARIABLE
from jaxrl_atari.errors import UserError, require
from jaxrl_atari.hardware.choice import divide_gpus
from jaxrl_atari.hardware.cpu import emulator_cores
from jaxrl_atari.hardware.gpus import visible_gpus
from jaxrl_atari.hardware.memory import FRACTION_VARIABLE, memory_fraction
from jaxrl_atari.output import counted
from jaxrl_atari.trials.slots import SlotPlan, plan_slots


@dataclass(frozen=True)
class ResourcesConfig:
    """Resources of each session of a suite, or of each trial of a search."""

    gpu: Annotated[float, Limits(0.0, 4_096.0)] = 1.0
    """GPUs of each: 0.5, 0.25, 0.125 for 2, 4, 8 on each GPU. With 0, or without a GPU, they run on the CPU."""
    cpu: Annotated[int, Limits(0, 4_096)] = 0
    """CPU cores of each. 0: an equal share where there are GPUs, 1 on a CPU."""

    def __post_init__(self) -> None:
        check_fields(self, "resources.")
        whole = self.gpu <= 1 or self.gpu == int(self.gpu)
        require(whole, "resources.gpu", self.gpu, "a share from 0 to 1, or a whole number of GPUs")


class MachineShare(NamedTuple):
    """The share of a machine that a job gets."""

    gpu: float  # GPUs; 0: the job runs on the CPU
    cpu: int  # cores

    def variables(self, devices: DevicesConfig) -> dict[str, str]:
        """The environment variables of a job that keeps within this share; call it on the machine of the job.

        Without a GPU, none is visible. With a part of one, such as 0.25, JAX's share of its memory leaves room for
        as many jobs on the GPU, here 4; see `memory_fraction`. Pools have as many emulator threads as the share
        has cores, unless the user has chosen a number.

        Raises:
            ConfigError: the share of the memory is too small, or devices.memory_fraction exceeds it.
        """
        variables = {DEFAULT_THREADS_VARIABLE: str(self.cpu)}
        if not self.gpu:
            return variables | _on_cpu(self.cpu)
        sharing = int(1 / min(self.gpu, 1))  # jobs on a GPU
        memory = min((gpu.memory for gpu in visible_gpus().gpus), default=0)
        fraction = memory_fraction(devices, sharing, memory, advice="raise resources.gpu")
        return variables if fraction is None else variables | {FRACTION_VARIABLE: str(fraction)}


def slots_here(resources: ResourcesConfig, config: Config, count: int) -> SlotPlan:
    """The slots of this machine on which jobs take turns, without Ray: as many at a time as there is room for.

    Args:
        resources: resources of each job.
        config: config of the jobs.
        count: number of jobs.

    Raises:
        ConfigError: the machine does not have the devices, or too little memory for jobs that share a GPU.
    """
    devices = config.devices if resources.gpu else replace(config.devices, gpu=False)
    blocks, _ = divide_gpus(devices)
    cpu = max(resources.cpu, 1)
    room = len(blocks) * int(1 / min(resources.gpu, 1)) if blocks[0] else max(emulator_cores() // cpu, 1)
    trial = replace(config.trial, parallel=min(room, count))
    plan = plan_slots(replace(config, devices=devices, trial=trial), count)
    if blocks[0]:
        return plan
    variables = {**plan.slots[0].variables, **_on_cpu(cpu)}
    return SlotPlan([plan.slots[0]._replace(variables=variables)], plan.parallel)


def _on_cpu(cores: int) -> dict[str, str]:
    """The environment variables of a job that sees no GPU; XLA has as many threads unless the user has chosen."""
    return {"CUDA_VISIBLE_DEVICES": "", "NPROC": os.environ.get("NPROC", str(cores))}


def allot(
    resources: ResourcesConfig, machines: Sequence[Mapping[str, float]], devices: DevicesConfig
) -> MachineShare:
    """Works out the share of a machine that each job gets.

    Args:
        resources: the resources that the user asks for.
        machines: the resources of each machine of the cluster: numbers of "GPU" and "CPU".
        devices: devices of the config.

    Raises:
        UserError: a job needs more than any machine has.
    """
    owned = [(machine.get("GPU", 0.0), machine.get("CPU", 0.0)) for machine in machines]
    gpu = resources.gpu if devices.may_use_gpus and any(gpus for gpus, _ in owned) else 0.0
    cpu = max(resources.cpu, 1)
    fitting = [(gpus, cores) for gpus, cores in owned if gpus >= gpu and cores >= cpu]
    if not fitting:
        there = "; ".join(f"{counted(gpus, 'GPU')} and {counted(cores, 'core')}" for gpus, cores in owned)
        raise UserError(
            f"resources: expected a machine with {counted(gpu, 'GPU')} and {counted(cpu, 'core')}; found {there}"
        )
    equal_share = min(int(cores * gpu / gpus) for gpus, cores in fitting) if gpu else 1
    return MachineShare(gpu, resources.cpu or max(equal_share, 1))
