"""Slots: the devices of this machine on which sessions train, in turn."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from jaxrl_atari.config import Config
from jaxrl_atari.envs import DEFAULT_THREADS_VARIABLE
from jaxrl_atari.hardware.choice import choose_devices, divide_gpus
from jaxrl_atari.hardware.cpu import emulator_cores
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
        """Whether each session needs a process of its own: see the table of `plan_slots`."""
        return self.parallel > 1 or bool(self.slots[0].variables)


def plan_slots(config: Config, sessions: int, waiting: int | None = None) -> SlotPlan:
    """Plans where sessions are trained: on the GPUs in turn, or on the CPU.

    | the sessions train | in processes of their own | whose environment gets |
    |---|---|---|
    | one after the other, on the CPU | no | |
    | one after the other, on the GPUs that a session takes if it sees all | no | |
    | in turn on several blocks of GPUs, or on one that CUDA_OFFSET moves | yes | the GPUs of the block |
    | side by side | yes | also a share of the threads of emulators |
    | side by side on the same GPUs | yes | also a share of their memory |

    Args:
        sessions: number of sessions in the trial or suite.
        waiting: number of sessions that remain to be trained. None: all.

    Raises:
        ConfigError: the machine does not have the devices, or sessions that share a GPU would take more memory
            than it has.
    """
    devices = config.devices
    all_blocks, why = divide_gpus(devices)
    blocks = all_blocks[:sessions]
    parallel = min(config.trial.parallel or len(blocks), sessions if waiting is None else waiting)
    sharing = math.ceil(parallel / len(blocks))
    # A session that sees all GPUs limits itself to those that it uses (`limit_jax`). If an option names a GPU by
    # its index, the session must see all, or the index would mean another GPU.
    chosen = choose_devices(devices)
    finds_its_gpus = len(blocks) == 1 and set(blocks[0]) == set(chosen.used)
    slots = []
    for block in blocks:
        gpus = [chosen.gpus[index] for index in block]
        text = f"on GPU {','.join(map(str, block))}" if gpus else "on CPU"
        variables = {}
        if not finds_its_gpus:
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in gpus)
        if parallel > 1:
            variables[DEFAULT_THREADS_VARIABLE] = str(max(1, emulator_cores() // parallel))
        fraction = None
        if gpus and sharing > 1:
            fraction = memory_fraction(devices, sharing, min(gpu.memory for gpu in gpus))
        if fraction is not None:
            variables[FRACTION_VARIABLE] = str(fraction)
            text += f", {fraction:.0%} of its memory"
        slots.append(Slot(f"{text} ({why})", variables))
    return SlotPlan(slots, parallel)
