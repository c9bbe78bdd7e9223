import os
import signal
import subprocess
import sys

import pytest

from jaxrl_atari.cli.signals import SIGNALS, StopRequest
from jaxrl_atari.config import Config, DevicesConfig
from jaxrl_atari.errors import Stopped
from jaxrl_atari.trials import sessions
from jaxrl_atari.trials.launch import Job, attempt, run_here


@pytest.mark.parametrize("number", SIGNALS)
def test_any_signal_requests_a_stop_and_a_second_ctrl_c_ends_at_once(number):
    """A cluster may send the others any number of times."""
    before = signal.getsignal(number)
    with StopRequest(quick=False) as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested
        for again in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.raise_signal(again)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", SIGNALS)
def test_any_signal_interrupts_a_command_so_that_it_can_clean_up(number):
    """Also SIGHUP: a closed terminal must not leave a partial file of `evaluate --video`."""
    code = (
        "import signal, sys; from jaxrl_atari import cli\n"
        "def main():\n"
        "    try: signal.raise_signal(int(sys.argv[1]))\n"
        "    finally: print('cleaned up')\n"
        "cli.run(main)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(int(number))], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "cleaned up\n", "interrupted\n")


def test_a_signal_that_the_parent_ignores_stays_ignored():
    """SIGINT, in a script's background: Ctrl-C in the foreground is not meant for it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_python_has_not_set_stays(monkeypatch):
    """A program that embeds Python may have one. Python shows it as None, and cannot set it again."""
    found = signal.getsignal
    before = found(signal.SIGUSR2)
    monkeypatch.setattr(signal, "getsignal", lambda number: None if number == signal.SIGUSR2 else found(number))
    with StopRequest():
        assert found(signal.SIGUSR2) == before
        assert found(signal.SIGUSR1) != before


COMPILING = """
import hashlib, time
from jaxrl_atari import cli
from jaxrl_atari.cli.signals import StopRequest

def main():
    with StopRequest("session 0") as stop:
        stop.training = {training}
        print("compiling", flush=True)
        end = time.monotonic() + 30
        while not stop.requested:
            # As in a compiled function, Python handles no signals.
            hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)
            assert time.monotonic() < end
    raise KeyboardInterrupt("stopped; go on with a command")
cli.run(main)
"""


@pytest.mark.parametrize(
    ("training", "output", "error"),
    [
        (False, "session 0  interrupted before the first update: there is nothing to save\n", "interrupted\n"),
        (
            True,
            "session 0  stopping after this update, with a last checkpoint\n",
            "stopped; go on with a command\n",
        ),
    ],
)
def test_a_signal_is_answered_after_a_compiled_function(training, output, error):
    code = COMPILING.format(training=training)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **pipes) as process:
        assert process.stdout.readline() == "compiling\n"
        process.terminate()
        assert (*process.communicate(timeout=60), process.returncode) == (output, error, 130)


def test_a_process_of_several_promises_no_update_before_its_first_one(tmp_path, monkeypatch, capfd):
    """With `devices.distributed`: all processes end together, perhaps while they start."""

    def run_session(*_, stop_requested, **options):
        signal.raise_signal(signal.SIGTERM)
        assert stop_requested()

    monkeypatch.setattr(sessions, "run_session", run_session)
    config = Config(devices=DevicesConfig(distributed=True))
    with pytest.raises(Stopped):
        sessions.train_job(Job(config, tmp_path, 0, description={}, position=0))
    said = capfd.readouterr().out
    assert said.startswith("session 0  stopping: each session that has trained writes a last checkpoint")


def test_a_stop_that_comes_when_a_session_has_asked_for_the_last_time_starts_no_other_session(
    tmp_path, monkeypatch
):
    trained = []

    def run_session(config, directory, number, *, on_first_update, **options):
        trained.append(number)
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(sessions, "run_session", run_session)
    jobs = [Job(Config(), tmp_path, number, description={}, position=number) for number in range(2)]
    with pytest.raises(KeyboardInterrupt):
        run_here(jobs, sessions.train_job, lambda job, failure: None)
    assert trained == [0]


def test_such_a_stop_of_one_process_stops_them_all(tmp_path, monkeypatch):
    monkeypatch.setattr(sessions, "run_session", lambda *_, **options: None)
    monkeypatch.setattr(sessions.distributed, "sum_over_processes", lambda count: count + 1)  # of another process
    with pytest.raises(Stopped):
        sessions.train_job(Job(Config(), tmp_path, 0, description={}, position=0))


def test_a_user_s_exit_is_a_failure(capfd):
    failure = attempt(sys.exit)
    assert failure is not None
    assert not failure.correctable
    assert "SystemExit" in capfd.readouterr().err


CLOSED = """
import os, signal, sys
from jaxrl_atari.cli.signals import StopRequest
from jaxrl_atari.output import say

how, read = sys.argv[1], int(sys.argv[2])
# Whoever started the tests may have been under nohup.
signal.signal(signal.SIGHUP, signal.SIG_IGN if how == "nohup" else signal.SIG_DFL)
with StopRequest(quick=False) as stop:
    os.close(read)  # nobody holds the other end of standard output any more
    signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGHUP)  # shell and kernel may both send it
    if how == "closed":
        say("nobody reads this")
    sys.exit(10 if stop.requested else 11)
"""


@pytest.mark.parametrize(("how", "status"), [("closed", 10), ("nohup", 11)])
def test_a_closed_terminal_is_a_stop_request_but_not_under_nohup(how, status):
    """In a process of its own, whose standard output is a pipe that breaks."""
    read, write = os.pipe()
    command = [sys.executable, "-c", CLOSED, how, str(read)]
    with subprocess.Popen(command, stdout=write, stderr=subprocess.PIPE, pass_fds=[read], text=True) as process:
        os.close(read)
        os.close(write)
        assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == status


SWALLOWED = """
import signal, time
from jaxrl_atari import cli
from jaxrl_atari.cli.signals import StopRequest

class Ignored:
    # Python ignores what it raises, as in the callbacks of imports and of the garbage collector.
    def __init__(self, number):
        self.number = number

    def __del__(self):
        signal.raise_signal(self.number)

def main():
    if {how!r} == "replaced":
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as error:
            raise ImportError("initialization failed") from error  # as an extension module does
    if {how!r} != "second":
        Ignored(signal.SIGTERM)
    if {how!r} == "returns":
        return
    try:
        with StopRequest(quick=False, answer="stopping") as stop:
            if {how!r} == "second":
                signal.raise_signal(signal.SIGTERM)
                Ignored(signal.SIGINT)
            time.sleep(30)
            print("it has trained")
    finally:
        time.sleep(0.1)
        print("cleared up")
cli.run(main)
"""


@pytest.mark.parametrize(
    ("how", "printed"),
    [("replaced", ""), ("returns", ""), ("trains", "cleared up\n"), ("second", "stopping\ncleared up\n")],
)
def test_a_signal_during_a_callback_is_not_lost(how, printed):
    command = [sys.executable, "-c", SWALLOWED.format(how=how)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, printed, "interrupted\n")
