"""Two processes that cannot learn together, or wait for one that never comes."""

import signal
import time

import pytest
from two_processes import TINY, distributed, output_of_both
from user_commands import free_address, start


def test_each_process_needs_as_many_devices_as_the_others(tmp_path):
    coordinator = free_address()
    words = [*TINY, "--env.num-envs", 6, "--ppo.minibatch-size", 48, "--run-dir", tmp_path / "run"]
    flags = [f"--xla_force_host_platform_device_count={count}" for count in (2, 1)]
    children = [start([*words, *distributed(coordinator, i)], XLA_FLAGS=flags[i]) for i in range(2)]
    for output in output_of_both(children, status=2):
        assert (
            "error: devices.distributed = True: expected as many devices in each process; they have 2 and 1"
            in output
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("index", [0, 1])
def test_a_signal_ends_the_wait_for_a_process_that_never_comes(index, tmp_path):
    coordinator = free_address()
    process = start([*TINY, "--run-dir", tmp_path / "run", *distributed(coordinator, index, 3)])
    printed = ""
    while "waiting" not in printed:
        printed = process.stdout.readline()
        assert printed
    assert printed == f"waiting for all 3 processes at {coordinator}\n"
    signalled = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[0].startswith("interrupted\n")  # then JAX logs that it ends
    assert process.returncode == 130
    assert time.monotonic() - signalled < 20
    assert not (tmp_path / "run").exists()
