"""Where a session runs: `place` turns the options `devices` into the devices that learn, act and evaluate.

The verbs mean the same here, in `hardware/choice.py` and in `hardware/gpus.py`:

| verb | meaning |
|---|---|
| choose | find what the options ask for: indices of visible GPUs, or the CPU |
| divide | share out the visible GPUs among the sessions of a trial, suite or sweep |
| limit | let JAX start on the chosen GPUs only |
| forbid | let JAX start on no GPU |
| start | start JAX on the GPUs to which it is limited |
| place | choose, limit and start: the result is devices of JAX |
| pick | place, for a single `gpu` option: the result is one device of JAX |

`check_placement` asserts where arrays lie, for `devices.check`. `data_parallel.py` runs the update on the devices
that learn. The command `python -m jaxrl_atari.devices` starts at the end of this file, and `device_report.py` has
what it prints.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from jaxrl_atari.checks import checked_value
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import ConfigError, UserError, require
from jaxrl_atari.hardware.choice import DeviceChoice, choose_devices, first_devices, limit_jax, start_gpus
from jaxrl_atari.hardware.device_class import DeviceClass, device_class
from jaxrl_atari.hardware.distributed import gather_items
from jaxrl_atari.hardware.gpus import gpu_provider, visible_gpus
from jaxrl_atari.option_forms import GpuOption, GpuWord


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

    @property
    def device_classes(self) -> tuple[DeviceClass, DeviceClass]:
        """The classes of the devices that learn and act, as `network_forms.make_network` takes them."""
        return device_class(self.learner[0]), device_class(self.actors[0])


def place(devices: DevicesConfig) -> Placement:
    """Returns the devices of a session, and starts JAX's back end on these devices alone.

    Raises:
        ConfigError: this machine lacks a device, or JAX has already started without it; or several processes learn
            on devices of different classes, or one of them on none.
        UserError: JAX cannot start on a GPU: other processes hold its memory, or this is one process of several.
    """
    chosen = limit_jax(devices)
    started = start_gpus(chosen)
    if chosen.gpus and not started:  # JAX cannot start on a GPU, and `start_gpus` has forbidden them all
        if devices.distributed:  # the others would learn on GPUs
            why = visible_gpus().why_none
            raise UserError(f"devices.distributed: {why}; fix it, or use --devices.gpu false in all processes")
        chosen = choose_devices(devices)  # `auto` now means the CPU; other options are an error
    learner = learner_devices(devices, chosen, started)
    if devices.distributed:
        _require_one_class(learner)
    _require_device_in_each_process(devices, learner)
    local = of_this_process(learner)
    gpus = local_gpus(started)
    actors = local
    if chosen.actor != "learner":
        actors = (local_device(chosen.actor, gpus, "devices.actor"),) * len(local)
    evaluator = local[0]
    if chosen.evaluator != "learner":
        evaluator = local_device(chosen.evaluator, gpus, "devices.evaluator")
    return Placement(learner, actors, evaluator, chosen.why_learner)


def _require_one_class(learner: Sequence[jax.Device]) -> None:
    """Raises `ConfigError` if devices of several classes learn, whose programs and arithmetic differ.

    A process knows only the classes of its own devices, so all processes must call this.
    """
    own = sorted({device_class(device) for device in of_this_process(learner)})
    classes = sorted({*gather_items(own)})
    expected = "devices of one class to learn in all processes"
    hint = f"they are {' and '.join(classes)}; use GPUs alone, or CPUs that agree in AVX512-BF16 and AMX"
    require(len(classes) == 1, "devices.distributed", True, expected, hint)


def _require_device_in_each_process(devices: DevicesConfig, learner: Sequence[jax.Device]) -> None:
    """Raises `ConfigError` if a process has none of the devices that learn."""
    processes = {device.process_index for device in learner}
    expected = f"all, or enough for the {jax.process_count()} processes: each has at least one device of its own"
    enough = len(processes) == jax.process_count()
    require(enough, "devices.data_parallel", devices.data_parallel, expected)


def learner_devices(
    devices: DevicesConfig, chosen: DeviceChoice, started: Sequence[jax.Device]
) -> tuple[jax.Device, ...]:
    """The devices that learn, of all processes.

    Args:
        chosen: the GPUs that `devices` asks for.
        started: the GPUs that `start_gpus` has returned.

    Raises:
        ConfigError: JAX has started without one of these devices.
    """
    if chosen.learner and not devices.distributed:
        gpus = local_gpus(started)
        return tuple(local_device(index, gpus, "devices.gpu") for index in chosen.learner)
    available = started if chosen.learner else jax.devices("cpu")
    return first_devices(devices, available, "the devices of JAX")


def local_gpus(started: Sequence[jax.Device]) -> dict[int, jax.Device]:
    """The GPUs that `start_gpus` has returned and this process has, by their indices among the visible GPUs.

    An index may be missing: JAX may have started without one of the visible GPUs.
    """
    return {gpu_provider().index(gpu): gpu for gpu in of_this_process(started)}


def of_this_process(devices: Sequence[jax.Device]) -> tuple[jax.Device, ...]:
    """The devices of this process, out of those of all processes."""
    return tuple(device for device in devices if device.process_index == jax.process_index())


def local_device(chosen: int | Literal["cpu"], gpus: Mapping[int, jax.Device], field: str) -> jax.Device:
    """The device of this process that an option means.

    Args:
        chosen: index of a GPU among the visible GPUs, or the CPU.
        gpus: those of `local_gpus`.
        field: name of the option in the error.

    Raises:
        ConfigError: JAX has started without this GPU.
    """
    if chosen == "cpu":
        return jax.local_devices(backend="cpu")[0]
    expected = f"one of {list(gpus)}, on which JAX has started"
    require(chosen in gpus, field, chosen, expected, "use a fresh process")
    return gpus[chosen]


def pick_device(gpu: GpuOption, field: str = "devices.gpu") -> jax.Device:
    """The device that a `gpu` option means, on which JAX has started; see `choice.choose_device` and `place`.

    Args:
        field: name of the option in the error.
    """
    try:
        return place(DevicesConfig(gpu=checked_value("devices.gpu", gpu, GpuWord))).home
    except ConfigError as error:
        raise error.renamed("devices.gpu", field) from None


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
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            where = ", ".join(sorted(map(str, found))) or "the host"
            expected = ", ".join(sorted(map(str, wanted)))
            raise PlacementError(f"{what}: {name} is on {where}; expected on {expected}")


# --- The command -------------------------------------------------------------------------------------------------

if __name__ == "__main__":
    # The report has a file of its own, because it imports the whole update, and sessions import this file.
    from jaxrl_atari import device_report

    device_report.run()
