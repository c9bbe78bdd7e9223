"""Files and directories of runs: atomic writes, locks, unused names, the user's code, and config.json."""

import re
import resource
from datetime import UTC, datetime

import jax
import pytest
from small_training import TINY, change

from jaxrl_atari.errors import UserError
from jaxrl_atari.imports import import_named
from jaxrl_atari.runs.description import describe, read_config
from jaxrl_atari.runs.files import read_json, write_file, write_json
from jaxrl_atari.runs.run_dir import claim_run_dir, keep_code, make_run_dir


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


# --- The directory of a run --------------------------------------------------------------------------------------


def test_a_new_run_never_takes_the_folder_of_another(tmp_path):
    config = change(TINY, output_dir=str(tmp_path))
    made = {make_run_dir(config) for _ in range(3)}
    assert len(made) == 3
    assert all(re.fullmatch(r"tiny_\d{8}_\d{6}(_\d)?", path.name) for path in made)
    (tmp_path / "notes").touch()
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "search.json").write_text("{}")
    for folder, problem in (
        (tmp_path, "holds .*, and no run"),
        (tmp_path / "notes" / "run", "Not a directory"),
        (taken, "holds a search; choose another folder"),
    ):
        with pytest.raises(UserError, match=problem):
            make_run_dir(config, folder)


@pytest.mark.parametrize(
    ("written", "end", "stays"),
    [
        ("suite.json", UserError("refused"), False),
        ("suite.json", KeyboardInterrupt(), True),
        ("Pong/session_0/metrics.csv", UserError("refused"), True),
    ],
)
def test_the_new_directory_of_a_refused_command_is_removed_unless_a_session_has_begun(
    written, end, stays, tmp_path
):
    """A folder of the user's own stays in any case."""

    def command(wanted):
        with claim_run_dir(TINY, wanted, is_new=True) as directory:
            (directory / written).parent.mkdir(parents=True, exist_ok=True)
            (directory / written).touch()
            raise end

    (tmp_path / "mine" / ".git").mkdir(parents=True)
    for name in ("new", "mine"):
        with pytest.raises(type(end)):
            command(tmp_path / name)
        assert (tmp_path / name).exists() == (stays or name == "mine")
    assert (tmp_path / "mine" / ".git").exists()


def test_a_file_that_was_imported_is_kept_once_and_may_go_away(tmp_path):
    own, other = tmp_path / "nets[1].py", tmp_path / "nets[1]_old.py"
    own.write_text("x = 1\n")
    other.write_text("x = 2\n")
    import_named([str(own), str(other)])
    assert keep_code(tmp_path) == keep_code(tmp_path) == []
    own.write_text("x = 3\n")
    (line,) = keep_code(tmp_path)
    assert line.endswith(f"kept as {tmp_path / 'code' / 'nets[1]_2.py'}")
    kept = {path.name: path.read_text() for path in (tmp_path / "code").iterdir()}
    assert kept == {"nets[1].py": "x = 1\n", "nets[1]_2.py": "x = 3\n", "nets[1]_old.py": "x = 2\n"}
    own.unlink()
    (line,) = keep_code(tmp_path)
    assert "is not kept" in line


# --- config.json -------------------------------------------------------------------------------------------------


def test_config_json_says_how_a_run_began_and_what_each_resume_changed(tmp_path):
    write_json(tmp_path / "config.json", describe(change(TINY, seed=3)) | {"git_revision": "abc", "python": "3.0"})
    assert read_config(tmp_path) == change(TINY, seed=3)
    write_json(tmp_path / "config.json", describe(change(TINY, seed=3, total_env_steps=320), tmp_path))
    described = read_json(tmp_path / "config.json")
    assert (described["seed"], described["game"], described["protocol"]) == (3, "Breakout", "v5, max_frames=128")
    assert (described["git_revision"], described["hardware"]["gpus"]) == ("abc", None)
    (entry,) = described["resumed"]
    assert entry["changed"] == {"total_env_steps": [256, 320]}
    since = datetime.now(UTC) - datetime.strptime(entry["date"], "%Y-%m-%d %H:%M:%S %Z").replace(tzinfo=UTC)
    assert 0 <= since.total_seconds() < 60, "UTC, also in an hour that a local clock shows twice"
    assert entry["versions"]["jax"] == jax.__version__


def test_a_start_that_changes_nothing_adds_nothing_and_one_on_another_machine_is_recorded(tmp_path):
    """As the sessions of a run, which begin one after the other, perhaps on several machines of a cluster."""
    write_json(tmp_path / "config.json", describe(TINY))
    before = read_json(tmp_path / "config.json")
    assert describe(TINY, tmp_path) == before
    write_json(tmp_path / "config.json", before | {"hardware": {"cpu": "another"}})
    write_json(tmp_path / "config.json", describe(TINY, tmp_path))
    described = read_json(tmp_path / "config.json")
    assert described["hardware"] == {"cpu": "another"}
    (entry,) = described["resumed"]
    assert (entry["hardware"], entry["changed"]) == (before["hardware"], {})
    assert describe(TINY, tmp_path) == described


@pytest.mark.parametrize("content", ["{", "[1, 2]", '{"config": {"ppo": {"x": 1}}}'])
def test_a_config_json_that_cannot_be_used_is_named_and_stays(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json: "):
        read_config(tmp_path)
    assert (tmp_path / "config.json").read_text() == content
