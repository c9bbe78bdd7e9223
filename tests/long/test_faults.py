"""Faults that CI rehearses: signals, kills, and saves that fail. `tests/release` has the long rehearsals."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import small_sessions
from rehearsal import ENDLESS, INTERRUPTED, rehearsal
from user_commands import ROOT, still_running

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


@pytest.fixture
def family(tmp_path):
    """Starts a parent with two children, as sessions side by side, but without training."""
    started = []

    def start(stdout=subprocess.PIPE):
        parent = subprocess.Popen(
            [sys.executable, small_sessions.__file__, tmp_path], stdout=stdout, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        started.append(parent)
        end = time.monotonic() + 60
        while len([*tmp_path.glob("ready *")]) < 2:
            assert parent.poll() is None, parent.communicate()
            assert time.monotonic() < end
            time.sleep(0.05)
        return parent, psutil.Process(parent.pid).children()

    yield start
    for parent in started:
        with parent:  # closes its pipes and waits
            parent.kill()


def saved(folder):
    return sorted(path.name for path in folder.glob("saved *")) == ["saved 0", "saved 1"]


def test_a_signal_to_every_process_of_a_trial_is_no_second_ctrl_c(family, tmp_path):
    """As clusters and terminals send it: the parent passes its own on to sessions that have had theirs."""
    parent, children = family()
    for process in (*children, parent):
        process.send_signal(signal.SIGINT)
    parent.communicate(timeout=60)
    assert parent.returncode == INTERRUPTED
    assert saved(tmp_path)


def test_a_second_ctrl_c_ends_the_sessions_at_once(family, tmp_path):
    (tmp_path / "deaf").touch()
    parent, children = family()
    for _ in range(2):
        parent.send_signal(signal.SIGINT)
        time.sleep(0.5)
    parent.communicate(timeout=60)
    assert parent.returncode == INTERRUPTED
    assert not still_running(children, seconds=5)
    assert not saved(tmp_path)


def test_sessions_end_with_a_killed_parent(family, tmp_path):
    parent, children = family()
    parent.kill()
    assert not still_running(children, seconds=30)
    assert saved(tmp_path), "each child ended by itself"


def test_sessions_save_when_their_parent_fails(family, tmp_path):
    """As it does when the disk is full, and it cannot start the process of another session."""
    (tmp_path / "full").touch()
    parent, _ = family()
    _, errors = parent.communicate(timeout=60)
    assert parent.returncode == 2
    assert "No space left on device" in errors
    assert sorted(path.name for path in tmp_path.glob("saved *")) == ["saved 1", "saved 2"]


def test_a_second_ctrl_c_ends_the_sessions_of_a_parent_that_fails_at_once(family, tmp_path):
    for name in ("full", "deaf"):
        (tmp_path / name).touch()
    parent, children = family()
    end = time.monotonic() + 60
    while (tmp_path / "full").exists():  # until its error, after which it waits for the sessions
        assert time.monotonic() < end
        time.sleep(0.05)
    for _ in range(2):
        time.sleep(0.5)
        parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=60)
    assert parent.returncode == INTERRUPTED
    assert not still_running(children, seconds=5)
    assert not [*tmp_path.glob("saved *")]


def test_two_writers_to_a_pipe_that_nobody_reads(family, tmp_path):
    """As `| head -1`: both sessions write on, and a signal still reaches them through their parent."""
    read, write = os.pipe()
    parent, _ = family(stdout=write)
    os.close(write)
    os.close(read)
    time.sleep(0.5)  # they write to it meanwhile
    assert parent.poll() is None
    parent.terminate()
    assert parent.wait(timeout=30) == INTERRUPTED, parent.stderr.read()
    assert saved(tmp_path)
