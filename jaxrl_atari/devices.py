"""Where a session runs: `place` finds the devices that learn, act and evaluate, from the options `devices`.

`check_placement` asserts where arrays lie, for `devices.check`. `hardware/choice.py` chooses among the GPUs before
JAX starts; `data_parallel.py` runs the update on the learner's devices; `device_report.py` holds the command
`python -m jaxrl_atari.devices`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jaxrl_atari.checks import check_fields
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import require
from jaxrl_atari.hardware.choice import first_devices, limit_jax, start_gpus
from jaxrl_atari.hardware.cpu import read_cpu
from jaxrl_atari.hardware.gpus import gpu_provider, visible_gpus
from jaxrl_atari.option_forms import GpuOption


class Placement(NamedTuple):
    """The devices of a session, by what they do."""

    learner: tuple[jax.Device, ...]  # of all processes
    actors: tuple[jax.Device, ...]  # for each learner device of this process, the device that acts for it
    evaluator: jax.Device
    why_learner: str  # why the learner has these devices

    @property
    def home(self) -> jax.Device:
        """The learner's first device in this process."""
        return next(d for d in self.learner if d.process_index == jax.process_index())

    @property
    def device_classes(self) -> tuple[str, str]:
        """The classes of the devices that learn and act, as `network_forms.make_networks` takes them."""
        return device_class(*self.learner), device_class(*self.actors)


def place(devices: DevicesConfig, field: str = "devices.gpu") -> Placement:
    """The devices of a session. Starts JAX's back end on these devices alone.

    Args:
        field: name of `devices.gpu` in messages.

    Raises:
        ConfigError: this machine lacks a device, or JAX has already started without it.
    """
    chosen = limit_jax(devices, field)
    found = start_gpus()
    cpus = jax.devices("cpu")
    if chosen.gpus and not visible_gpus().gpus:  # JAX could not start on them, and `start_gpus` has forbidden them
        return place(devices, field)  # `auto` now means the CPU; other options are an error
    here = jax.process_index()
    gpus = {gpu_provider().index(device): device for device in found if device.process_index == here}

    def device_of(index: int | None, option: str) -> jax.Device:
        """The GPU with the index that an option means; the CPU for None."""
        if index is None:
            return jax.local_devices(backend="cpu")[0]
        expected = f"one of {list(gpus)}, on which JAX has started"
        require(index in gpus, option, index, expected, "use a fresh process")
        return gpus[index]

    if chosen.learner and not devices.distributed:
        learner = tuple(device_of(index, field) for index in chosen.learner)
    else:
        learner = first_devices(devices, found if chosen.learner else cpus, "the devices of JAX")
    processes = {device.process_index for device in learner}
    expected = f"all, or enough for the {jax.process_count()} processes: each has at least one device of its own"
    enough = len(processes) == jax.process_count()
    require(enough, "devices.data_parallel", devices.data_parallel, expected)
    local = tuple(device for device in learner if device.process_index == here)
    actors = local if devices.actor == "learner" else (device_of(chosen.actor, "devices.actor"),) * len(local)
    evaluator = local[0] if devices.evaluator == "learner" else device_of(chosen.evaluator, "devices.evaluator")
    return Placement(learner, actors, evaluator, chosen.why_learner)


def pick_device(gpu: GpuOption, field: str = "devices.gpu") -> jax.Device:
    """The device that a `gpu` option means; see `place`."""
    options = DevicesConfig(gpu=gpu)
    check_fields(options, "devices.")
    return place(options, field).home


def device_class(*devices: jax.Device) -> str:
    """How devices compute bfloat16, which decides the form and the arithmetic of a network (`network_forms.py`).

    | class | devices |
    |---|---|
    | "gpu" | GPUs with bfloat16 units |
    | "old gpu" | GPUs, at least one of them from before Ampere |
    | "amx cpu" | a CPU with AVX512-BF16 and AMX |
    | "bfloat16 cpu" | a CPU with AVX512-BF16 alone |
    | "cpu" | any other CPU |
    | name of another JAX platform, such as "tpu" | its devices |
    """
    gpus = [device for device in devices if device.platform == "gpu"]
    # A GPU of another process may report no compute capability.
    if any(float(getattr(gpu, "compute_capability", 8)) < 8 for gpu in gpus):
        return "old gpu"
    platform = devices[0].platform
    sets = read_cpu().instruction_sets
    if platform != "cpu" or "BF16" not in sets:
        return platform
    return "amx cpu" if "AMX" in sets else "bfloat16 cpu"


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


if __name__ == "__main__":
    from jaxrl_atari import device_report

    device_report.run()
