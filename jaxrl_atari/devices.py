"""Devices: the `gpu` option -> JAX devices, the placement of a session, one session over several GPUs.

    python -m jaxrl_atari.devices [--config configs/qbert.py]

reports the devices of this machine, the one that each `gpu` option picks, and problems.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_atari.config import DevicesConfig, GpuOption
from jaxrl_atari.errors import ConfigError
from jaxrl_atari.hardware import gpus, jax_gpus
from jaxrl_atari.hardware.jax_gpus import forbid_gpu, gpus_by_index, visible_gpus
from jaxrl_atari.ppo import Shard


class Placement(NamedTuple):
    """Which device does what in a session."""

    learner: tuple[jax.Device, ...]  # of all processes
    actors: tuple[jax.Device, ...]  # for each of this process's learner devices, the one that acts for it
    evaluator: jax.Device
    reason: str

    @property
    def home(self) -> jax.Device:
        """The learner's first device in this process."""
        return next(d for d in self.learner if d.process_index == jax.process_index())

    @property
    def devices(self) -> list[jax.Device]:
        """All devices that learn or act."""
        return sorted({*self.learner, *self.actors}, key=str)


# --- The `gpu` option ----------------------------------------------------------------------------------------------


def pick_device(gpu: GpuOption, here: bool = False, field: str = "devices.gpu") -> tuple[jax.Device, str]:
    """The device that a `gpu` option means, and why.

    | gpu | device |
    |---|---|
    | "auto" | the first GPU if JAX has one, else the CPU |
    | True | the first GPU, or an error |
    | False | the CPU, even if there is a GPU |
    | 0, 1, ... | exactly that GPU, or an error |

    Args:
        here: choose among the devices of this process alone, if there are several processes.
        field: the name of the option, for the reason and for errors.

    Raises:
        ConfigError: no such GPU; the message names what is visible.
    """
    if gpu is False:
        forbid_gpu(f"{field} = false")
        return jax.devices("cpu")[0], f"{field} = false"
    devices, problem = gpus_by_index()
    if here and jax.distributed.is_initialized():
        devices = dict(enumerate(d for d in devices.values() if d.process_index == jax.process_index()))
    if gpu == "auto" and not devices:
        cpus = jax.local_devices(backend="cpu") if here else jax.devices("cpu")
        return cpus[0], f"{field} = auto, and there is no GPU: {problem}"
    index = min(devices, default=0) if gpu == "auto" or gpu is True else gpu
    if index not in devices:
        if jax_gpus.limited_to and index < len(gpus.visible().gpus):
            raise ConfigError(
                field, gpu, f"GPU {', '.join(map(str, devices))}, to which JAX was limited when it started",
                "use another GPU in a fresh process",
            )  # fmt: skip
        raise gpus.no_such_gpu(gpu, [d.device_kind for d in devices.values()], problem, field)
    reason = f"{field} = auto, and there is a GPU" if gpu == "auto" else f"{field} = {str(gpu).lower()}"
    simulated = "" if gpus.simulated_count() is None else ", simulated by a CPU device"
    return devices[index], reason + simulated


def place(config: DevicesConfig) -> Placement:
    """The devices of a session; starts JAX's back end.

    Raises:
        ConfigError: a device that is not there.
    """
    first, reason = pick_device(config.gpu)
    # Several devices: those from the chosen one on.
    peers = [first]
    if config.data_parallel != 1:
        gpus_here = visible_gpus() if config.gpu is not False else []
        everywhere = gpus_here if first in gpus_here else jax.devices(first.platform)
        peers = everywhere[everywhere.index(first) :]
    count = len(peers) if config.data_parallel == "all" else config.data_parallel
    if count > len(peers):
        raise ConfigError("devices.data_parallel", count, f"at most {len(peers)}, the devices from {first} on")
    learner = tuple(peers[:count])
    if len({d.process_index for d in learner}) < jax.process_count():
        raise ConfigError(
            "devices.data_parallel", config.data_parallel, f"all, or enough for the {jax.process_count()} processes of"
            " devices.distributed: each has at least one device of its own",
        )  # fmt: skip
    local = tuple(d for d in learner if d.process_index == jax.process_index())

    def other(name: Literal["actor", "evaluator"]) -> jax.Device | None:
        """The device of `devices.actor` or `devices.evaluator`; None if it is the learner's own."""
        option = getattr(config, name)
        if option == "learner":
            return None
        if option is False:
            return jax.local_devices(backend="cpu")[0]
        return pick_device(option, here=True, field=f"devices.{name}")[0]

    actor, evaluator = other("actor"), other("evaluator")
    actors = local if actor is None else (actor,) * len(local)
    return Placement(learner, actors, evaluator or local[0], reason)


# --- Data parallel -----------------------------------------------------------------------------------------------

AXIS = "devices"


class DataParallel:
    """One program on one device or on several, each with its shard of the data.

    On one device it is `jit`, and arrays are unchanged. On several it is `pmap`, which JAX builds on `jit(shard_map)`:
    every array then has a leading axis, one row per device.
    """

    def __init__(self, devices: Sequence[jax.Device]):
        self.devices = tuple(devices)
        self.local_devices = tuple(d for d in self.devices if d.process_index == jax.process_index())
        mesh = jax.sharding.Mesh(np.asarray(self.devices), (AXIS,))
        self._rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))

    def __len__(self) -> int:
        return len(self.devices)

    def compile(self, function: Callable, donate_argnums: Sequence[int] = ()) -> Callable:
        """The function on all devices; on several, it is given `shard`, its part (`ppo.Shard`), as a keyword."""
        if len(self) == 1:
            return jax.jit(function, donate_argnums=donate_argnums)

        def on_each(*args: Any) -> Any:
            shard = Shard(lax.axis_index(AXIS), len(self), partial(lax.psum, axis_name=AXIS))
            return function(*_with_keys(args), shard=shard)

        return jax.pmap(on_each, axis_name=AXIS, devices=self.devices, donate_argnums=tuple(donate_argnums))

    def assemble(self, shards: Sequence[Any]) -> Any:
        """A tree of arrays from one tree per local device; each is moved to its device if it is elsewhere."""
        placed = [jax.device_put(shard, device) for shard, device in zip(shards, self.local_devices, strict=True)]
        if len(self) == 1:
            return placed[0]

        def rows(*parts: jax.Array) -> jax.Array:
            shape = (len(self), *parts[0].shape)
            return jax.make_array_from_single_device_arrays(shape, self._rows, [part[None] for part in parts])

        return jax.tree.map(rows, *_without_keys(placed))

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


class _KeyData(NamedTuple):
    """The data of typed PRNG keys, which pmap does not accept across processes."""

    data: jax.Array


def _without_keys(tree: Any) -> Any:
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: _KeyData(jax.random.key_data(x)) if is_key(x) else x, tree)


def _with_keys(tree: Any) -> Any:
    is_data = lambda x: isinstance(x, _KeyData)  # noqa: E731
    return jax.tree.map(lambda x: jax.random.wrap_key_data(x.data) if is_data(x) else x, tree, is_leaf=is_data)


# --- The checker -------------------------------------------------------------------------------------------------


class PlacementError(AssertionError):
    """An array is not on the device where it belongs."""


def check_placement(what: str, arrays: Any, devices: Sequence[jax.Device]) -> None:
    """Asserts that every array of a tree lies on exactly these devices of this process.

    Raises:
        PlacementError: it names the first misplaced array, where it is and where it should be.
    """
    wanted = set(devices)
    for path, x in jax.tree_util.tree_leaves_with_path(arrays):
        found = None
        if isinstance(x, jax.Array):
            found = {device for device in x.devices() if device.process_index == jax.process_index()}
        if found != wanted:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            where = "the host" if found is None else ", ".join(sorted(map(str, found)))
            should = ", ".join(sorted(map(str, wanted)))
            raise PlacementError(f"{what}: {name} is on {where}; expected on {should}")


if __name__ == "__main__":
    from jaxrl_atari import cli
    from jaxrl_atari.hardware import report

    cli.run(lambda: report.main(pick_device))
