"""Two real processes that learn one session together, over gloo."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

CHILD = Path(__file__).with_name("distributed_child.py")


def run(tmp_path, processes, devices_here):
    """Parameters of each process."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    files = [tmp_path / f"{processes}_{index}.npz" for index in range(processes)]
    children = [
        subprocess.Popen(
            [sys.executable, CHILD, file, str(processes), str(index), coordinator, str(devices_here)], env=environment
        )
        for index, file in enumerate(files)
    ]
    try:
        for child in children:
            assert child.wait(timeout=240) == 0
    finally:
        for child in children:
            child.kill()  # jax.distributed swallows SIGTERM
            child.wait()
    return [dict(np.load(file)) for file in files]


def test_two_processes_learn_what_one_learns(tmp_path):
    first, second = run(tmp_path, processes=2, devices_here=1)
    (alone,) = run(tmp_path, processes=1, devices_here=2)
    assert first.keys() == second.keys() == alone.keys()
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
        assert np.sqrt(np.mean(np.square(first[name] - alone[name]))) < 1e-5  # Adam can have gone 6e-3
