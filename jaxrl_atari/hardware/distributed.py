"""Several processes that learn together (`devices.distributed`): joining, sums, and agreement.

In a single process, `sum_over_processes`, `gather_items` and `agree` return their argument, and start no back end.
"""

import itertools
import json
import os
import socket
from collections import Counter
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from jaxrl_atari.cli.signals import received
from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import ConfigError, UserError, require
from jaxrl_atari.hardware.settings import jax_config
from jaxrl_atari.hardware.start import limit_jax, start_jax
from jaxrl_atari.output import say

WAIT_SECONDS = 24 * 3_600
"""Time that a process waits for the others to start."""


def join_processes(options: DevicesConfig) -> None:
    """Makes this process one of several that learn together. Call before JAX starts its back end.

    Raises:
        ConfigError: this machine lacks the devices, process 0 cannot use its port, or an option has an impossible
            value.
        UserError: the options do not say where the other processes are; JAX has started, or cannot start on a
            GPU.
    """
    coordinator, count, index = options.coordinator, options.num_processes, options.process_index
    if coordinator is not None and index == 0:  # without a free port, JAX crashes when the process ends
        try:
            socket.create_server(("", int(coordinator.rpartition(":")[2]))).close()
        except (ValueError, OSError, OverflowError) as error:
            expected = "HOST:PORT, with a free port of this machine"
            raise ConfigError("devices.coordinator", coordinator, expected, str(error)) from error
    if count is not None and index is not None:  # the others would wait
        expected = f"less than devices.num_processes = {count}; the first process has index 0"
        require(index < count, "devices.process_index", index, expected)
    chosen = limit_jax(options)
    if coordinator is not None:
        everyone = f"all {count} processes" if count else "all processes"
        say(f"waiting for {everyone} at {coordinator}")
    # JAX's preemption service would swallow SIGTERM until a session handles it.
    jax_config.update("jax_enable_preemption_service", False)
    arguments: dict[str, Any] = {
        "coordinator_address": coordinator,
        "num_processes": count,
        "process_id": index,
        "initialization_timeout": WAIT_SECONDS,
    }
    if not os.environ.get("JAX_LOCAL_DEVICE_IDS") and chosen.used:
        arguments["local_device_ids"] = chosen.used  # a cluster manager would give one GPU to each process
    try:
        with ThreadPool(1) as thread:  # JAX waits in C++, where the main thread would answer no signal
            joined = thread.apply_async(jax.distributed.initialize, kwds=arguments)
            while not joined.ready():
                joined.wait(0.2)
                if received:  # Python swallows an interrupt in a callback, such as one of the garbage collector
                    raise KeyboardInterrupt
            joined.get()
        if chosen.used:
            # XLA tunes a program in all processes together, which would wait for those that have it on disk.
            jax_config.update("jax_enable_compilation_cache", False)
            start_jax(options, chosen)
    except (RuntimeError, ValueError) as error:
        hint = ""
        if None in (coordinator, count, index):
            hint = (
                "; it needs devices.coordinator HOST:PORT, devices.num_processes and devices.process_index,"
                " or a cluster manager that JAX knows"
            )
        raise UserError(f"devices.distributed: {str(error).rstrip('.')}{hint}") from error


def is_leader() -> bool:
    """True in the process that writes files: process 0 of several, or the only one.

    In a single process, it does not start JAX's back end.
    """
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def sum_over_processes(count: int) -> int:
    """The sum of the counts of all processes."""
    return int(gather(np.int32(count)).sum())


def gather_items(items: Sequence[Any]) -> Sequence[Any]:
    """The items of all processes, in the order of the processes.

    They travel as JSON, which keeps whole numbers and floats exactly. A tuple comes back as a list. The number of
    items may differ between processes.
    """
    if not jax.distributed.is_initialized():
        return items
    text = np.frombuffer(json.dumps(items).encode(), np.uint8)
    lengths = gather(np.int32(len(text)))
    longest = int(lengths.max())
    padding = 2 ** longest.bit_length() - len(text)  # up to a power of 2, so that few sizes are compiled
    texts = gather(np.pad(text, (0, padding)))
    parts = [json.loads(bytes(each[:length])) for each, length in zip(texts, lengths, strict=True)]
    return list(itertools.chain(*parts))


def gather(x: Any) -> np.ndarray:
    """The arrays of all processes, which have one shape: [...] -> [processes, ...].

    Raises:
        ConfigError: processes have different numbers of devices, between which JAX gathers nothing.
    """
    if not jax.distributed.is_initialized():
        return np.asarray(x)[None]
    numbers = Counter(device.process_index for device in jax.devices())
    got = " and ".join(str(numbers[index]) for index in sorted(numbers))
    hint = f"they have {got}; CUDA_VISIBLE_DEVICES or JAX_LOCAL_DEVICE_IDS chooses the GPUs of a process"
    expected = "as many devices in each process"
    require(len(set(numbers.values())) == 1, "devices.distributed", True, expected, hint)
    with jax.transfer_guard("allow"):
        return process_allgather(x)


def agree(text: str) -> str:
    """The text of process 0, in every process."""
    return gather_items([text])[0]


def wait_for_all() -> None:
    """Returns once every process has called it. Otherwise the exit of process 0 would abort the others."""
    agree("")
