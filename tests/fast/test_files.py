"""Files and directories of runs: atomic writes, locks, unused names, the user's code, and config.json."""

import re
import resource
from datetime import UTC, datetime

import jax
import pytest
from small_training import TINY, change

from jaxrl_atari.errors import UserError
from jaxrl_atari.imports import IMPORTS_VARIABLE, import_named
from jaxrl_atari.runs.description import describe, describe_here, read_config
from jaxrl_atari.runs.files import read_json, write_file, write_json
from jaxrl_atari.runs.run_dir import keep_code, make_run_dir, removed_if_refused


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
        (taken, f"holds a search, which `python -m jaxrl_atari.search --resume {taken}` continues"),
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
def test_what_a_refused_command_has_written_is_removed_unless_a_session_has_begun(written, end, stays, tmp_path):
    """From a new directory, and from a folder of the user's own, in which hidden files and links are."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/notes.txt").write_text("mine")
    for name in ("new", "mine"):
        directory = tmp_path / name
        was_there = name == "mine"
        (directory / ".git").mkdir(parents=True)
        (directory / written).parent.mkdir(parents=True, exist_ok=True)
        (directory / written).touch()
        (directory / "link").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(type(end)), removed_if_refused(directory, is_new=True, was_there=was_there):
            raise end
        assert (directory / written).exists() == stays
        assert (directory / ".git").exists() == (stays or was_there)
    assert (tmp_path / "elsewhere/notes.txt").read_text() == "mine"


def test_a_file_that_was_imported_is_kept_once_and_may_go_away(tmp_path, monkeypatch):
    monkeypatch.setenv(IMPORTS_VARIABLE, "[]")
    own, other = tmp_path / "nets[1].py", tmp_path / "nets[1]_old.py"
    own.write_text("x = 1\n")
    other.write_text("x = 2\n")
    import_named([str(own), str(other)])
    assert keep_code(tmp_path) == keep_code(tmp_path) == []
    own.write_text("x = 2\n")  # the content that the other file has
    (line,) = keep_code(tmp_path)
    assert line.endswith(f"kept as {tmp_path / 'code' / 'nets[1]_2.py'}")
    kept = {path.name: path.read_text() for path in (tmp_path / "code").iterdir()}
    assert kept == {"nets[1].py": "x = 1\n", "nets[1]_2.py": "x = 2\n", "nets[1]_old.py": "x = 2\n"}
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


def test_a_description_of_another_machine_becomes_one_of_this_machine(tmp_path):
    """It is then what `describe` would have returned here, for a new run and for a resume."""
    elsewhere = {"python": "3.0", "git_revision": "abc", "hardware": {"cpu": "another"}}
    assert describe_here(describe(TINY) | elsewhere, TINY.devices) == describe(TINY)
    first = change(TINY, total_env_steps=192)
    write_json(tmp_path / "config.json", describe(first) | {"git_revision": "def"})
    expected = describe(TINY, tmp_path)
    (entry,) = expected["resumed"]
    assert describe_here(expected | {"resumed": [entry | elsewhere]}, TINY.devices) == expected
    assert expected["git_revision"] == "def"


@pytest.mark.parametrize("content", ["{", "", "[1, 2]", "{}", '{"config": {"ppo": {"x": 1}}}'])
def test_a_config_json_that_cannot_be_used_is_named_and_stays(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UserError, match=r"config\.json: "):
        read_config(tmp_path)
    assert (tmp_path / "config.json").read_text() == content


def test_a_run_keeps_its_lambda_although_the_default_of_its_game_has_changed(tmp_path):
    write_json(tmp_path / "config.json", describe(TINY) | {"gae_lambda": 0.25})
    assert TINY.ppo.gae_lambda is None
    assert read_config(tmp_path).resolved_gae_lambda == 0.25
