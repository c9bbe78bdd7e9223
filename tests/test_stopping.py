import os
import signal
import subprocess
import sys

import pytest
from user_commands import ROOT

from jaxrl_atari.cli.stopping import StopRequest


def test_the_first_signal_requests_a_stop_and_the_second_ends_at_once():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        assert not stop.requested()
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_signal_that_the_parent_ignores_stays_ignored():
    """SIGINT, in a script's background: Ctrl-C in the foreground is not meant for it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop.requested()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_cluster_may_send_its_signal_any_number_of_times(number):
    with StopRequest() as stop:
        for _ in range(3):
            signal.raise_signal(number)
        assert stop.requested()


COMPILING = """
import hashlib, time
from jaxrl_atari import cli
from jaxrl_atari.cli.stopping import SessionStop

def main():
    with SessionStop("session 0") as stop:
        stop.training = {training}
        print("compiling", flush=True)
        end = time.monotonic() + 30
        while True:
            hashlib.pbkdf2_hmac("sha256", b"", b"", {work})  # as in a compiled function, Python handles no signals
            if stop.requested():
                break
            assert time.monotonic() < end
cli.run(main)
"""


@pytest.mark.parametrize(
    ("training", "work", "message", "status"),
    [
        (False, 2_000_000_000, "session 0  interrupted before the first update: there is nothing to save", 130),
        (True, 1_000_000, "session 0  stopping after this update, with a last checkpoint", 0),
    ],
)
def test_a_signal_is_answered_while_a_function_is_compiled(training, work, message, status):
    code = COMPILING.format(training=training, work=work)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "compiling\n"
    process.terminate()
    try:
        output, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (output.strip(), process.returncode) == (message, status)


IMPORTING = """
import signal
from jaxrl_atari import cli

def main():
    try:
        signal.raise_signal(signal.SIGTERM)
    except BaseException as error:
        raise ImportError("initialization failed") from error  # as an extension module does
cli.run(main)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_during_an_import_is_answered(name):
    code = IMPORTING.replace("SIGTERM", name)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("module", "number"),
    [
        *(("train", number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)),
        ("search", signal.SIGTERM),
        ("suite.session_worker", signal.SIGTERM),
    ],
)
def test_a_signal_while_a_command_imports_its_packages_ends_it(module, number, tmp_path):
    """Before `cli.run`: one of the packages takes its time."""
    (tmp_path / "tyro.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-m", f"jaxrl_atari.{module}"], env=environment, **pipes) as process:
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        assert process.communicate(timeout=30) == ("", "interrupted\n")
    assert process.returncode == 130


def test_a_script_that_imports_the_package_keeps_its_signals():
    code = "import signal; before = signal.getsignal(15), signal.getsignal(2); import jaxrl_atari\n"
    code += "assert before == (signal.getsignal(15), signal.getsignal(2))"
    assert subprocess.run([sys.executable, "-c", code, "jaxrl_atari.train"], timeout=60, check=False).returncode == 0


CLOSED = """
import os, signal, sys
from jaxrl_atari.cli.stopping import StopRequest

# Whoever started the tests may have been under nohup.
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
with StopRequest() as stop:
    os.close(int(sys.argv[2]))  # nobody holds the other end of standard output any more
    signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGHUP)  # shell and kernel may both send it
    if sys.argv[1] == "closed":
        print("nobody reads this", flush=True)
    sys.exit(10 if stop.requested() else 11)
"""


@pytest.mark.parametrize(("how", "status"), [("closed", 10), ("nohup", 11)])
def test_a_closed_terminal_is_a_stop_request_but_not_under_nohup(how, status):
    """In a process of its own, whose standard output is a pipe that breaks."""
    code = "import os; read, write = os.pipe(); os.dup2(write, 1); os.set_inheritable(1, True);"
    code += f"import sys; sys.argv = ['-c', {how!r}, str(read)]; exec({CLOSED!r})"
    ended = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert ended.returncode == status, ended.stderr
