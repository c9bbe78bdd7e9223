"""Runs the update on one learner device or on several, each with its part of the environments."""

from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_atari.algorithm import Shard
from jaxrl_atari.keys import key_of_data

AXIS = "devices"


class DataParallel:
    """Runs one program on one or several devices, each with its part of the data.

    On one device it uses `jit`, and arrays stay as they are. On several it uses `pmap`, which JAX builds on
    `jit(shard_map)`: every array then has a leading axis, with one row per device. `assemble` and `replicate` put
    data on the devices in this form, and `local_part` takes out what lies on one of them.

    JAX only maintains `pmap`, and recommends `jit(shard_map)`. A change to that would touch the leading axis (in
    this class alone), how a key gets to the devices (`compile`), `differing_leaf`, and the mean of gradients
    (`update.mean_over_devices`).
    """

    def __init__(self, devices: Sequence[jax.Device]):
        self.devices = tuple(devices)
        self.local_devices = tuple(d for d in self.devices if d.process_index == jax.process_index())
        self._is_single = len(self.devices) == 1

    @cached_property
    def _rows(self) -> jax.sharding.NamedSharding:
        """One row of the leading axis for each device."""
        mesh = jax.sharding.Mesh(np.asarray(self.devices), (AXIS,))
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))

    def compile(self, function: Callable, donate_argnums: Sequence[int] = ()) -> Callable:
        """Compiles a function that takes arrays and the keyword `key`, a random key.

        On several devices, the function also gets the keyword `shard`: a `Shard`, its part of the data.
        """
        if self._is_single:
            return jax.jit(function, donate_argnums=donate_argnums)

        def on_each(*args: Any, key: jax.Array) -> Any:
            shard = Shard(lax.axis_index(AXIS), len(self.devices), partial(lax.psum, axis_name=AXIS))
            return function(*args, key=key_of_data(key), shard=shard)  # `assemble` has made integers of the key

        return jax.pmap(on_each, axis_name=AXIS, devices=self.devices, donate_argnums=donate_argnums)

    def assemble(self, parts: Sequence[Any]) -> Any:
        """Joins trees of arrays, one for each local device, into a single tree, and moves each to its device.

        On several devices, random keys become arrays of integers: across processes, `pmap` accepts no typed keys.
        """
        moved = [jax.device_put(part, device) for part, device in zip(parts, self.local_devices, strict=True)]
        if self._is_single:
            return moved[0]

        def join(*arrays: jax.Array) -> jax.Array:
            if jnp.issubdtype(arrays[0].dtype, jax.dtypes.prng_key):
                arrays = tuple(map(jax.random.key_data, arrays))
            shape = (len(self.devices), *arrays[0].shape)
            return jax.make_array_from_single_device_arrays(shape, self._rows, [array[None] for array in arrays])

        return jax.tree.map(join, *moved)

    def replicate(self, tree: Any) -> Any:
        """A tree with the same values on all devices."""
        return self.assemble([tree] * len(self.local_devices))

    def local_part(self, tree: Any, index: int) -> Any:
        """The part of a tree that lies on `local_devices[index]`, without the leading axis."""
        if self._is_single:
            return tree
        device = self.local_devices[index]

        def row(x: jax.Array) -> jax.Array:
            return next(shard.data for shard in x.addressable_shards if shard.device == device).squeeze(0)

        return jax.tree.map(row, tree)

    def differing_leaf(self, tree: Any, *, rounded: bool = False) -> str | None:
        """The path of the first leaf of a tree that differs from device to device; None if all are equal.

        All processes must call it, and each gets the same answer.

        Args:
            rounded: devices may round the tree differently, so floats are compared with `jnp.allclose`.
        """
        if self._is_single or not jax.tree.leaves(tree):
            return None
        differs = _compiled_differs(self.devices, rounded)(tree)
        answers = jax.device_get(self.local_part(differs, 0))
        for path, answer in jax.tree_util.tree_leaves_with_path(answers):
            if answer:
                return jax.tree_util.keystr(path)
        return None


@lru_cache(maxsize=8)
def _compiled_differs(devices: tuple[jax.Device, ...], rounded: bool) -> Callable:
    """`_differs` on these devices. The sessions of a process share it, so that it is compiled once."""
    return jax.pmap(partial(_differs, rounded=rounded), axis_name=AXIS, devices=devices)


def _differs(tree: Any, rounded: bool) -> Any:
    """For each leaf, whether it differs on any device from that of the first: bool []. Runs on each device."""
    is_first = lax.axis_index(AXIS) == 0

    def differs(x: jax.Array) -> jax.Array:
        value_of_first = lax.psum(jnp.where(is_first, x, jnp.zeros_like(x)), AXIS)
        same = jnp.allclose if rounded and jnp.issubdtype(x.dtype, jnp.floating) else jnp.array_equal
        return lax.psum(~same(x, value_of_first, equal_nan=True), AXIS) > 0

    return jax.tree.map(differs, tree)
