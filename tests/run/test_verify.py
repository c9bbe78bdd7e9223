"""`verify` on a run of two sessions: its scores are recomputed, changes are found, and a part is trained again."""

import json
import shutil
from pathlib import Path

import pytest
from small_training import KINDS, contents
from tampering import another_action, change_a_weight, edit_row, edit_segment, segment_paths, verify_status

from jaxrl_atari.errors import UserError, VerificationFailed
from jaxrl_atari.plots import main as plots
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.verify.__main__ import main as verify


@pytest.fixture
def run_dir(trained, tmp_path):
    return shutil.copytree(trained("plain"), tmp_path / "run")


def test_the_scores_of_every_session_are_recomputed(run_dir, capsys):
    code, line = verify_status(capsys, run_dir, "--session", 1, "--sample", 1)
    assert code == 0
    assert line.startswith("session_1  verified: 3 of 3 rows and ")
    assert " in 1 of " in line
    assert not (run_dir / "session_1" / "verified.json").exists(), "a part proves nothing of the rest"
    assert verify_status(capsys, run_dir)[0] == 0
    for session in (0, 1):
        verified = json.loads((run_dir / f"session_{session}" / "verified.json").read_text())
        assert verified["rows"] == 3
        assert verified["games"] >= 4


def test_a_changed_action_or_row_is_found_and_hides_no_other_session(run_dir, capsys):
    edit_segment(segment_paths(run_dir / "session_0")[-1], actions=another_action)
    with pytest.raises(VerificationFailed, match=r"session_0: .*differs from that of the log"):
        verify([str(run_dir)])
    assert "session_1  verified: " in capsys.readouterr().out
    edit_row(run_dir / "session_1" / "metrics.csv", "return_mean", "99.5")
    code, line = verify_status(capsys, run_dir, "--session", 1)
    assert code == 1
    assert "return_mean is 99.5, the games give" in line
    assert not (run_dir / "session_1" / "verified.json").exists(), "it is not verified any more"


def test_the_shipped_agent_is_as_its_seeds_and_actions_say(capsys):
    agent = Path(__file__).parents[2] / "agents" / "crazy_climber"
    verify([str(agent), "--sample", "1"])  # all rows, and one piece of the games
    assert capsys.readouterr().out.startswith("session_0  verified: 50 of 50 rows and ")


def test_a_session_that_was_copied_from_another_is_refused(run_dir, capsys):
    shutil.rmtree(run_dir / "session_1")
    shutil.copytree(run_dir / "session_0", run_dir / "session_1")
    with pytest.raises(UserError, match=r"session_1: was trained with seed 0, and this session .* has seed 1"):
        verify([str(run_dir)])
    assert "session_0  verified: " in capsys.readouterr().out
    with pytest.raises(UserError, match=r"was trained with seed 0"):
        plots([str(run_dir)])


def test_the_log_of_another_session_or_without_an_environment_is_found(run_dir, capsys):
    for path in segment_paths(run_dir / "session_1"):
        edit_segment(path, anchors=lambda anchors: anchors[anchors[:, 1] != 0])
    code, line = verify_status(capsys, run_dir, "--session", 1)
    assert code == 1
    assert "do not start as those of a session with seed 1" in line
    for name in ("actions", "checkpoints"):  # a published copy may lack the checkpoints, which have the seed
        shutil.rmtree(run_dir / "session_1" / name)
    shutil.copytree(run_dir / "session_0", run_dir / "session_1", dirs_exist_ok=True)
    shutil.rmtree(run_dir / "session_1" / "checkpoints")
    code, line = verify_status(capsys, run_dir, "--session", 1)
    assert code == 1
    assert "do not start as those of a session with seed 1" in line


def test_a_part_is_trained_again_to_the_same_bits_and_a_changed_weight_is_found(run_dir, capsys):
    before = contents(run_dir)
    session_dir = run_dir / "session_0"
    start, target, *_ = Checkpoints(session_dir).env_steps()
    words = [str(run_dir), "--session", "0", "--retrain", str(start)]
    verify(words)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith(f"session_0  retrained: from {start:,} to {target:,} env steps, all bits of ")
    assert contents(run_dir) == before
    change_a_weight(session_dir, KINDS["plain"])
    with pytest.raises(UserError, match=r"\d+ of \d+ arrays differ from those written"):
        verify(words)
