"""docs/idea.md: its blocks of code do what the page says, and its first command trains an idea."""

import json

import jax
import jax.numpy as jnp
import numpy as np
from idea_page import COEFFICIENT, IDEA, block, train, write_files
from sample_runs import read_csv
from small_networks import FeedForward, make

from jaxrl_atari.algorithm import Mean, Minibatch, Rollout, find_algorithm, resolved_options
from jaxrl_atari.config import Config, PPOConfig, set_fields
from jaxrl_atari.networks import Observation
from jaxrl_atari.ppo import PPO, Samples


def test_an_idea_is_trained(tmp_path):
    folder = write_files(tmp_path)
    train(folder, COEFFICIENT, "--run-dir", "data/strong")
    run_dir = folder / "data" / "strong"
    saved = json.loads((run_dir / "config.json").read_text())
    assert saved["config"]["ppo"]["coefficients"] == {"z_loss": 0.01}
    assert all(float(row["z_loss"]) > 0 for row in read_csv(run_dir / "session_0/metrics.csv")[1:])
    assert (run_dir / "code" / "my_idea.py").read_text() == (folder / "my_idea.py").read_text()


def test_coefficients_of_an_idea():
    """The penalty that the loss adds."""
    exec(block(IDEA), {})
    algorithm = find_algorithm("z_loss")
    base = Config(algorithm="z_loss")
    varied = [set_fields(base, {"ppo.coefficients.z_loss": x}) for x in (1e-3, 1e-2, 1e-1)]

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
    _, samples, _ = find_algorithm("careful").prepare(None, None, rollout, mean, config, None)
    np.testing.assert_allclose(samples.target[:, 0], [0.25 * -2, -2, 1])
    np.testing.assert_allclose(samples.target[:, 1], [1, 0, 1 - 1])


def test_an_optimiser_of_the_users():
    """Lion's first step has the size of the rate in every direction, after the decay of the weights."""
    exec(block("import optax"), {})
    config = PPOConfig(learning_rate=0.1, weight_decay=0.5)
    optimizer = find_algorithm("lion").optimizer(config)
    params = jnp.array([2.0, -2.0])
    updates, _ = optimizer.update(jnp.array([100.0, -1.0]), optimizer.init(params), params)
    np.testing.assert_allclose(updates, [-0.1 - 0.1, 0.1 + 0.1], rtol=1e-6)
