"""`verify` on a session that was stopped twice, and on logs and tables that were changed."""

import contextlib
import json
import re
import shutil
import threading

import numpy as np
import pytest
from small_training import TINY, change, edit_meta, latest_meta, stop_before

from jaxrl_atari import cli
from jaxrl_atari.envs import make_pool
from jaxrl_atari.errors import UserError, VerificationFailed
from jaxrl_atari.runs.actions import cut_segments, read_actions, segments
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.session import run_session
from jaxrl_atari.trials.trial import run_training
from jaxrl_atari.verify import games, recompute
from jaxrl_atari.verify.__main__ import main as verify

pytestmark = pytest.mark.long
CONFIG = change(TINY, total_env_steps=1_024, env={"num_envs": 4, "max_frames": 200, "anchor_steps": 60})


def status(capsys, *arguments):
    """The exit status of the command, and its last line."""
    threads = set(threading.enumerate())
    with pytest.raises(SystemExit) as end:
        cli.run(lambda: verify(list(map(str, arguments))))
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=10)  # one that still draws would wait for itself if it were collected there
        assert not thread.is_alive(), thread
    output = capsys.readouterr()
    return end.value.code, (output.err or output.out).splitlines()[-1]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("run")
    write_json(run_dir / "config.json", {"config": CONFIG.to_dict()})
    for rollout in (5, 6, 100):
        with contextlib.suppress(KeyboardInterrupt):
            run_session(CONFIG, run_dir / "session_0", resume=True, stop_requested=stop_before(rollout))
    return run_dir


@pytest.fixture
def run_dir(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def test_a_session_that_was_stopped_twice(run_dir, capsys):
    code, line = status(capsys, run_dir)
    verified = json.loads((run_dir / "session_0" / "verified.json").read_text())
    rows, games = verified["rows"], verified["games"]
    assert code == 0
    assert rows > 10
    assert games > 10
    assert line == f"session_0  verified: {rows} of {rows} rows and {games} games are equal"
    assert status(capsys, run_dir, "--session", "1")[0] == 2


@pytest.mark.slow
def test_every_session_is_verified_although_one_differs(run_dir, capsys):
    for session in (1, 2):
        shutil.copytree(run_dir / "session_0", run_dir / f"session_{session}")
    for session in (0, 1):
        edit([path for *_, path in segments(run_dir / f"session_{session}")][SEGMENT], actions=another_action)
    with pytest.raises(VerificationFailed) as error:
        verify([str(run_dir)])
    for session in (0, 1):
        assert f"session_{session}: environment" in str(error.value)
    assert "session_2  verified: " in capsys.readouterr().out
    assert (run_dir / "session_2" / "verified.json").is_file()


def test_options_of_games_are_refused_with_retrain(run_dir, capsys):
    code, line = status(capsys, run_dir, "--retrain", 64, "--sample", 2)
    assert (code, line) == (
        2,
        "error: --sample = 2: expected nothing with --retrain, which plays no games of the log",
    )


def test_a_part_of_the_games(run_dir, capsys):
    for part in (["--sample", 2], ["--from", 100, "--to", 200]):
        code, line = status(capsys, run_dir, *part)
        assert code == 0
        assert re.search(r" \d+ of \d+ pieces of games, in which \d+ games? ended, are equal$", line)
    assert not (run_dir / "session_0" / "verified.json").exists()
    code, line = status(capsys, run_dir, "--from", 10**6)
    assert code == 2
    assert line.startswith("error: --from 1000000: no piece of a game lies there; the log has ")


def test_a_result_that_cannot_be_saved_is_shown_all_the_same(run_dir, capsys):
    session_dir = run_dir / "session_0"
    (session_dir / "verified.json" / "in the way").mkdir(parents=True)
    code, line = status(capsys, run_dir)
    assert code == 0
    assert line == f"session_0  the result is not saved: {session_dir / 'verified.json'}: Is a directory"
    replace_in(session_dir / "metrics.csv", "return_mean", "99.5")
    code, line = status(capsys, run_dir)
    assert code == 1
    assert "return_mean is 99.5, the games give" in line


def edit(path, **changes):
    """Replaces arrays of a segment by functions of them."""
    arrays = dict(np.load(path))
    np.savez(path, **arrays | {name: new(arrays[name].copy()) for name, new in changes.items()})


def without(path, name):
    """Removes an array from a segment."""
    arrays = dict(np.load(path))
    del arrays[name]
    np.savez(path, **arrays)


def another_action(actions):
    actions[len(actions) // 2] = (actions[len(actions) // 2] + 2) % 4
    return actions


def better(games):
    games[0, 2] += 1
    return games


def replace_in(path, column, text):
    header, *rows = [line.split(",") for line in path.read_text().splitlines()]
    rows[-3][header.index(column)] = text
    path.write_text("\n".join(map(",".join, [header, *rows])) + "\n")


def wider(path):
    """The name of a segment with one more step."""
    first, last = map(int, path.stem.split("_"))
    return path.with_name(f"{first:010}_{last + 1:010}.npz")


SEGMENT = 3


@pytest.mark.parametrize(
    ("tamper", "found"),
    [
        (lambda parts, table: without(parts[SEGMENT], "games"), "damaged (KeyError: "),
        (
            lambda parts, table: edit(parts[SEGMENT], games=lambda games: games[:, :2]),
            "its arrays have other shapes",
        ),
        (
            lambda parts, table: edit(parts[SEGMENT], actions=another_action),
            "differs from that of the log",
        ),
        (lambda parts, table: edit(parts[SEGMENT], actions=lambda actions: actions + 9), "cannot be played"),
        (
            lambda parts, table: edit(parts[0], anchors=lambda anchors: anchors + np.array([0, 9, 0])),
            "an anchor has a step, ",
        ),
        (
            lambda parts, table: edit(parts[0], anchors=lambda anchors: anchors - np.array([0, 0, 2**31])),
            "an anchor has a ",
        ),
        (
            lambda parts, table: edit(parts[0], anchors=lambda anchors: anchors + np.array([10**6, 0, 0])),
            "an anchor has a ",
        ),
        (lambda parts, table: edit(parts[SEGMENT], games=better), "return_mean is "),
        (
            lambda parts, table: edit(parts[SEGMENT], games=lambda games: np.repeat(games, 2, 0)),
            "where no update ended",
        ),
        (lambda parts, table: edit(parts[0], anchors=lambda anchors: anchors[:-1]), " games, the actions give "),
        (lambda parts, table: replace_in(table, "return_mean", "99.5"), "return_mean is 99.5, the games give"),
        (
            lambda parts, table: replace_in(table, "env_steps", "999"),
            "999 env steps: metrics.csv has a row",
        ),
        (
            lambda parts, table: replace_in(table, "return_mean", "99.5,"),
            "metrics.csv: 1 line is not understood (line ",
        ),
        (lambda parts, table: table.write_text("a,b\n1,2\n"), "metrics.csv: 1 line is not understood (line 1: "),
        (lambda parts, table: table.unlink(), "metrics.csv: ends at 0 env steps, and had rows up to "),
        (lambda parts, table: table.write_text(table.read_text()[:-9]), "metrics.csv: ends at "),
        (lambda parts, table: parts[SEGMENT].unlink(), " before it is missing"),
        (lambda parts, table: shutil.copy(parts[SEGMENT], wider(parts[SEGMENT])), "move away the one that is not"),
        (lambda parts, table: parts[-1].rename(wider(parts[-1])), "its arrays have other shapes"),
        (lambda parts, table: parts[-1].unlink(), "the log of actions ends at"),
        (lambda parts, table: parts[SEGMENT].write_bytes(parts[SEGMENT].read_bytes()[:-99]), "damaged ("),
    ],
)
def test_what_was_changed_is_found(tamper, found, run_dir, capsys):
    session_dir = run_dir / "session_0"
    (session_dir / "verified.json").touch()
    tamper([path for *_, path in segments(session_dir)], session_dir / "metrics.csv")
    code, line = status(capsys, run_dir)
    assert code == 1
    assert line.startswith("error: ")
    assert found in line
    assert not (session_dir / "verified.json").exists(), "it is not verified any more"


@pytest.mark.slow
def test_a_foreign_file_beside_the_segments_is_ignored(run_dir, capsys):
    """Such as the copy that a program leaves that synchronises folders."""
    session_dir = run_dir / "session_0"
    *_, (first, last, path) = segments(session_dir)
    for name in (f"{path.stem}_conflict", f"{path.stem} (copy)", f"{first}_{last}", "a_b"):
        shutil.copy2(path, path.with_name(f"{name}.npz"))
    assert status(capsys, run_dir)[0] == 0
    cut_segments(session_dir, first)
    assert segments(session_dir)[-1][1] == first
    assert path.with_name("a_b.npz").is_file()


def test_new_games_and_other_rollouts_after_a_resume(tmp_path, capsys):
    """Every game has ended just before the resume: no auto-reset step follows."""
    config = change(CONFIG, total_env_steps=256, env={"max_frames": 128})
    write_json(tmp_path / "config.json", {"config": config.to_dict()})
    session_dir = tmp_path / "session_0"
    with pytest.raises(KeyboardInterrupt):
        run_session(config, session_dir, stop_requested=stop_before(3))
    meta = latest_meta(session_dir)
    assert (meta["steps"], meta["statistics"]["lengths"]) == (32, [32] * 4)
    edit_meta(session_dir, meta["env_steps"], items={})
    run_session(change(config, ppo={"rollout_length": 8}), session_dir, resume=True)
    assert status(capsys, tmp_path)[0] == 0


@pytest.mark.parametrize("order", [(False, True), (True, False)])
def test_a_log_that_was_off_for_a_part_is_no_accusation(order, tmp_path, capsys):
    """Through `run_training`, whose config.json says what each resume changed."""
    run_dir = tmp_path / "run"
    for part, is_on in enumerate(order, 1):
        config = change(CONFIG, total_env_steps=part * 128, log={"actions": is_on}, sessions=1)
        run_training(config, run_dir)
    code, line = status(capsys, run_dir)
    assert code == 2
    assert "log.actions was False for a part of the run" in line


@pytest.mark.parametrize(
    ("was", "why"), [(False, "log.actions was False"), (None, "trained by a version without a log of actions")]
)
def test_a_log_that_was_off_for_a_part_does_not_keep_others_from_being_verified(was, why, run_dir, capsys):
    shutil.copytree(run_dir / "session_0", run_dir / "session_1")
    next(path for *_, path in segments(run_dir / "session_0")).unlink()
    write_json(
        run_dir / "config.json",
        {"config": CONFIG.to_dict(), "resumed": ["malformed", {"changed": {"log.actions": [was, True]}}]},
    )
    with pytest.raises(UserError, match=f"session_0: cannot be verified: .*{why}") as error:
        verify([str(run_dir)])
    assert error.value.exit_status == 2
    assert "session_1  verified: " in capsys.readouterr().out


@pytest.mark.parametrize("described", ["versions", pytest.param("resumed", marks=pytest.mark.slow)])
def test_a_difference_with_another_emulator_is_no_accusation(described, run_dir, capsys):
    versions = {"versions": {"ale-py": "0.1"}}
    more = versions if described == "versions" else {"resumed": [versions]}
    write_json(run_dir / "config.json", {"config": CONFIG.to_dict(), **more})
    assert status(capsys, run_dir)[0] == 0, "what is equal is verified all the same"
    edit([path for *_, path in segments(run_dir / "session_0")][SEGMENT], actions=another_action)
    code, line = status(capsys, run_dir)
    assert code == 2
    assert "proves nothing, because ale-py was 0.1 in training" in line


@pytest.mark.parametrize(
    "tamper",
    [
        lambda session_dir: replace_in(session_dir / "metrics.csv", "return_mean", "99.5"),
        lambda session_dir: segments(session_dir)[-1][2].unlink(),
    ],
)
def test_another_emulator_excuses_no_difference_that_needs_none(tamper, run_dir, capsys):
    """A row follows from the log, and a lost segment from the checkpoints."""
    session_dir = run_dir / "session_0"
    write_json(run_dir / "config.json", {"config": CONFIG.to_dict(), "versions": {"ale-py": "0.1"}})
    (session_dir / "verified.json").touch()
    tamper(session_dir)
    assert status(capsys, run_dir)[0] == 1
    assert not (session_dir / "verified.json").exists()


def test_a_row_that_differs_with_another_version_of_this_package_is_no_accusation(run_dir, capsys):
    write_json(run_dir / "config.json", {"config": CONFIG.to_dict(), "versions": {"jaxrl_atari": "0.0.1"}})
    replace_in(run_dir / "session_0" / "metrics.csv", "return_mean", "99.5")
    code, line = status(capsys, run_dir)
    assert code == 2
    assert "proves nothing, because jaxrl_atari was 0.0.1 in training" in line


def test_a_bug_of_ours_accuses_no_run(run_dir, monkeypatch):
    def fail(*_):
        raise ValueError("operands could not be broadcast together")

    monkeypatch.setattr(games.EpisodeCounter, "count", fail)
    with pytest.raises(ValueError, match="operands"):
        verify([str(run_dir)])


def test_a_checkpoint_that_is_written_meanwhile_is_no_accusation(run_dir, capsys, monkeypatch):
    """The session trains on: it writes a checkpoint after `verify` has read the log of actions."""
    session_dir = run_dir / "session_0"

    def read_then_train_on(path):
        log = read_actions(path)
        newest = max(Checkpoints(path).env_steps())
        shutil.copytree(path / "checkpoints" / str(newest), path / "checkpoints" / str(newest + 64))
        return log

    monkeypatch.setattr(recompute, "read_actions", read_then_train_on)
    assert status(capsys, run_dir)[0] == 0
    assert (session_dir / "verified.json").is_file()


def test_games_are_played_on_all_cores_although_training_had_one_thread(run_dir, capsys, monkeypatch):
    assert CONFIG.env.num_threads == 1
    threads = set()

    def make_and_note(*args, num_threads, **named):
        threads.add(num_threads)
        return make_pool(*args, num_threads=num_threads, **named)

    monkeypatch.setattr(games, "make_pool", make_and_note)
    assert status(capsys, run_dir)[0] == 0
    assert threads == {0}  # one per core


def test_a_row_that_the_session_is_writing_is_no_accusation(run_dir, capsys):
    with (run_dir / "session_0" / "metrics.csv").open("a") as table:
        table.write("9999,1")
    assert status(capsys, run_dir)[0] == 0


def test_a_session_without_a_log_of_actions(run_dir, capsys):
    shutil.rmtree(run_dir / "session_0" / "actions")
    code, line = status(capsys, run_dir)
    assert code == 2
    assert "session_0: has no log of actions; `log.actions`" in line


def test_a_distributed_run_has_no_log_of_actions(run_dir, capsys):
    config = change(CONFIG, devices={"distributed": True})
    write_json(run_dir / "config.json", {"config": config.to_dict()})
    code, line = status(capsys, run_dir)
    assert code == 2
    assert "has no log of actions; games are not recorded with devices.distributed" in line
