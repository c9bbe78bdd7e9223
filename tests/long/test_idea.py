"""docs/idea.md, followed word for word: ideas and a network in files of a user's, with a user's commands."""

import shlex
import shutil

import numpy as np
import pytest
from idea_page import SMALL, SWEEP, TRAIN, TRY, block, run, train, write_files
from sample_runs import read_csv


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("idea"))


@pytest.fixture(scope="module")
def idea(folder):
    """The run of the idea: two sessions, each in a process."""
    train(folder, TRAIN, "--sessions=2", "--trial.parallel=2")
    return folder / "data" / "z_loss"


def test_a_try_of_a_minute(folder):
    train(folder, TRY)


def test_an_idea_is_compared_with_the_baseline_in_one_command(folder):
    ended = run(folder, "suite", "--config", *shlex.split(SWEEP), *SMALL, "--sessions=2")
    assert ended.returncode == 0, ended.stderr
    text = (folder / "data" / "idea" / "results.md").read_text()
    assert "Breakout: algorithm=z_loss - algorithm=ppo: " in text


def test_an_idea_is_evaluated_and_resumed(folder, idea):
    ended = run(folder, "evaluate", "data/z_loss", "--episodes", "1")  # the policy needs no algorithm
    assert ended.returncode == 0, ended.stderr
    shutil.copytree(idea, folder / "data" / "again")
    without = run(folder, "train", "--resume", "data/again", "--total-env-steps", "320")
    assert without.returncode == 2
    assert "--import" in without.stderr
    kept = ("--import", "data/again/code/my_idea.py", "--total-env-steps", "320")
    ended = run(folder, "train", "--resume", "data/again", *kept)
    assert ended.returncode == 0, ended.stderr
    assert float(read_csv(folder / "data/again/session_0/metrics.csv")[-1]["env_steps"]) > 256
    assert [path.name for path in (folder / "data" / "again" / "code").iterdir()] == ["my_idea.py"]


def test_a_network_of_the_users(folder):
    named = ("--import", "my_network.py")
    ended = run(folder, "train", "--run-dir", "data/tiny", "--network.name", "tiny", *named, *SMALL)
    assert ended.returncode == 0, ended.stderr
    ended = run(folder, "evaluate", "data/tiny", "--episodes", "1", *named)
    assert ended.returncode == 0, ended.stderr


def test_a_look_at_one_update(folder, monkeypatch, capsys):
    """The metrics that it prints, and a state that has learned with every minibatch of the config."""
    monkeypatch.syspath_prepend(folder)
    names = {}
    exec(block("import my_idea"), names)
    assert "z_loss" in capsys.readouterr().out
    assert all(np.isfinite(float(x)) for x in names["metrics"].values())
    assert names["state"].optimizer_steps == 4 * 4 * 16 // 32
