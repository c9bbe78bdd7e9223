"""Atomic writes, locks, unused names, and the git revision of a run."""

import errno
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import jaxrl_atari
from jaxrl_atari.errors import UserError
from jaxrl_atari.runs.files import only_writer, unused, write_file


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "file"
    write_file(path, "± 1\r\n")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # as on a full disk
    try:
        with pytest.raises(OSError, match=str(path)):
            write_file(path, b"new" * 100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == b"\xc2\xb1 1\r\n"
    assert list(tmp_path.iterdir()) == [path]


def write_and_read(path, letter):
    for _ in range(20):
        write_file(path, letter * 100_000)
        assert len(set(path.read_text())) == 1  # a mixture would have several letters


def test_several_processes_can_write_one_file(tmp_path):
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        pool.starmap(write_and_read, [(tmp_path / "file", letter) for letter in "abc"])


def test_an_unused_name_is_numbered(tmp_path):
    for name in ("metrics.csv", "metrics_2.csv", "metrics_3.csv"):
        assert unused(tmp_path / "metrics.csv") == tmp_path / name
        (tmp_path / name).touch()


def test_a_directory_has_one_writer_at_a_time(tmp_path):
    with (
        only_writer(tmp_path),
        pytest.raises(UserError, match="another process is training"),
        only_writer(tmp_path),
    ):
        pass
    with only_writer(tmp_path):
        pass


def test_a_file_system_without_fsync_is_written_to(tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", fsync)
    write_file(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_lock_of_another_user_holds():
    code = (
        "import os, pathlib, sys; from jaxrl_atari.runs.files import only_writer; os.setuid(54_321);"
        "exec('with only_writer(pathlib.Path(sys.argv[1])): print(1)')"
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        with only_writer(Path(folder)):
            refused = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
        assert "another process is training" in refused.stderr
        assert subprocess.check_output([sys.executable, "-c", code, folder]) == b"1\n"


@pytest.mark.parametrize("variables", [{}, {"GIT_DIR": "../.git"}])
def test_a_package_inside_another_repository_has_not_its_revision(variables, tmp_path):
    commit = "git init -q && git -c user.name=a -c user.email=b commit -q --allow-empty -m theirs"
    subprocess.run(commit, shell=True, cwd=tmp_path, check=True)
    shutil.copytree(Path(jaxrl_atari.__file__).parent, tmp_path / "venv" / "jaxrl_atari")
    code = "from jaxrl_atari.runs.run_dir import *; print(surroundings(Config())['git_revision'])"
    environment = os.environ | variables
    assert (
        subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path / "venv", env=environment) == b"None\n"
    )
