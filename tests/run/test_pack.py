"""Runs to pass on: packed without the state that training needs, they play, verify and report, and are not
resumed."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_training import TINY, change, edit_meta

from jaxrl_atari import plots
from jaxrl_atari.config import NetworkConfig, config_from_dict
from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate.__main__ import main as evaluate
from jaxrl_atari.evaluate.policy import load_policy
from jaxrl_atari.hub.__main__ import main as hub_command
from jaxrl_atari.network_interface import Observation
from jaxrl_atari.report.__main__ import main as report
from jaxrl_atari.report.summary import read_run, trial_summary
from jaxrl_atari.runs.description import describe
from jaxrl_atari.runs.files import read_json, write_json
from jaxrl_atari.runs.layout import checkpoint_env_steps
from jaxrl_atari.session import run_session
from jaxrl_atari.train import main as train
from jaxrl_atari.trials.trial import run_training
from jaxrl_atari.verify.__main__ import main as verify

BFLOAT16 = NetworkConfig(compute_dtype="bfloat16", conv="by_hand")
CONFIG = change(TINY, total_env_steps=256, network=BFLOAT16)


def trained(config, run_dir):
    run_session(config, run_dir / "session_0", resume=True)
    write_json(run_dir / "config.json", describe(config))
    return run_dir


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return trained(CONFIG, tmp_path_factory.mktemp("runs") / "breakout")


def pack(*arguments):
    hub_command(["pack", *map(str, arguments)])


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def outputs(policy, stacks):
    """Logits and value in the arithmetic of the policy."""
    blocks = policy.network.layout.arrange(jnp.moveaxis(jnp.asarray(stacks), -1, 0))
    return policy.network.apply(policy.params, Observation(jnp.concatenate(list(blocks), axis=-1)))[:2]


def test_a_packed_run_plays_verifies_and_reports_as_its_original(run_dir, tmp_path, capsys):
    step = checkpoint_env_steps(run_dir / "session_0")[-1]
    pack(run_dir, packed := tmp_path / "packed", "--checkpoint", step)
    said = capsys.readouterr().out
    assert "left out: the optimiser state, the random key and the games in progress" in said
    files = contents(packed)
    assert f"packed: {packed} ({sum(map(len, files.values())) / 1e6:.1f} MB)" in said
    assert max(map(len, files.values())) < 2**20  # repositories refuse large files
    assert not [name for name in files if "opt_state" in str(name)]
    original, copy = (load_policy(folder, step) for folder in (run_dir, packed))
    assert jax.tree.all(jax.tree.map(np.array_equal, original.params, copy.params))
    verify([str(packed)])
    plots.main([str(packed)])
    report([str(packed)])
    evaluate([str(packed), "--episodes", "2", "--gpu", "false"])
    assert (packed / "report.html").is_file()
    assert (packed / "session_0" / f"evaluation_{step}.json").is_file()
    with pytest.raises(UserError, match="exists already"):
        pack(run_dir, packed)


def test_a_packed_run_that_a_rule_stopped_is_complete(tmp_path):
    config = change(TINY, total_env_steps=256, log={"checkpoint_every_env_steps": 32, "graphs": False})
    original = run_training(
        config, tmp_path / "run", stop=lambda row: row["gpu_busy_percent"] > 0 or row["env_steps"] >= 96
    )
    assert original.summary["complete"]
    assert original.summary["stopped"]
    pack(tmp_path / "run", packed := tmp_path / "packed", "--checkpoint", "64")
    assert trial_summary(read_run(packed)) == original.summary


def test_a_packed_run_is_not_resumed_and_keeps_its_files(run_dir, tmp_path):
    pack(run_dir, packed := tmp_path / "packed")
    before = contents(packed)
    with pytest.raises(UserError, match="holds the parameters alone, without the optimiser state"):
        train(["--resume", str(packed), "--total-env-steps", "1024"])
    config = config_from_dict(read_json(packed / "config.json")["config"] | {"total_env_steps": 1024})
    with pytest.raises(UserError, match="holds the parameters alone, without the optimiser state"):
        run_session(config, packed / "session_0", resume=True)
    (packed / "session_0" / ".lock").unlink()
    assert contents(packed) == before


@pytest.mark.long
def test_rounded_parameters_compute_the_same_bits_in_bfloat16(run_dir, tmp_path):
    pack(run_dir, packed := tmp_path / "packed", "--rounded")
    original, copy = load_policy(run_dir), load_policy(packed)
    kernels = [np.asarray(policy.params["dense"]["kernel"]) for policy in (original, copy)]
    assert not np.array_equal(*kernels)
    assert np.array_equal(kernels[0].astype(jnp.bfloat16), kernels[1].astype(jnp.bfloat16))
    stacks = np.random.default_rng(0).integers(0, 256, (8, 84, 84, 4), np.uint8)
    assert jax.tree.all(jax.tree.map(np.array_equal, outputs(original, stacks), outputs(copy, stacks)))
    pack(run_dir, whole := tmp_path / "whole")
    sizes = [sum(map(len, contents(folder / "session_0" / "checkpoints").values())) for folder in (packed, whole)]
    assert sizes[0] < 0.6 * sizes[1]


@pytest.mark.long
def test_a_run_in_float32_is_not_rounded(run_dir, tmp_path):
    shutil.copytree(run_dir, own := tmp_path / "own")
    for step in checkpoint_env_steps(own / "session_0"):
        edit_meta(own / "session_0", step, compute_dtype="float32")
    with pytest.raises(UserError, match="this one computed in float32: leave --rounded out"):
        pack(own, tmp_path / "packed", "--rounded")
    assert not (tmp_path / "packed").exists()
