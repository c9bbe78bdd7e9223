"""The launcher, with jobs that do not train: failures, slots, stops, kills, and the order of compiling."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import small_jobs
from user_commands import ROOT, still_running

from jaxrl_atari.cli.signals import INTERRUPTED
from jaxrl_atari.errors import SessionsFailed, UserError
from jaxrl_atari.trials.launch import raise_failures, run_jobs
from jaxrl_atari.trials.slots import Slot, SlotPlan

PATHS = os.pathsep.join([str(ROOT), str(ROOT / "tests")])


@pytest.fixture(autouse=True)
def stub_jobs(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", PATHS)


def run(kind, folder, count, slots="A", parallel=2):
    """Runs jobs; returns their failures in the order of their ends."""
    ended = {}
    places = [Slot(f"on {name}", {"SLOT": name}) for name in slots]
    run_jobs(
        small_jobs.jobs(kind, folder, count),
        lambda job, failure: ended.update({job.position: failure}),
        SlotPlan(places, parallel),
    )
    return ended


def test_each_failure_is_named_and_the_others_finish(tmp_path, capfd):
    ended = run("fail", tmp_path, 5, parallel=3)
    assert {number: failure and (type(failure), str(failure)) for number, failure in ended.items()} == {
        0: None,
        1: (UserError, "seed = -1: expected another one"),
        2: (SessionsFailed, "ValueError: a bug"),
        3: (SessionsFailed, "ended by signal 9 (Killed); does the machine have too little memory?"),
        4: None,
    }
    lines = capfd.readouterr().out.splitlines()
    for line in ("on A", "it begins", "it goes on"):
        assert {f"session {number}  {line}" for number in range(5)} <= {*lines}
    assert "session 2  Traceback (most recent call last):" in lines


def test_an_only_session_fails_with_its_own_error(tmp_path):
    (tmp_path / "session_0").mkdir()
    (tmp_path / "session_0" / "metrics.csv").touch()
    failure = UserError("seed = -1: expected another one")
    with pytest.raises(UserError) as only:
        raise_failures({"session 0": failure}, 1, tmp_path, "")
    assert only.value is failure
    with pytest.raises(SessionsFailed, match="1 of 2 sessions failed"):
        raise_failures({"session 0": failure}, 2, tmp_path, "")


def test_a_job_runs_on_its_slot_or_on_the_one_that_is_free(tmp_path):
    """Job 0 waits for job 2, which would be next on A; B is free first."""
    assert list(run("take_turns", tmp_path, 3, slots="AB").values()) == [None] * 3
    assert sorted((tmp_path / "notes").read_text().splitlines()) == ["0 on A", "1 on B", "2 on B"]


def test_an_error_at_the_end_of_a_job_is_raised_once_the_others_have_saved(tmp_path):
    """A bug in the code that saves results, for example."""
    first, second = small_jobs.jobs("fail", tmp_path, 1)[0], small_jobs.jobs("until_stopped", tmp_path, 2)[1]

    def on_end(job, failure):
        small_jobs.wait_for(tmp_path / "ready 1")
        raise KeyError("score")

    with pytest.raises(KeyError):
        run_jobs([first, second], on_end, SlotPlan([Slot("here", {})], 2))
    assert (tmp_path / "saved 1").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="calls a function of glibc")
@pytest.mark.timeout(60)
def test_a_job_ends_although_a_library_hangs_at_exit(tmp_path, capfd):
    assert run("hang_at_exit", tmp_path, 1) == {0: None}
    assert (tmp_path / "handler called").exists()
    assert "the end of a line" in capfd.readouterr().out


@pytest.fixture
def family(tmp_path):
    """A function that starts a parent with two jobs, in a process group of their own."""
    started = []

    def start(stdout=subprocess.PIPE):
        parent = subprocess.Popen(
            [sys.executable, small_jobs.__file__, "parent", tmp_path], stdout=stdout, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
        started.append(parent)
        for number in range(2):
            small_jobs.wait_for(tmp_path / f"ready {number}")
        return parent, psutil.Process(parent.pid).children()

    yield start
    for parent in started:
        with parent:  # closes its pipes and waits
            parent.kill()


def saved(folder):
    return sorted(path.name for path in folder.glob("saved *")) == ["saved 0", "saved 1"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_every_process_is_one_stop_request(number, family, tmp_path):
    """As terminals and clusters send it. Ctrl-Z and `fg` before reach all of them, too."""
    parent, children = family()
    os.killpg(parent.pid, signal.SIGSTOP)
    for process in children:
        while process.status() != psutil.STATUS_STOPPED:
            time.sleep(0.05)
    os.killpg(parent.pid, signal.SIGCONT)
    os.killpg(parent.pid, number)
    parent.communicate(timeout=60)
    assert parent.returncode == INTERRUPTED
    assert saved(tmp_path)


def test_a_second_ctrl_c_kills_the_jobs(family, tmp_path):
    (tmp_path / "deaf").touch()
    parent, children = family()
    parent.send_signal(signal.SIGINT)
    while parent.stdout.readline()[:9] != "stopping:":
        pass
    parent.send_signal(signal.SIGINT)
    parent.communicate(timeout=60)
    assert parent.returncode == INTERRUPTED
    assert not still_running(children, seconds=5)
    assert not saved(tmp_path)


def test_jobs_save_and_end_when_their_parent_is_killed(family, tmp_path):
    parent, children = family()
    parent.kill()
    assert not still_running(children, seconds=30)
    assert saved(tmp_path)


def test_jobs_go_on_when_nobody_reads_their_output(family, tmp_path):
    """As `| head -1`; a signal still reaches them through their parent."""
    read, write = os.pipe()
    parent, _ = family(stdout=write)
    os.close(write)
    os.close(read)
    time.sleep(0.5)  # they write to it meanwhile
    assert parent.poll() is None
    parent.terminate()
    assert parent.wait(timeout=30) == INTERRUPTED, parent.stderr.read()
    assert saved(tmp_path)
