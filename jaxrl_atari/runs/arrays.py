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


def read_arrays(directory: Path, tree: Any, part: str) -> dict[str, np.ndarray]:
    """Reads arrays of a saved tree: path -> array.

    The arrays are read one after another. Otherwise a single unreadable array makes orbax close its event loop and
    print a traceback for each of the others.

    Args:
        directory: of the item in the checkpoint.
        tree: has the leaves that are wanted.
        part: beginning of the paths of the leaves that are read.
    """
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=this_process())
    saved: Any = directory.absolute()
    # The saved structure, and not the structure of `tree`: empty parts of a state may come and go.
    skeleton = jax.tree.map(lambda _: ocp.PLACEHOLDER, handler.metadata(saved).tree)
    names = list(by_path(skeleton))
    values: dict[str, np.ndarray] = {}
    for name in by_path(tree):
        if name.startswith(part):
            wanted = [0 if each == name else ocp.PLACEHOLDER for each in names]
            item = jax.tree.structure(skeleton).unflatten(wanted)
            values[name] = by_path(handler.restore(saved, args=ocp.args.PyTreeRestore(item)))[name]
    return values


def to_devices(values: dict[str, np.ndarray], target: Any) -> Any:
    """The tree `target` with the arrays of `values`, by their paths, on its devices; its other leaves stay.

    The data of a key become a key again.
    """

    def placed(path: Any, leaf: Any) -> Any:
        if name_of(path) not in values:
            return leaf
        array = jax.device_put(values[name_of(path)], leaf.sharding)
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


def digest_of(arrays: dict[str, np.ndarray]) -> str:
    """One digest of arrays by their paths."""
    return digest(json.dumps(array_digests(arrays), sort_keys=True).encode())
