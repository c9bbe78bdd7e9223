"""Exported policies: the three programs compute what training's network does, and play.py plays the same games."""

import dataclasses
import importlib.metadata
import json
import os
import subprocess
import sys
import venv
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sample_runs import table, write_run

from jaxrl_atari.config import NetworkConfig, config_from_dict
from jaxrl_atari.envs import make_pool
from jaxrl_atari.envs.protocols import PROTOCOLS
from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate.play import play as evaluated
from jaxrl_atari.evaluate.play import run_evaluation
from jaxrl_atari.evaluate.policy import load_policy
from jaxrl_atari.export import play
from jaxrl_atari.export.__main__ import main
from jaxrl_atari.export.programs import NumPyOutputs, largest_difference, run_jax, run_onnx
from jaxrl_atari.export.readme import score_lines, start_of_game
from jaxrl_atari.frames import arrange_stacks
from jaxrl_atari.network_forms import make_network
from jaxrl_atari.network_functions import apply_module, init_params, initial_carry, make_module
from jaxrl_atari.network_interface import Observation
from jaxrl_atari.report.summary import read_run
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.runs.files import read_json, write_json
from jaxrl_atari.runs.published import save_parameters

pytest.importorskip("onnxruntime", reason="pip install 'jaxrl_atari[export]'")
ACTIONS = {"Pong": 6, "Breakout": 4}
FILES = {"policy.onnx", "policy.npz", "policy.jaxexport", "play.py", "README.md"}


def make_run(run_dir, name="nature", game="Pong", undecided=False):
    """A run whose checkpoint has random parameters, with logits and values from -1 to 1.

    Args:
        undecided: no action is the best one everywhere. The logits are then differences of larger numbers.
    """
    write_run(run_dir, [table([1.0, 2.0])], game=game)
    described = read_json(run_dir / "config.json")
    described["config"] |= {"network": dataclasses.asdict(NetworkConfig(name=name, compute_dtype="float32"))}
    write_json(run_dir / "config.json", described)
    config = config_from_dict(described["config"])
    module = make_module(config.network, ACTIONS[game], jnp.float32)
    shapes = jax.eval_shape(partial(init_params, module), jax.random.key(0))
    random = np.random.default_rng(3)

    def drawn(at, leaf):
        size = 0.1 if leaf.ndim == 1 else 1.3 * np.prod(leaf.shape[:-1]) ** -0.5
        return random.normal(size=leaf.shape, scale=size).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(drawn, shapes)
    stacks = recorded_stacks(game)
    first = np.ones(len(stacks), bool)
    observation = Observation(stacks, first, initial_carry(module, len(stacks)))
    logits, value, *_ = jax.device_get(apply_module(module, params, observation))
    for head, outputs in (("policy", logits), ("value", value)):
        if undecided:
            params[head]["bias"] -= outputs.mean(0)
            outputs = outputs - outputs.mean(0)
        params[head] = jax.tree.map(partial(np.multiply, 1 / np.abs(outputs).max()), params[head])
    meta = {
        "config": config.to_dict(), "num_actions": ACTIONS[game], "env_steps": 200, "score": 2.0,
        "compute_dtype": "float32",
    }  # fmt: skip
    save_parameters(Checkpoints(run_dir / "session_0"), params, meta)
    return run_dir


@cache
def recorded_stacks(game="Pong", steps=12):
    """Frame stacks of random play, uint8 [steps, 84, 84, 4]."""
    pool = make_pool("ale", game, 1, seed=5, rules=PROTOCOLS["v5"])
    random = np.random.default_rng(0)
    frames = [pool.reset().frame[0]]
    for _ in range(62 + steps):
        frames.append(pool.step(random.integers(0, ACTIONS[game], 1)).frame[0])
    pool.close()
    return np.stack([np.stack(frames[at : at + 4], axis=-1) for at in range(60, 60 + steps)])


def trained_outputs(policy, stacks, first, carry):
    """What the package computes, in the form in which a CPU trains."""
    network = make_network(policy.config.network, ACTIONS[policy.config.env.game_name], "cpu")
    return network.apply(policy.params, Observation(arrange_stacks(network.layout, stacks), first, carry))


@pytest.mark.parametrize(
    "name",
    [
        "nature",
        pytest.param("impala", marks=pytest.mark.long),
        pytest.param("nature_lstm", marks=pytest.mark.long),
    ],
)
def test_the_three_programs_compute_what_the_package_does(name, tmp_path, capsys):
    run_dir = make_run(tmp_path / "run", name)
    main([str(run_dir)])
    folder = run_dir / "session_0" / "export_200"
    assert f"exported: {folder}" in capsys.readouterr().out
    assert {path.name for path in folder.iterdir()} == FILES
    policy = load_policy(run_dir)
    params, about = play.load(folder / "policy.npz")
    model, program = ((folder / f"policy.{end}").read_bytes() for end in ("onnx", "jaxexport"))
    stacks = recorded_stacks()
    # Batches of 1 and 3 environments; several steps, with a game that starts among them, for a network with a
    # memory.
    for size in (1, 3):
        carry = policy.initial_carry(size)
        memories = [tuple(np.zeros((size, each), np.float32) for each in about["memory"])] * 3
        for step, at in enumerate(range(0, 3 * size, size)):
            part = stacks[at : at + size]
            first = np.arange(size) == step - 1
            outputs = trained_outputs(policy, part, first, carry)
            logits, value, carry = outputs.logits, outputs.value, outputs.carry
            assert np.ptp(logits) > 0.5
            numpy = play.NETWORKS[name](play.NumPyLayers(), params, part, first, memories[0])
            others = run_onnx(model, part, first, memories[1]), run_jax(program, part, first, memories[2])
            for other in (numpy, *others):
                assert np.allclose(other[0], logits, rtol=1e-5, atol=1e-5)
                assert np.allclose(other[1], value, rtol=1e-5, atol=1e-5)
                for memory, expected in zip(other[2], jax.tree.leaves(carry), strict=True):
                    assert np.allclose(memory, expected, rtol=1e-5, atol=1e-5)
            memories = [each[2] for each in (numpy, *others)]


def test_a_gate_that_is_closed_warns_of_no_overflow():
    x = np.array([-200.0, -1.0, 0.0, 200.0], np.float32)
    with np.errstate(all="raise"):
        found = play.NumPyLayers().sigmoid(x)
    assert found.dtype == np.float32
    assert np.allclose(found, [0, 0.26894142, 0.5, 1], atol=1e-7)


def test_nan_in_any_output_is_a_difference():
    zeros = NumPyOutputs(np.zeros((2, 3), np.float32), np.zeros(2, np.float32), ())
    assert largest_difference(zeros, zeros) == 0
    assert largest_difference(zeros, zeros._replace(value=np.array([0.5, 0]))) == 0.5
    assert largest_difference(zeros, zeros._replace(value=np.array([np.nan, 0]))) == np.inf


def test_the_readme_has_what_a_score_needs(tmp_path):
    run_dir = make_run(tmp_path / "run")
    write_json(
        run_dir / "session_0" / "evaluation_200.json",
        {"env_steps": 200, "checkpoint": "best", "episodes": 7, "mean": 12.5, "std": 3.25, "greedy": False,
        "seed": 4,
         "compute_dtype": "float32"},
    )  # fmt: skip
    main([str(run_dir), "--output", str(tmp_path / "out")])
    text = " ".join((tmp_path / "out" / "README.md").read_text().split())
    for words in (
        "Pong: a policy trained with ppo", "session_0 of run after 200 env steps",
        "evaluated in float32: mean return 12.50 over 7 full games", "std 3.25", "sampled actions, seed 4",
        "Protocol: v5", "score is 1.50", "sticky actions 0.25", "at most 108,000",
        "Start of a game: FIRE, then 0 to 28 no-ops.", "NOOP, FIRE, RIGHT, LEFT, RIGHTFIRE, LEFTFIRE",
    ):  # fmt: skip
        assert words in text


@pytest.mark.parametrize("std", [None, 0.0])  # 0.0 is what earlier versions wrote
def test_the_readme_gives_no_std_of_one_game(std, tmp_path):
    run_dir = make_run(tmp_path / "run")
    session_dir = run_dir / "session_0"
    found = {"env_steps": 200, "episodes": 1, "mean": 12.5, "std": std, "greedy": False, "seed": 4}
    write_json(session_dir / "evaluation_200.json", found)
    policy = SimpleNamespace(session_dir=session_dir, env_steps=200)
    assert score_lines(policy, read_run(run_dir))[-1] == "12.50 over 1 full game, sampled actions, seed 4."


@pytest.mark.parametrize(
    ("actions", "fire_on_reset", "noop_max", "start"),
    [
        (["NOOP", "FIRE"], True, 30, "FIRE, then 0 to 28 no-ops"),
        (["NOOP", "FIRE"], False, 30, "0 to 29 no-ops"),
        (["NOOP", "UP"], True, 30, "0 to 29 no-ops"),  # as Freeway
        (["NOOP", "FIRE"], True, 1, "FIRE"),
        (["NOOP", "FIRE"], False, 0, "no no-ops and no FIRE"),
    ],
)
def test_the_start_of_a_game_in_words(actions, fire_on_reset, noop_max, start):
    """The numbers are those of docs/parity.md, which has ALE's lines."""
    assert start_of_game({"actions": actions, "fire_on_reset": fire_on_reset, "noop_max": noop_max}) == start


def test_what_cannot_be_exported_is_one_line_and_writes_nothing(tmp_path, monkeypatch):
    run_dir = make_run(tmp_path / "run")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").touch()
    with pytest.raises(UserError, match=r"--output .*full: exists already"):
        main([str(run_dir), "--output", str(tmp_path / "full")])

    def edited(layers, params, *inputs):
        return play.nature(
            layers, params | {"value": {**params["value"], "bias": params["value"]["bias"] + 1}}, *inputs
        )

    monkeypatch.setitem(play.NETWORKS, "nature", edited)
    with pytest.raises(UserError, match=r"the outputs of (NumPy|onnxruntime) and JAX differ by .* nothing was"):
        main([str(run_dir), "--output", str(tmp_path / "out")])
    monkeypatch.setitem(play.NETWORKS, "nature", lambda layers, params, *inputs: params["hidden"])
    with pytest.raises(UserError, match=r"play.py fails \(KeyError: 'hidden'\); nothing was written"):
        main([str(run_dir), "--output", str(tmp_path / "out")])
    monkeypatch.delitem(play.NETWORKS, "nature")
    with pytest.raises(UserError, match=r"network.name = 'nature': only impala, nature_lstm can be exported"):
        main([str(run_dir), "--output", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "ale-py[vector] is not installed: the module ale_py.vector_env is missing; pip install numpy"),
        (["--games", "0"], "--games 0: expected at least 1"),
        (["--seed", "-1"], "--seed -1: expected at least 0"),
        (["--policy", "none.npz"], "--policy none.npz: there is no such file"),
        (["--policy", __file__], "not an exported policy, or damaged ("),
    ],
)
def test_play_ends_in_a_line_where_something_is_missing(words, text, tmp_path, monkeypatch, capsys):
    about = {"network": "nature", "memory": [], "game": "Pong", "protocol": "v5", "rom": "pong"}
    content = np.frombuffer(json.dumps(about).encode(), np.uint8)
    np.savez(tmp_path / "policy.npz", about=content)
    monkeypatch.setitem(sys.modules, "ale_py.vector_env", None)
    monkeypatch.setattr(sys, "argv", ["play.py", "--policy", str(tmp_path / "policy.npz"), *words])
    with pytest.raises(SystemExit) as ended:
        play.main()
    assert ended.value.code == 2
    assert text in capsys.readouterr().err.splitlines()[-1]


# --- play.py where there is no JAX -------------------------------------------------------------------------------


PACKAGES = ("numpy", "ale-py", "gymnasium", "cloudpickle", "farama-notifications", "typing-extensions")
RECORD = """
import importlib.util
import numpy as np
import play
assert importlib.util.find_spec("jax") is None and importlib.util.find_spec("jaxrl_atari") is None
actions, total = [], 0.0
for step in play.play(play.Policy("policy.npz", 1), seed=11, greedy=True):
    actions.append(step.actions[0])
    total += step.reward[0]
    if step.ended[0]:
        break
np.savez("played.npz", actions=actions, total=total)
"""


def python_with(packages, folder):
    """The Python of a new virtual environment that has these packages of this one, and no others."""
    venv.create(folder, with_pip=False)
    site = next(folder.glob("lib/python*/site-packages"))
    for package in packages:
        distribution = importlib.metadata.distribution(package)
        for top in {
            file.parts[0] for file in distribution.files if not file.parts[0].startswith(("..", "__pycache__"))
        }:
            (site / top).symlink_to(Path(str(distribution.locate_file(top))).resolve())
    return folder / "bin" / "python"


@pytest.mark.parametrize(
    "name", [pytest.param("nature", marks=pytest.mark.long), pytest.param("nature_lstm", marks=pytest.mark.slow)]
)
def test_play_plays_the_same_whole_game_without_jax(name, tmp_path):
    run_dir = make_run(tmp_path / "run", name, undecided=True)
    main([str(run_dir), "--output", str(folder := tmp_path / "out")])
    python = python_with(PACKAGES, tmp_path / "venv")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    in_folder = {"cwd": folder, "env": environment, "check": True}
    subprocess.run([python, "-c", RECORD], **in_folder)
    policy = load_policy(run_dir, device=jax.devices("cpu")[0])
    (game,) = run_evaluation(policy, 1, seed=11, greedy=True, num_envs=1).games
    expected = []
    pool = make_pool("ale", "Pong", 1, seed=11, rules=policy.config.env.rules)
    for step, decision in evaluated(policy, pool, seed=11, greedy=True):
        expected += [] if decision is None else [decision.actions[0]]
        if step.terminated[0] or step.truncated[0]:
            break
    pool.close()
    played = np.load(folder / "played.npz")
    assert len(expected) == game.length > 500
    assert len(set(expected)) > 1
    assert played["actions"].tolist() == expected
    assert played["total"] == game.episode_return
    words = [python, "play.py", "--greedy", "--seed", "11"]
    said = subprocess.run(words, **in_folder, capture_output=True, text=True).stdout
    assert f"game 1: return {game.episode_return:,.1f} after {game.length:,} steps" in said
