"""Faults, rehearsed with the real commands in the environment of a user's shell.

    python -m pytest -n 0 tests/release/test_long_faults.py

After each fault what was on disk is sound, the same command line continues, exit status and message are right, and
no process is left. JAXRL_ATARI_FAULT_ROUNDS=20 repeats what happens at a random moment; before a release, do that.
"""

import contextlib
import os
import random
import re
import subprocess
import time

import pytest
from rehearsal import ENDLESS, INTERRUPTED, rehearsal
from user_commands import one_error_line, user_environment

train = pytest.fixture(rehearsal)

pytestmark = [
    pytest.mark.timeout(3_600),
    pytest.mark.filterwarnings(
        r"ignore:os\.fork\(\) was called:RuntimeWarning"
    ),  # what is forked runs a program at once
]

ROUNDS = int(os.environ.get("JAXRL_ATARI_FAULT_ROUNDS", "1"))


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """With a cache of compiled programs of its own: a process that is killed can leave half a program in it."""
    caches = {
        name: str(tmp_path_factory.mktemp("cache")) for name in ("XDG_CACHE_HOME", "JAX_COMPILATION_CACHE_DIR")
    }
    return user_environment(**caches)


# --- Stopped -----------------------------------------------------------------------------------------------------


def test_sigterm_during_the_start_is_answered(train, tmp_path):
    """With an empty cache of programs: compilation, in which Python handles no signals, takes seconds."""
    for seconds in [0.0, 3.0, *(random.uniform(0, 6) for _ in range(ROUNDS - 1))]:
        process = train.start(variables={"JAX_COMPILATION_CACHE_DIR": str(tmp_path / f"cache {seconds}")})
        assert process.stdout.readline()
        time.sleep(seconds)
        process.terminate()
        output, _ = process.communicate(timeout=120)
        assert process.returncode == INTERRUPTED, output
        assert "first rollout" not in output  # it did not wait for the compiler
    train.continues()


# --- The disk ----------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(train, tmp_path):
    """The run directory on an ext4 file system of 64 MiB."""
    train.run_dir.mkdir()
    image = tmp_path / "disk"
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, train.run_dir], capture_output=True).returncode:
        pytest.skip("only root may mount a file system, and not in every container")
    (train.run_dir / "lost+found").rmdir()
    yield train.run_dir
    for process in train.started:
        process.kill()
        process.wait()
    subprocess.run(["umount", "-l", train.run_dir], check=True)


@pytest.mark.parametrize("first", ["checkpoint", "metrics.csv"])
def test_a_full_disk(train, small_disk, first):
    """The disk fills while training: what is written first finds no room. The command ends within a minute."""
    rare = "--log.every-env-steps" if first == "checkpoint" else "--log.checkpoint-every-env-steps"
    options = [rare, 1_000_000, "--log.no-tensorboard"]
    status, output = train.run("--total-env-steps", 300, *options)
    assert status == 0, output
    before = train.last()
    process = train.start(*options, *ENDLESS)
    for line in process.stdout:
        if "first rollout" in line:
            break
    with contextlib.suppress(OSError), (small_disk / ".filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(4096))
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 2, output
    assert re.search("^error: .*No space left", output, re.M), output
    assert train.last() >= before
    (small_disk / ".filler").unlink()
    train.continues(*options)


# --- Training itself ---------------------------------------------------------------------------------------------


def test_out_of_memory(train):
    """The process may have 2 GiB of addresses; the update takes 3.8 with a minibatch of 16,384 samples."""
    assert train.run("--total-env-steps", 300)[0] == 0
    before = train.steps()
    large = ["--env.num-envs", 64, "--ppo.rollout-length", 256, "--ppo.minibatch-size", 16_384]
    status, output = train.run("--total-env-steps", 20_000, *large, limit=f"-v {2 << 20}")
    assert status == 2, output
    assert re.search(r"lower ppo.minibatch_size .*16384.* or env.num_envs .*64", one_error_line(output))
    assert train.steps() == before
    train.continues()
