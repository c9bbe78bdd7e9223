"""Faults, rehearsed with the real commands in the environment of a user's shell.

    python -m pytest -n 0 -m slow tests/faults

After each fault: what was on disk is sound, the same command line continues, exit status and message are right, and no
process is left. JAXRL_ATARI_FAULT_ROUNDS=20 repeats what happens at a random moment; before a release, do that. A short
form of each fault is in test_short.py, which CI runs, or in the test that the table in docs/resume.md names.
"""

import contextlib
import fcntl
import importlib.util
import os
import pty
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import termios
import time

import psutil
import pytest
from rehearsal import CONFIG, INTERRUPTED, rehearsal
from sample_runs import read_csv
from user_commands import ROOT, TWO_GPUS, one_error_line, user_environment

from jaxrl_atari.runs.meta import is_sound

train = pytest.fixture(rehearsal)


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """With a cache of compiled programs of its own: a process that is killed can leave half a program in it."""
    caches = {name: str(tmp_path_factory.mktemp("cache")) for name in ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR")}
    return user_environment(**caches)


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3_600),
    pytest.mark.filterwarnings(
        r"ignore:os\.fork\(\) was called:RuntimeWarning"
    ),  # what is forked runs a program at once
]

ROUNDS = int(os.environ.get("JAXRL_ATARI_FAULT_ROUNDS", "1"))


# --- Killed ----------------------------------------------------------------------------------------------------------


def test_a_session_killed_at_random_moments_loses_nothing(train):
    """Checkpoints are written without a pause, so that many kills come in the middle of one."""
    for _ in range(max(2, ROUNDS)):
        before = train.last()
        process = train.start("--total-env-steps", 1_000_000)
        if random.random() < 0.7:
            train.wait_for(process, after=before)
            time.sleep(random.uniform(0, 2))
        else:
            time.sleep(random.uniform(0.5, 10))  # also during the start
        assert process.poll() is None, process.communicate()[0]
        process.kill()
        output, _ = process.communicate()
        train.check_soundness()
        assert train.last() >= before
        if before and "resumed at" in output:
            assert f"resumed at {before:,} env steps" in output
    train.continues()


def test_sessions_end_with_their_killed_parent(train):
    two = ["--sessions", 2, "--total-env-steps", 1_000_000]
    for _ in range(ROUNDS):
        before = [train.last(session) for session in (0, 1)]
        process = train.start(*two, **TWO_GPUS)
        for session in (0, 1):
            train.wait_for(process, session, before[session])
        children = psutil.Process(process.pid).children()
        time.sleep(random.uniform(0, 2))
        process.kill()
        assert not psutil.wait_procs(children, timeout=120)[1]
        train.check_soundness()
        for session in (0, 1):  # each wrote a last checkpoint
            last = (train.run_dir / f"session_{session}" / "metrics.csv").read_text().splitlines()[-1]
            assert train.last(session) == int(last.split(",")[0])
    total = max(train.last(0), train.last(1)) + 100
    status, output = train.run("--sessions", 2, "--total-env-steps", total, **TWO_GPUS)
    assert status == 0, output
    assert min(train.last(0), train.last(1)) > total - 20


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_to_all_processes_of_a_trial_ends_them_with_a_last_checkpoint(train, number):
    """As a cluster does it: every process gets the signal, and the sessions get it from their parent too."""
    process = train.start("--sessions", 2, "--total-env-steps", 1_000_000, **TWO_GPUS)
    for session in (0, 1):
        train.wait_for(process, session)
    for each in [*psutil.Process(process.pid).children(), psutil.Process(process.pid)]:
        each.send_signal(number)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == INTERRUPTED, output
    for session in (0, 1):
        last = (train.run_dir / f"session_{session}" / "metrics.csv").read_text().splitlines()[-1]
        assert train.steps(session)[-1] == int(last.split(",")[0])


def test_sigterm_during_the_start_is_answered(train, tmp_path):
    """With an empty cache of programs: compilation, in which Python handles no signals, takes seconds."""
    for seconds in [0.0, 3.0, *(random.uniform(0, 6) for _ in range(ROUNDS - 1))]:
        process = train.start(JAX_COMPILATION_CACHE_DIR=str(tmp_path / f"cache {seconds}"))
        assert process.stdout.readline()
        time.sleep(seconds)
        process.terminate()
        output, _ = process.communicate(timeout=120)
        assert process.returncode == INTERRUPTED, output
        assert "interrupted" in output
        assert "first env step" not in output  # it did not wait for the compiler
        assert "Traceback" not in output
    train.continues()


def test_sigterm_during_an_evaluation_gives_it_up(train):
    long = ["--evaluation.every-env-steps", 64, "--evaluation.episodes", 1_000]
    process = train.start(*long, "--total-env-steps", 100_000)
    train.wait_for(process, after=128)
    process.terminate()
    output, _ = process.communicate(timeout=120)  # a thousand games take hours
    assert process.returncode == INTERRUPTED, output
    assert "given up, because the session is asked to stop" in output
    train.continues("--evaluation.every-env-steps", 0)


def test_stopped_and_continued(train):
    process = train.start()
    train.wait_for(process)
    process.send_signal(signal.SIGSTOP)
    time.sleep(60 if ROUNDS > 1 else 3)
    process.send_signal(signal.SIGCONT)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output


SEARCH = """
from jaxrl_atari.search import FloatDistribution, SearchConfig

def get_search():
    return SearchConfig(
        space={'ppo.gamma': FloatDistribution(0.9, 0.99)}, trials=2, method='random', early_stopping='none', retries=1
    )
"""


PROMPT = {"RAY_worker_niceness": "0"}  # Ray's default of 15 starves the trials on a busy machine


def trial_steps(train):
    """Env steps of the latest checkpoint of any trial."""
    names = [path.name for path in train.run_dir.glob("trial_*/session_0/checkpoints/*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def wait_for_a_trial(train, process):
    """Waits for a new checkpoint of a trial."""
    before, end = trial_steps(train), time.monotonic() + 300
    while trial_steps(train) <= before:
        assert time.monotonic() < end
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.1)


def test_a_killed_trial_of_a_search_is_tried_again(train):
    if not all(map(importlib.util.find_spec, ("ray", "optuna"))):
        pytest.skip("search mode is not installed: pip install 'jaxrl_atari[search]'")
    train.config.write_text(CONFIG + SEARCH)
    process = train.start(module="search", **PROMPT)
    wait_for_a_trial(train, process)
    family = psutil.Process(process.pid).children(recursive=True)
    next(child for child in family if "ImplicitFunc" in " ".join(child.cmdline())).kill()
    output, _ = process.communicate(timeout=900)
    assert process.returncode == 0, output
    assert "is tried again: its process was killed" in output
    assert [trial["status"] for trial in read_csv(train.run_dir / "trials.csv")] == ["finished", "finished"]


def test_a_killed_search_leaves_no_process_and_continues(train):
    if not all(map(importlib.util.find_spec, ("ray", "optuna"))):
        pytest.skip("search mode is not installed: pip install 'jaxrl_atari[search]'")
    train.config.write_text(CONFIG + SEARCH)
    for _ in range(max(1, ROUNDS // 10)):
        process = train.start("--total-env-steps", 20_000, module="search", **PROMPT)
        wait_for_a_trial(train, process)
        time.sleep(random.uniform(0, 3))
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        assert not psutil.wait_procs(family, timeout=120)[1]
        for path in train.run_dir.glob("trial_*/session_0/checkpoints/*"):
            assert is_sound(path) or not path.name.isdecimal(), path
    process = train.start("--total-env-steps", 20_000, module="search", **PROMPT)
    wait_for_a_trial(train, process)
    os.killpg(process.pid, signal.SIGTERM)
    began = time.monotonic()
    output, _ = process.communicate(timeout=300)
    assert process.returncode == INTERRUPTED, output
    assert time.monotonic() - began < 60, "it waited until the trials were killed"
    trials = read_csv(train.run_dir / "trials.csv")
    assert {trial["status"] for trial in trials} <= {"finished", "unfinished"}, trials


# --- Output ----------------------------------------------------------------------------------------------------------


def test_two_sessions_go_on_when_nobody_reads_their_output(train):
    read, write = os.pipe()
    process = train.start("--sessions", 2, stdout=write, **TWO_GPUS)
    os.close(write)
    assert os.read(read, 10)
    os.close(read)  # as `| head -1`
    assert process.wait(timeout=600) == 0
    assert min(train.steps(0)[-1], train.steps(1)[-1]) > 980


def test_an_ascii_terminal(train):
    evaluations = ["--evaluation.every-env-steps", 500, "--evaluation.episodes", 1, "--env.max-frames", 400]
    status, output = train.run(*evaluations, PYTHONIOENCODING="ascii")
    assert status == 0, output
    assert "mean return" in output


def test_a_terminal_that_goes_away(train):
    master, slave = pty.openpty()

    def control():
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever started the tests may have been under nohup
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        [sys.executable, "-m", "jaxrl_atari.train", "--config", train.config, "--run-dir", train.run_dir],
        cwd=ROOT, env=train.environment, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        preexec_fn=control,
    )  # fmt: skip
    train.started.append(process)
    os.close(slave)
    train.wait_for(process)
    os.close(master)
    assert process.wait(timeout=120) == INTERRUPTED
    train.continues()


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
    status, output = train.run("--total-env-steps", 300, *options)
    assert status == 0, output
    before = train.steps()[-1]
    process = train.start("--total-env-steps", 1_000_000, *options)
    for line in process.stdout:
        if "first env step" in line:
            break
    with contextlib.suppress(OSError), (small_disk / ".filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 2, output
    assert "free some space" in one_error_line(output)
    assert "No space left" in output
    assert train.steps()[-1] >= before
    (small_disk / ".filler").unlink()
    train.continues(*options)


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
        status, output = train.run(run_dir=folder / "run")
        assert status == 2, output
        assert "choose a folder that can be written to" in one_error_line(output)
        status, output = train.run(run_dir=folder)
        assert status == 2, output
        assert "choose a folder that can be written to" in one_error_line(output)
    finally:
        if os.geteuid() == 0:
            subprocess.run(["umount", str(folder)], check=True)


def test_two_writers(train):
    process = train.start()
    train.wait_for(process)
    status, output = train.run()
    assert status == 2
    assert "another process is training there" in one_error_line(output)
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output


def test_a_folder_deleted_under_a_running_process(train):
    process = train.start("--total-env-steps", 1_000_000)
    train.wait_for(process)
    checkpoints = train.run_dir / "session_0" / "checkpoints"
    process.send_signal(signal.SIGSTOP)
    while any(checkpoints.glob("*tmp*")):  # a save is under way: orbax would make the folder again
        process.send_signal(signal.SIGCONT)
        time.sleep(0.05)
        process.send_signal(signal.SIGSTOP)
    checkpoints.rename(checkpoints.with_name("deleted"))
    process.send_signal(signal.SIGCONT)
    shutil.rmtree(checkpoints.with_name("deleted"), ignore_errors=True)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2, output
    assert "a checkpoint could not be written" in one_error_line(output)
    train.continues()


# --- Training itself -------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite(train):
    status, output = train.run(FAULT="nan")
    assert status == 2, output
    assert re.search(r"error: update \d+: .*nan.*the last checkpoint is kept", one_error_line(output))
    assert 64 <= train.steps()[-1] <= 320
    train.continues()


def test_an_emulator_that_raises(train):
    status, output = train.run(FAULT="emulator")
    assert status == 1, output
    assert "RuntimeError: the emulator is broken" in output
    train.continues()


def test_out_of_memory(train):
    """The process may have 2 GiB of addresses; the update takes 3.8 with a minibatch of 16,384 samples."""
    limit = 2 << 30
    assert train.run("--total-env-steps", 300)[0] == 0
    before = train.steps()
    large = ["--env.num-envs", 64, "--ppo.rollout-length", 256, "--ppo.minibatch-size", 16_384]
    status, output = train.run(
        "--total-env-steps", 20_000, *large, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    )
    assert status == 2, output
    assert "lower ppo.minibatch_size (now 16384) or env.num_envs (now 64)" in one_error_line(output)
    assert train.steps() == before
    train.continues()


def test_a_clock_that_is_set_back(train):
    """By a day, between two starts."""
    assert train.run("--total-env-steps", 300)[0] == 0
    status, output = train.run("--total-env-steps", 600, FAULT="clock")
    assert status == 0, output
    assert "resumed at" in output
    train.continues()
    events = list((train.run_dir / "session_0").glob("events.out.tfevents.*"))
    in_time = sorted(events, key=lambda path: path.stat().st_ctime_ns)
    assert sorted(events) == in_time, "TensorBoard reads them in the order of their names"
