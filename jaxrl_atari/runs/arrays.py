"""Arrays of a checkpoint: moving them between devices, NumPy and orbax's files, and their shapes and digests."""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jaxrl_atari.algorithm import key_of_data


def this_process() -> ocp.options.MultiprocessingOptions:
    """Options of orbax with which it waits for no other process: one writes, and each reads on its own."""
    if not jax.distributed.is_initialized():
        return ocp.options.MultiprocessingOptions()
    process = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"process_{process}"
    )


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def to_host(arrays: Any) -> Any:
    """NumPy copies of arrays, which the leader can write without the other processes; keys become their data."""
    plain = jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, arrays)
    return jax.tree.map(np.array, jax.device_get(plain))


def read_arrays(directory: Path) -> dict[str, np.ndarray]:
    """Reads the arrays of an item in a checkpoint, which lies in this directory: path -> array.

    The arrays are read one after another. Otherwise a single unreadable array makes orbax close its event loop and
    print a traceback for each of the others.
    """
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=this_process())
    saved: Any = directory.absolute()
    leaves, structure = jax.tree_util.tree_flatten_with_path(handler.metadata(saved).tree)
    values: dict[str, np.ndarray] = {}
    for name in (name_of(path) for path, _ in leaves):
        wanted = structure.unflatten([0 if name_of(path) == name else ocp.PLACEHOLDER for path, _ in leaves])
        values[name] = by_path(handler.restore(saved, args=ocp.args.PyTreeRestore(wanted)))[name]
    return values


def to_device(values: dict[str, np.ndarray], target: Any, device: jax.Device) -> Any:
    """The tree `target` with the arrays of `values`, by their paths, on a device. Key data become a key."""

    def placed(path: Any, leaf: Any) -> Any:
        array = jax.device_put(values[name_of(path)], device)
        return key_of_data(array) if _is_key(leaf) else array

    return jax.tree_util.tree_map_with_path(placed, target)


def name_of(path: Any) -> str:
    """A path in a pytree as text: `train_state/params/value/bias`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def by_path(arrays: Any) -> dict[str, Any]:
    """The leaves of a pytree by their paths (`name_of`)."""
    return {name_of(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(arrays)}


def array_shapes(arrays: Any) -> dict[str, str]:
    """Path -> dtype and shape of each array in a pytree: `{"train_state/params/value/bias": "float32[1]"}`."""
    return {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in by_path(arrays).items()}


def array_digests(arrays: Any) -> dict[str, str]:
    """Path -> digest of the dtype, shape and bytes of each array in a pytree of NumPy arrays."""
    shapes = array_shapes(arrays)
    return {name: digest(shapes[name].encode() + leaf.tobytes()) for name, leaf in by_path(arrays).items()}


def digest(content: bytes) -> str:
    """BLAKE2b of 64 bits, in hexadecimal."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def digest_of(values: dict[str, Any]) -> str:
    """One digest of JSON values, such as what `array_digests` returns."""
    return digest(json.dumps(values, sort_keys=True).encode())
