"""Faults, rehearsed with the real commands in an environment that no conftest.py prepared.

    python -m pytest -n 0 -m slow tests/faults

After each fault: what was on disk is sound, the same command line goes on, exit status and message are right, and no
process is left. JAXRL_ATARI_FAULT_ROUNDS=20 repeats what happens at a random moment; before a release, do that.
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest

from jaxrl_atari.run_dir.checkpoints import Checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROOT = Path(__file__).parents[2]
ROUNDS = int(os.environ.get("JAXRL_ATARI_FAULT_ROUNDS", "1"))
INTERRUPTED = 130

CONFIG = """
import os
from jaxrl_atari.config import Config, EnvConfig, EvaluationConfig, LogConfig, PPOConfig

def get_config():
    return Config(
        name="fault", total_env_steps=1_000, env=EnvConfig(game="Breakout", num_envs=2, num_threads=1),
        ppo=PPOConfig(rollout_length=8, minibatch_size=16, epochs=1),
        log=LogConfig(every_env_steps=16, checkpoint_every_env_steps=64, graphs=False),
    )

if os.environ.get("FAULT") == "nan":
    from jaxrl_atari import session
    rate = session.learning_rate
    session.learning_rate = lambda config, steps: float("nan") if steps > 300 else rate(config, steps)
if os.environ.get("FAULT") == "emulator":
    from jaxrl_atari.envs import ale
    receive, steps = ale.AlePool._recv, []
    def recv(pool):
        steps.append(None)
        if len(steps) > 150:
            raise RuntimeError("the emulator is broken")
        return receive(pool)
    ale.AlePool._recv = recv
"""


@pytest.fixture(scope="session")
def environment(tmp_path_factory):
    """The environment of a user: without the variables that the suite sets, with a cache folder in the usual place."""
    unwanted = ("XLA_FLAGS", "JAX_", "JAXRL_ATARI", "CUDA_", "PYTEST_", "COLUMNS")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    return kept | {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}


class Train:
    """`train --config CONFIG --run-dir DIR`, started as often as a test likes."""

    def __init__(self, folder, environment):
        self.run_dir, self._environment = folder / "run", environment
        self.config = folder / "fault.py"
        self.config.write_text(CONFIG)
        self.started = []

    def start(self, *options, stdout=subprocess.PIPE, run_dir=None, module="train", **environment):
        options = ["--config", self.config, "--run-dir", run_dir or self.run_dir, *options]
        process = subprocess.Popen(
            [sys.executable, "-m", f"jaxrl_atari.{module}", *map(str, options)], cwd=ROOT, stdin=subprocess.DEVNULL,
            env=self._environment | environment, stdout=stdout, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def ends(self, *options, **how):
        """Starts it and waits; returns the status and the output."""
        process = self.start(*options, **how)
        output, _ = process.communicate(timeout=300)
        return process.returncode, output

    def steps(self, session=0):
        """Env steps of the complete checkpoints."""
        folder = self.run_dir / f"session_{session}" / "checkpoints"
        return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())

    def wait_for(self, process, session=0, after=0):
        """Waits for a checkpoint beyond `after` env steps."""
        end = time.monotonic() + 120
        while not any(step > after for step in self.steps(session)):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end
            time.sleep(0.05)

    def goes_on(self, *options, **how):
        """The same command line loses nothing and finishes; once more, it does nothing."""
        before = self.steps()
        self.is_sound()
        total = max([1_000, *(step + 100 for step in before)])
        options = ["--total-env-steps", total, *options]
        status, output = self.ends(*options, **how)
        assert status == 0, output
        if before:
            assert f"resumed at {before[-1]:,} env steps" in output or "finished already" in output, output
        assert self.steps()[-1] > total - 20
        assert json.loads((self.run_dir / "trial.json").read_text())["complete"]
        status, output = self.ends(*options, **how)
        assert (status, "finished already" in output) == (0, True), output

    def is_sound(self):
        """Every checkpoint can be read."""
        for path in self.run_dir.glob("session_*"):
            if (path / "checkpoints").is_dir():
                checkpoints = Checkpoints(path, read_only=True)
                for step in checkpoints.steps():
                    assert checkpoints.read_meta(step)["env_steps"] == step


def processes_of(run_dir):
    """Running processes whose command line names the run directory."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(run_dir) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


@pytest.fixture
def train(tmp_path, environment):
    """`Train` in a folder of its own; after the test, no process of it is left."""
    train = Train(tmp_path, environment)
    yield train
    for process in train.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    left = processes_of(train.run_dir)
    for process in left:
        process.kill()
    assert not left


def one_error_line(output):
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, output
    assert "Traceback" not in output
    return errors[0]


# --- Killed ----------------------------------------------------------------------------------------------------------


def test_a_session_killed_at_random_moments_loses_nothing(train):
    for _ in range(max(2, ROUNDS)):
        process = train.start()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=random.uniform(0.5, 10))
        process.kill()
        process.communicate()
        train.is_sound()
    train.goes_on()


def test_sessions_end_with_their_killed_parent(train):
    two = {"JAXRL_ATARI_SIMULATED_GPUS": "2"}
    for _ in range(ROUNDS):
        before = [max(train.steps(session), default=0) for session in (0, 1)]
        process = train.start("--sessions", 2, "--total-env-steps", 100_000, **two)
        for session in (0, 1):
            train.wait_for(process, session, before[session])
        children = psutil.Process(process.pid).children()
        time.sleep(random.uniform(0, 2))
        process.kill()
        assert not psutil.wait_procs(children, timeout=60)[1]
        train.is_sound()
    status, output = train.ends("--sessions", 2, **two)
    assert status == 0, output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_all_processes_of_a_trial_ends_them_with_a_last_checkpoint(train, number):
    """As a cluster does it: every process gets the signal, and the sessions get it from their parent too."""
    two = {"JAXRL_ATARI_SIMULATED_GPUS": "2"}
    process = train.start("--sessions", 2, "--total-env-steps", 100_000, **two)
    for session in (0, 1):
        train.wait_for(process, session)
    for each in [*psutil.Process(process.pid).children(), psutil.Process(process.pid)]:
        each.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED, output
    for session in (0, 1):
        last = (train.run_dir / f"session_{session}" / "metrics.csv").read_text().splitlines()[-1]
        assert train.steps(session)[-1] == int(last.split(",")[0])


def test_sigterm_during_the_start_is_answered(train, tmp_path):
    """With an empty cache of programs: compilation, in which Python handles no signals, takes seconds."""
    for seconds in [0.0, 3.0, *(random.uniform(0, 6) for _ in range(ROUNDS - 1))]:
        process = train.start(XDG_CACHE_HOME=str(tmp_path / f"cache {seconds}"))
        assert process.stdout.readline()
        time.sleep(seconds)
        process.terminate()
        output, _ = process.communicate(timeout=60)
        assert process.returncode == INTERRUPTED, output
        assert "interrupted" in output
        assert "first env step" not in output  # it did not wait for the compiler
        assert "Traceback" not in output
    train.goes_on()


def test_sigterm_during_an_evaluation_gives_it_up(train):
    long = ["--evaluation.every-env-steps", 64, "--evaluation.episodes", 1_000]
    process = train.start(*long, "--total-env-steps", 100_000)
    train.wait_for(process, after=128)
    process.terminate()
    output, _ = process.communicate(timeout=120)  # a thousand games take hours
    assert process.returncode == INTERRUPTED, output
    assert "given up, because the session is asked to stop" in output
    train.goes_on("--evaluation.every-env-steps", 0)


def test_stopped_and_continued(train):
    process = train.start()
    train.wait_for(process)
    process.send_signal(signal.SIGSTOP)
    time.sleep(60 if ROUNDS > 1 else 3)
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output


def test_a_killed_trial_of_a_search_is_tried_again(train):
    if not all(map(importlib.util.find_spec, ("ray", "optuna"))):
        pytest.skip("search mode is not installed: pip install 'jaxrl_atari[search]'")
    train.config.write_text(
        CONFIG + "\nfrom jaxrl_atari.search import SearchConfig, Uniform\n\ndef get_search():\n    return SearchConfig("
        "space={'ppo.gamma': Uniform(0.9, 0.99)}, trials=2, method='random', early_stopping='none', retries=1)\n"
    )
    process = train.start(module="search")
    worker, end = None, time.monotonic() + 120
    while worker is None:
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)
        if any(train.run_dir.glob("trial_*/session_0/checkpoints/*")):
            children = psutil.Process(process.pid).children(recursive=True)
            worker = next((child for child in children if "run_search_trial" in " ".join(child.cmdline())), None)
    worker.kill()
    output, _ = process.communicate(timeout=280)
    assert process.returncode == 0, output
    assert "is tried again: its process was killed" in output
    records = [json.loads(path.read_text()) for path in train.run_dir.glob("trial_*/record.json")]
    assert [record["status"] for record in records] == ["finished", "finished"]


# --- Output ----------------------------------------------------------------------------------------------------------


def test_two_sessions_go_on_when_nobody_reads_their_output(train):
    read, write = os.pipe()
    process = train.start("--sessions", 2, stdout=write, JAXRL_ATARI_SIMULATED_GPUS="2")
    os.close(write)
    assert os.read(read, 10)
    os.close(read)  # as `| head -1`
    assert process.wait(timeout=200) == 0
    assert min(train.steps(0)[-1], train.steps(1)[-1]) > 980


def test_an_ascii_terminal(train):
    evaluations = ["--evaluation.every-env-steps", 500, "--evaluation.episodes", 1, "--env.max-frames", 400]
    status, output = train.ends(*evaluations, PYTHONIOENCODING="ascii")
    assert status == 0, output
    assert "mean return" in output


def test_a_terminal_that_goes_away(train):
    master, slave = pty.openpty()

    def control():
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [sys.executable, "-m", "jaxrl_atari.train", "--config", train.config, "--run-dir", train.run_dir],
        cwd=ROOT, env=train._environment, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=control,
    )  # fmt: skip
    train.started.append(process)
    os.close(slave)
    train.wait_for(process)
    os.close(master)
    assert process.wait(timeout=60) == INTERRUPTED
    train.goes_on()


# --- The disk --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(train):
    """The run directory on a file system of 48 MiB."""
    train.run_dir.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48m", "tmpfs", str(train.run_dir)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small file system, and not in every container")
    yield train.run_dir
    for process in train.started:
        process.kill()
        process.wait()
    subprocess.run(["umount", "-l", str(train.run_dir)], check=True)


@pytest.mark.parametrize(
    "options",
    [
        ["--log.every-env-steps", "1000000", "--log.no-tensorboard"],
        ["--log.checkpoint-every-env-steps", "1000000", "--log.no-tensorboard"],
        ["--log.checkpoint-every-env-steps", "1000000", "--log.tensorboard"],
    ],
    ids=["checkpoint", "metrics.csv", "event file"],
)
def test_a_full_disk(train, small_disk, options):
    status, output = train.ends("--total-env-steps", 300, *options)
    assert status == 0, output
    before = train.steps()[-1]
    process = train.start("--total-env-steps", 1_000_000, *options)
    for line in process.stdout:
        if "first env step" in line:
            break
    with contextlib.suppress(OSError), (small_disk / ".filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 2, output
    assert "free some space" in one_error_line(output)
    assert "No space left" in output
    assert train.steps()[-1] >= before
    (small_disk / ".filler").unlink()
    train.goes_on(*options)


def test_a_read_only_directory(train, tmp_path):
    folder = tmp_path / "read only"
    folder.mkdir()
    if os.geteuid() == 0:
        mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("root may write anywhere, and cannot mount a read-only file system here")
    else:
        folder.chmod(0o555)
    try:
        status, output = train.ends(run_dir=folder / "run")
        assert status == 2, output
        assert "choose a folder that can be written to" in one_error_line(output)
        status, output = train.ends(run_dir=folder)
        assert status == 2, output
        assert "choose a folder that can be written to" in one_error_line(output)
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", str(folder)], check=True)


def test_two_writers(train):
    process = train.start()
    train.wait_for(process)
    status, output = train.ends()
    assert status == 2
    assert "another process is training there" in one_error_line(output)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output


def test_a_folder_deleted_under_a_running_process(train):
    process = train.start("--total-env-steps", 1_000_000)
    train.wait_for(process)
    shutil.rmtree(train.run_dir / "session_0" / "checkpoints")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert "a checkpoint could not be written" in one_error_line(output)
    train.goes_on()


# --- Training itself -------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite(train):
    status, output = train.ends(FAULT="nan")
    assert status == 2, output
    assert re.search(r"error: update \d+: .*nan.*the last checkpoint is kept", one_error_line(output))
    assert 64 <= train.steps()[-1] <= 320
    train.goes_on()


def test_an_emulator_that_raises(train):
    status, output = train.ends(FAULT="emulator")
    assert status == 1, output
    assert "RuntimeError: the emulator is broken" in output
    train.goes_on()
