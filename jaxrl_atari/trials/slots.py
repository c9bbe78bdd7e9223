"""Slots: the devices on which sessions train on this machine, in turn, and the launcher that suits them."""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from jaxrl_atari.config import Config, DevicesConfig
from jaxrl_atari.envs import THREADS
from jaxrl_atari.hardware.choice import session_gpus
from jaxrl_atari.hardware.cpu import emulator_cores
from jaxrl_atari.hardware.gpus import visible
from jaxrl_atari.hardware.memory import FRACTION, memory_fraction
from jaxrl_atari.option_forms import gpu_index
from jaxrl_atari.runs.writers import Writer
from jaxrl_atari.trials.launch import Job, Launcher, Slot, Train, run_here
from jaxrl_atari.trials.processes import run_processes
from jaxrl_atari.trials.sessions import Stop, train_job


class SlotPlan(NamedTuple):
    """The devices that sessions take in turn, and how many of them train at a time."""

    slots: list[Slot]
    parallel: int

    @property
    def needs_processes(self) -> bool:
        """Whether sessions run side by side, or see one of several GPUs: then each has a process of its own."""
        return self.parallel > 1 or bool(self.slots[0].variables)


def plan_slots(config: Config, sessions: int, waiting: int | None = None) -> SlotPlan:
    """Plans where sessions are trained: on the GPUs in turn, or on the CPU.

    Args:
        sessions: number of sessions in the trial or suite.
        waiting: sessions that remain to be trained. None: all.

    Raises:
        ConfigError: the machine does not have the devices, or sessions that share a GPU would take more memory
            than it has.
    """
    blocks: list[tuple[tuple[int, ...], str]] = []
    for number in range(sessions):
        block = session_gpus(config.devices, number)
        if block in blocks:  # they come again in the same order
            break
        blocks.append(block)
    parallel = min(config.trial.parallel or len(blocks), waiting or sessions)
    sharing = math.ceil(parallel / len(blocks))
    slots = [_slot(config.devices, indices, why, sharing) for indices, why in blocks]
    if parallel > 1:
        threads = {THREADS: str(max(1, emulator_cores() // parallel))}
        slots = [slot._replace(variables={**slot.variables, **threads}) for slot in slots]
    return SlotPlan(slots, parallel)


def _slot(devices: DevicesConfig, indices: Sequence[int], why: str, sharing: int) -> Slot:
    """The slot of a block of GPUs, or of the CPU.

    Args:
        indices: the GPUs of the block among the visible ones; empty for the CPU.
        why: why these were chosen.
        sharing: number of sessions that train there at a time.
    """
    if not indices:
        return Slot(f"on CPU ({why})", {})
    found = visible().gpus
    gpus = [found[index] for index in indices]
    where = f"GPU {','.join(map(str, indices))}"
    variables = {}
    counts_all = gpu_index(devices.gpu) is not None  # an index counts all visible GPUs
    if not counts_all and len(gpus) < len(found):
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.name for gpu in gpus)
    fraction = None
    if sharing > 1:
        fraction = memory_fraction(devices, sharing, min(gpu.memory for gpu in gpus))
    if fraction is not None:
        where += f", {fraction:.0%} of its memory"
        variables[FRACTION] = str(fraction)
    return Slot(f"on {where} ({why})", variables)


def choose_launcher(
    jobs: Sequence[Job], writers: Sequence[Writer] = (), stop: Stop | None = None
) -> tuple[Launcher, Train]:
    """Chooses the launcher of sessions on this machine, and the function that trains each of them.

    The sessions of a suite have processes of their own. In this process, the only session of a trial raises its
    error, and so does any session with `devices.distributed`: a follower cannot see that the leader's session
    failed, and would wait for it.

    Args:
        jobs: at least one.
        writers, stop: see `trial.run_training`.
    """
    config = jobs[0].config
    plan = plan_slots(config, 1 + max(job.number for job in jobs), len(jobs))
    if jobs[0].game or plan.needs_processes:
        launch = partial(run_processes, slots=plan.slots, parallel=plan.parallel)
        return launch, partial(train_job, writers=writers, close_writers=True, stop=stop)
    alone = config.sessions == 1 or config.devices.distributed
    return partial(run_here, raises=alone), partial(train_job, writers=writers, stop=stop)
