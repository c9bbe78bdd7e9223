"""Slots: the devices of this machine on which sessions train, in turn."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from jaxrl_atari.config import Config, DevicesConfig
from jaxrl_atari.envs import DEFAULT_THREADS_VARIABLE
from jaxrl_atari.hardware.choice import choose_devices, divide_gpus
from jaxrl_atari.hardware.cpu import emulator_cores
from jaxrl_atari.hardware.gpus import visible_gpus
from jaxrl_atari.hardware.memory import FRACTION_VARIABLE, memory_fraction


class Slot(NamedTuple):
    """Devices for one session, or for several that share them."""

    text: str  # where a session trains, and why there
    variables: Mapping[str, str]  # added to the environment of the processes that train there


class SlotPlan(NamedTuple):
    """The slots that sessions take in turn."""

    slots: list[Slot]
    parallel: int  # number of sessions that train at a time

    @property
    def needs_processes(self) -> bool:
        """Whether each session needs a process of its own.

        It does where sessions run side by side, and where a session may see only some of the GPUs. The only
        session of a trial uses the first GPUs without that (`limit_jax`), unless CUDA_OFFSET gives it others.
        """
        return self.parallel > 1 or bool(self.slots[0].variables)


def plan_slots(config: Config, sessions: int, waiting: int | None = None) -> SlotPlan:
    """Plans where sessions are trained: on the GPUs in turn, or on the CPU.

    Args:
        sessions: number of sessions in the trial or suite.
        waiting: number of sessions that remain to be trained. None: all.

    Raises:
        ConfigError: the machine does not have the devices, or sessions that share a GPU would take more memory
            than it has.
    """
    division = divide_gpus(config.devices)
    blocks = division.blocks[:sessions]
    parallel = min(config.trial.parallel or len(blocks), waiting or sessions)
    sharing = math.ceil(parallel / len(blocks))
    # `limit_jax` gives a session these GPUs where it sees all, as it has to if an option names a GPU by its index.
    by_itself = choose_devices(config.devices).used
    hides_others = blocks != [by_itself]
    slots = [_slot(config.devices, block, division.why, hides_others, sharing) for block in blocks]
    if parallel > 1:
        threads = {DEFAULT_THREADS_VARIABLE: str(max(1, emulator_cores() // parallel))}
        slots = [slot._replace(variables={**slot.variables, **threads}) for slot in slots]
    return SlotPlan(slots, parallel)


def _slot(devices: DevicesConfig, block: Sequence[int], why: str, hides_others: bool, sharing: int) -> Slot:
    """Makes the slot of a block of GPUs, or of the CPU.

    Args:
        block: one of those of `divide_gpus`.
        why: why sessions get these devices.
        hides_others: whether sessions see only the GPUs of the block.
        sharing: number of sessions that train there at a time.
    """
    if not block:
        return Slot(f"on CPU ({why})", {})
    visible = visible_gpus().gpus
    gpus = [visible[index] for index in block]
    where = f"GPU {','.join(map(str, block))}"
    variables = {}
    if hides_others and len(gpus) < len(visible):
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in gpus)
    fraction = None
    if sharing > 1:
        fraction = memory_fraction(devices, sharing, min(gpu.memory for gpu in gpus))
    if fraction is not None:
        where += f", {fraction:.0%} of its memory"
        variables[FRACTION_VARIABLE] = str(fraction)
    return Slot(f"on {where} ({why})", variables)
