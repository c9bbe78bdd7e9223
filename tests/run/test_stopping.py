"""Signals: a stop request, an interrupted command, a closed terminal."""

import os
import signal
import subprocess
import sys

import pytest

from jaxrl_atari.cli.signals import SIGNALS, StopRequest


def test_any_signal_requests_a_stop_and_a_second_ctrl_c_ends_at_once():
    """A cluster may send the others any number of times."""
    for number in SIGNALS:
        before = signal.getsignal(number)
        with StopRequest(saves=True) as stop:
            assert not stop.requested
            signal.raise_signal(number)
            assert stop.requested
            for again in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                signal.raise_signal(again)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(number) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_interrupts_a_command_so_that_it_can_clean_up(number):
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


COMPILING = """
import hashlib, time
from jaxrl_atari import cli
from jaxrl_atari.cli.signals import StopRequest

def main():
    with StopRequest("session 0") as stop:
        stop.saves = {training}
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


CLOSED = """
import os, signal, sys
from jaxrl_atari.cli.signals import StopRequest
from jaxrl_atari.output import say

how, read = sys.argv[1], int(sys.argv[2])
# Whoever started the tests may have been under nohup.
signal.signal(signal.SIGHUP, signal.SIG_IGN if how == "nohup" else signal.SIG_DFL)
with StopRequest(saves=True) as stop:
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
