"""Where a session runs: `place` turns the options `devices` into the devices that learn, act and evaluate.

`hardware/choice.py` chooses GPUs or the CPU, and `hardware/start.py` limits JAX to them and starts it.
`check_placement` asserts where arrays lie, for `devices.check`. `learner.py` runs the update on the devices
that learn. The command `python -m jaxrl_atari.devices` starts at the end of this file, and
`cli/device_report.py` has what it prints.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from jaxrl_atari.config import DevicesConfig, GpuOption, check_fields
from jaxrl_atari.hardware import cpu, gpus
from jaxrl_atari.hardware.choice import first_devices
from jaxrl_atari.hardware.start import limit_jax, start_jax

DeviceClass = Literal["gpu", "amx cpu", "bfloat16 cpu", "cpu"]
"""Classes of devices, which decide the form and the arithmetic of a network (`networks.make_network`)."""


def device_class(device: jax.Device) -> DeviceClass:
    """The class of a device of this process: that of its CPU, or `gpu` for any other device."""
    if device.platform != "cpu":
        return "gpu"
    sets = cpu.read_cpu().instruction_sets
    if "BF16" not in sets:
        return "cpu"
    return "amx cpu" if "AMX" in sets else "bfloat16 cpu"


class Placement(NamedTuple):
    """The devices of a session, by what they do."""

    learner: tuple[jax.Device, ...]  # of all processes
    actors: tuple[jax.Device, ...]  # for each learner device of this process, the device that acts for it
    evaluator: jax.Device
    why_learner: str  # why the learner has these devices

    @property
    def local_learner(self) -> tuple[jax.Device, ...]:
        """The learner's devices in this process."""
        return of_this_process(self.learner)

    @property
    def home(self) -> jax.Device:
        """The learner's first device in this process."""
        return self.local_learner[0]


def place(options: DevicesConfig) -> Placement:
    """Returns the devices of a session, and starts JAX's back end on these devices alone.

    Raises:
        ConfigError: an option has a value that it cannot have; or this machine lacks a device, or JAX has already
            started without it.
        UserError: JAX cannot start on a GPU: other processes hold its memory, or this is one process of several.
    """
    check_fields(options, "devices.")
    chosen, by_index = start_jax(options, limit_jax(options))
    if chosen.learner and not options.distributed:
        learner = tuple(by_index[index] for index in chosen.learner)
    else:
        learner = first_devices(
            options, gpus.jax_gpus() if chosen.learner else jax.devices("cpu"), "JAX's devices"
        )
    local = of_this_process(learner)
    actors = local if chosen.actor == "learner" else (_local_device(chosen.actor, by_index),) * len(local)
    evaluator = local[0] if chosen.evaluator == "learner" else _local_device(chosen.evaluator, by_index)
    return Placement(learner, actors, evaluator, chosen.why_learner)


def of_this_process(devices: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    """The devices of this process, out of those of all processes."""
    return tuple(device for device in devices if device.process_index == jax.process_index())


def _local_device(where: int | Literal["cpu"], by_index: Mapping[int, jax.Device]) -> jax.Device:
    """The GPU of this process that has this index among the visible ones, or its CPU."""
    return jax.local_devices(backend="cpu")[0] if where == "cpu" else by_index[where]


def pick_device(gpu: GpuOption) -> jax.Device:
    """The device that a `gpu` option means, on which JAX has started; see `choice.choose_device` and `place`."""
    return place(DevicesConfig(gpu=gpu)).home


# --- Check of placement ------------------------------------------------------------------------------------------


class PlacementError(AssertionError):
    """An array is not on the device where it belongs."""


def check_placement(what: str, arrays: Any, devices: Sequence[jax.Device]) -> None:
    """Asserts that every array of a tree lies on exactly these devices of this process.

    Args:
        what: names the tree in the error.

    Raises:
        PlacementError: names the first misplaced array, its devices, and the expected ones.
    """
    wanted = set(devices)
    for path, x in jax.tree_util.tree_leaves_with_path(arrays):
        found = x.sharding.addressable_devices if isinstance(x, jax.Array) else set()
        if found != wanted:
            name = jax.tree_util.keystr(path, simple=True, separator="/") or "the array"
            where = ", ".join(sorted(map(str, found))) or "the host"
            expected = ", ".join(sorted(map(str, wanted)))
            raise PlacementError(f"{what}: {name} is on {where}; expected on {expected}")


# --- The command -------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    from jaxrl_atari import cli
    from jaxrl_atari.cli import device_report

    cli.run(device_report.main)
