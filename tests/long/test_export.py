"""Exports of the other networks; and play.py where JAX and this package are not installed."""

import importlib.metadata
import os
import subprocess
import venv
from pathlib import Path

import jax
import pytest

from jaxrl_atari import load_policy, run_evaluation
from jaxrl_atari.report.summary import read_run

pytest.importorskip("onnxruntime", reason="pip install 'jaxrl_atari[export]'")
from exported_policies import check_programs, with_network

from jaxrl_atari.export.folder import export_policy

PACKAGES = (
    "numpy", "onnxruntime", "flatbuffers", "protobuf", "packaging", "ale-py", "gymnasium", "cloudpickle",
    "farama-notifications", "typing-extensions",
)  # fmt: skip


@pytest.mark.parametrize("name", ["impala", "nature_lstm"])
def test_the_programs_compute_what_the_package_does(name, trained, tmp_path):
    policy = with_network(load_policy(trained("plain"), device=jax.devices("cpu")[0]), name)
    export_policy(policy, read_run(trained("plain")), tmp_path / "out")
    check_programs(policy, tmp_path / "out")


def python_of(folder):
    """The Python of a new virtual environment that has `PACKAGES` of this one, and no others."""
    venv.create(folder, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    for package in PACKAGES:
        distribution = importlib.metadata.distribution(package)
        for top in {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return folder / "bin" / "python"


def test_play_plays_the_same_games_without_jax(trained, tmp_path):
    policy = with_network(load_policy(trained("plain"), device=jax.devices("cpu")[0]), "nature_lstm")
    export_policy(policy, read_run(trained("plain")), tmp_path / "out")
    python = python_of(tmp_path / "venv")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = {"cwd": tmp_path / "out", "env": environment, "check": True, "capture_output": True, "text": True}
    without = "import importlib.util as u; assert u.find_spec('jax') is None is u.find_spec('jaxrl_atari')"
    subprocess.run([python, "-c", without], **options)
    said = subprocess.run([python, "play.py", "--greedy", "--seed", "11", "--games", "3"], **options).stdout
    games = run_evaluation(policy, 3, seed=11, greedy=True, num_envs=1).games
    for number, game in enumerate(games, start=1):
        assert f"game {number}: return {game.episode_return:,.1f} after {game.length:,} steps" in said
