"""Checkpoints under single flipped bits, a kill during a save, and disks without space."""

import contextlib
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from small_checkpoints import CPU, GAMES, assert_same, newest, save, save_two, small_arrays
from small_training import flip_bit

from jaxrl_atari.runs.checkpoints import Checkpoints, DamagedCheckpoint


@pytest.fixture
def session(tmp_path):
    return save_two(tmp_path)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # orbax's own, of a damaged .zarray
def test_a_flipped_bit_is_never_silent(session):
    step_dir, found = session / "checkpoints" / "20", set()
    sound = Checkpoints(session).read_meta(20)
    for path in sorted(filter(Path.is_file, step_dir.rglob("*"))):
        content = path.read_bytes()
        for at in (0, 0.3, 0.7, 1):
            flip_bit(path, at)
            checkpoints = Checkpoints(session)
            try:
                checkpoint = checkpoints.read(20)
                assert_same(checkpoint.to_device("arrays", small_arrays(0), CPU), small_arrays(20))
                assert_same(checkpoint.items["games"], GAMES)
                assert checkpoint.meta == sound
            except DamagedCheckpoint:
                found.add(path.relative_to(step_dir).as_posix())
            env_steps, arrays, damaged = newest(session)
            assert_same(arrays, small_arrays(env_steps))
            assert list(damaged) == ([] if env_steps == 20 else [20])
            path.write_bytes(content)
    assert {"meta/metadata", "games/steps/0", "arrays/train_state.params.policy.bias/0"} <= found


SAVE = """
    import sys, jax
    from pathlib import Path
    from jaxrl_atari import cli
    from jaxrl_atari.runs.checkpoints import Checkpoints
    # Many arrays, so that some are being written when one fails; random ones, because ones would vanish.
    arrays = {str(i): jax.random.uniform(jax.random.key(i), int(sys.argv[2]) // 20) for i in range(20)}
    cli.run(lambda: Checkpoints(Path(sys.argv[1])).save(30, {"arrays": arrays}, {}, 9.0))
"""


def start_save(session, size, environment):
    command = [sys.executable, "-c", textwrap.dedent(SAVE), str(session), f"{size:.0f}"]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def test_a_killed_save_keeps_the_previous_checkpoints(session, environment):
    with start_save(session, 3e7, environment) as process:
        while len(list((session / "checkpoints").iterdir())) < 3:
            assert process.poll() is None
            time.sleep(0.001)
        process.kill()
    assert Checkpoints(session).env_steps() == [10, 20], "the save was complete: nothing was tested"
    assert_same(newest(session)[1], small_arrays(20))
    (session / "checkpoints" / "removed_5").mkdir()  # a killed deletion
    save(Checkpoints(session), 30, 1.0)
    assert sorted(path.name for path in (session / "checkpoints").iterdir()) == ["10", "20", "30"]


@contextlib.contextmanager
def small_disk(folder, limit):
    mount = ["mount", "-t", "tmpfs", "-o", limit, "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("free_files", [None, 0, 2], ids=["no space", "no further file", "two further files"])
def test_a_full_disk_ends_a_save_at_once_and_nothing_is_lost(free_files, tmp_path, environment):
    """Orbax's threads must not wait for a folder that never comes: Python would wait for them."""
    with small_disk(tmp_path, "size=1m" if free_files is None else "nr_inodes=200"):
        save(Checkpoints(tmp_path), 20, 1.0)
        fillers = []
        while free_files is not None and os.statvfs(tmp_path).f_favail > free_files:
            fillers.append(tmp_path / str(os.statvfs(tmp_path).f_favail))
            fillers[-1].touch()
        with start_save(tmp_path, 1e6 if free_files is None else 10, environment) as process:
            _, errors = process.communicate(timeout=100)
        assert process.returncode == 2, errors
        (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
        assert "checkpoints/30: the checkpoint could not be written (" in line
        assert_same(newest(tmp_path)[1], small_arrays(20))
        for filler in fillers:
            filler.unlink()
        save(Checkpoints(tmp_path), 40, 1.0)  # the rest of the failed one makes room
