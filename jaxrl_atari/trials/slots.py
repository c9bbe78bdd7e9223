"""Where jobs train, and with which share of a machine: GPUs and their memory, cores and threads.

A job learns its share from environment variables, on this machine and on Ray.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from jaxrl_atari.config import Config, DevicesConfig, NonNegativeFloat, NonNegativeInt, check_fields
from jaxrl_atari.errors import UserError, require
from jaxrl_atari.hardware.choice import choose_devices, divide_gpus
from jaxrl_atari.hardware.cpu import DEFAULT_THREADS_VARIABLE, emulator_cores
from jaxrl_atari.hardware.memory import FRACTION_VARIABLE, memory_fraction
from jaxrl_atari.output import counted


@dataclass(frozen=True)
class ResourcesConfig:
    """Resources of each session of a suite on Ray, or of each trial of a search."""

    gpu: NonNegativeFloat = 1.0
    """GPUs of each: 0.5, 0.25, 0.125 for 2, 4, 8 on each GPU. With 0, or without a GPU, they run on the CPU."""
    cpu: NonNegativeInt = 0
    """CPU cores of each. 0: an equal share where there are GPUs, 1 on a CPU."""

    def __post_init__(self) -> None:
        check_fields(self, "resources.")
        whole = self.gpu <= 1 or self.gpu == int(self.gpu)
        require(whole, "resources.gpu", self.gpu, "a share from 0 to 1, or a whole number of GPUs")

    @property
    def jobs_on_gpu(self) -> int:
        """Number of jobs that share a GPU; 0 if they run on the CPU."""
        return int(1 / min(self.gpu, 1)) if self.gpu else 0


class Slot(NamedTuple):
    """Devices for one job, or for several that share them."""

    text: str  # where a job trains, and why there
    variables: Mapping[str, str]  # added to the environment of the jobs that train there


class SlotPlan(NamedTuple):
    """The slots of this machine that jobs take in turn."""

    slots: list[Slot]
    parallel: int  # number of jobs at a time

    @property
    def needs_processes(self) -> bool:
        """Whether each session needs a process of its own: see the table of `plan_slots`."""
        return self.parallel > 1 or bool(self.slots[0].variables)


def plan_slots(config: Config, sessions: int, waiting: int) -> SlotPlan:
    """Plans where the sessions of a trial or suite are trained: on the GPUs in turn, or on the CPU.

    | the sessions train | in processes of their own | whose environment gets |
    |---|---|---|
    | one after the other, on the CPU | no | |
    | one after the other, on the GPUs that a session takes if it sees all | no | |
    | in turn on several blocks of GPUs, or on one that CUDA_OFFSET moves | yes | the GPUs of the block |
    | side by side | yes | also a share of the threads of emulators |
    | side by side on the same GPUs | yes | also a share of their memory |

    Args:
        sessions: number of sessions in the trial or suite.
        waiting: number of sessions that remain to be trained.

    Raises:
        ConfigError: the machine does not have the devices, or sessions that share a GPU would take more memory
            than it has.
    """
    slots, on_gpu = _slots(config.devices, sessions)
    parallel = min(config.trial.parallel or len(slots), waiting)
    if parallel == 1:
        return SlotPlan(slots, 1)
    jobs_on_gpu = math.ceil(parallel / len(slots)) if on_gpu else 0
    share = _limits(config.devices, max(1, emulator_cores() // parallel), jobs_on_gpu)
    return SlotPlan([Slot(slot.text, {**slot.variables, **share}) for slot in slots], parallel)


def plan_search_slots(resources: ResourcesConfig, devices: DevicesConfig, trials: int) -> SlotPlan:
    """Plans where the trials of a search train on this machine: as many at a time as there is room for.

    Raises:
        ConfigError: as `plan_slots`.
        UserError: a trial needs more than this machine has.
    """
    if not resources.gpu:
        devices = replace(devices, gpu=False)
    machine = {"GPU": len(choose_devices(devices).gpus), "CPU": emulator_cores()}
    share = allot(resources, [machine], devices)
    slots, _ = _slots(devices, trials)
    room = len(slots) * share.jobs_on_gpu or emulator_cores() // share.cpu
    if resources.cpu:
        room = min(room, emulator_cores() // resources.cpu)
    variables = share_variables(share, devices)
    return SlotPlan([Slot(slot.text, {**slot.variables, **variables}) for slot in slots], min(room, trials))


def _slots(devices: DevicesConfig, count: int) -> tuple[list[Slot], bool]:
    """At most `count` slots, which have the GPUs of one job each, and whether they have any."""
    blocks, why = divide_gpus(devices)
    blocks = blocks[:count]
    # A session that sees all GPUs limits itself to those that it uses (`limit_jax`). If an option names a GPU by
    # its index, the session must see all, or the index would mean another GPU.
    chosen = choose_devices(devices)
    finds_its_gpus = len(blocks) == 1 and set(blocks[0]) == set(chosen.used)
    slots = []
    for block in blocks:
        place = f"on GPU {','.join(map(str, block))}" if block else "on CPU"
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(chosen.gpus[index].uuid for index in block)}
        slots.append(Slot(f"{place} ({why})", {} if finds_its_gpus else visible))
    return slots, bool(blocks[0])


def _limits(devices: DevicesConfig, cores: int, jobs_on_gpu: int) -> dict[str, str]:
    """The variables of a job that keeps within a share of this machine.

    Pools have as many emulator threads as the share has cores, unless the user has chosen a number. JAX's share of
    a GPU's memory leaves room for the other jobs there; see `memory_fraction`.

    Raises:
        ConfigError: the share of the memory is too small, or devices.memory_fraction exceeds it.
    """
    variables = {DEFAULT_THREADS_VARIABLE: str(cores)}
    if jobs_on_gpu:
        gpus = choose_devices(devices).gpus
        memory = min((gpus[index].memory for block in divide_gpus(devices)[0] for index in block), default=0)
        fraction = memory_fraction(devices, jobs_on_gpu, memory)
        if fraction is not None:
            variables[FRACTION_VARIABLE] = str(fraction)
    return variables


def share_variables(share: ResourcesConfig, devices: DevicesConfig) -> dict[str, str]:
    """The environment variables of a job with this share of a machine; call it on that machine.

    Without a GPU none is visible, and XLA has as many threads as the share has cores unless the user has chosen.

    Raises:
        ConfigError: as `plan_slots`.
    """
    variables = _limits(devices, share.cpu, share.jobs_on_gpu)
    if not share.gpu:
        variables |= {"CUDA_VISIBLE_DEVICES": "", "NPROC": os.environ.get("NPROC", str(share.cpu))}
    return variables


def allot(
    resources: ResourcesConfig, machines: Sequence[Mapping[str, float]], devices: DevicesConfig
) -> ResourcesConfig:
    """Works out the share of a machine that each job gets: its GPUs, 0 on the CPU, and its cores, at least 1.

    Args:
        resources: the resources that the user asks for.
        machines: the resources of each machine: numbers of "GPU" and "CPU".

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
    return ResourcesConfig(gpu, resources.cpu or max(equal_share, 1))
