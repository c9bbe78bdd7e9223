"""Atomic writes, locks, unused names, and the git revision of a run."""

import errno
import fcntl
import json
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
from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError
from jaxrl_atari.imports.children import IMPORTS_VARIABLE
from jaxrl_atari.imports.named import import_named
from jaxrl_atari.runs import run_dir
from jaxrl_atari.runs.description import read_config
from jaxrl_atari.runs.files import create_file, only_writer, unused, write_file
from jaxrl_atari.runs.run_dir import is_only_copy, keep_code


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
    for name in (
        "lr0.001_20260101",
        "lr0.001_20260101_2",
        "lr0.001_20260101_3",
    ):  # the name of a run has no suffix
        assert unused(tmp_path / "lr0.001_20260101") == tmp_path / name
        (tmp_path / name).mkdir()


def test_runs_that_start_in_the_same_second_have_folders_of_their_own(tmp_path, monkeypatch):
    config = Config(output_dir=str(tmp_path))
    first = run_dir.make_run_dir(config)
    taken = iter([first])  # another run takes the name after it was found unused
    monkeypatch.setattr(run_dir, "unused", lambda path: next(taken, None) or unused(path))
    second = run_dir.make_run_dir(config)
    assert second != first
    assert second.is_dir()


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


def test_a_lock_that_cannot_be_taken_is_an_error_unless_the_file_system_has_none(tmp_path, monkeypatch):
    def fail(number):
        def flock(descriptor, operation):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(fcntl, "flock", flock)

    fail(errno.ENOLCK)
    with only_writer(tmp_path):
        pass
    fail(errno.EBADF)  # NFS, for a file that was opened for reading
    with (
        pytest.raises(UserError, match=r"\.lock: cannot be locked \(Bad file descriptor\)"),
        only_writer(tmp_path),
    ):
        pass


def test_who_may_write_to_a_directory_may_lock_it(tmp_path):
    tmp_path.chmod(0o770)
    with only_writer(tmp_path):
        assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o660


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
        (Path(folder) / ".lock").unlink()
        read_only = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True)
    assert f"UserError: {folder}: cannot be written to (Permission denied); copy it" in read_only.stderr


def test_a_file_that_was_imported_is_kept_once_and_may_go_away(tmp_path, monkeypatch):
    monkeypatch.setenv(IMPORTS_VARIABLE, "[]")
    own, other = tmp_path / "nets[1].py", tmp_path / "nets[1]_old.py"
    own.write_text("x = 1\n")
    other.write_text("x = 2\n")
    import_named([str(own), str(other)])
    assert keep_code(tmp_path) == keep_code(tmp_path) == []
    own.write_text("x = 2\n")  # the content that the other file has
    assert keep_code(tmp_path) == [
        f"{own} differs from the copies of that name, and is kept as {tmp_path / 'code' / 'nets[1]_2.py'}"
    ]
    assert sorted(path.name for path in (tmp_path / "code").iterdir()) == [
        "nets[1].py",
        "nets[1]_2.py",
        "nets[1]_old.py",
    ]
    own.unlink()
    assert keep_code(tmp_path) == [f"{own} is not kept: No such file or directory"]


@pytest.mark.parametrize(("first", "second"), [("mine", "another"), ("same", "same")])
def test_a_file_of_the_user_is_no_copy_of_another_one(first, second, tmp_path, monkeypatch):
    """Although its name is that of a copy."""
    monkeypatch.setenv(IMPORTS_VARIABLE, "[]")
    own, other = tmp_path / "agent.py", tmp_path / "agent_2.py"
    own.write_text(first)
    other.write_text(second)
    monkeypatch.setattr(run_dir, "imported_files", lambda: [other, own])
    run = tmp_path / "run"
    run.mkdir()
    assert keep_code(run) == []
    assert {path.name: path.read_text() for path in (run / "code").iterdir()} == {
        "agent.py": first,
        "agent_2.py": second,
    }
    assert is_only_copy(run, own)
    assert is_only_copy(run, other)
    own.write_text("edited")
    keep_code(run)
    assert not is_only_copy(run, own)


@pytest.mark.parametrize("faster", ["before the name", "after the name"])
@pytest.mark.parametrize("content", ["mine", "another"])
def test_sessions_that_start_side_by_side_keep_one_copy_of_a_file(faster, content, tmp_path, monkeypatch):
    """Another session keeps its copy before or after this one chooses a name."""
    own = tmp_path / "own.py"
    own.write_text("mine")
    code = tmp_path / "run" / "code"
    code.mkdir(parents=True)

    def unused_beside_another(path):
        name = unused(path) if faster == "after the name" else None
        (code / "own.py").write_text(content)
        return name or unused(path)

    monkeypatch.setattr(run_dir, "imported_files", lambda: [own])
    monkeypatch.setattr(run_dir, "unused", unused_beside_another)
    said = keep_code(code.parent)
    copies = {path.name: path.read_text() for path in code.iterdir()}
    if content == "mine":
        assert copies == {"own.py": "mine"}
        assert said == []
    else:
        assert copies == {"own.py": "another", "own_2.py": "mine"}
        assert said == [f"{own} differs from the copies of that name, and is kept as {code / 'own_2.py'}"]


def test_a_file_is_created_once(tmp_path):
    path = tmp_path / "file"
    assert create_file(path, "first")
    assert not create_file(path, "second")
    assert path.read_text() == "first"
    assert list(tmp_path.iterdir()) == [path], "nothing is left beside it"


def test_a_config_of_another_version_has_one_advice(tmp_path):
    write_file(tmp_path / "config.json", json.dumps({"config": {"ppo": {"x": 1}}}))
    with pytest.raises(UserError) as error:
        read_config(tmp_path)
    assert str(error.value) == (
        f"{tmp_path / 'config.json'}: ppo.x: this version of jaxrl_atari has no such field; use the version that"
        " saved it"
    )


@pytest.mark.parametrize("variables", [{}, {"GIT_DIR": "../.git"}])
def test_a_package_inside_another_repository_has_not_its_revision(variables, tmp_path):
    commit = "git init -q && git -c user.name=a -c user.email=b commit -q --allow-empty -m theirs"
    subprocess.run(commit, shell=True, cwd=tmp_path, check=True)
    shutil.copytree(Path(jaxrl_atari.__file__).parent, tmp_path / "venv" / "jaxrl_atari")
    code = (
        "from jaxrl_atari.runs.description import *; print(software_and_machine(DevicesConfig())['git_revision'])"
    )
    environment = os.environ | variables
    assert (
        subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path / "venv", env=environment) == b"None\n"
    )
