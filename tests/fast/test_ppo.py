"""`ppo.py` against `reference.py`, golden numbers and what must not matter."""

from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from originals.rollouts import SHAPES
from small_networks import nature_in_float64

from jaxrl_atari.algorithm import ONE_DEVICE, Mean, Minibatch, Rollout, Shard
from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.config import NetworkConfig, PPOConfig
from jaxrl_atari.errors import InterfaceError
from jaxrl_atari.frames import BLOCKED, PLAIN, as_frames
from jaxrl_atari.networks import Observation, Outputs, make_network
from jaxrl_atari.ppo import PPO, Samples, gae, log_prob_of, ppo_loss
from jaxrl_atari.rollout import sample_action
from jaxrl_atari.update import current_options, draw_minibatches, init_train_state, observe, update

HYPER = {
    "learning_rate": 2.5e-4, "gamma": 0.99, "gae_lambda": 0.9,
    "clip_epsilon": 0.1, "entropy_coef": 0.01, "value_coef": 0.5,
}  # fmt: skip
ACTIONS = 6
LEARNED = ("loss", "policy_loss", "value_loss", "entropy", "approx_kl", "clip_fraction")


def random_rollout(seed, steps=4, num_envs=4):
    """A rollout in float64 NumPy with all that a game can do, ratios and values on both sides of the clip
    range."""
    rng = np.random.default_rng(seed)
    shape = (steps, num_envs)
    terminated = rng.random(shape) < 0.15
    truncated = ~terminated & (rng.random(shape) < 0.1)
    life_lost = terminated & (rng.random(shape) < 0.5)
    weight, age = np.ones(shape), np.zeros(shape, np.int32)
    for t in range(1, steps):  # the step after the end of a game is an auto-reset step
        over = (terminated & ~life_lost | truncated)[t - 1] & (weight[t - 1] > 0)
        weight[t, over] = 0.0
        terminated[t, over] = truncated[t, over] = life_lost[t, over] = False
        age[t] = np.where(weight[t - 1] == 0, 0, np.minimum(age[t - 1] + 1, 3))
    return {
        "frames": rng.integers(0, 256, (steps + 3, num_envs, 84, 84), dtype=np.uint8),
        "age": age,
        "action": rng.integers(0, ACTIONS, shape).astype(np.int32),
        "log_prob": np.float32(-np.log(ACTIONS) + 0.3 * rng.standard_normal(shape)).astype(np.float64),
        "value": np.float32(0.3 * rng.standard_normal(shape)).astype(np.float64),
        "reward": rng.integers(-1, 2, shape).astype(np.float64),
        "terminated": terminated,
        "truncated": truncated,
        "weight": weight,
        "bootstrap_value": np.float32(rng.standard_normal(num_envs)).astype(np.float64),
    }


def shipped(rollout, frame_shape=BLOCKED):
    """The same rollout as the package takes it."""
    float32 = {n: x.astype(np.float32) if x.dtype == np.float64 else x for n, x in rollout.items()}
    return Rollout(
        **{name: jnp.asarray(x) for name, x in float32.items()}
        | {"frames": as_frames(jnp.asarray(rollout["frames"]), frame_shape)}
    )


def trained_params(seed=0):
    """Parameters as training leaves them: biases that are not 0, and a policy that prefers something."""
    rng, shapes = np.random.default_rng(seed), SHAPES | {"policy": (512, ACTIONS)}

    def layer(name, shape):
        scale = np.sqrt((1 if name == "policy" else 2) / np.prod(shape[:-1]))
        kernel = scale * rng.standard_normal(shape)
        return {"kernel": jnp.float32(kernel), "bias": jnp.float32(0.05 * rng.standard_normal(shape[-1]))}

    return {name: layer(name, shape) for name, shape in shapes.items()}


def in_float64(params):
    return jax.tree.map(lambda x: np.asarray(x, np.float64), params)


# A unit nearer to ReLU's kink than float32 can tell has no gradient to compare: seeds with one are passed over.
KINK_MARGIN = 1e-6


def network(conv="auto"):
    return make_network(NetworkConfig(conv=conv), ACTIONS, "cpu")


# --- generalised advantage estimation ----------------------------------------------------------------------------


def test_gae_golden_numbers():
    """Worked out by hand at gamma = lambda = 1/2: delta = 1 + V'/2 - V, A = delta + A'/4."""
    reward = jnp.array([[1.0], [0.0], [1.0], [2.0]])
    value = jnp.array([[2.0], [4.0], [6.0], [8.0]])
    no = jnp.zeros((4, 1), bool)
    at_1 = no.at[1].set(True)
    solve = partial(gae, reward, value, jnp.array([4.0]), gamma=0.5, gae_lambda=0.5)
    # delta = [1, -1, -1, -4]
    np.testing.assert_array_equal(
        solve(no, no)[:, 0], [1 - 1 / 4 - 1 / 16 - 4 / 64, -1 - 1 / 4 - 4 / 16, -2.0, -4.0]
    )
    # A life is lost at step 1: nothing beyond, delta_1 = 0 - 4.
    np.testing.assert_array_equal(solve(at_1, no)[:, 0], [1 - 1.0, -4.0, -2.0, -4.0])
    # The game is cut off at step 1: the value beyond counts, delta_1 = 0 + 6 / 2 - 4, the rewards beyond do not.
    np.testing.assert_array_equal(solve(no, at_1)[:, 0], [1 - 1 / 4, -1.0, -2.0, -4.0])
    # At the last step, the value beyond is the bootstrap value, unless the game ended.
    assert solve(no.at[3].set(True), no)[3, 0] == 2 - 8
    assert solve(no, no.at[3].set(True))[3, 0] == 2 + 4 / 2 - 8


def test_gae_is_the_double_sum():
    rollout = random_rollout(1, steps=30, num_envs=16)
    assert rollout["terminated"].any()
    assert rollout["truncated"].any()
    assert (rollout["weight"] == 0).any()
    expected = reference.advantages(rollout, 0.99, 0.95)
    arrays = shipped(rollout)
    names = ("reward", "value", "bootstrap_value", "terminated", "truncated")
    advantage = jax.jit(gae)(*[getattr(arrays, name) for name in names], 0.99, 0.95)
    np.testing.assert_allclose(advantage, expected, rtol=1e-5, atol=1e-5)


# --- loss and gradients ------------------------------------------------------------------------------------------


def minibatch(seed, size=64):
    """A minibatch in float64 with ratios and values on both sides of the clip range, and a few weights of 0."""
    rng = np.random.default_rng(seed)
    batch = {
        "action": rng.integers(0, ACTIONS, size).astype(np.int32),
        "log_prob": -np.log(ACTIONS) + 0.3 * rng.standard_normal(size),
        "value": 0.3 * rng.standard_normal(size),
        "target": rng.standard_normal(size),
        "weight": (rng.random(size) > 0.2).astype(np.float64),
    }
    batch["advantage"] = reference.normalize(rng.standard_normal(size), batch["weight"])
    return batch


def shipped_loss(params, apply, stacks, batch, dtype=jnp.float32, **changes):
    """The package's loss of a minibatch of `minibatch`, whose advantages are normalised already."""
    samples = Samples(**{n: jnp.asarray(batch[n], jnp.int32 if n == "action" else dtype) for n in Samples._fields})
    config = jax.tree.map(dtype, PPOConfig(**HYPER, **changes, normalize_advantages=False))
    mean = Mean.over(jnp.asarray(batch["weight"], dtype))
    return ppo_loss(params, apply, Minibatch(Observation(stacks), samples, mean, KEY), config)


def outputs_as_params(params, observation):
    """A network whose parameters are its outputs."""
    return Outputs(*params)


@pytest.mark.parametrize("clip_value", [True, False])
def test_loss_and_its_gradients_in_float64(clip_value):
    rng = np.random.default_rng(3)
    batch = minibatch(3)
    logits, value = 0.5 * rng.standard_normal((64, ACTIONS)), 0.3 * rng.standard_normal(64)
    parts, d_logits, d_value = reference.ppo_loss(logits, value, batch, HYPER, clip_value)
    assert 0.2 < parts["clip_fraction"] < 0.9
    with jax.enable_x64(True):

        @jax.jit
        @partial(jax.grad, has_aux=True)
        def gradient(outputs):
            return shipped_loss(outputs, outputs_as_params, None, batch, jnp.float64, clip_value_loss=clip_value)

        (got_logits, got_value), metrics = gradient((jnp.asarray(logits), jnp.asarray(value)))
        assert got_logits.dtype == jnp.float64
        np.testing.assert_allclose(got_logits, d_logits, rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(got_value, d_value, rtol=1e-12, atol=1e-15)
        for name in {*LEARNED} - {"loss"}:  # the update adds the loss
            np.testing.assert_allclose(metrics[name], parts[name], rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("conv", ["plain", "auto"])
def test_gradients_of_all_parameters(conv):
    rng = np.random.default_rng(6)
    params, batch = trained_params(6), minibatch(6, size=16)
    stacks = rng.integers(0, 256, (16, 84, 84, 4), dtype=np.uint8)
    parts, expected = reference.minibatch_gradients(in_float64(params), stacks, batch, HYPER)
    assert parts["kink_margin"] > KINK_MARGIN
    made = network(conv)

    @jax.jit
    @jax.grad
    def gradient(params):
        return shipped_loss(params, made.apply, jnp.asarray(stacks), batch)[0]

    gradients = gradient(params)
    for name, layer in expected.items():
        for key, x in layer.items():
            error = np.abs(np.asarray(gradients[name][key]) - x).max() / np.abs(x).max()
            assert error < 1e-5, f"{name}/{key}: {error}"


def test_samples_that_do_not_count_leave_the_means_as_they_are():
    x, weight = jnp.array([1.0, jnp.inf, 3.0, jnp.nan]), jnp.array([1.0, 0.0, 1.0, 0.0])
    mean = Mean.over(weight)
    assert mean(x) == 2
    assert mean.moments(x) == (2, 1)


def test_a_mean_of_another_shape_is_refused():
    for shape in [(), (8, 1)]:
        with pytest.raises(InterfaceError, match="one number per sample"):
            Mean.over(jnp.ones(8))(jnp.zeros(shape))


def test_normalized_advantages():
    advantage, weight = jnp.array([1.0, 3.0, 1e6, 5.0]), jnp.array([1.0, 1.0, 0.0, 1.0])
    normalized = Mean.over(weight).normalize(advantage)
    np.testing.assert_allclose(normalized[jnp.array([0, 1, 3])], [-(1.5**0.5), 0, 1.5**0.5], atol=1e-6)
    # Of 1, 3 and 5 the variance is 8/3 with N, and 4 with N - 1.
    unbiased = Mean.over(weight).normalize(advantage, unbiased=True)
    np.testing.assert_allclose(unbiased[jnp.array([0, 1, 3])], [-1, 0, 1], atol=1e-6)
    single = jnp.array([1.0, 0.0, 0.0, 0.0])  # N - 1 is 0
    assert np.isfinite(Mean.over(single).normalize(advantage, unbiased=True)).all()


# --- one whole update --------------------------------------------------------------------------------------------


def small_config(**changes):
    return PPOConfig(**({"rollout_length": 4, "minibatch_size": 4, "epochs": 2} | HYPER | changes))


@cache
def jitted_update(apply):
    return jax.jit(partial(update, apply=apply, algorithm=PPO))


KEY = jax.random.key(3)


def minibatches(key, *, rollout_length, num_envs, epochs, size, shard=ONE_DEVICE, uniform=False):
    """`draw_minibatches` for one device of `shard`, with `num_envs` environments and minibatches of `size`."""
    rollout = SimpleNamespace(action=np.zeros((rollout_length, num_envs)), carry=())
    options = PPOConfig(
        epochs=epochs, minibatch_size=size * shard.count, minibatches="uniform" if uniform else "stratified"
    )
    return np.asarray(draw_minibatches(key, rollout, options, shard))


def run_update(rollout, params, config, conv="auto"):
    """The new state and the metrics of an update of a rollout in NumPy."""
    arrays = shipped(rollout, network(conv).frame_shape)
    return jitted_update(network(conv).apply)(init_train_state(params, config, PPO, KEY), arrays, config, KEY)


SWITCHED = {
    "clip_value_loss": False,
    "unbiased_std": True,
    "minibatches": "uniform",
    "truncation_is_terminal": True,
    "learn_from_auto_resets": True,
}
"""The switches of dialects, none as it is by default. `test_originals.py` flips each of them."""


@pytest.mark.parametrize(
    ("conv", "seed", "changes"),
    [
        ("auto", 0, {"weight_decay": 0.0}),
        ("plain", 5, {"weight_decay": 0.1, "max_grad_norm": 20.0, "adam_epsilon": 1e-3} | SWITCHED),
    ],
)
def test_a_whole_update(conv, seed, changes):
    """2 epochs over 16 samples in minibatches of 4: 8 gradient steps.

    The longest way that Adam can have gone is 8 times the learning rate.
    """
    config = small_config(**changes)
    uniform = config.minibatches == "uniform"
    indices = minibatches(
        KEY, rollout_length=4, num_envs=4, epochs=config.epochs, size=config.minibatch_size, uniform=uniform
    )
    switches = {
        name: getattr(config, name) for name in ("normalize_advantages", "clip_value_loss", "unbiased_std")
    }
    ends = {name: getattr(config, name) for name in ("truncation_is_terminal", "learn_from_auto_resets")}
    for candidate in range(seed, seed + 20):
        rollout, params = random_rollout(candidate), trained_params(candidate)
        start = in_float64(params)
        adam = reference.Adam(start, config.max_grad_norm, config.adam_epsilon, config.weight_decay)
        learned = reference.with_ends(rollout, **ends)
        expected, history = reference.update(start, learned, HYPER, indices, adam, **switches)
        has_all = (rollout["weight"] == 0).any() and rollout["truncated"].any()
        if min(parts["kink_margin"] for parts in history) > KINK_MARGIN and has_all:
            break
    else:
        pytest.fail("no seed will do")
    state, metrics = run_update(rollout, params, config, conv)
    assert len(history) == 8
    assert max(parts["gradient_norm"] for parts in history) > config.max_grad_norm  # so that clipping is seen
    longest = HYPER["learning_rate"] * len(history)
    for name, layer in expected.items():
        for key, x in layer.items():
            error = np.abs(np.asarray(state.params[name][key]) - x).max() / longest
            assert np.abs(x - start[name][key]).max() / longest > 5e-3
            assert error < 1e-3, f"{name}/{key}: {error}"
    assert state.optimizer_steps == len(history)
    for name in (*LEARNED, "gradient_norm"):
        mean = np.mean([parts[name] for parts in history])
        np.testing.assert_allclose(metrics[name], mean, rtol=1e-3, atol=1e-5, err_msg=name)
    advantage = reference.advantages(learned, HYPER["gamma"], HYPER["gae_lambda"])
    counted = learned["weight"] > 0
    explained = 1 - advantage[counted].var() / (rollout["value"] + advantage)[counted].var()
    np.testing.assert_allclose(metrics["explained_variance"], explained, rtol=1e-3)


def linear(params, observation):
    """A network that compiles fast: a few pixels, and one layer."""
    stacks = observation.stacks
    x = stacks.reshape(len(stacks), -1)[:, ::977] / 255.0
    return Outputs(x @ params["policy"], (x @ params["value"])[:, 0])


def test_target_kl_ends_the_epochs():
    """The update is that of as many epochs as were taken, metrics and optimiser state included."""
    rng, rollout = np.random.default_rng(1), shipped(random_rollout(1), PLAIN)
    params = {
        name: jnp.float32(0.1 * rng.standard_normal((29, n))) for name, n in (("policy", ACTIONS), ("value", 1))
    }
    outputs = linear(params, observe(rollout, jnp.arange(16)))
    log_prob = log_prob_of(outputs.logits, rollout.action.reshape(-1)).reshape(4, 4)
    rollout = rollout._replace(log_prob=log_prob)  # so that the updates alone move the policy away

    def run(epochs, target_kl=None):
        config = small_config(epochs=epochs, target_kl=target_kl)
        return jitted_update(linear)(init_train_state(params, config, PPO, KEY), rollout, config, KEY)

    plain = {epochs: run(epochs) for epochs in (1, 2)}
    one, two = (float(plain[epochs][1]["approx_kl"]) * epochs for epochs in (1, 2))  # sums over epochs
    first, second = one, two - one
    assert 0 < first < second
    state, metrics = run(3, target_kl=(first + second) / 2)
    expected, means = plain[2]
    assert metrics.pop("skipped_steps") == 4
    assert state.optimizer_steps == expected.optimizer_steps == 8
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-9), state, expected)
    assert set(metrics) == set(means)
    for name, mean in means.items():
        np.testing.assert_allclose(metrics[name], mean, rtol=1e-5, atol=1e-8, err_msg=name)


def test_the_update_of_the_a2c_config_is_a_step_of_a2c(request):
    """In float64, from parameters and a rollout that they played: log_prob and value are theirs."""
    config = load_config(request.config.rootpath / "configs" / "a2c_qbert.py")
    steps, num_envs = config.ppo.rollout_length, config.env.num_envs
    assert (config.ppo.epochs, config.num_minibatches, steps) == (1, 1, 5)
    rollout, params = random_rollout(2, steps, num_envs), in_float64(trained_params(2))
    assert (rollout["weight"] == 0).any()
    assert rollout["truncated"].any()
    logits, value, _ = reference.forward(params, reference.stacks_of(rollout, np.ndindex(steps, num_envs)))
    taken = np.arange(steps * num_envs), rollout["action"].reshape(-1)
    rollout["log_prob"] = reference.log_softmax(logits)[taken].reshape(steps, num_envs)
    rollout["value"] = value.reshape(steps, num_envs)
    ppo = current_options(config, 0)
    hyper = {name: float(getattr(ppo, name)) for name in HYPER}
    gradients = reference.a2c_gradients(params, rollout, hyper)
    adam = reference.Adam(params, ppo.max_grad_norm, ppo.adam_epsilon, ppo.weight_decay)
    expected = adam.step(params, gradients, hyper["learning_rate"])
    with jax.enable_x64(True):
        state = init_train_state(jax.tree.map(jnp.asarray, params), ppo, PPO, KEY)
        arrays = Rollout(**{name: jnp.asarray(x) for name, x in rollout.items()})
        arrays = arrays._replace(frames=arrays.frames[..., None])  # a frame's only channel
        state, metrics = jitted_update(nature_in_float64)(state, arrays, jax.tree.map(jnp.float64, ppo), KEY)
        np.testing.assert_allclose(metrics["gradient_norm"], reference.global_norm(gradients), rtol=1e-10)
        np.testing.assert_allclose(metrics["approx_kl"], 0.0, atol=1e-12)
        for name, layer in expected.items():
            for key, x in layer.items():
                got = np.asarray(state.params[name][key])
                assert got.dtype == np.float64
                np.testing.assert_allclose(got - params[name][key], x - params[name][key], rtol=1e-6, atol=1e-12)


def test_steps_of_weight_0_have_no_influence():
    """Whatever an auto-reset step after a termination holds: frame, action, log_prob, value, reward."""
    rollout, params = random_rollout(1), trained_params(8)
    masked = (rollout["weight"] == 0) & np.roll(rollout["terminated"], 1, axis=0)
    assert masked.sum() == 2
    frames = rollout["frames"].copy()
    frames[3:][masked] = 255 - frames[3:][masked]
    garbage = {
        "frames": frames,
        "action": np.where(masked, (rollout["action"] + 1) % ACTIONS, rollout["action"]).astype(np.int32),
        "log_prob": np.where(masked, -10.0, rollout["log_prob"]),
        "value": np.where(masked, 1e3, rollout["value"]),
        "reward": np.where(masked, -1e3, rollout["reward"]),
    }
    clean, dirty = (
        run_update(rollout | changes, params, small_config(weight_decay=0.0)) for changes in ({}, garbage)
    )
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)


def test_a_minibatch_in_which_nothing_counts_moves_nothing():
    rollout, params = random_rollout(9), trained_params(9)
    rollout["weight"][:] = 0.0
    state, metrics = run_update(rollout, params, small_config(weight_decay=0.0))
    jax.tree.map(np.testing.assert_array_equal, state.params, params)
    assert all(np.isfinite(x).all() for x in metrics.values())


def test_an_action_that_is_ruled_out_is_as_if_it_were_not_there():
    """With a logit of -1e9, loss and gradients are those of a policy without it."""
    batch = minibatch(4)
    batch["action"] %= ACTIONS - 1  # the last one is ruled out
    logits = jnp.float32(np.random.default_rng(5).standard_normal((64, ACTIONS)))

    def gradient(policy):
        def loss(logits):
            return shipped_loss((policy(logits), jnp.float32(batch["value"])), outputs_as_params, None, batch)

        return jax.jit(jax.grad(loss, has_aux=True))(logits)

    got, expected = gradient(lambda x: x.at[:, -1].set(-1e9)), gradient(lambda x: x[:, :-1])
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, expected)
    assert np.any(got[0])


@pytest.mark.parametrize(("num_envs", "size", "strata"), [(8, 16, 8), (6, 16, 2), (1, 4, 1)])
def test_every_epoch_is_a_fresh_permutation_of_the_samples(num_envs, size, strata):
    draw = partial(minibatches, rollout_length=16, num_envs=num_envs, epochs=3, size=size)
    indices = draw(jax.random.key(10))
    samples = 16 * num_envs
    assert indices.shape == (3 * samples // size, size)
    np.testing.assert_array_equal(np.sort(indices.reshape(3, samples)), np.tile(np.arange(samples), (3, 1)))
    # The samples are permuted anew, not the order of the same minibatches.
    assert len({frozenset(row) for row in indices.tolist()}) == len(indices)
    assert not np.array_equal(indices, draw(jax.random.key(11)))
    # Each minibatch takes equally many samples of each stratum of environments.
    stratum = indices % num_envs * strata // num_envs
    counts = np.apply_along_axis(np.bincount, 1, stratum, minlength=strata)
    np.testing.assert_array_equal(counts, size // strata)


def test_uniform_minibatches_are_permutations_of_the_rollout():
    """Every sample once an epoch; how many of each environment is left to chance."""
    indices = minibatches(jax.random.key(10), rollout_length=16, num_envs=8, epochs=3, size=16, uniform=True)
    np.testing.assert_array_equal(np.sort(indices.reshape(3, 128)), np.tile(np.arange(128), (3, 1)))
    counts = np.apply_along_axis(np.bincount, 1, indices % 8, minlength=8)
    # Hypergeometric, 16 of 128 of which 16 are an environment's: variance 16 (1/8) (7/8) (112/127).
    assert counts.var() == pytest.approx(16 / 8 * 7 / 8 * 112 / 127, rel=0.3)


def test_devices_draw_their_parts_of_the_same_minibatches():
    """Two devices with four of eight environments each draw what one device with all eight draws."""
    draw = partial(minibatches, jax.random.key(4), rollout_length=16, epochs=2)
    whole = draw(num_envs=8, size=32)
    parts = [draw(num_envs=4, size=16, shard=Shard(i, 2)) for i in range(2)]
    for row, *shards in zip(whole, *parts, strict=True):
        there = {(t, b + 4 * i) for i, shard in enumerate(shards) for t, b in zip(*divmod(shard, 4), strict=True)}
        assert there == set(zip(*divmod(row, 8), strict=True))


# --- acting ------------------------------------------------------------------------------------------------------


def test_actions_follow_the_distribution_and_log_prob_is_theirs():
    logits = np.array([2.0, 0.0, -1.0, 1.0])
    rows = 100_000
    keys = jax.random.split(jax.random.key(13), rows)
    action, log_prob = jax.jit(sample_action)(keys, jnp.tile(jnp.float32(logits), (rows, 1)))
    expected = reference.log_softmax(logits[None])[0]
    np.testing.assert_allclose(log_prob, expected[np.asarray(action)], rtol=1e-6)
    counts = np.bincount(action, minlength=4)
    chi_square = ((counts - rows * np.exp(expected)) ** 2 / (rows * np.exp(expected))).sum()
    assert chi_square < 16.3  # 3 degrees of freedom: one key in a thousand lies beyond
    again, _ = sample_action(keys[7:9], jnp.tile(jnp.float32(logits), (2, 1)))
    np.testing.assert_array_equal(again, action[7:9])  # a row's action depends on its own key alone
