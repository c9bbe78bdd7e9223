"""Several processes that learn together (`devices.distributed`): joining them, sums, and agreement.

In a process that is alone, `sum_over_processes`, `gather_rows` and `agree` return their argument and start no back end.
"""

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather

from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import UserError
from jaxrl_atari.hardware.jax_gpus import limit_jax


def join_processes(config: DevicesConfig) -> None:
    """Makes this process one of several that learn together. Call before JAX starts its back end.

    Raises:
        UserError: the others cannot be found.
    """
    limit_jax(config)
    jax.config.update("jax_enable_preemption_service", False)  # it would swallow SIGTERM until a session handles it
    try:
        jax.distributed.initialize(config.coordinator, config.num_processes, config.process_index)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"devices.distributed: {str(error).rstrip('.')}; give devices.coordinator HOST:PORT, devices.num_processes"
            " and devices.process_index, or start it under a cluster manager that JAX knows"
        ) from error


def is_leader() -> bool:
    """True in the process that writes files: the only one, or process 0 of several.

    In a single process, this does not start JAX's back end.
    """
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def sum_over_processes(count: int) -> int:
    """The sum of every process's count; on one process, the count itself."""
    if not jax.distributed.is_initialized():
        return count
    with jax.transfer_guard("allow"):
        return int(process_allgather(np.int32(count)).sum())


def gather_rows(rows: np.ndarray) -> np.ndarray:
    """The rows `[n, k]` of all processes, in the order of the processes; each may have another n.

    Numbers come back as float32 from several processes, and as they are from one.
    """
    if not jax.distributed.is_initialized():
        return rows
    with jax.transfer_guard("allow"):
        counts = process_allgather(np.int32(len(rows)))
        # A power of two, so that few sizes are compiled.
        padded = np.zeros((1 << (max(1, int(counts.max())) - 1).bit_length(), rows.shape[1]), np.float32)
        padded[: len(rows)] = rows
        everywhere = process_allgather(padded)
    return np.concatenate([part[:count] for part, count in zip(everywhere, counts, strict=True)])


def agree(text: str) -> str:
    """Process 0's text, in every process."""
    if not jax.distributed.is_initialized():
        return text
    letters = np.zeros(4_096, np.uint8)
    encoded = np.frombuffer(text.encode(), np.uint8)
    letters[: len(encoded)] = encoded
    return bytes(broadcast_one_to_all(letters)).rstrip(b"\0").decode()


def wait_for_all() -> None:
    """Waits until every process has come here. JAX ends the others soon after one has left."""
    agree("")
