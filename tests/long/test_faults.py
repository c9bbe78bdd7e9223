"""Faults that CI rehearses: signals, kills, and saves that fail. `tests/release` has the long rehearsals."""

import signal
import subprocess
import time

import pytest
from rehearsal import ENDLESS, INTERRUPTED, rehearsal

train = pytest.fixture(rehearsal)


def test_one_line_survives_a_pause_a_kill_and_a_signal(train):
    """SIGSTOP and SIGCONT, SIGKILL, then SIGUSR1; the same command line each time."""
    process = train.start(*ENDLESS)
    train.wait_for(process)
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    process.send_signal(signal.SIGCONT)
    train.wait_for(process, after=train.last())
    process.kill()
    process.communicate()

    before = train.last()
    process = train.start(*ENDLESS)
    train.wait_for(process, after=before)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED, output
    assert f"resumed at {before:,} env steps" in output
    assert train.last() == train.logged()[-1]
    # The last line is the command that goes on.
    last, command = output.splitlines()[-1], f"python -m jaxrl_atari.train --resume {train.run_dir}"
    assert last == f"stopped; go on with {command}"
    train.continues()


def test_a_save_that_fails_ends_the_command_with_one_line(train):
    assert train.run("--total-env-steps", 300)[0] == 0
    limit = "-f 512"  # no file may grow beyond 256 KiB, as on a full disk
    process = train.start(*ENDLESS, stderr=subprocess.PIPE, limit=limit)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 2, errors
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "the checkpoint could not be written" in line
    assert train.last() > 0
    train.continues()
