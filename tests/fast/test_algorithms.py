"""The open core: algorithms, optimisers and losses that are not PPO's, on networks and games of milliseconds."""

import dataclasses
import re
import subprocess
import sys
from collections import namedtuple
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_pools import Corridor, FakePool, group_of
from small_networks import FeedForward, Recurrent, make

from jaxrl_atari import network_functions, register_algorithm, register_network
from jaxrl_atari.algorithm import Mean, Shard, find_algorithm
from jaxrl_atari.algorithm_options import as_numbers, resolved_options
from jaxrl_atari.categorical import log_prob_of
from jaxrl_atari.config import Config, NetworkConfig, PPOConfig
from jaxrl_atari.config_dicts import config_from_dict, set_fields
from jaxrl_atari.data_parallel import DataParallel
from jaxrl_atari.errors import ConfigError, InterfaceError
from jaxrl_atari.minibatches import observe
from jaxrl_atari.network_interface import Observation
from jaxrl_atari.ppo import PPO, ppo_loss, ppo_loss_of_outputs, ppo_prepare
from jaxrl_atari.random_rollout import random_rollout
from jaxrl_atari.registry import ALGORITHMS
from jaxrl_atari.rollout import collect
from jaxrl_atari.trials.sessions import compile_key
from jaxrl_atari.trials.varied_fields import can_vary
from jaxrl_atari.update import init_train_state, update

LENGTH, ENVS = 16, 8
CONFIG = PPOConfig(rollout_length=LENGTH, minibatch_size=2 * LENGTH, epochs=2, gae_lambda=0.95)
KEY = jax.random.key(7)


def collected(network, params, envs=ENVS, seed=0):
    group = group_of(Corridor(envs, seed), network)
    for number in range(2):  # in the second rollout games are in progress
        rollout = collect([[group]], [params], jax.random.fold_in(KEY, number), LENGTH).rollouts[0]
    return rollout


def options(algorithm, config=CONFIG, **chosen):
    """`config` with the coefficients of an algorithm, and some that are chosen."""
    return dataclasses.replace(config, coefficients={**algorithm.coefficients, **chosen})


def updated(algorithm, network=FeedForward, config=CONFIG):
    """The states before and after an update, and the metrics."""
    config = options(algorithm, config, **config.coefficients)
    params, made = make(network, Corridor.num_actions)
    before = init_train_state(params, config, algorithm, KEY)
    rollout = collected(made, params)
    after, metrics = jax.jit(partial(update, apply=made.apply, algorithm=algorithm))(before, rollout, config, KEY)
    return before, after, metrics


@pytest.mark.parametrize("network", [FeedForward, pytest.param(Recurrent, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_every_algorithm_moves_every_parameter(name, network):
    before, after, metrics = updated(ALGORITHMS.get(name), network)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((after.params, after.extra, metrics)))
    for old, new in zip(*map(jax.tree.leaves, (before.params, after.params)), strict=True):
        assert np.any(old != new)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert {"loss", "entropy", "explained_variance", "gradient_norm"} <= metrics.keys()


def test_an_algorithm_that_does_not_exist():
    known = ", ".join(ALGORITHMS.names())  # other tests may have registered theirs before
    assert known.startswith("ppo, rnd, vtrace")
    message = f"algorithm = 'pppo': expected one of {known}; name the file that registers it: --import FILE"
    with pytest.raises(ConfigError, match=re.escape(message)):
        ALGORITHMS.get("pppo")


class Sized(nn.Module):
    """A network with a field of its own."""

    num_actions: int
    dtype: Any = jnp.float32
    sizes: Any = (32,)

    @nn.compact
    def __call__(self, stacks):
        x = nn.Dense(self.sizes[0])(stacks[:, ::7, ::7].reshape(len(stacks), -1) / 255)
        return nn.Dense(self.num_actions)(x), nn.Dense(1)(x)[:, 0]


@pytest.mark.parametrize(
    ("register", "name", "entry", "message"),
    [
        (register_algorithm, "ppo", PPO, "algorithm = 'ppo': expected a new name"),
        (register_algorithm, "my idea", PPO, "algorithm = 'my idea': expected a name of letters"),
        (register_algorithm, "a/b", PPO, "algorithm = 'a/b': expected a name of letters"),
        (register_algorithm, 3, PPO, "algorithm = 3: expected a name of letters"),
        (register_algorithm, "loss", ppo_loss, "algorithm = 'loss': expected an Algorithm, such as"),
        (
            register_algorithm,
            "no_loss",
            PPO._replace(loss=None),
            "algorithm no_loss: loss = None: expected a function",
        ),
        (
            register_algorithm,
            "with_text",
            PPO._replace(coefficients={"beta": "0.1"}),
            "algorithm with_text: coefficients.beta = '0.1': expected a finite number",
        ),
        (register_network, "nature", Sized, "network.name = 'nature': expected a new name"),
        (register_network, "made", Sized(6), r"network.name = 'made': expected a class of modules, .*not Tiny\("),
    ],
)
def test_what_cannot_be_registered(register, name, entry, message):
    with pytest.raises(ConfigError, match=message):
        register(name, entry)


def test_a_part_that_is_not_hashable():
    @dataclasses.dataclass
    class Loss:
        coefficient: float

        def __call__(self, params, apply, batch, options):
            return ppo_loss(params, apply, batch, options)

    with pytest.raises(ConfigError, match=r"algorithm own: loss = .*: expected a function \(hashable\)"):
        register_algorithm("own", PPO._replace(loss=Loss(1.0)))


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (partial(Sized, sizes=np.ones(2)), "Failed to hash Flax Module"),
        (lambda num_actions: Sized(num_actions), "unexpected keyword argument 'dtype'"),
        (lambda num_actions, dtype: None, "it makes NoneType"),
    ],
)
def test_a_network_that_cannot_be_made(network, message):
    register_network("own", network)
    with pytest.raises(ConfigError, match=f"network.name = 'own': expected a flax.linen.Module .*; .*{message}"):
        network_functions.make_module(NetworkConfig(name="own"), 4, jnp.float32)


def test_a_fault_within_a_network_keeps_its_traceback():
    """A `TypeError` was called a wrong class."""

    class Faulty(Sized):
        def __post_init__(self):
            len(3)

    register_network("own", Faulty)
    with pytest.raises(TypeError, match="object of type 'int' has no len"):
        network_functions.make_module(NetworkConfig(name="own"), 4, jnp.float32)


def test_a_network_with_a_field_of_its_own():
    register_network("own", partial(Sized, sizes=(7,)))
    module = network_functions.make_module(NetworkConfig(name="own"), 4, jnp.float32)
    assert network_functions.init_params(module, KEY)["Dense_0"]["kernel"].shape == (12 * 12 * 4, 7)


@pytest.mark.parametrize("network", [FeedForward, Recurrent])
def test_a_rollout_of_random_numbers_is_like_one_that_was_played(network):
    _, made = make(network, Corridor.num_actions)
    rollout = random_rollout(KEY, made, length=LENGTH, num_envs=ENVS, num_actions=Corridor.num_actions)
    played = collected(made, make(network, Corridor.num_actions)[0])
    types = [[(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(each)] for each in (rollout, played)]
    assert types[0] == types[1]
    terminated, weight, age = map(np.asarray, (rollout.terminated, rollout.weight, rollout.age))
    assert terminated.any()
    assert (weight[0] == 1).all()
    np.testing.assert_array_equal(weight[1:] == 0, terminated[:-1])  # an auto-reset step follows each end
    assert not terminated[weight == 0].any()
    for b in range(ENVS):
        expected = 0
        for t in range(LENGTH + 1):
            starts = t == 0 or weight[t - 1, b] == 0
            expected = 0 if starts else min(expected + 1, 3)
            assert age[t, b] == expected


# --- What `prepare` is given -------------------------------------------------------------------------------------


@pytest.mark.long
def test_prepare_draws_the_same_on_all_devices_and_another_number_in_each_update():
    def prepare(state, apply, rollout, mean, options, key):
        state = state.replace(extra=jax.random.uniform(key))
        return ppo_prepare(state, apply, rollout, mean, options, key)

    algorithm = PPO._replace(init=lambda params, key: (params, jnp.zeros(())), prepare=prepare)
    params, network = make(FeedForward, Corridor.num_actions)
    parallel = DataParallel(jax.devices("cpu")[:2])
    rollout = parallel.assemble([collected(network, params, ENVS // 2, seed) for seed in (0, 1)])
    step = parallel.compile(partial(update, apply=network.apply, algorithm=algorithm))
    state, config = map(parallel.replicate, (init_train_state(params, CONFIG, algorithm, KEY), CONFIG))
    drawn = []
    for number in range(2):
        state, _ = step(state, rollout, config, key=parallel.replicate(jax.random.fold_in(KEY, number)))
        drawn.append([float(parallel.local_part(state.extra, device)) for device in (0, 1)])
    assert drawn[0][0] == drawn[0][1] != drawn[1][0] == drawn[1][1]


def test_vtrace_computes_part_of_a_minibatch_at_a_time_on_each_device():
    params, network = make(FeedForward, Corridor.num_actions)
    sizes = []

    def apply(params, observation):
        sizes.append(len(observation.stacks))
        return network.apply(params, observation)

    algorithm, bounds = find_algorithm("vtrace"), {}
    config = dataclasses.replace(
        CONFIG, minibatch_size=ENVS * (LENGTH + 1), epochs=1, coefficients=algorithm.coefficients
    )
    rollout = collected(network, params)
    for devices in (1, 2):
        sizes.clear()
        mean = Mean.over(rollout.weight, Shard(0, devices))
        state = init_train_state(params, config, algorithm, KEY)
        jax.eval_shape(
            partial(algorithm.prepare, apply=apply, options=config), state, rollout=rollout, mean=mean, key=KEY
        )
        bounds[devices] = max(sizes)
    assert bounds == {1: config.minibatch_size, 2: config.minibatch_size // 2}


@pytest.mark.parametrize("value", [0.1, jnp.log(0.1)])
def test_a_state_of_weak_types_compiles_an_update_once(value):
    """JAX takes a Python number, and what is computed of it alone, for an array whose type may still change."""

    def prepare(state, *arguments):
        return PPO.prepare(state.replace(extra=jnp.where(state.optimizer_steps > 3, 1.0, 0.0)), *arguments)

    algorithm = PPO._replace(init=lambda params, key: ({**params, "own": value}, value), prepare=prepare)
    params, network = make(FeedForward, Corridor.num_actions)
    state = init_train_state(params, CONFIG, algorithm, KEY)
    rollout = random_rollout(KEY, network, length=LENGTH, num_envs=ENVS, num_actions=Corridor.num_actions)
    compiled = jax.jit(partial(update, apply=network.apply, algorithm=algorithm))
    for _ in range(3):
        state, _metrics = compiled(state, rollout, CONFIG, KEY)
    assert compiled._cache_size() == 1
    assert not any(leaf.weak_type for leaf in jax.tree.leaves(state))


def test_a_lambda_of_the_game_is_no_number_of_an_update():
    """For any algorithm, one that reads `config.gae_lambda` itself too."""

    def prepare(state, apply, rollout, mean, options, key):
        return state, rollout.reward * options.gae_lambda, {}

    params, network = make(FeedForward, Corridor.num_actions)
    config, algorithm = dataclasses.replace(CONFIG, gae_lambda=None), PPO._replace(prepare=prepare)
    state = init_train_state(params, config, algorithm, KEY)
    rollout = random_rollout(KEY, network, length=LENGTH, num_envs=ENVS, num_actions=Corridor.num_actions)
    with pytest.raises(
        ConfigError, match=r"ppo.gae_lambda = None: expected a number in an update; .*resolved_options"
    ):
        update(state, rollout, config, KEY, apply=network.apply, algorithm=algorithm)


@pytest.mark.parametrize("given", [{}, {"alpha": 1.0}, {"alpha": 1.0, "beta": 1.0}])
def test_an_update_is_given_the_coefficients_of_its_algorithm(given):
    """A `KeyError` came from within the loss."""

    def loss(params, apply, batch, options):
        value, metrics = ppo_loss(params, apply, batch, options)
        return value + options.coefficients["beta"], metrics

    params, network = make(FeedForward, Corridor.num_actions)
    algorithm = PPO._replace(loss=loss, coefficients={"beta": 0.5})
    config = dataclasses.replace(CONFIG, coefficients=given)
    state = init_train_state(params, config, algorithm, KEY)
    rollout = random_rollout(KEY, network, length=LENGTH, num_envs=ENVS, num_actions=Corridor.num_actions)
    message = f"ppo.coefficients = {list(given)}: expected the coefficients of the algorithm, ['beta']; "
    with pytest.raises(ConfigError, match=re.escape(message) + ".*resolved_options"):
        update(state, rollout, config, KEY, apply=network.apply, algorithm=algorithm)


@pytest.mark.parametrize("part", ["loss", "prepare"])
def test_a_metric_is_a_single_number(part):
    def with_a_vector(*arguments):
        *results, metrics = getattr(PPO, part)(*arguments)
        return *results, metrics | {"advantages": jnp.zeros(3)}

    with pytest.raises(InterfaceError, match=rf"metric advantages of {part} = 'float32\[3\]': expected a single"):
        updated(PPO._replace(**{part: with_a_vector}))

    def with_a_tree(*arguments):
        *results, metrics = getattr(PPO, part)(*arguments)
        return *results, metrics | {"advantages": {"mean": jnp.zeros(())}}

    with pytest.raises(InterfaceError, match=f"metric advantages of {part} = 'dict': expected a single"):
        updated(PPO._replace(**{part: with_a_tree}))


@pytest.mark.parametrize("minibatch_size", [7, ENVS * LENGTH // 2 + 1])
def test_minibatches_that_do_not_divide_the_rollout_are_refused_by_an_update_too(minibatch_size):
    params, network = make(FeedForward, Corridor.num_actions)
    config = dataclasses.replace(CONFIG, minibatch_size=minibatch_size, gae_lambda=0.95)
    state = init_train_state(params, config, PPO, KEY)
    rollout = random_rollout(KEY, network, length=LENGTH, num_envs=ENVS, num_actions=Corridor.num_actions)
    message = f"ppo.minibatch_size = {minibatch_size}: expected a divisor of the {ENVS * LENGTH} samples"
    with pytest.raises(ConfigError, match=message):
        update(state, rollout, config, KEY, apply=network.apply, algorithm=PPO)


@pytest.mark.parametrize("name", ["loss", "gradient_norm", "skipped_steps", "explained_variance"])
def test_a_metric_of_the_loss_has_a_name_of_its_own(name):
    """The first three are those of the update, the fourth is one that `prepare` returns."""

    def loss(*arguments):
        value, metrics = ppo_loss(*arguments)
        return value, metrics | {name: value}

    with pytest.raises(InterfaceError, match=f"name of a metric = '{name}': expected another name"):
        updated(PPO._replace(loss=loss))


@pytest.mark.parametrize("target_kl", [None, 1.0])
@pytest.mark.parametrize("part", ["loss", "prepare"])
def test_a_metric_may_be_a_number_of_any_type(part, target_kl):
    """Its mean is taken in float32: in bfloat16, a sum of steps would have three digits."""
    numbers = {"samples": jnp.int32(3), "positive": jnp.bool(True), "short": jnp.bfloat16(1.0078125)}

    def with_all(*arguments):
        *results, metrics = getattr(PPO, part)(*arguments)
        return *results, metrics | numbers

    config = dataclasses.replace(CONFIG, target_kl=target_kl)
    _, _, metrics = updated(PPO._replace(**{part: with_all}), config=config)
    assert {name: metrics[name] for name in numbers} == {"samples": 3.0, "positive": 1.0, "short": 1.0078125}
    assert all(metric.dtype == jnp.float32 for metric in metrics.values())


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (jnp.zeros((LENGTH + 1, ENVS)), f"['own'] of prepare = 'float32[{LENGTH + 1}, {ENVS}]'"),
        (0.5, "['own'] of prepare = 'float32[]'"),
        ("text", "['own'] of prepare = 'str'"),
    ],
)
def test_samples_of_another_shape_than_the_rollouts(leaf, message):
    def prepare(*arguments):
        state, samples, metrics = PPO.prepare(*arguments)
        return state, {"ppo": samples, "own": leaf}, metrics

    expected = f"expected an array of shape [{LENGTH}, {ENVS}, ...]"
    with pytest.raises(InterfaceError, match=re.escape(f"samples{message}: {expected}")):
        updated(PPO._replace(prepare=prepare))


@pytest.mark.parametrize("value", [KEY, 1j])
def test_a_metric_is_a_real_number(value):
    """A random key was an error of NumPy, and a complex number ended the training when it was logged."""

    def loss(*arguments):
        loss, metrics = ppo_loss(*arguments)
        return loss, metrics | {"own": jnp.asarray(value)}

    with pytest.raises(InterfaceError, match=r"metric own of loss = .*: expected a single number"):
        updated(PPO._replace(loss=loss))


def test_samples_around_those_of_ppo_are_no_samples_of_its_loss():
    """An `AttributeError` came from within the package."""

    def prepare(*arguments):
        state, samples, metrics = ppo_prepare(*arguments)
        return state, {"ppo": samples}, metrics

    with pytest.raises(InterfaceError, match=r"samples in ppo_loss_of_outputs = 'dict': expected ppo\.Samples: "):
        updated(PPO._replace(prepare=prepare))


@pytest.mark.parametrize("name", ["log_prob", "value"])
def test_every_sample_of_the_loss_of_ppo_is_a_number(name):
    """A column was an error that advised to sum it, and a field that is missing an `AttributeError`."""

    def prepare(change, *arguments):
        state, samples, metrics = ppo_prepare(*arguments)
        return state, change(samples), metrics

    def column(samples):
        return samples._replace(**{name: getattr(samples, name)[..., None]})

    size = CONFIG.minibatch_size
    message = (
        f"shape of samples.{name} in ppo_loss_of_outputs = [{size}, 1]: expected [{size}], one number per sample"
    )
    with pytest.raises(InterfaceError, match=re.escape(message)):
        updated(PPO._replace(prepare=partial(prepare, column)))

    def without(samples):
        fields = samples._asdict()
        del fields[name]
        return namedtuple("Own", fields)(**fields)

    with pytest.raises(InterfaceError, match=r"samples in ppo_loss_of_outputs = 'Own': expected ppo\.Samples: "):
        updated(PPO._replace(prepare=partial(prepare, without)))


def test_a_loss_in_bfloat16_is_a_metric_in_float32():
    """It was the only metric that stayed in bfloat16."""

    def loss(*arguments):
        loss, metrics = ppo_loss(*arguments)
        return loss.astype(jnp.bfloat16), metrics

    _, _, metrics = updated(PPO._replace(loss=loss))
    assert {metric.dtype for metric in metrics.values()} == {jnp.dtype("float32")}


def test_what_code_returns_is_no_error_of_the_config():
    """A script that catches `ConfigError`, in order to try another config, learns of a mistake in the code."""
    with pytest.raises(InterfaceError, match="loss = 'NoneType'") as error:
        updated(PPO._replace(loss=lambda *arguments: None))
    assert not isinstance(error.value, ConfigError)
    assert error.value.exit_status == 2


def test_a_loss_of_each_sample():
    def loss(params, apply, batch, options):
        return apply(params, batch.observation).value, {}

    message = rf"loss = 'float32\[{CONFIG.minibatch_size}\]': expected a single float, such as batch.mean\(x\)"
    with pytest.raises(InterfaceError, match=message):
        updated(PPO._replace(loss=loss))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda loss, metrics: loss, r"loss = 'float32\[\]': expected a pair: the loss, and metrics"),
        (lambda loss, metrics: (loss, metrics, {}), r"loss = '\(float32\[\], dict, dict\)': expected a pair"),
        (lambda loss, metrics: None, "loss = 'NoneType': expected a pair: the loss, and metrics"),
        (lambda loss, metrics: (None, metrics), "loss = 'NoneType': expected a single float"),
        (lambda loss, metrics: (1, metrics), r"loss = 'int32\[\]': expected a single float"),
        (lambda loss, metrics: (loss, []), "metrics of loss = 'list': expected a dict"),
        (lambda loss, metrics: (loss, {3: loss}), "name of a metric of loss = 3: expected a string"),
        (lambda loss, metrics: (loss, {"name": "text"}), "metric name of loss = 'str': expected a single number"),
    ],
)
def test_a_loss_that_returns_something_else(change, message):
    """Most of these were errors of JAX, with the name of a tracer in them."""
    with pytest.raises(InterfaceError, match=message):
        updated(PPO._replace(loss=lambda *arguments: change(*ppo_loss(*arguments))))


@pytest.mark.parametrize("field", ["params", "opt_state"])
def test_the_gradient_steps_start_from_the_state_that_prepare_returns(field):
    """Such as one whose optimiser starts anew."""

    def changed(state):
        return state.replace(**{field: jax.tree.map(jnp.zeros_like, getattr(state, field))})

    def prepare(state, *arguments):
        return ppo_prepare(changed(state), *arguments)

    params, network = make(FeedForward, Corridor.num_actions)
    rollout = collected(network, params)
    twice = partial(update, rollout=rollout, options=CONFIG, key=KEY, apply=network.apply)
    first, _ = twice(init_train_state(params, CONFIG, PPO, KEY), algorithm=PPO)
    expected, _ = twice(changed(first), algorithm=PPO)
    got, _ = twice(first, algorithm=PPO._replace(prepare=prepare))
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (jnp.zeros((), jnp.int32), r"extra of prepare = int32\[\]: expected float32\[\]"),
        (jnp.zeros(2), r"extra of prepare = float32\[2\]: expected float32\[\]"),
        ({"a": jnp.zeros(())}, r"extra of prepare = nothing: expected float32\[\]"),
        ((), r"extra of prepare = nothing: expected float32\[\]"),
        ("text", r"extra of prepare = str: expected float32\[\]"),
    ],
)
def test_a_state_of_another_shape_or_type(extra, message):
    """It could not be restored from a checkpoint."""

    def prepare(state, *arguments):
        return ppo_prepare(state.replace(extra=extra), *arguments)

    algorithm = PPO._replace(init=lambda params, key: (params, jnp.zeros(())), prepare=prepare)
    with pytest.raises(InterfaceError, match=message.replace("= ", "= '").replace(": expected", "': expected")):
        updated(algorithm)


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (lambda params, key: params, "init = 'dict': expected a pair: parameters, and extra"),
        (lambda params, key: ({"network": params}, ()), r"params\['.*'\] of init = 'nothing': expected float32\["),
        (
            lambda params, key: (params, {"key": key}),
            r"extra\['key'\] of init = 'key<fry>\[\]': expected .*no random key",
        ),
        (lambda params, key: (params, {"a": "float32"}), r"extra\['a'\] of init = 'str': expected an array or a "),
        (lambda params, key: ({**params, "a": jnp.arange(3)}, ()), r"\['a'\] of init = 'int32\[3\]': .* floats, "),
        (lambda params, key: ({**params, "a": "text"}, ()), r"params\['a'\] of init = 'str': .* floats, float32 "),
        (
            lambda params, key: ({**params, "a": jnp.ones(3, jnp.bfloat16)}, ()),
            r"init = 'bfloat16\[3\]': .* floats, ",
        ),
        (lambda params, key: ({**params, "a": jnp.ones(3) * 1j}, ()), r"init = 'complex64\[3\]': .* floats, "),
    ],
)
def test_an_init_that_returns_something_else(init, message):
    params, _ = make(FeedForward, Corridor.num_actions)
    with pytest.raises(InterfaceError, match=message):
        init_train_state(params, CONFIG, PPO._replace(init=init), KEY)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda state, samples, metrics: samples, "Samples"),
        (lambda state, samples, metrics: (state, samples), "(TrainState, Samples)"),
        (lambda state, samples, metrics: (samples, state, metrics), "(Samples, TrainState, dict)"),
    ],
)
def test_a_prepare_that_returns_something_else(change, kind):
    message = f"prepare = '{kind}': expected a triple: the state, samples and metrics"
    with pytest.raises(InterfaceError, match=re.escape(message)):
        updated(PPO._replace(prepare=lambda *arguments: change(*ppo_prepare(*arguments))))


def test_a_leaf_of_extra_that_init_has_not_made():
    def prepare(state, *arguments):
        return ppo_prepare(state.replace(extra={"n": jnp.zeros(3)}), *arguments)

    message = "extra['n'] of prepare = 'float32[3]': expected nothing, as in the state before; init decides which"
    with pytest.raises(InterfaceError, match=re.escape(message)):
        updated(PPO._replace(prepare=prepare))


def test_parameters_that_prepare_adds_are_refused():
    def prepare(state, *arguments):
        return ppo_prepare(state.replace(params={**state.params, "new": jnp.zeros(3)}), *arguments)

    with pytest.raises(InterfaceError, match=r"params\['new'\] of prepare = 'float32\[3\]': expected nothing"):
        updated(PPO._replace(prepare=prepare))


def test_a_name_that_is_registered_twice_is_a_warning(caplog):
    register_algorithm("twice", PPO)
    assert not caplog.records
    register_algorithm("twice", PPO._replace(coefficients={"new": 1.0}))
    assert caplog.messages == ["algorithm twice is registered again: the new one replaces the one before"]
    assert "new" in find_algorithm("twice").coefficients


# --- Coefficients ------------------------------------------------------------------------------------------------


def test_coefficients_are_those_of_the_algorithm_unless_others_are_chosen():
    def resolved(algorithm, **chosen):
        return resolved_options(Config(algorithm=algorithm, ppo=PPOConfig(coefficients=chosen))).coefficients

    assert resolved("ppo") == {}
    assert resolved("vtrace") == {"max_rho": 1.0, "max_c": 1.0}
    assert resolved("vtrace", max_c=2) == {"max_rho": 1.0, "max_c": 2.0}
    with pytest.raises(
        ConfigError, match=r"ppo.coefficients.rho = 2: .* of algorithm = vtrace, which has max_rho, "
    ):
        resolved("vtrace", rho=2)
    hint = "of algorithm = ppo, which has none; --ppo.coefficients '{}' chooses none"
    with pytest.raises(ConfigError, match=f"ppo.coefficients.rho = 2: .* {hint}"):
        resolved("ppo", rho=2)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"beta": "1"}, "ppo.coefficients.beta = '1': expected a finite number"),
        ({"beta": float("nan")}, "ppo.coefficients.beta = nan: expected a finite number"),
        ({"beta": True}, "ppo.coefficients.beta = True: expected a finite number"),
        ({"a.b": 1.0}, "ppo.coefficients = 'a.b': expected names of letters, digits and _"),
        ([1.0], "ppo.coefficients = "),
    ],
)
def test_coefficients_that_a_config_refuses(chosen, message):
    with pytest.raises(ConfigError, match=message):
        Config(ppo=PPOConfig(coefficients=chosen))


def test_a_coefficient_of_a_sweep_and_of_a_stored_run():
    """`ppo.coefficients.NAME` is a field; a config of before there were coefficients is read as one without."""
    config = set_fields(Config(algorithm="vtrace"), {"ppo.coefficients.max_c": 0.5, "ppo.gamma": 0.9})
    assert config.ppo.coefficients == {"max_c": 0.5}
    assert config_from_dict(config.to_dict()) == config
    old = Config().to_dict()
    del old["ppo"]["coefficients"]
    assert config_from_dict(old) == Config()
    assert can_vary("ppo.coefficients.max_c", Config())
    assert not can_vary("ppo.coefficient.max_c", Config())
    assert compile_key(config) == compile_key(set_fields(config, {"ppo.coefficients.max_c": 0.7}))


def test_another_coefficient_is_another_loss_and_compiles_nothing():
    def loss(params, apply, batch, options):
        value, metrics = ppo_loss(params, apply, batch, options)
        return value + options.coefficients["beta"], metrics

    register_algorithm("shifted", PPO._replace(loss=loss, coefficients={"beta": 0.5}))
    algorithm = find_algorithm("shifted")
    params, network = make(FeedForward, Corridor.num_actions)
    rollout = collected(network, params)
    traces = []

    @jax.jit
    def run(rollout, config):
        traces.append(config)
        state = init_train_state(params, config, algorithm, KEY)
        return update(state, rollout, config, KEY, apply=network.apply, algorithm=algorithm)[1]["loss"]

    losses = [run(rollout, as_numbers(options(algorithm, **chosen))) for chosen in ({}, {"beta": 3.5})]
    np.testing.assert_allclose(losses[1] - losses[0], 3.0, rtol=1e-5)
    assert len(traces) == 1


# --- Losses ------------------------------------------------------------------------------------------------------


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


def prepare_with_a_plain_mean(state, apply, rollout, *arguments):
    """A metric of `jnp.mean` sees the part of one device."""
    state, samples, metrics = PPO.prepare(state, apply, rollout, *arguments)
    return state, samples, metrics | {"value": jnp.mean(rollout.value)}


def test_one_device_and_two_compute_the_same_loss():
    """A rounding apart: what is drawn differs from device to device, and is averaged."""
    algorithm = PPO._replace(loss=idea, prepare=prepare_with_a_plain_mean)
    params, network = make(FeedForward, Corridor.num_actions)
    halves = [collected(network, params, ENVS // 2, seed) for seed in (0, 1)]
    whole = jax.tree.map(lambda *x: jnp.concatenate(x, axis=min(1, x[0].ndim - 1)), *halves)
    step = partial(update, apply=network.apply, algorithm=algorithm)
    found = []
    for devices, rollouts in ((jax.devices("cpu")[:1], [whole]), (jax.devices("cpu")[:2], halves)):
        parallel = DataParallel(devices)
        state, config, key = map(
            parallel.replicate, (init_train_state(params, CONFIG, algorithm, KEY), CONFIG, KEY)
        )
        new = parallel.compile(step)(state, parallel.assemble(rollouts), config, key=key)
        found.append(parallel.local_part(new, 0))
    (one, one_metrics), (two, two_metrics) = jax.device_get(found)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-3, atol=2e-5), one.params, two.params)
    assert one_metrics.keys() == two_metrics.keys() > {"z_loss", "penalty", "value"}
    for name in one_metrics.keys() - {"drawn"}:
        np.testing.assert_allclose(one_metrics[name], two_metrics[name], rtol=1e-4, atol=1e-6, err_msg=name)
    moved = optax.tree.norm(optax.tree.sub(one.params, params))
    assert moved > 100 * optax.tree.norm(optax.tree.sub(one.params, two.params))


def test_a_metric_of_a_loss_is_the_mean_over_gradient_steps():
    def loss(params, apply, batch, options):
        value, metrics = ppo_loss(params, apply, batch, options)
        return value, metrics | {"size": jnp.float32(len(batch.samples.action))}

    _, _, metrics = updated(PPO._replace(loss=loss))
    assert metrics["size"] == CONFIG.minibatch_size


def test_a_loss_without_approx_kl_refuses_target_kl():
    def loss(params, apply, batch, options):
        return ppo_loss(params, apply, batch, options)[0], {}

    with pytest.raises(ConfigError, match=r"ppo.target_kl = 0.01: expected None: the loss of this algorithm"):
        updated(PPO._replace(loss=loss), config=PPOConfig(**{**vars(CONFIG), "target_kl": 0.01}))


# --- Optimisers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda options: optax.adam(options.learning_rate),
        pytest.param(lambda options: optax.sgd(options.learning_rate, momentum=0.9), marks=pytest.mark.long),
        pytest.param(lambda options: optax.lamb(options.learning_rate), marks=pytest.mark.long),
        pytest.param(lambda options: optax.contrib.muon(options.learning_rate), marks=pytest.mark.long),
        lambda options: optax.chain(optax.clip_by_global_norm(0.5), optax.rmsprop(options.learning_rate)),
    ],
    ids=["adam", "sgd", "lamb", "muon", "rmsprop"],
)
def test_optimisers_of_optax_step_downhill(optimizer):
    """The loss is that of the value alone; its targets do not change."""
    config = PPOConfig(**{**vars(CONFIG), "learning_rate": 1e-3, "entropy_coef": 0.0, "clip_value_loss": False})

    def loss(params, apply, batch, options):
        error = batch.mean(jnp.square(apply(params, batch.observation).value - batch.samples.target))
        return error, {"value_loss": error}

    algorithm = PPO._replace(loss=loss, optimizer=optimizer)
    params, network = make(FeedForward, Corridor.num_actions)
    rollout = collected(network, params)
    step = jax.jit(partial(update, apply=network.apply, algorithm=algorithm))
    state, first = step(init_train_state(params, config, algorithm, KEY), rollout, config, KEY)
    for _ in range(10):
        state, last = step(state, rollout, config, KEY)
    assert last["value_loss"] < 0.9 * first["value_loss"]


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.lbfgs, "required keyword-only arguments: 'value'"),
        (optax.polyak_sgd, "required keyword-only argument: 'value'"),
        (lambda rate: optax.chain(optax.adam(rate), optax.contrib.reduce_on_plateau()), "argument: 'value'"),
        (optax.contrib.sophia, "obj_fn must be provided"),
        (lambda rate: optax.lookahead(optax.adam(rate), sync_period=5, slow_step_size=0.5), "no attribute 'fast'"),
    ],
    ids=["lbfgs", "polyak_sgd", "reduce_on_plateau", "sophia", "lookahead"],
)
def test_an_optimiser_that_needs_more_than_an_update_gives_it_is_an_error(optimizer, message):
    """The first two rows of the table in docs/idea.md, "Another optimiser"."""
    with pytest.raises((TypeError, ValueError, AttributeError), match=message):
        updated(PPO._replace(optimizer=lambda options: optimizer(options.learning_rate)))


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (
            lambda rate: optax.chain(optax.clip_by_global_norm(1.0), optax.inject_hyperparams(optax.adam)(rate)),
            "'InjectStatefulHyperparamsState': expected an optimiser without inject_hyperparams",
        ),
        (
            lambda rate: optax.contrib.schedule_free(optax.adam(rate), rate),
            "'ScheduleFreeState': expected an optimiser that trains the parameters with which the policy acts",
        ),
        (
            lambda rate: optax.contrib.sam(optax.sgd(rate), optax.sgd(0.01)),
            "'SAMState': expected an optimiser that trains the parameters with which the policy acts",
        ),
    ],
    ids=["inject_hyperparams", "schedule_free", "sam"],
)
def test_an_optimiser_that_would_train_wrongly_is_an_error(optimizer, message):
    """The last two rows of that table."""
    algorithm = PPO._replace(optimizer=lambda options: optimizer(options.learning_rate))
    params, _ = make(FeedForward, Corridor.num_actions)
    with pytest.raises(InterfaceError, match=f"optimizer = {message}"):
        init_train_state(params, CONFIG, algorithm, KEY)


@pytest.mark.parametrize(
    ("returned", "kind"),
    [(None, "NoneType"), (optax.adam, "function"), (tuple(optax.adam(1e-3)), "(function, function)")],
    ids=["None", "function", "tuple"],
)
def test_an_optimizer_that_returns_something_else(returned, kind):
    params, _ = make(FeedForward, Corridor.num_actions)
    message = f"optimizer = '{kind}': expected an optax.GradientTransformation, such as optax.adam"
    with pytest.raises(InterfaceError, match=re.escape(message)):
        init_train_state(params, CONFIG, PPO._replace(optimizer=lambda options: returned), KEY)


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


@pytest.mark.parametrize("chosen", [{}, {"max_rho": 0.9, "max_c": 1.2}])
def test_vtrace_is_the_double_sum_for_a_policy_that_has_moved_on(chosen):
    params, network = make(FeedForward, Corridor.num_actions)
    rollout = collected(network, params)
    assert rollout.terminated.any()
    rollout = rollout._replace(truncated=rollout.truncated.at[5, 2].set(True))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: x + 0.1 * rng.standard_normal(x.shape, np.float32), params)
    algorithm = find_algorithm("vtrace")
    config = options(algorithm, **chosen)
    state = init_train_state(params, config, algorithm, KEY)
    _, samples, metrics = algorithm.prepare(state, network.apply, rollout, Mean.over(rollout.weight), config, KEY)
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


def test_vtrace_of_the_policy_that_acted_has_the_targets_of_gae():
    params, network = make(FeedForward, Corridor.num_actions)
    rollout = collected(network, params)
    config = options(find_algorithm("vtrace"))
    state, mean = init_train_state(params, config, PPO, KEY), Mean.over(rollout.weight)
    _, samples, _ = find_algorithm("vtrace").prepare(state, network.apply, rollout, mean, config, KEY)
    _, gae_samples, _ = PPO.prepare(state, network.apply, rollout, mean, config, KEY)
    np.testing.assert_allclose(samples.target, gae_samples.target, rtol=1e-4, atol=1e-5)


# --- Random network distillation ---------------------------------------------------------------------------------


class Chain(FakePool):
    """A walk of at most 60 steps on 10 cells, from the left end. Only the right end gives a reward, and ends the
    game.

    In each cell one of 4 actions goes right, and the frame does not show which; the others go left. Random play
    reaches the right end in about one of a thousand games.
    """

    num_actions = 4
    CELLS, STEPS = 10, 60

    def __init__(self, num_envs, seed):
        super().__init__(num_envs)
        self._right = np.random.default_rng(seed).integers(self.num_actions, size=self.CELLS)
        self._place, self._steps = np.zeros(num_envs, int), np.zeros(num_envs, int)

    def _start(self, i):
        self._place[i] = self._steps[i] = 0

    def _play(self, i, action):
        self._steps[i] += 1
        right = action == self._right[self._place[i]]
        self._place[i] = self._place[i] + 1 if right else max(0, self._place[i] - 1)
        found = self._place[i] == self.CELLS - 1
        return float(found), bool(found), bool(not found and self._steps[i] == self.STEPS), False

    def _frame(self, i):
        frame = np.zeros((84, 84), np.uint8)
        x = 8 * self._place[i]
        frame[28:56, x : x + 8] = 255
        return frame


def games_won(name, seed, updates=80):
    """Share of the games of the last ten rollouts that found the reward."""
    config = PPOConfig(
        rollout_length=64, minibatch_size=256, learning_rate=1e-3, gae_lambda=0.95, weight_decay=0.0
    )
    algorithm = ALGORITHMS.get(name)
    config = options(algorithm, config)
    params, network = make(FeedForward, Chain.num_actions, seed)
    state = init_train_state(params, config, algorithm, jax.random.key(seed))
    step = jax.jit(partial(update, apply=network.apply, algorithm=algorithm), donate_argnums=0)
    group = group_of(Chain(16, seed=0), network)
    won = []
    for number in range(updates):
        act_key, update_key = jax.random.split(jax.random.fold_in(jax.random.key(seed), number))
        played = collect([[group]], [state.params], act_key, config.rollout_length)
        state, _ = step(state, played.rollouts[0], config, update_key)
        won.append([game.episode_return for game in played.games])
    return float(np.mean(np.concatenate(won[-10:])))


def test_a_network_whose_parameters_are_called_as_those_of_rnd():
    with pytest.raises(InterfaceError, match="name of a parameter of the network = 'rnd': expected another name"):
        init_train_state({"rnd": jnp.zeros(3)}, CONFIG, ALGORITHMS.get("rnd"), KEY)


def test_the_coefficient_of_rnd():
    params, network = make(FeedForward, Corridor.num_actions)
    rollout = collected(network, params)
    mean = Mean.over(rollout.weight)
    algorithm = find_algorithm("rnd")
    found = []
    for intrinsic_reward in (1.0, 3.0):
        config = options(algorithm, intrinsic_reward=intrinsic_reward)
        state = init_train_state(params, config, algorithm, KEY)
        _, _, metrics = algorithm.prepare(state, network.apply, rollout, mean, config, KEY)
        found.append(metrics["intrinsic_reward"])
    np.testing.assert_allclose(found[1], 3 * found[0], rtol=1e-5)
    assert found[0] > 0.1


@pytest.mark.long
def test_rnd_finds_a_reward_that_ppo_does_not():
    assert games_won("ppo", seed=1) < 0.05
    assert games_won("rnd", seed=1) > 0.5


def test_an_observation_of_a_feed_forward_network_needs_no_carry():
    params, network = make(FeedForward, 3)
    outputs = network.apply(params, Observation(jnp.zeros((2, 84, 84, 4), jnp.uint8)))
    assert outputs.carry == ()
    assert outputs.features.shape == (2, 32)


def test_options_can_be_arguments_of_a_compiled_function_wherever_they_come_from():
    """In a process that has imported nothing else."""
    code = (
        "import jax; from jaxrl_atari.config import Config; from jaxrl_atari.algorithm_options import *\n"
        "print(jax.jit(lambda options: options.gamma)(resolved_options(Config())))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(result.stdout) == pytest.approx(Config().ppo.gamma)


@pytest.mark.parametrize(
    ("init", "step", "message"),
    [
        (
            lambda params: {"name": "own"},
            lambda g, s: (g, s),
            "state['name'] of optimizer = 'str': expected",
        ),
        (lambda params: (), lambda g, s: g, "optimizer.update = 'dict': expected a pair: updates, and the state"),
        (
            lambda params: (),
            lambda g, s: (jax.tree.leaves(g), s),
            "updates['dense']['bias'] of optimizer.update = 'nothing': expected [32], as in the parameters",
        ),
        (
            lambda params: (),
            lambda g, s: (jax.tree.map(lambda x: x[None], g), s),
            "updates['dense']['bias'] of optimizer.update = '[1, 32]': expected [32], as in the parameters",
        ),
        (
            lambda params: (),
            lambda g, s: (jax.tree.map(jnp.sum, g), s),
            "updates['dense']['bias'] of optimizer.update = '[]': expected [32], as in the parameters",
        ),
        (
            lambda params: (jnp.int32(0),),
            lambda g, s: (g, [*s]),
            "state of optimizer.update = PyTreeDef([*]): expected the structure PyTreeDef((*,)), as in the state",
        ),
        (
            lambda params: jnp.int32(0),
            lambda g, s: (g, s + 0.5),
            "state of optimizer.update = 'float32[]': expected int32[], as in the state before",
        ),
    ],
    ids=["a text in the state", "no pair", "another tree", "another axis", "sums", "a list", "another type"],
)
def test_an_optimiser_of_ones_own_that_steps_wrongly(init, step, message):
    """These were errors of JAX and of optax."""
    own = optax.GradientTransformation(init, lambda gradients, state, params=None: step(gradients, state))
    with pytest.raises(InterfaceError, match=re.escape(message)):
        updated(PPO._replace(optimizer=lambda options: own))
