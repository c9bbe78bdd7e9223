"""Arrays of a checkpoint, written and read by orbax, in this process alone and without its internal messages."""

import logging
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

# Orbax logs internals, and errors that it also raises, through absl, which prints warnings to the terminal.
logging.getLogger("absl").addFilter(lambda record: "orbax" not in Path(record.pathname).parts)


def single_process() -> ocp.options.MultiprocessingOptions:
    """Options that keep orbax from waiting for other processes: one process writes, and each reads on its own."""
    if not jax.distributed.is_initialized():
        return ocp.options.MultiprocessingOptions()
    process = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=process, active_processes={process}, barrier_sync_key_prefix=f"process_{process}"
    )


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def to_host(arrays: Any) -> Any:
    """NumPy copies: a process that writes alone cannot write arrays on devices that it shares with other processes."""
    plain = jax.tree.map(lambda x: jax.random.key_data(x) if _is_key(x) else x, arrays)
    return jax.tree.map(np.array, jax.device_get(plain))


def _restore_template(target: Any) -> np.ndarray:
    """An array of the shape and dtype that orbax reads for `target`."""
    data = jax.eval_shape(jax.random.key_data, target) if _is_key(target) else target
    return np.empty(data.shape, data.dtype)


def to_device(value: np.ndarray, target: Any) -> jax.Array:
    """Moves a restored array to the devices of `target`; key data become a key again."""
    array = jax.device_put(value, target.sharding)
    return jax.random.wrap_key_data(array) if _is_key(target) else array


def read_arrays(directory: Path, target: Any) -> Any:
    """Reads a folder of arrays as NumPy arrays, in the structure, shapes and dtypes of `target`. Can raise any type."""
    handler = ocp.StandardCheckpointHandler(multiprocessing_options=single_process())
    hide_later_errors()
    return handler.restore(
        directory.absolute(),  # pyright: ignore[reportArgumentType]
        args=ocp.args.StandardRestore(jax.tree.map(_restore_template, target)),
    )


@cache
def hide_later_errors() -> None:
    """From now on, hides the tracebacks of all arrays but the first. Call it before orbax writes or reads.

    When one array cannot be written or read, orbax raises the error and closes its event loop. Other arrays fail with
    it, or later, in threads of tensorstore, which call the closed loop: asyncio and Python would print a traceback for
    each, beside our one-line error. A save fails in the background, so this lasts until the process ends.
    """
    logging.getLogger("asyncio").addFilter(
        lambda record: (
            not (
                "exception was never retrieved" in record.getMessage()
                and record.exc_info
                and re.match("[A-Z_]+: ", str(record.exc_info[1]))  # the form of tensorstore's errors
            )
        )
    )
    hook = sys.unraisablehook

    def hide_closed_loop(unraisable: Any) -> None:
        # An exception in a callback of Python has an object: the function.
        if unraisable.object is not None or str(unraisable.exc_value) != "Event loop is closed":
            hook(unraisable)

    sys.unraisablehook = hide_closed_loop


def reason_text(error: Exception) -> str:
    """An exception as one short line. Long texts lose their middle: the cause is at the start or at the end."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 240 else f"{text[:120]} ... {text[-120:]}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
