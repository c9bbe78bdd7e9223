"""docs/idea.md, followed word for word: an idea and a network in a file of the user's, with the commands of a
user."""

import csv
import re
import subprocess
import sys

import pytest
from user_commands import ROOT, user_environment

PAGE = (ROOT / "docs" / "idea.md").read_text()
SMALL = (
    "--env.num-envs=2", "--env.max-frames=120", "--ppo.rollout-length=8", "--ppo.minibatch-size=16",
    "--total-env-steps=96", "--log.every-env-steps=16", "--log.checkpoint-every-env-steps=48", "--log.no-graphs",
    "--devices.gpu=false",
)  # fmt: skip
"""Options that make a training one of moments."""


def block(beginning):
    """The block of Python on the page that begins with these words."""
    (found,) = [text for text in re.findall(r"```python\n(.*?)```", PAGE, re.S) if text.startswith(beginning)]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("idea")
    (folder / "my_idea.py").write_text(block("import jax\n"))
    (folder / "my_network.py").write_text(block("import flax"))
    return folder


def run(folder, command, *options):
    return subprocess.run(
        [sys.executable, "-m", f"jaxrl_atari.{command}", *options],
        cwd=folder, env=user_environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True,
    )  # fmt: skip


def rows(run_dir, session=0):
    return list(csv.DictReader((run_dir / f"session_{session}" / "metrics.csv").read_text().splitlines()))


@pytest.mark.long
def test_an_idea_is_trained_beside_the_baseline_evaluated_and_resumed(folder):
    commands = re.findall(r"python -m jaxrl_atari\.train --config (.*)", PAGE)
    assert len(commands) == 2
    for command in commands:
        options = command.replace("--sessions 4", "--sessions 2 --trial.parallel 2").split()
        ended = run(folder, "train", "--config", *options, *SMALL)
        assert ended.returncode == 0, ended.stderr
    idea, baseline = folder / "data" / "z_loss", folder / "data" / "baseline"
    assert all(float(row["z_loss"]) > 0 for session in (0, 1) for row in rows(idea, session)[1:])
    assert "z_loss" not in rows(baseline)[0]
    assert (idea / "code" / "my_idea.py").read_text() == (folder / "my_idea.py").read_text()

    without = run(folder, "evaluate", "data/z_loss", "--episodes", "1")
    assert without.returncode == 2
    assert "algorithm = 'z_loss'" in without.stderr
    assert "--import" in without.stderr
    named = ("--import", "my_idea.py")
    ended = run(folder, "evaluate", "data/z_loss", "--episodes", "1", *named)
    assert ended.returncode == 0, ended.stderr
    kept = ("--import", "data/z_loss/code/my_idea.py", "--total-env-steps", "160")
    ended = run(folder, "train", "--resume", "data/z_loss", *kept)
    assert ended.returncode == 0, ended.stderr
    assert float(rows(idea)[-1]["env_steps"]) > 96
    assert [path.name for path in (idea / "code").iterdir()] == ["my_idea.py"]


@pytest.mark.long
def test_coefficients_of_an_idea(folder):
    """Names for several choices, in place of the one loss; a suite trains them beside the baseline."""
    page = block("import jax\n")
    start, end = page.index("def loss("), page.index("def get_config")
    (folder / "coefficients.py").write_text(page[:start] + block("def z_loss(") + "\n\n" + page[end:])
    (vary,) = re.findall(r"--vary (algorithm=[\w,]+)", PAGE)
    options = ("--config", "coefficients.py", "--vary", vary, "--games", "CrazyClimber", "--run-dir", "data/suite")
    ended = run(folder, "suite", *options, *SMALL)
    assert ended.returncode == 0, ended.stderr
    z_loss = {}
    for path in (folder / "data" / "suite").rglob("session_0"):
        z_loss[path.parent.name, path.parents[1].name] = rows(path.parent)[-1].get("z_loss")
    assert len(z_loss) == 3
    assert len({value for value in z_loss.values() if value}) == 2


@pytest.mark.long
def test_a_network_of_the_users(folder):
    named = ("--import", "my_network.py")
    ended = run(folder, "train", "--run-dir", "data/tiny", "--network.name", "tiny", *named, *SMALL)
    assert ended.returncode == 0, ended.stderr
    ended = run(folder, "evaluate", "data/tiny", "--episodes", "1", *named)
    assert ended.returncode == 0, ended.stderr


def test_a_network_that_is_not_registered_leaves_no_directory(folder):
    ended = run(folder, "train", "--run-dir", "data/other", "--network.name", "other", *SMALL)
    assert ended.returncode == 2
    expected = (
        "network.name = 'other': expected one of nature, impala, nature_lstm; name the file that registers it"
    )
    assert expected in ended.stderr
    assert not (folder / "data" / "other").exists()


def test_a_minibatch_that_does_not_suit_a_recurrent_network_leaves_no_directory(folder):
    options = (*SMALL, "--network.name", "nature_lstm", "--ppo.minibatch-size", "4")
    ended = run(folder, "train", "--run-dir", "data/lstm", *options)
    assert ended.returncode == 2
    assert "ppo.minibatch_size = 4: expected a multiple of ppo.rollout_length x devices = 8 x 1" in ended.stderr
    assert not (folder / "data" / "lstm").exists()
