"""`verify` on a session that was stopped twice, and on logs and tables that were changed."""

import contextlib
import json
import shutil

import numpy as np
import pytest
from small_training import TINY, change, edit_meta, latest_meta, stop_before
from tampering import another_action, edit_row, edit_segment, segment_paths, verify_status

from jaxrl_atari.runs.actions import read_actions, segments
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.session import run_session
from jaxrl_atari.verify import recompute

CONFIG = change(TINY, total_env_steps=1_024, env={"max_frames": 200, "anchor_steps": 60})


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    write_json(run_dir / "config.json", {"config": CONFIG.to_dict(), "versions": {}})
    for rollout in (5, 6, 100):
        with contextlib.suppress(KeyboardInterrupt):
            run_session(CONFIG, run_dir / "session_0", stop_requested=stop_before(rollout))
    return run_dir


@pytest.fixture
def run_dir(stopped, tmp_path):
    return shutil.copytree(stopped, tmp_path / "run")


def test_a_session_that_was_stopped_twice(run_dir, capsys):
    code, line = verify_status(capsys, run_dir)
    verified = json.loads((run_dir / "session_0" / "verified.json").read_text())
    rows, games = verified["rows"], verified["games"]
    assert code == 0
    assert min(rows, games) > 10
    assert line == f"session_0  verified: {rows} of {rows} rows and {games} games are equal"
    assert verify_status(capsys, run_dir, "--session", "1")[0] == 2


def test_a_result_that_cannot_be_saved_is_shown_all_the_same(run_dir, capsys):
    (run_dir / "session_0" / "verified.json" / "in the way").mkdir(parents=True)
    code, line = verify_status(capsys, run_dir)
    assert code == 0
    assert "; the result is not saved: " in line


def without_games(path):
    arrays = dict(np.load(path))
    del arrays["games"]
    np.savez(path, **arrays)


def better(games):
    games[0, 2] += 1
    return games


def wider(path):
    """The name of a segment with one more step."""
    first, last = map(int, path.stem.split("_"))
    return path.with_name(f"{first:010}_{last + 1:010}.npz")


SEGMENT = 5  # in its middle games go on, and one ends in it


@pytest.mark.parametrize(
    ("tamper", "found"),
    [
        (lambda parts, table: edit_segment(parts[SEGMENT], actions=lambda a: a + 9), "cannot be played"),
        (lambda parts, table: edit_segment(parts[SEGMENT], games=better), "return_mean is "),
        (
            lambda parts, table: edit_segment(parts[SEGMENT], games=lambda games: np.repeat(games, 2, 0)),
            "where no update ended",
        ),
        (lambda parts, table: edit_segment(parts[0], anchors=lambda a: a[:-1]), "do not start as those of"),
        (lambda parts, table: without_games(parts[SEGMENT]), "damaged (KeyError: "),
        (lambda parts, table: parts[SEGMENT].unlink(), " before it end at step "),
        (lambda parts, table: shutil.copy(parts[SEGMENT], wider(parts[SEGMENT])), " before it end at step "),
        (lambda parts, table: parts[-1].unlink(), "the log of actions ends at"),
        (lambda parts, table: parts[SEGMENT].write_bytes(parts[SEGMENT].read_bytes()[:-99]), "damaged ("),
        (lambda parts, table: edit_row(table, "env_steps", "999"), "999 env steps: metrics.csv has a row"),
        (lambda parts, table: edit_row(table, "return_mean", "99.5,"), "is not understood"),
        (lambda parts, table: table.unlink(), "metrics.csv: ends at 0 env steps, and had rows up to "),
        (lambda parts, table: table.write_text(table.read_text()[:-9]), "metrics.csv: ends at "),
    ],
)
def test_what_was_changed_is_found(tamper, found, run_dir, capsys):
    session_dir = run_dir / "session_0"
    (session_dir / "verified.json").touch()
    tamper(segment_paths(session_dir), session_dir / "metrics.csv")
    code, line = verify_status(capsys, run_dir)
    assert code == 1
    assert found in line
    assert not (session_dir / "verified.json").exists(), "it is not verified any more"


def test_a_foreign_file_beside_the_segments_is_ignored(run_dir, capsys):
    """Such as the copy that a program leaves that synchronises folders."""
    session_dir = run_dir / "session_0"
    *_, (first, last, path) = segments(session_dir)
    for name in (f"{path.stem}_conflict", f"{path.stem} (copy)", f"{first}_{last}", "a_b"):
        shutil.copy2(path, path.with_name(f"{name}.npz"))
    assert verify_status(capsys, run_dir)[0] == 0


def test_new_games_and_other_rollouts_after_a_resume(tmp_path, capsys):
    """Every game has ended just before the resume: no auto-reset step follows."""
    config = change(CONFIG, total_env_steps=256, env={"max_frames": 128})
    resumed = [{"changed": {"total_env_steps": [128, 256]}}]
    described = {"config": config.to_dict(), "versions": {}, "resumed": resumed}
    write_json(tmp_path / "config.json", described)
    session_dir = tmp_path / "session_0"
    run_session(change(config, total_env_steps=128), session_dir)
    meta = latest_meta(session_dir)
    assert (meta["steps"], meta["statistics"]["lengths"]) == (32, [32] * 4)
    edit_meta(session_dir, meta["env_steps"], items={})
    run_session(change(config, ppo={"rollout_length": 8}), session_dir)
    assert verify_status(capsys, tmp_path)[0] == 0


def test_a_difference_with_another_emulator_is_no_accusation(run_dir, capsys):
    write_json(run_dir / "config.json", {"config": CONFIG.to_dict(), "versions": {"ale-py": "0.1"}})
    assert verify_status(capsys, run_dir)[0] == 0, "what is equal is verified all the same"
    edit_segment(segment_paths(run_dir / "session_0")[SEGMENT], actions=another_action)
    code, line = verify_status(capsys, run_dir)
    assert code == 2
    assert "proves nothing, because ale-py was 0.1 in training" in line


def test_a_session_that_trains_meanwhile_is_not_accused(run_dir, capsys, monkeypatch):
    """It writes a row, and a checkpoint after `verify` has read the log of actions."""
    session_dir = run_dir / "session_0"

    def read_then_train_on(path):
        log = read_actions(path)
        newest = max(Checkpoints(path).env_steps())
        shutil.copytree(path / "checkpoints" / str(newest), path / "checkpoints" / str(newest + 64))
        return log

    monkeypatch.setattr(recompute, "read_actions", read_then_train_on)
    with (session_dir / "metrics.csv").open("a") as table:
        table.write("9999,1")
    assert verify_status(capsys, run_dir)[0] == 0
    assert (session_dir / "verified.json").is_file()


def test_a_session_without_a_log_of_actions(run_dir, capsys):
    shutil.rmtree(run_dir / "session_0" / "actions")
    code, line = verify_status(capsys, run_dir)
    assert code == 2
    assert "session_0: has no log of actions; `log.actions`" in line
