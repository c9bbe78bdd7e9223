"""Several processes that learn together (`devices.distributed`): joining them, sums, and agreement.

In a process that is alone, `sum_over_processes`, `gather_rows` and `agree` return their argument and start no back
end.
"""

import re
import socket
from multiprocessing.pool import ThreadPool

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather

from jaxrl_atari.cli import say
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import ConfigError, UserError, require
from jaxrl_atari.hardware.choice import limit_jax
from jaxrl_atari.hardware.runtime import jax_config

WAIT_SECONDS = 24 * 3_600
"""How long a process waits for the others."""


def join_processes(devices: DevicesConfig) -> None:
    """Makes this process one of several that learn together. Call before JAX starts its back end.

    Raises:
        UserError: the options do not say who the others are, or process 0 cannot use its port.
    """
    limit_jax(devices)
    coordinator = devices.coordinator
    count = devices.num_processes
    if coordinator is not None:
        expected = "HOST:PORT of process 0"
        require(re.fullmatch(r".+:\d+", coordinator), "devices.coordinator", coordinator, expected)
        if devices.process_index == 0:  # without a free port, JAX crashes when the process ends
            try:
                socket.create_server(("", int(coordinator.rpartition(":")[2]))).close()
            except (OSError, OverflowError) as error:
                expected = "a free port of this machine"
                raise ConfigError("devices.coordinator", coordinator, expected, str(error)) from error
        everyone = f"all {count} processes" if count else "all processes"
        say(f"waiting for {everyone} at {coordinator}")
    # It would swallow SIGTERM until a session handles it.
    jax_config.update("jax_enable_preemption_service", False)
    try:  # in a thread: JAX waits in C++, where signals have no effect
        with ThreadPool(1) as thread:
            options = {
                "coordinator_address": coordinator,
                "num_processes": count,
                "process_id": devices.process_index,
                "initialization_timeout": WAIT_SECONDS,
            }
            thread.apply(jax.distributed.initialize, kwds=options)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"devices.distributed: {str(error).rstrip('.')}; it needs devices.coordinator HOST:PORT,"
            " devices.num_processes and devices.process_index, or a cluster manager that JAX knows"
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
    """The rows `[n, k]` of all processes, in the order of the processes. n may differ between them.

    Numbers come back as float32 from several processes, and as they are from one.
    """
    if not jax.distributed.is_initialized():
        return rows
    with jax.transfer_guard("allow"):
        counts = process_allgather(np.int32(len(rows)))
        longest = int(counts.max())
        padding = 2 ** longest.bit_length() - len(rows)  # to a power of 2, so that few sizes are compiled
        everywhere = process_allgather(np.pad(rows.astype(np.float32), ((0, padding), (0, 0))))
    return everywhere[np.arange(everywhere.shape[1]) < counts[:, None]]


def agree(text: str) -> str:
    """Process 0's text, in every process."""
    if not jax.distributed.is_initialized():
        return text
    letters = np.frombuffer(text.encode().ljust(4_096, b"\0"), np.uint8)
    return bytes(broadcast_one_to_all(letters)).rstrip(b"\0").decode()


def wait_for_all() -> None:
    """Waits until every process calls it. Without that, the first process to exit would end the others."""
    agree("")
