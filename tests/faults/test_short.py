"""A short form of each fault, for CI: most of them inside a training that runs in this process.

The long forms, with real disks, kills and signals at random moments, are in test_faults.py.
"""

import contextlib
import dataclasses
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import psutil
import pytest
from rehearsal import INTERRUPTED, rehearsal
from user_commands import ROOT, one_error_line

from jaxrl_atari import cli, session
from jaxrl_atari import train as command
from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, EvaluationConfig, LogConfig, PPOConfig
from jaxrl_atari.envs.ale import AlePool
from jaxrl_atari.errors import UserError
from jaxrl_atari.learner import Learner
from jaxrl_atari.runs import writers
from jaxrl_atari.runs.checkpoint_writer import CheckpointWriter
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.runs.meta import is_sound
from jaxrl_atari.suite.trial import run_training

train = pytest.fixture(rehearsal)

SMALL = Config(
    name="fault", total_env_steps=96, env=EnvConfig(game="Breakout", num_envs=2, num_threads=1),
    ppo=PPOConfig(rollout_length=8, minibatch_size=16, epochs=1), devices=DevicesConfig(gpu=False),
    log=LogConfig(every_env_steps=16, checkpoint_every_env_steps=32, graphs=False),
)  # fmt: skip


# --- Through the command ---------------------------------------------------------------------------------------------


def test_one_line_survives_a_pause_a_kill_and_a_signal(train):
    """SIGSTOP and SIGCONT, SIGKILL, then SIGUSR1; the same command line each time."""
    process = train.start("--total-env-steps", 1_000_000)
    train.wait_for(process)
    process.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    process.send_signal(signal.SIGCONT)
    train.wait_for(process, after=train.last())
    process.kill()
    process.communicate()
    train.check_soundness()

    before = train.last()
    process = train.start("--total-env-steps", 1_000_000)
    train.wait_for(process, after=before)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED, output
    assert f"resumed at {before:,} env steps" in output
    last = (train.run_dir / "session_0" / "metrics.csv").read_text().splitlines()[-1]
    assert train.last() == int(last.split(",")[0])
    train.check_soundness()


@pytest.mark.parametrize("fault", ["disk full", "folder moved away"])
def test_a_save_that_fails_in_the_background_ends_the_command_with_one_line(train, fault):
    """In the middle of a save: orbax has 39 arrays under way, and each fails in its turn."""
    disk = {"FAULT": "disk"} if fault == "disk full" else {}
    process = train.start("--total-env-steps", 1_000_000, stderr=subprocess.PIPE, **disk)
    if not disk:
        train.wait_for(process)
        checkpoints = train.run_dir / "session_0" / "checkpoints"
        while not _stopped_in_a_save(process, checkpoints):
            assert process.poll() is None, process.communicate()
        checkpoints.rename(checkpoints.with_name("moved"))
        process.send_signal(signal.SIGCONT)
    _, errors = process.communicate(timeout=240)
    assert process.returncode == 2, errors
    assert len(errors.splitlines()) == 1, errors
    assert "a checkpoint could not be written" in one_error_line(errors)


def _stopped_in_a_save(process, checkpoints):
    """Stops the process, if it is writing the arrays of a checkpoint; otherwise it goes on."""

    def writes():
        with contextlib.suppress(FileNotFoundError):  # renamed while it was read
            return any(checkpoints.glob("*tmp/arrays*/*"))

    if not writes():
        return False
    process.send_signal(signal.SIGSTOP)
    while process.poll() is None and psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
        time.sleep(0.001)
    if writes():  # still, now that it has stopped
        return True
    process.send_signal(signal.SIGCONT)
    return False


CHILD = """
import pathlib, sys, time
from jaxrl_atari.suite.processes import end_with_parent
from jaxrl_atari.cli.stopping import StopRequest

with StopRequest() as stop:
    end_with_parent()
    print("ready", flush=True)
    while not stop.requested():
        time.sleep(0.02)
        if sys.argv[2:] == ["talk"]:
            print("a line", flush=True)
    if sys.argv[2:] == ["save"]:
        time.sleep(1)
pathlib.Path(sys.argv[1]).touch()
"""
PARENT = """
import os, sys
from jaxrl_atari import cli
from jaxrl_atari.suite.processes import Task, run_processes

def main():
    names = sys.argv[1:3]
    run_processes([Task(n, ("child", n, *sys.argv[3:]), dict(os.environ), ()) for n in names], parallel=2)

cli.run(main)
"""


@pytest.fixture
def family(tmp_path):
    """Starts a parent with two children, as sessions side by side, but without training; `marks` are their files."""
    (tmp_path / "child.py").write_text(CHILD)
    with contextlib.ExitStack() as stack:

        def start(*arguments, stdout=subprocess.PIPE):
            marks = [tmp_path / "first", tmp_path / "second"]
            parent = subprocess.Popen(
                [sys.executable, "-c", PARENT, *map(str, marks), *arguments], stdout=stdout, stderr=subprocess.PIPE,
                text=True, env=os.environ | {"PYTHONPATH": f"{ROOT}:{tmp_path}"},
            )  # fmt: skip
            stack.enter_context(parent)
            stack.callback(parent.kill)
            return parent, marks

        yield start


def test_a_signal_to_every_process_of_a_trial_is_no_second_ctrl_c(family):
    """As clusters send it: the parent passes its own on to sessions that have had theirs."""
    parent, marks = family("save")
    ready = 0
    while ready < 2:
        ready += "ready" in parent.stdout.readline()
    for process in (*psutil.Process(parent.pid).children(), parent):
        process.send_signal(signal.SIGINT)
    parent.communicate(timeout=60)
    assert parent.returncode == INTERRUPTED
    assert all(mark.exists() for mark in marks)


def test_sessions_end_with_a_killed_parent(family):
    parent, marks = family()
    ready = 0
    while ready < 2:
        ready += "ready" in parent.stdout.readline()
    children = psutil.Process(parent.pid).children()
    assert len(children) == 2
    parent.kill()
    assert not psutil.wait_procs(children, timeout=30)[1]
    assert all(mark.exists() for mark in marks), "each child ended by itself"


def test_two_writers_to_a_pipe_that_nobody_reads(family):
    """As `| head -1`: both sessions write on, and a signal still reaches them through their parent."""
    read, write = os.pipe()
    parent, marks = family("talk", stdout=write)
    os.close(write)
    seen = b""
    while seen.count(b"ready") < 2:
        seen += os.read(read, 100)
    children = psutil.Process(parent.pid).children()
    os.close(read)
    time.sleep(0.5)  # they write to it meanwhile
    assert parent.poll() is None
    parent.terminate()
    assert parent.wait(timeout=30) == INTERRUPTED, parent.stderr.read()
    assert not psutil.wait_procs(children, timeout=5)[1]
    assert all(mark.exists() for mark in marks), "each child ended by itself"
    assert parent.stderr.read() == ""


def test_a_command_whose_reader_is_gone_ends_silently():
    code = "from jaxrl_atari import cli; cli.run(lambda: [print('x' * 70_000, flush=True) for _ in range(9)])"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, **pipes) as process:
        assert process.stdout.read(10) == b"x" * 10
        process.stdout.close()
        assert (process.stderr.read(), process.wait(timeout=30)) == (b"", 1)


# --- In this process -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run, to be copied."""
    return run_training(SMALL, tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture
def run_dir(trained, tmp_path):
    """A run that has spent its budget; `fails` and `continues` train it further."""
    shutil.copytree(trained, tmp_path / "run")
    return tmp_path / "run"


def steps(run_dir):
    checkpoints = run_dir / "session_0" / "checkpoints"
    return sorted(int(path.name) for path in checkpoints.glob("*") if path.name.isdecimal())


def ends(run_dir, budget, *options):
    """The exit status of `train --run-dir`, in this process."""
    with pytest.raises(SystemExit) as end:
        cli.run(lambda: command.main(["--run-dir", str(run_dir), "--total-env-steps", str(budget), *options]))
    return end.value.code


def fails(run_dir, capfd, *words, status=2):
    """Training on fails with one line that has these words, and what was on disk is sound."""
    before = steps(run_dir)
    assert ends(run_dir, 320) == status
    line = one_error_line(capfd.readouterr().err)
    for word in words:
        assert word in line
    after = steps(run_dir)
    assert not before or after[-1] >= before[-1]
    assert all(is_sound(run_dir / "session_0" / "checkpoints" / str(step)) for step in after)


def continues(run_dir, capfd):
    """The same line trains to the end from the latest checkpoint."""
    before = steps(run_dir)
    assert ends(run_dir, 320) == 0
    if before:
        assert f"resumed at {before[-1]} env steps" in capfd.readouterr().out
    assert steps(run_dir)[-1] > 300
    rows = (run_dir / "session_0" / "metrics.csv").read_text().splitlines()[1:]
    logged = [int(row.split(",")[0]) for row in rows]
    assert logged == sorted(set(logged))
    assert json.loads((run_dir / "trial.json").read_text())["complete"]


@pytest.mark.parametrize("writer", [writers.CsvWriter, writers.TensorBoardWriter])
def test_a_full_disk_at_a_log_point(writer, run_dir, capfd, monkeypatch):
    """/dev/full takes the place of the file: the system refuses what is written to it."""
    write, count = writer.write, []

    def to_a_full_disk(self, row):
        count.append(row)
        if len(count) == 4:
            self._file.close()
            if writer is writers.CsvWriter:
                self._file = Path("/dev/full").open("w")  # noqa: SIM115
            else:
                self._file._writer = Path("/dev/full").open("wb")  # noqa: SIM115
        write(self, row)

    monkeypatch.setattr(writer, "write", to_a_full_disk)
    fails(run_dir, capfd, "No space left on device", "free some space", "session_0")
    monkeypatch.undo()
    continues(run_dir, capfd)


def test_a_disk_that_takes_no_more_of_a_checkpoint(run_dir, capfd):
    """No file may grow beyond 256 KiB: the system refuses the rest of the arrays."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, before[1]))
    try:
        fails(run_dir, capfd, "a checkpoint could not be written", "then use --resume")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    continues(run_dir, capfd)


@pytest.mark.parametrize("exists", [False, True], ids=["new folder", "folder"])
def test_a_read_only_directory(exists, tmp_path, capfd, monkeypatch):
    """As root may write anywhere, the system call is replaced."""
    folder, make, create = tmp_path / "run", os.mkdir, os.open
    if exists:
        folder.mkdir()

    def refuse(call):
        def called(path, *arguments, **options):
            if str(path).startswith(str(folder)):
                raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
            return call(path, *arguments, **options)

        return called

    monkeypatch.setattr(os, "mkdir", refuse(make))
    monkeypatch.setattr(os, "open", refuse(create))
    with pytest.raises(UserError, match="Read-only file system; choose a folder that can be written to"):
        run_training(SMALL, folder)
    assert not exists or not list(folder.iterdir())


def test_checkpoints_deleted_under_a_training(run_dir, capfd, monkeypatch):
    save, checkpoints = CheckpointWriter.save, run_dir / "session_0" / "checkpoints"

    def delete_and_save(self, *arguments):
        self.wait()  # a save under way would make the folder again
        if steps(run_dir)[-1] > 120:
            shutil.rmtree(checkpoints)
            monkeypatch.undo()
        return save(self, *arguments)

    monkeypatch.setattr(CheckpointWriter, "save", delete_and_save)
    assert ends(run_dir, 320) == 2
    assert "a checkpoint could not be written" in one_error_line(capfd.readouterr().err)
    assert not checkpoints.exists()
    assert ends(run_dir, 320) == 2
    assert "but no checkpoint; put its checkpoints back" in one_error_line(capfd.readouterr().err)
    (run_dir / "session_0" / "metrics.csv").rename(run_dir / "session_0" / "elsewhere.csv")
    continues(run_dir, capfd)


def raise_at(monkeypatch, owner, name, call, error):
    """The `call`-th call of a method raises what `error()` raises."""
    method, calls = getattr(owner, name), []

    def counted(self, *arguments, **options):
        calls.append(None)
        if len(calls) == call:
            error()
        return method(self, *arguments, **options)

    monkeypatch.setattr(owner, name, counted)


def take_a_petabyte():
    jax.block_until_ready(jax.jit(lambda: jnp.zeros((1 << 50,), jnp.uint8))())


def test_out_of_memory(run_dir, capfd, monkeypatch):
    raise_at(monkeypatch, Learner, "update", 6, take_a_petabyte)
    fails(run_dir, capfd, "out of device memory (RESOURCE_EXHAUSTED", "lower ppo.minibatch_size (now 16)")
    monkeypatch.undo()
    continues(run_dir, capfd)


def test_a_loss_that_is_not_finite(run_dir, capfd, monkeypatch):
    rate = session.learning_rate
    monkeypatch.setattr(session, "learning_rate", lambda config, at: float("nan") if at > 180 else rate(config, at))
    fails(run_dir, capfd, "error: update ", "loss = nan", "; training stopped at", "the last checkpoint is kept")
    monkeypatch.undo()
    continues(run_dir, capfd)


def test_an_emulator_that_raises(run_dir, capfd, monkeypatch):
    def broken():
        raise RuntimeError("the emulator is broken")

    raise_at(monkeypatch, AlePool, "_recv", 70, broken)
    with pytest.raises(RuntimeError, match="the emulator is broken"):  # a bug: with its traceback, and status 1
        command.main(["--run-dir", str(run_dir), "--total-env-steps", "320"])
    monkeypatch.undo()
    continues(run_dir, capfd)


def test_a_clock_that_is_set_back(run_dir, capfd, monkeypatch):
    """By a day, between two starts."""
    first = set((run_dir / "session_0").glob("events.*"))
    now, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now() - 86_400)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() - 86_400 * 10**9)
    continues(run_dir, capfd)
    monkeypatch.undo()
    (second,) = set((run_dir / "session_0").glob("events.*")) - first
    assert second > max(first), "TensorBoard reads them in the order of their names"
    tomorrow = time.time() + 86_400  # files of before the clock was set back
    for path in [*run_dir.rglob("*.csv"), *run_dir.rglob("config.json")]:
        os.utime(path, (tomorrow, tomorrow))
    assert ends(run_dir, 320) == 0
    assert "finished already" in capfd.readouterr().out


def test_a_stop_request_during_the_last_evaluation(tmp_path):
    """The budget is spent, but the session was interrupted: the exit status says so."""
    every = SMALL.total_env_steps
    config = dataclasses.replace(SMALL, evaluation=EvaluationConfig(every_env_steps=every, episodes=1_000))
    folder = tmp_path / "session_0"

    def stop_requested():
        return folder.is_dir() and config.is_spent(max(Checkpoints(folder).steps(), default=0))

    with pytest.raises(KeyboardInterrupt):
        session.run_session(config, folder, stop_requested=stop_requested)
    assert not (folder / "evaluations.csv").exists()


def test_a_stop_request_during_an_evaluation(tmp_path, capfd):
    """A thousand games would take hours."""
    config = dataclasses.replace(SMALL, evaluation=EvaluationConfig(every_env_steps=32, episodes=1_000))
    asked = []

    def stop_requested():
        asked.append(None)
        return len(asked) > 4

    with pytest.raises(KeyboardInterrupt):
        session.run_session(config, tmp_path / "session_0", stop_requested=stop_requested)
    assert "given up, because the session is asked to stop" in capfd.readouterr().out
    assert Checkpoints(tmp_path / "session_0").steps()[-1] >= 48
