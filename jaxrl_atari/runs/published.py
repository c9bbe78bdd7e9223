"""Published checkpoints, which hold the parameters of a network and nothing else."""

from typing import Any

import jax.numpy as jnp

from jaxrl_atari.errors import UserError
from jaxrl_atari.runs.checkpoints import Checkpoints, saved_return_mean

PORTABLE_CHUNK_BYTES = 2**20
"""Size of an array in a file of a published checkpoint, before compression: repositories refuse large files."""


def save_parameters(checkpoints: Checkpoints, params: Any, meta: dict[str, Any], rounded: bool = False) -> None:
    """Writes a published checkpoint, with only the parameters: 7 MB instead of 20 for `nature`.

    Args:
        checkpoints: where it is written.
        params: parameters of a checkpoint.
        meta: meta of the same checkpoint.
        rounded: round the kernel of the layer `dense` to bfloat16, and store it in half the space. Where the
            network computes in bfloat16, its outputs stay the same bits, because it rounds that kernel anyway.

    Raises:
        UserError: it cannot be written; `rounded` with another layout of parameters, or for a network that was
            trained in another arithmetic.
    """
    if rounded:
        computed = meta.get("compute_dtype")
        if computed != "bfloat16" or "dense" not in params:
            raise UserError(
                f"{checkpoints.directory}: only a network with a layer `dense` that was trained in bfloat16 can be"
                f" rounded without another output; this one computed in {computed}: leave --rounded out"
            )
        kernel = params["dense"]["kernel"]
        # Still float32, its lower half zero, which the compression of the files takes out.
        kernel = kernel.astype(jnp.bfloat16).astype(kernel.dtype)
        params = {**params, "dense": {**params["dense"], "kernel": kernel}}
    arrays = {"train_state": {"params": params}}
    own = {"parameters_only": True, "rounded": rounded}
    checkpoints.save(
        meta["env_steps"],
        {"arrays": arrays},
        meta | own,
        saved_return_mean(meta),
        chunk_bytes=PORTABLE_CHUNK_BYTES,
        advice="fix the cause, then publish again",
    )
