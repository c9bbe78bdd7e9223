"""Exported policies: the programs compute what training's network does, and play.py plays the same games."""

import shutil

import jax
import pytest
from small_networks import Recurrent

from jaxrl_atari import load_policy, register_network
from jaxrl_atari.envs import make_pool
from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate.play import play as evaluated
from jaxrl_atari.export.__main__ import main
from jaxrl_atari.report.summary import read_run
from jaxrl_atari.runs.files import read_json, write_json

pytest.importorskip("onnxruntime", reason="pip install 'jaxrl_atari[export]'")
from exported_policies import check_programs, with_network

from jaxrl_atari.export import onnx_model, play
from jaxrl_atari.export.folder import export_policy


@pytest.fixture(scope="module")
def policy(trained):
    return with_network(load_policy(trained("plain"), device=jax.devices("cpu")[0]), "nature")


@pytest.fixture(scope="module")
def folder(policy, trained, tmp_path_factory):
    """The folder of an export."""
    directory = tmp_path_factory.mktemp("exported") / "nature"
    export_policy(policy, read_run(trained("plain")), directory)
    return directory


def test_the_programs_compute_what_the_package_does(policy, folder):
    assert {path.name for path in folder.iterdir()} == {"policy.onnx", "policy.jaxexport", "play.py", "README.md"}
    check_programs(policy, folder)


def test_a_network_of_the_users_own_is_exported_for_jax(policy, trained, tmp_path):
    register_network("own_recurrent", Recurrent)
    own = with_network(policy, "own_recurrent")
    export_policy(own, read_run(trained("plain")), tmp_path / "own")
    assert {path.name for path in (tmp_path / "own").iterdir()} == {"policy.jaxexport", "README.md"}
    assert "onnx" not in (tmp_path / "own" / "README.md").read_text().lower()
    check_programs(own, tmp_path / "own")


def test_play_plays_what_an_evaluation_does(policy, folder):
    pool = make_pool(policy.config.env, 1, seed=11)
    expected = evaluated(policy, pool, seed=11, greedy=True)
    next(expected)  # the start
    actions = []
    for played in play.play(play.Policy(folder / "policy.onnx"), seed=11, greedy=True):
        step, decision = next(expected)
        assert [played.action] == decision.actions.tolist()
        assert [played.reward] == step.reward.tolist()
        actions.append(played.action)
        if played.ended:
            break
    pool.close()
    assert len(set(actions)) > 1


def test_what_cannot_be_exported_is_one_line_and_writes_nothing(policy, trained, tmp_path, monkeypatch):
    run_dir = trained("plain")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(UserError, match=r"full: exists already"):
        main([str(run_dir), "--output", str(tmp_path / "full")])

    edited = onnx_model.NATURE.replace("features = Relu (dense)", "features = Abs (dense)")
    monkeypatch.setitem(onnx_model.NETWORKS, "nature", edited)
    with pytest.raises(UserError, match=r"the outputs of onnxruntime and JAX differ by .*onnx_model.py"):
        export_policy(policy, read_run(run_dir), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    own = shutil.copytree(run_dir, tmp_path / "own")
    described = read_json(own / "config.json")
    described["config"]["env"].update(backend="gymnasium", game="ALE/Breakout-v5")
    write_json(own / "config.json", described)
    with pytest.raises(UserError, match="only ALE games can be exported"):
        main([str(own)])
