"""docs/idea.md, followed word for word: an idea and a network in a file of the user's, with the commands of a
user."""

import csv
import dataclasses
import json
import re
import shlex
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_networks import FeedForward, make
from user_commands import ROOT, user_environment

from jaxrl_atari import ConfigError, register_network, try_update
from jaxrl_atari.algorithm import Mean, Minibatch, Rollout, find_algorithm
from jaxrl_atari.algorithm_options import resolved_options
from jaxrl_atari.config import Config, EnvConfig, NetworkConfig, PPOConfig
from jaxrl_atari.config_dicts import set_fields
from jaxrl_atari.network_interface import Observation
from jaxrl_atari.ppo import PPO, Samples
from jaxrl_atari.registry import ALGORITHMS
from jaxrl_atari.suite.vary import parse_vary

PAGE = (ROOT / "docs" / "idea.md").read_text()
SMALL = (
    "--env.num-envs=2", "--env.max-frames=120", "--ppo.rollout-length=8", "--ppo.minibatch-size=16",
    "--total-env-steps=96", "--log.every-env-steps=16", "--log.checkpoint-every-env-steps=48", "--log.no-graphs",
    "--devices.gpu=false",
)  # fmt: skip
"""Options that make a training one of moments."""


IDEA = "import jax\nimport jax.numpy as jnp\n\nfrom jaxrl_atari import PPO"
"""The first lines of `my_idea.py`."""


def block(beginning):
    """The block of Python on the page that begins with these words."""
    (found,) = [text for text in re.findall(r"```python\n(.*?)```", PAGE, re.S) if text.startswith(beginning)]
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("idea")
    (folder / "my_idea.py").write_text(block(IDEA))
    (folder / "my_network.py").write_text(block("from typing"))
    return folder


def run(folder, command, *options):
    return subprocess.run(
        [sys.executable, "-m", f"jaxrl_atari.{command}", *options],
        cwd=folder, env=user_environment(PYTHONPATH=str(ROOT)), capture_output=True, text=True,
    )  # fmt: skip


def rows(run_dir, session=0):
    return list(csv.DictReader((run_dir / f"session_{session}" / "metrics.csv").read_text().splitlines()))


# The idea, the baseline, the try of a minute, and another coefficient.
IDEA_COMMAND, BASELINE, TRY, COEFFICIENT = re.findall(r"python -m jaxrl_atari\.train --config (.*)", PAGE)


def train(folder, command, *options, sessions="1"):
    words = shlex.split(command.replace("--sessions 4", f"--sessions {sessions}"))
    ended = run(folder, "train", "--config", *words, *options, *SMALL)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture(scope="module")
def idea(folder):
    """The run of the idea: two sessions, each in a process."""
    train(folder, IDEA_COMMAND, sessions="2 --trial.parallel 2")
    return folder / "data" / "z_loss"


@pytest.mark.long
def test_an_idea_is_trained_beside_the_baseline(folder, idea):
    train(folder, BASELINE)
    assert all(float(row["z_loss"]) > 0 for session in (0, 1) for row in rows(idea, session)[1:])
    assert "z_loss" not in rows(folder / "data" / "baseline")[0]
    assert (idea / "code" / "my_idea.py").read_text() == (folder / "my_idea.py").read_text()


@pytest.mark.long
def test_an_idea_is_tried_and_has_another_coefficient(folder):
    train(folder, TRY)
    train(folder, COEFFICIENT, "--run-dir", "data/strong")
    saved = json.loads((folder / "data" / "strong" / "config.json").read_text())
    assert saved["config"]["ppo"]["coefficients"] == {"z_loss": 0.01}
    refused = run(folder, "train", "--config", "my_idea.py", "--ppo.coefficients", '{"z_los": 1}', *SMALL)
    assert refused.returncode == 2
    expected = "ppo.coefficients.z_los = 1: expected a coefficient of algorithm = z_loss, which has z_loss"
    assert expected in refused.stderr


@pytest.mark.long
def test_an_idea_is_evaluated_and_resumed(folder, idea):
    ended = run(folder, "evaluate", "data/z_loss", "--episodes", "1")  # the policy needs no algorithm
    assert ended.returncode == 0, ended.stderr
    without = run(folder, "train", "--resume", "data/z_loss", "--total-env-steps", "160")
    assert without.returncode == 2
    assert "algorithm = 'z_loss'" in without.stderr
    assert "--import" in without.stderr
    kept = ("--import", "data/z_loss/code/my_idea.py", "--total-env-steps", "160")
    ended = run(folder, "train", "--resume", "data/z_loss", *kept)
    assert ended.returncode == 0, ended.stderr
    assert float(rows(idea)[-1]["env_steps"]) > 96
    assert [path.name for path in (idea / "code").iterdir()] == ["my_idea.py"]


def test_coefficients_of_an_idea():
    """The penalty that the loss adds, for the values that `--vary` gives it."""
    exec(block(IDEA), {})
    algorithm = find_algorithm("z_loss")
    (texts,) = re.findall(r"--vary (ppo\.coefficients\S+)", PAGE)
    base = Config(algorithm="z_loss")
    varied = [set_fields(base, {name: x}) for name, values in parse_vary([texts], base).items() for x in values]

    params, network = make(FeedForward, num_actions=4)
    numbers = jnp.linspace(0.1, 0.4, 4)
    samples = Samples(jnp.arange(4), -numbers, numbers, numbers, numbers)
    observation = Observation(jnp.ones((4, 84, 84, 4), jnp.uint8))
    batch = Minibatch(observation, samples, Mean.over(jnp.ones(4)), jax.random.key(0))
    baseline, _ = PPO.loss(params, network.apply, batch, base.ppo)
    losses = []
    for config in (base, *varied):
        loss, metrics = algorithm.loss(params, network.apply, batch, resolved_options(config))
        losses.append(float(loss - baseline))
    logits = network.apply(params, observation).logits
    z_loss = np.mean(np.log(np.sum(np.exp(logits), axis=-1)) ** 2)
    np.testing.assert_allclose(losses / z_loss, [1e-3, 1e-3, 1e-2, 1e-1], rtol=1e-3)
    np.testing.assert_allclose(metrics["z_loss"], z_loss, rtol=1e-5)


def test_a_reward_of_the_users():
    """The targets of hand-made steps: a lost life costs 1, and nothing beyond it counts."""
    exec(block("from jaxrl_atari import PPO, register_algorithm"), {})
    steps = jnp.zeros((3, 2))
    reward = jnp.array([[0.0, 1.0], [-1.0, 0.0], [1.0, 1.0]])
    lost = jnp.array([[False, False], [True, False], [False, True]])
    rollout = Rollout(
        steps, jnp.zeros((4, 2)), steps, steps, steps, reward, lost, steps > 0, jnp.ones((3, 2)), jnp.zeros(2)
    )
    mean, config = Mean.over(rollout.weight), PPOConfig(gae_lambda=0.5, gamma=0.5)
    _, samples, _ = ALGORITHMS.get("careful").prepare(None, None, rollout, mean, config, None)
    np.testing.assert_allclose(samples.target[:, 0], [0.25 * -2, -2, 1])
    np.testing.assert_allclose(samples.target[:, 1], [1, 0, 1 - 1])


def test_an_optimiser_of_the_users():
    """Lion's first step has the size of the rate in every direction, after the decay of the weights."""
    exec(block("import optax"), {})
    config = PPOConfig(learning_rate=0.1, weight_decay=0.5)
    optimizer = ALGORITHMS.get("lion").optimizer(config)
    params = jnp.array([2.0, -2.0])
    updates, _ = optimizer.update(jnp.array([100.0, -1.0]), optimizer.init(params), params)
    np.testing.assert_allclose(updates, [-0.1 - 0.1, 0.1 + 0.1], rtol=1e-6)


def test_one_update_of_a_small_network():
    exec(block(IDEA), {})
    register_network("small", FeedForward)
    ppo = PPOConfig(rollout_length=8, minibatch_size=8, epochs=3)
    config = Config(
        algorithm="z_loss", network=NetworkConfig(name="small"), env=EnvConfig(num_envs=2), ppo=ppo, seed=5
    )
    state, metrics = try_update(config, num_actions=4)
    assert state.optimizer_steps == 3 * 2
    assert state.params["policy"]["bias"].shape == (4,)
    assert metrics["z_loss"] > 0
    again, _ = try_update(config, num_actions=4)
    jax.tree.map(np.testing.assert_array_equal, state.params, again.params)
    with pytest.raises(ConfigError, match="algorithm = 'unknown'"):
        try_update(dataclasses.replace(config, algorithm="unknown"))


@pytest.mark.slow
def test_a_look_at_one_update(folder, monkeypatch, capsys):
    """The metrics that it prints, and a state that has learned with every minibatch of the config."""
    monkeypatch.syspath_prepend(folder)
    names = {}
    exec(block("import my_idea"), names)
    assert "z_loss" in capsys.readouterr().out
    assert all(np.isfinite(float(x)) for x in names["metrics"].values())
    assert names["state"].optimizer_steps == 4 * 16 * 128 // 256


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
