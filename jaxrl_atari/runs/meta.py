"""Checks of a checkpoint that start no back end of JAX: whether it is sound, and the values in its meta.

The meta has a checksum of each array and one of itself: BLAKE2b digests of 64 bits. They find damage; they do not prove
who wrote the checkpoint.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_atari.runs.files import read_json


def array_shapes(arrays: Any) -> dict[str, str]:
    """Path -> dtype and shape of each array in a pytree: `{"train_state/params/value/bias": "float32[1]", ...}`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(arrays)
    }


def array_checksums(arrays: Any) -> dict[str, str]:
    """Path -> `array_checksum` of each array in a pytree of NumPy arrays."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): array_checksum(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(arrays)
    }


def array_checksum(array: np.ndarray) -> str:
    """The checksum of an array's dtype, shape and bytes."""
    return _digest(f"{array.dtype}{list(array.shape)}".encode(), np.ascontiguousarray(array).tobytes())


def meta_checksum(meta: dict[str, Any]) -> str:
    """The checksum of a meta, its own `checksum` left out."""
    content = {name: value for name, value in meta.items() if name != "checksum"}
    return _digest(json.dumps(content, sort_keys=True).encode())


def _digest(*parts: bytes) -> str:
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


def is_sound(step_dir: Path) -> bool:
    """Whether a checkpoint can be read and equals its checksums.

    This reads the arrays with TensorStore, as orbax does, but starts no back end of JAX, as orbax would: whoever asks
    whether a session is finished must leave the GPUs to the sessions. It checks only that orbax's own description of
    the arrays is JSON; `Checkpoints.restore` checks the rest.
    """
    import tensorstore

    try:
        meta = read_json(step_dir / "meta" / "metadata")
        if meta["checksum"] != meta_checksum(meta):
            return False
        read_json(step_dir / "arrays" / "_METADATA")
        folder = (step_dir / "arrays").absolute()
        reads = {}
        for name in meta["shapes"]:
            kvstore = {"driver": "file", "path": f"{folder}/{name.replace('/', '.')}/"}
            reads[name] = tensorstore.open({"driver": "zarr", "kvstore": kvstore}).result().read()
        found = {name: array_checksum(read.result()) for name, read in reads.items()}
    except Exception:  # TensorStore can raise any type for a damaged file
        return False
    return found == meta["checksums"]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e30  # not NaN


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 10**15


def _is_window(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 1_000 and all(map(_is_number, value))


_IS_VALID = {
    "config": lambda value: isinstance(value, dict) and _is_count(value.get("total_env_steps")),
    "num_actions": lambda value: _is_count(value) and 1 <= value <= 18,
    "env_steps": _is_count,
    "updates": _is_count,
    "wall_seconds": _is_number,
    "best_score": lambda value: value is None or _is_number(value),
    "score": lambda value: value is None or _is_number(value),
    "statistics": lambda value: (
        isinstance(value, dict)
        and _is_count(value.get("episodes"))
        and all(_is_window(value.get(name)) for name in ("returns", "lengths", "points"))
    ),
}

SESSION_FIELDS = ("config", "num_actions", "env_steps", "updates", "wall_seconds", "best_score", "statistics")
"""Fields that a session needs to resume."""


def require_fields(meta: dict[str, Any], names: tuple[str, ...]) -> None:
    """Raises `ValueError` unless a meta has these fields, each with a value that can be used."""
    for name in names:
        if name not in meta or not _IS_VALID[name](meta[name]):
            raise ValueError(f"{name} is {f'{meta[name]!r:.40}' if name in meta else 'missing'}")
