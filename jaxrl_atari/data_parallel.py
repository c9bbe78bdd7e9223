"""Runs the update on one learner device or on several, each with its shard of the environments."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_atari.keys import key_of_data
from jaxrl_atari.minibatches import Shard

AXIS = "devices"


class DataParallel:
    """Runs one program on one or several devices, each with its shard of the data.

    On one device it uses `jit`, and arrays stay as they are. On several it uses `pmap`, which JAX builds on
    `jit(shard_map)`: every array then has a leading axis, with one row per device.
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

        On several devices, the function also receives the keyword `shard`: a `Shard`, its part of the data.
        """
        if len(self) == 1:
            return jax.jit(function, donate_argnums=donate_argnums)

        def on_each(*args: Any) -> Any:
            *others, key_data = args
            shard = Shard(lax.axis_index(AXIS), len(self), partial(lax.psum, axis_name=AXIS))
            return function(*others, key_of_data(key_data), shard=shard)

        return jax.pmap(on_each, axis_name=AXIS, devices=self.devices, donate_argnums=donate_argnums)

    def assemble(self, shards: Sequence[Any]) -> Any:
        """Joins one tree of arrays per local device into a single tree, and moves each to its device.

        On several devices, random keys become arrays of integers: across processes, `pmap` accepts no typed keys.
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
        """A tree with the same values on all devices."""
        return self.assemble([tree] * len(self.local_devices))

    def shard(self, tree: Any, index: int) -> Any:
        """The part of a tree that lies on local device number `index`."""
        if len(self) == 1:
            return tree
        device = self.local_devices[index]

        def row(x: jax.Array) -> jax.Array:
            return next(part.data for part in x.addressable_shards if part.device == device).squeeze(0)

        return jax.tree.map(row, tree)
