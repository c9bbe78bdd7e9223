import errno
import json
import os
import subprocess
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest

from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError
from jaxrl_atari.runs import description
from jaxrl_atari.runs.files import only_writer, unused, write_file, write_json


def test_text_and_bytes_are_written_as_they_are(tmp_path):
    path = tmp_path / "file"
    write_file(path, "± 1\r\n")
    assert path.read_bytes() == b"\xc2\xb1 1\r\n"
    write_file(path, b"\x00\xff")
    assert path.read_bytes() == b"\x00\xff"
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask():
    before = os.umask(0)
    os.umask(before)
    return before


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_file(path, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def write_and_read(path, content):
    for _ in range(20):
        write_file(path, content)
        assert len(set(path.read_text())) == 1  # a mixture would have several letters
    return True


def test_several_processes_can_write_one_file(tmp_path):
    with ProcessPoolExecutor(3, mp_context=get_context("spawn")) as pool:
        assert all(pool.map(partial(write_and_read, tmp_path / "file"), [letter * 100_000 for letter in "abc"]))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_json_is_indented_and_refuses_nan(tmp_path):
    path = tmp_path / "values.json"
    write_json(path, {"score": 1.5, "missing": None})
    assert json.loads(path.read_text()) == {"score": 1.5, "missing": None}
    assert path.read_text().startswith('{\n  "score"')
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"score": float("nan")})


def test_an_unused_name_is_numbered(tmp_path):
    path = tmp_path / "metrics.csv"
    assert unused(path) == path
    for name in ("metrics.csv", "metrics_2.csv"):
        (tmp_path / name).touch()
    assert unused(path) == Path(tmp_path / "metrics_3.csv")


def test_a_directory_has_one_writer_at_a_time(tmp_path):
    with (
        only_writer(tmp_path),
        pytest.raises(UserError, match="another process is training there"),
        only_writer(tmp_path),
    ):
        pass
    with only_writer(tmp_path):  # the lock was released
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_directory_that_cannot_be_written_to_is_locked_too(tmp_path, monkeypatch, number):
    """That of a finished run, which `--run-dir` leaves alone."""
    open_file = os.open

    def refuse(path, flags, *mode):
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number), str(path))
        return open_file(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    with only_writer(tmp_path), pytest.raises(UserError, match="another process"), only_writer(tmp_path):
        pass


def test_the_git_revision_is_that_of_this_package_alone(tmp_path, monkeypatch):
    """A virtual environment inside another repository does not give the package that repository's commit."""
    own = Path(description.__file__).parents[2]
    assert (description.surroundings(Config())["git_revision"] is not None) == (own / ".git").exists()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run([*git, *command], check=True)
    installed = tmp_path / "venv" / "site-packages" / "jaxrl_atari" / "run_dir" / "description.py"
    installed.parent.mkdir(parents=True)
    monkeypatch.setattr(description, "__file__", str(installed))
    assert description.surroundings(Config())["git_revision"] is None
