"""The open core: algorithms, optimisers and losses that are not PPO's, on networks and games of milliseconds."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_pools import Corridor, group_of
from small_networks import FeedForward, Recurrent, make

from jaxrl_atari.algorithm import Mean, find_algorithm, resolved_options
from jaxrl_atari.config import Config, PPOConfig, config_from_dict, set_fields
from jaxrl_atari.errors import ConfigError, InterfaceError
from jaxrl_atari.learner import DataParallel, random_rollout
from jaxrl_atari.ppo import PPO, log_prob_of, ppo_loss, ppo_loss_of_outputs, ppo_prepare
from jaxrl_atari.rollout import collect
from jaxrl_atari.update import init_train_state, observe, update

LENGTH, ENVS = 16, 8
CONFIG = PPOConfig(rollout_length=LENGTH, minibatch_size=2 * LENGTH, epochs=2, gae_lambda=0.95)
KEY = jax.random.key(7)


@cache
def collected(network=FeedForward, envs=ENVS, seed=0):
    """The second rollout of a policy that has learned nothing: games are in progress when it starts."""
    params, made = make(network, Corridor.num_actions)
    group = group_of(Corridor(envs, seed), made)
    for number in range(2):
        rollout = collect([[group]], [params], jax.random.fold_in(KEY, number), LENGTH).rollouts[0]
    return rollout


def options(algorithm, **chosen):
    """`CONFIG` with the coefficients of an algorithm, and some that are chosen."""
    return replace(CONFIG, coefficients={**algorithm.coefficients, **chosen})


def arguments(algorithm, network=FeedForward):
    """What an update takes, and the update."""
    config = options(algorithm)
    params, made = make(network, Corridor.num_actions)
    state = init_train_state(params, config, algorithm, KEY)
    return (state, collected(network), config, KEY), partial(update, apply=made.apply, algorithm=algorithm)


@pytest.mark.parametrize(("name", "network"), [("rnd", FeedForward), ("vtrace", Recurrent)])
def test_every_algorithm_moves_every_parameter(name, network):
    (before, *others), function = arguments(find_algorithm(name), network)
    after, metrics = jax.jit(function)(before, *others)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((after.params, after.extra, metrics)))
    for old, new in zip(*map(jax.tree.leaves, (before.params, after.params)), strict=True):
        assert np.any(old != new)
    assert jax.tree.structure(before) == jax.tree.structure(after)


# --- Coefficients ------------------------------------------------------------------------------------------------


def test_coefficients_are_those_of_the_algorithm_unless_others_are_chosen():
    def resolved(algorithm, **chosen):
        return resolved_options(Config(algorithm=algorithm, ppo=PPOConfig(coefficients=chosen))).coefficients

    assert resolved("ppo") == {}
    assert resolved("vtrace") == {"max_rho": 1.0, "max_c": 1.0}
    assert resolved("vtrace", max_c=2) == {"max_rho": 1.0, "max_c": 2.0}
    with pytest.raises(ConfigError, match=r"ppo.coefficients.rho = 2: .* vtrace, which has max_rho, max_c"):
        resolved("vtrace", rho=2)
    with pytest.raises(InterfaceError, match=r"rho.* declares, which are: max_rho, max_c"):
        resolved("vtrace")["rho"]


def test_a_coefficient_is_a_field_of_a_config():
    config = set_fields(Config(algorithm="vtrace"), {"ppo.coefficients.max_c": 0.5})
    assert config_from_dict(config.to_dict()) == config


# --- What an update gives to the functions, and takes from them --------------------------------------------------


def test_a_rollout_of_random_numbers_is_like_one_that_was_played():
    _, made = make(Recurrent, Corridor.num_actions)
    size = {"length": LENGTH, "num_envs": ENVS}
    rollout = jax.jit(partial(random_rollout, network=made, **size))(KEY)
    types = [[(x.shape, x.dtype) for x in jax.tree.leaves(each)] for each in (rollout, collected(Recurrent))]
    assert types[0] == types[1]
    terminated, weight = map(np.asarray, (rollout.terminated, rollout.weight))
    assert terminated.any()
    assert (weight[0] == 1).all()
    np.testing.assert_array_equal(weight[1:] == 0, terminated[:-1])  # an auto-reset step follows each end
    assert not terminated[weight == 0].any()


def idea(params, apply, batch, options):
    """A term with a mean, a penalty without samples, the log of a mean, and something drawn."""
    outputs = apply(params, batch.observation)
    loss, metrics = ppo_loss_of_outputs(outputs, batch, options)
    spread = jnp.log(batch.mean(jnp.square(outputs.value)))
    penalty = optax.tree.norm(params, squared=True)
    z_loss = batch.mean(jnp.square(jax.nn.logsumexp(outputs.logits, axis=-1)))
    return loss + 0.1 * spread + 1e-3 * penalty + 0.1 * z_loss, metrics | {
        "z_loss": z_loss,
        "penalty": penalty,
        "drawn": jax.random.uniform(batch.key),
    }


def prepare_and_draw(state, apply, rollout, mean, options, key):
    """A number for all devices in the state, and a metric of `jnp.mean`, which sees the part of one device."""
    state = state.replace(extra=jax.random.uniform(key))
    state, samples, metrics = PPO.prepare(state, apply, rollout, mean, options, key)
    return state, samples, metrics | {"value": jnp.mean(rollout.value)}


def test_one_device_and_two_compute_the_same():
    """A rounding apart: what a loss draws differs from device to device, and is averaged; what `prepare` draws
    does not differ."""
    algorithm = PPO._replace(init=lambda params, key: (params, 0.0), loss=idea, prepare=prepare_and_draw)
    (first, _, config, key), step = arguments(algorithm)
    halves = [collected(envs=ENVS // 2, seed=seed) for seed in (0, 1)]
    whole = jax.tree.map(lambda *x: jnp.concatenate(x, axis=min(1, x[0].ndim - 1)), *halves)
    found = []
    for devices, rollouts in ((jax.devices("cpu")[:1], [whole]), (jax.devices("cpu")[:2], halves)):
        parallel = DataParallel(devices)
        state, *others = map(
            parallel.replicate, (jax.tree.map(jnp.copy, first), config, key)
        )  # it consumes the state
        new = parallel.compile(step)(state, parallel.assemble(rollouts), others[0], key=others[1])
        found += [parallel.local_part(new, index) for index in range(len(devices))]
    (one, one_metrics), (two, two_metrics), (second_device, _) = jax.device_get(found)
    assert 0 < one.extra == two.extra == second_device.extra
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-5), one.params, two.params)
    jax.tree.map(np.testing.assert_array_equal, two.params, second_device.params)
    assert one_metrics.keys() == two_metrics.keys() > {"z_loss", "penalty", "value"}
    for name in one_metrics.keys() - {"drawn"}:
        np.testing.assert_allclose(one_metrics[name], two_metrics[name], rtol=1e-4, atol=1e-6, err_msg=name)
    moved = optax.tree.norm(optax.tree.sub(one.params, first.params))
    assert moved > 100 * optax.tree.norm(optax.tree.sub(one.params, two.params))


def test_a_state_of_weak_types_compiles_an_update_once():
    """JAX takes a Python number, and what is computed of it alone, for an array whose type may still change."""

    def prepare(state, *others):
        return PPO.prepare(state.replace(extra=jnp.where(state.optimizer_steps > 3, 1.0, 0.0)), *others)

    def init(params, key):
        return {**params, "own": jnp.log(0.1)}, 0.1

    given, function = arguments(PPO._replace(init=init, prepare=prepare))
    state, *others = jax.device_put(given, jax.devices("cpu")[0])
    compiled = jax.jit(function)
    for _ in range(3):
        state, _ = compiled(state, *others)
    assert compiled._cache_size() == 1


def test_a_metric_may_be_a_number_of_any_type():
    """Its mean is taken in float32: in bfloat16, a sum of steps would have three digits."""
    numbers = {"samples": jnp.int32(3), "positive": jnp.bool(True), "short": jnp.bfloat16(1.0078125)}

    def prepare(*given):
        state, samples, metrics = ppo_prepare(*given)
        return state, samples, metrics | {f"{name} before": x for name, x in numbers.items()}

    def loss(*given):
        value, metrics = ppo_loss(*given)
        return value.astype(jnp.bfloat16), metrics | numbers

    given, function = arguments(PPO._replace(prepare=prepare, loss=loss))
    _, metrics = jax.jit(function)(*given)
    for name, expected in {"samples": 3.0, "positive": 1.0, "short": 1.0078125}.items():
        assert metrics[name] == metrics[f"{name} before"] == expected
    assert all(metric.dtype == jnp.float32 for metric in metrics.values())


# --- Mistakes that would train without a word --------------------------------------------------------------------


def of_loss(**metrics):
    """A loss with further metrics."""

    def loss(*given):
        value, own = ppo_loss(*given)
        return value, own | metrics

    return PPO._replace(loss=loss)


def of_prepare(change):
    """A `prepare` whose result is changed."""
    return PPO._replace(prepare=lambda *given: change(*ppo_prepare(*given)))


def inject(options):
    rate = optax.inject_hyperparams(optax.adam)(options.learning_rate)
    return optax.chain(optax.clip_by_global_norm(1.0), rate)


@pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(of_loss(own=jnp.zeros(3)), id="a metric that is no number"),
        pytest.param(of_loss(loss=jnp.zeros(())), id="a metric with the name of one of the update"),
        pytest.param(
            of_prepare(lambda state, samples, metrics: (state, jax.tree.map(jnp.transpose, samples), metrics)),
            id="samples [B, T]",
        ),
        pytest.param(
            of_prepare(lambda state, samples, metrics: (state.replace(extra=jnp.zeros(3)), samples, metrics)),
            id="arrays of the state that a checkpoint would not have",
        ),
        pytest.param(PPO._replace(optimizer=inject), id="an optimiser that keeps the first learning rate"),
    ],
)
def test_a_mistake_that_would_train_without_a_word(algorithm):
    def trace():
        given, function = arguments(algorithm)
        jax.eval_shape(function, *given)

    with pytest.raises((InterfaceError, AssertionError)):
        trace()


# --- V-trace -----------------------------------------------------------------------------------------------------


def naive_vtrace(rollout, value, log_prob, gamma, gae_lambda, max_rho, max_c):
    """Equation 1 of the paper as a double loop in float64: targets, and advantages without their weight.

    `value` is that of steps 0 to T.
    """
    rollout = jax.tree.map(np.asarray, rollout)
    length, envs = rollout.reward.shape
    ratio = np.exp(log_prob - rollout.log_prob)
    rho, c = np.minimum(ratio, max_rho), gae_lambda * np.minimum(ratio, max_c)
    targets = np.zeros((length + 1, envs))
    targets[length] = value[length]
    advantages = np.zeros((length, envs))
    for b in range(envs):
        for t in range(length):
            total, factor = 0.0, 1.0
            for k in range(t, length):
                beyond = 0.0 if rollout.terminated[k, b] else value[k + 1, b]
                total += factor * rho[k, b] * (rollout.reward[k, b] + gamma * beyond - value[k, b])
                factor *= gamma * c[k, b]
                if rollout.terminated[k, b] or rollout.truncated[k, b]:
                    break
            targets[t, b] = value[t, b] + total
        for t in range(length):
            beyond = 0.0 if rollout.terminated[t, b] else targets[t + 1, b]
            if rollout.truncated[t, b]:
                beyond = value[t + 1, b]
            advantages[t, b] = rollout.reward[t, b] + gamma * beyond - value[t, b]
    return targets[:-1], advantages


def prepared(name, config, params, rollout):
    """What `prepare` of an algorithm returns for parameters that may differ from those that acted."""
    algorithm, (_, network) = find_algorithm(name), make(FeedForward, Corridor.num_actions)
    state = init_train_state(params, config, algorithm, KEY)
    prepare = jax.jit(partial(algorithm.prepare, apply=network.apply))
    return prepare(state, rollout=rollout, mean=Mean.over(rollout.weight), options=config, key=KEY)


def test_vtrace_is_the_double_sum_for_a_policy_that_has_moved_on():
    params, network = make(FeedForward, Corridor.num_actions)
    rollout = collected()
    assert rollout.terminated.any()
    rollout = rollout._replace(truncated=rollout.truncated.at[5, 2].set(True))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape, np.float32), params)
    config = options(find_algorithm("vtrace"), max_rho=0.9, max_c=1.2)
    _, samples, metrics = prepared("vtrace", config, params, rollout)
    outputs = network.apply(params, observe(rollout, jnp.arange((LENGTH + 1) * ENVS)))
    logits = outputs.logits[: LENGTH * ENVS]
    log_prob = np.reshape(log_prob_of(logits, rollout.action.reshape(-1)), (LENGTH, ENVS))
    value = np.reshape(outputs.value, (LENGTH + 1, ENVS))
    assert np.abs(value[-1] - rollout.bootstrap_value).max() > 1e-3  # it is that of the parameters that learn
    target, advantage = naive_vtrace(
        rollout, value, log_prob, config.gamma, config.gae_lambda, **config.coefficients
    )
    assert 0.5 < metrics["mean_rho"] < 0.99
    np.testing.assert_allclose(samples.target, target, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(samples.advantage, advantage, rtol=1e-4, atol=1e-5)


# --- Random network distillation ---------------------------------------------------------------------------------


def test_the_coefficient_of_rnd():
    params, _ = make(FeedForward, Corridor.num_actions)
    found = []
    for intrinsic_reward in (1.0, 3.0):
        config = options(find_algorithm("rnd"), intrinsic_reward=intrinsic_reward)
        _, _, metrics = prepared("rnd", config, params, collected())
        found.append(metrics["intrinsic_reward"])
    np.testing.assert_allclose(found[1], 3 * found[0], rtol=1e-5)
    assert found[0] > 0.1
