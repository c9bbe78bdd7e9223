"""Several processes that learn together (`devices.distributed`): joining, sums, and agreement.

In a single process, `sum_over_processes`, `gather_items` and `agree` return their argument, and start no back end.
In several, what they return has passed through JSON: a tuple comes back as a list.
"""

import itertools
import json
import os
import re
import socket
from collections import Counter
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from typing import Any

import jax
import numpy as np
from jax.experimental.multihost_utils import process_allgather

from jaxrl_atari.config import DevicesConfig
from jaxrl_atari.errors import ConfigError, UserError, require
from jaxrl_atari.hardware.jax_settings import has_started, jax_options
from jaxrl_atari.hardware.start import limit_jax
from jaxrl_atari.output import say

WAIT_SECONDS = 24 * 3_600
"""Time that a process waits for the others to start."""

LOCAL_IDS_VARIABLE = "JAX_LOCAL_DEVICE_IDS"
"""JAX's environment variable for the GPUs of one process of several."""


def join_processes(options: DevicesConfig) -> None:
    """Makes this process one of several that learn together. Call before JAX starts its back end.

    Raises:
        ConfigError: JAX has started, this machine lacks the devices, process 0 cannot use its port, or an option
            or JAX_LOCAL_DEVICE_IDS has an impossible value.
        UserError: the options do not say where the other processes are.
    """
    is_first = not jax.distributed.is_initialized() and not has_started()
    expected = "to be set once in a process, before JAX starts"
    require(is_first, "devices.distributed", True, expected, "train in a fresh process")
    coordinator = options.coordinator
    count = options.num_processes
    if coordinator is not None:
        _check_coordinator(coordinator, is_here=options.process_index == 0)
    _check_indices(options)
    chosen = limit_jax(options)
    if coordinator is not None:
        everyone = f"all {count} processes" if count else "all processes"
        say(f"waiting for {everyone} at {coordinator}")
    # JAX's preemption service would swallow SIGTERM until a session handles it.
    jax_options.set_for_process("jax_enable_preemption_service", False)
    arguments: dict[str, Any] = {
        "coordinator_address": coordinator,
        "num_processes": count,
        "process_id": options.process_index,
        "initialization_timeout": WAIT_SECONDS,
    }
    if not os.environ.get(LOCAL_IDS_VARIABLE) and chosen.used:
        arguments["local_device_ids"] = chosen.used  # a cluster manager would give one GPU to each process
    try:
        with ThreadPool(1) as thread:  # JAX waits in C++, where the main thread would answer no signal
            joined = thread.apply_async(jax.distributed.initialize, kwds=arguments)
            while not joined.ready():
                joined.wait(0.2)
            joined.get()
    except (RuntimeError, ValueError) as error:
        hint = ""
        if None in (coordinator, count, options.process_index):
            hint = (
                "; it needs devices.coordinator HOST:PORT, devices.num_processes and devices.process_index,"
                " or a cluster manager that JAX knows"
            )
        raise UserError(f"devices.distributed: {str(error).rstrip('.')}{hint}") from error


def _check_indices(options: DevicesConfig) -> None:
    """Raises `ConfigError` for an index of a process that there is not, or indices of GPUs that are none."""
    count, index = options.num_processes, options.process_index
    if count is not None and index is not None:
        expected = f"less than devices.num_processes = {count}; the first process has index 0"
        require(index < count, "devices.process_index", index, expected)
    local_ids = os.environ.get(LOCAL_IDS_VARIABLE)
    if local_ids:
        is_list = re.fullmatch(r"[0-9]+(,[0-9]+)*", local_ids.replace(" ", "")) is not None
        require(is_list, LOCAL_IDS_VARIABLE, local_ids, "indices of visible GPUs, such as 0,1")


def _check_coordinator(coordinator: str, is_here: bool) -> None:
    """Raises `ConfigError` unless `devices.coordinator` is HOST:PORT, with a port that is free if it is here."""
    expected = "HOST:PORT of process 0, with a PORT from 1 to 65535"
    is_address = re.fullmatch(r".+:\d+", coordinator) is not None
    port = int(coordinator.rpartition(":")[2]) if is_address else 0
    require(1 <= port <= 65_535, "devices.coordinator", coordinator, expected)
    if is_here:  # without a free port, JAX crashes when the process ends
        try:
            socket.create_server(("", port)).close()
        except OSError as error:
            expected = "a free port of this machine"
            raise ConfigError("devices.coordinator", coordinator, expected, str(error)) from error


def is_leader() -> bool:
    """True in the process that writes files: process 0 of several, or the only one.

    In a single process, it does not start JAX's back end.
    """
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def sum_over_processes(count: int) -> int:
    """The sum of the counts of all processes."""
    if not jax.distributed.is_initialized():
        return count
    return int(_gather(np.int32(count)).sum())


def gather_items(items: Sequence[Any]) -> Sequence[Any]:
    """The items of all processes, in the order of the processes.

    They travel as JSON, which keeps whole numbers and floats exactly. A tuple comes back as a list. The number of
    items may differ between processes.
    """
    if not jax.distributed.is_initialized():
        return items
    text = np.frombuffer(json.dumps(items).encode(), np.uint8)
    lengths = _gather(np.int32(len(text)))
    longest = int(lengths.max())
    padding = 2 ** longest.bit_length() - len(text)  # up to a power of 2, so that few sizes are compiled
    texts = _gather(np.pad(text, (0, padding)))
    parts = [json.loads(bytes(each[:length])) for each, length in zip(texts, lengths, strict=True)]
    return list(itertools.chain(*parts))


def _gather(x: Any) -> np.ndarray:
    """The arrays of all processes, which have one shape: [...] -> [processes, ...].

    Raises:
        ConfigError: processes have different numbers of devices, between which JAX gathers nothing.
    """
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
