"""Devices: the placement of a session, one session over several GPUs, and the check of where arrays are.

As a command, `python -m jaxrl_atari.devices`, it reports the devices of this machine (`commands/devices.py`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_atari.config import DevicesConfig, GpuOption, NetworkConfig
from jaxrl_atari.errors import check_fields, require
from jaxrl_atari.fast.forms import Network, make_network
from jaxrl_atari.hardware.choice import first_devices, limit_jax, start_gpus
from jaxrl_atari.hardware.gpus import gpu_provider, network_platform, visible
from jaxrl_atari.ppo import KEYS, Shard


class Placement(NamedTuple):
    """Which device does what in a session."""

    learner: tuple[jax.Device, ...]  # in every process
    actors: tuple[jax.Device, ...]  # the device that acts for each local learner device of this process
    evaluator: jax.Device
    reason: str

    @property
    def home(self) -> jax.Device:
        """The learner's first device in this process."""
        return next(d for d in self.learner if d.process_index == jax.process_index())


def place(devices: DevicesConfig, field: str = "devices.gpu") -> Placement:
    """The devices of a session. Starts JAX's back end, on these devices alone.

    `limit_jax` chooses the indices of GPUs, `start_gpus` starts JAX, and `on` maps an index to its device.

    Args:
        field: the name of `devices.gpu` in texts.

    Raises:
        ConfigError: a device that is not there.
    """
    use = limit_jax(devices, field)
    found = start_gpus()
    cpus = jax.devices("cpu")
    if use.gpus and not visible().gpus:  # JAX failed to start on the GPUs and is now kept off them: choose again
        return place(devices, field)
    here = jax.process_index()
    own = [device for device in found if device.process_index == here]
    gpus = {gpu_provider().index(device): device for device in own}

    def on(index: int | None) -> jax.Device:
        if index is None:
            return jax.local_devices(backend="cpu")[0]
        require(
            index in gpus, field, index, f"one of {list(gpus)}, on which JAX has started", "use a fresh process"
        )
        return gpus[index]

    if use.learner and not devices.distributed:
        learner = tuple(map(on, use.learner))
    else:
        learner = first_devices(devices, found if use.learner else cpus, "the devices of JAX")
    processes = {device.process_index for device in learner}
    require(
        len(processes) == jax.process_count(), "devices.data_parallel", devices.data_parallel,
        f"all, or enough for the {jax.process_count()} processes: each has at least one device of its own",
    )  # fmt: skip
    local = tuple(device for device in learner if device.process_index == here)
    actors = local if devices.actor == "learner" else (on(use.actor),) * len(local)
    evaluator = local[0] if devices.evaluator == "learner" else on(use.evaluator)
    return Placement(learner, actors, evaluator, use.reason)


def pick_device(gpu: GpuOption, field: str = "devices.gpu") -> jax.Device:
    """The device that a `gpu` option means; see `place`."""
    options = DevicesConfig(gpu=gpu)
    check_fields(options, "devices.")
    return place(options, field).home


class Networks(NamedTuple):
    """A session's network, in the forms that suit its devices. Both compute in one arithmetic."""

    learning: Network
    acting: Network


def make_networks(config: NetworkConfig, num_actions: int, placement: Placement) -> Networks:
    """The networks of a session; the same arguments give the same objects."""
    learner, actor = (network_platform(*devices) for devices in (placement.learner, placement.actors))
    return Networks(
        make_network(config, num_actions, learner, actor), make_network(config, num_actions, actor, learner)
    )


# --- Data parallel -----------------------------------------------------------------------------------------------

AXIS = "devices"


class DataParallel:
    """One program on one device or on several, each with its shard of the data.

    On one device it is `jit`, and arrays are unchanged. On several it is `pmap`, which JAX builds on
    `jit(shard_map)`: every array then has a leading axis, one row per device.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        self.devices = tuple(devices)
        self.local_devices = tuple(d for d in self.devices if d.process_index == jax.process_index())
        mesh = jax.sharding.Mesh(np.asarray(self.devices), (AXIS,))
        self._rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))

    def __len__(self) -> int:
        return len(self.devices)

    def compile(self, function: Callable, donate_argnums: Sequence[int] = ()) -> Callable:
        """Compiles a function whose last argument is a key.

        On several devices it also receives `shard` (`ppo.Shard`), this device's part of the data, as a keyword.
        """
        if len(self) == 1:
            return jax.jit(function, donate_argnums=donate_argnums)

        def on_each(*args: Any) -> Any:
            *others, key_data = args
            shard = Shard(lax.axis_index(AXIS), len(self), partial(lax.psum, axis_name=AXIS))
            return function(*others, jax.random.wrap_key_data(key_data, impl=KEYS), shard=shard)

        return jax.pmap(on_each, axis_name=AXIS, devices=self.devices, donate_argnums=donate_argnums)

    def assemble(self, shards: Sequence[Any]) -> Any:
        """A tree of arrays from one tree per local device; each is moved to its device if it is elsewhere.

        On several devices keys become their data, because `pmap` accepts no typed keys across processes.
        """
        placed = [jax.device_put(shard, device) for shard, device in zip(shards, self.local_devices, strict=True)]
        if len(self) == 1:
            return placed[0]

        def rows(*parts: jax.Array) -> jax.Array:
            if jnp.issubdtype(parts[0].dtype, jax.dtypes.prng_key):
                parts = tuple(map(jax.random.key_data, parts))
            shape = (len(self), *parts[0].shape)
            return jax.make_array_from_single_device_arrays(shape, self._rows, [part[None] for part in parts])

        return jax.tree.map(rows, *placed)

    def replicate(self, tree: Any) -> Any:
        """The same values on all devices."""
        return self.assemble([tree] * len(self.local_devices))

    def shard(self, tree: Any, index: int) -> Any:
        """The part of a tree that local device `index` holds, on that device."""
        if len(self) == 1:
            return tree
        device = self.local_devices[index]

        def row(x: jax.Array) -> jax.Array:
            return next(part.data for part in x.addressable_shards if part.device == device).squeeze(0)

        return jax.tree.map(row, tree)


# --- Where arrays are --------------------------------------------------------------------------------------------


class PlacementError(AssertionError):
    """An array is not on the device where it belongs."""


def check_placement(what: str, arrays: Any, devices: Sequence[jax.Device]) -> None:
    """Asserts that every array of a tree lies on exactly these devices of this process.

    Raises:
        PlacementError: it names the first misplaced array, where it is and where it should be.
    """
    wanted = set(devices)
    for path, x in jax.tree_util.tree_leaves_with_path(arrays):
        found = x.sharding.addressable_devices if isinstance(x, jax.Array) else set()
        if found != wanted:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            where, should = (", ".join(sorted(map(str, each))) for each in (found, wanted))
            raise PlacementError(f"{what}: {name} is on {where or 'the host'}; expected on {should}")


if __name__ == "__main__":
    from jaxrl_atari.commands import devices

    devices.run()
