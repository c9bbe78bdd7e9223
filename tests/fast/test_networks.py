"""What training needs of every network, each against layers that are not ours, and frames against naive loops."""

import contextlib
import dataclasses
import itertools
import operator
import re
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from small_training import first_arrays
from threadpoolctl import threadpool_limits

from jaxrl_atari import network_interface, networks
from jaxrl_atari.algorithm import Mean, Minibatch
from jaxrl_atari.categorical import log_prob_of
from jaxrl_atari.config import Config, DevicesConfig, NetworkConfig, PPOConfig
from jaxrl_atari.config_checks import check_names_and_minibatches
from jaxrl_atari.errors import ConfigError, InterfaceError, UserError
from jaxrl_atari.fast import by_hand
from jaxrl_atari.fast.substitution import apply_by_hand
from jaxrl_atari.frames import (
    BLOCKED,
    PLAIN,
    arrange_stacks,
    as_images,
    block_frames,
    gather_stacks,
    map_images,
)
from jaxrl_atari.groups import first_rollout_start
from jaxrl_atari.layers import Conv, for_cpus, in_chunks
from jaxrl_atari.network_advice import NATURE, network_advice
from jaxrl_atari.network_forms import make_network
from jaxrl_atari.network_functions import apply_module, init_params, make_module
from jaxrl_atari.network_interface import Observation, Outputs
from jaxrl_atari.networks import NatureActorCritic, NatureLSTM
from jaxrl_atari.ppo import Samples, ppo_loss
from jaxrl_atari.registry import NETWORKS
from jaxrl_atari.rollout import act, begin_rollout

ACTIONS = 6


# --- Every network -----------------------------------------------------------------------------------------------

SHIPPED = NETWORKS.names()
every = pytest.mark.parametrize("name", SHIPPED)


@cache
def first_params(name):
    return jax.jit(partial(init_params, make_module(NetworkConfig(name=name), ACTIONS, jnp.float32)))(
        jax.random.key(1)
    )


def observation(network, stacks, envs=None):
    """Images uint8 [n, 84, 84, 4] as what a network sees; a recurrent one, as first steps in `envs`
    environments."""
    n = len(stacks)
    return Observation(
        arrange_stacks(network.layout, jnp.asarray(stacks)),
        jnp.arange(n) % 3 == 0,
        network.initial_carry(envs or n),
    )


def perturbed(params):
    """Parameters with non-zero biases and a policy head of ordinary size, so that an error anywhere shows."""
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda x: x + 0.02 * rng.standard_normal(x.shape, np.float32), params)


def random_stacks(n):
    return np.random.default_rng(0).integers(0, 256, (n, 84, 84, 4), dtype=np.uint8)


@every
def test_the_number_of_parameters_is_the_one_of_the_docstring(name):
    leaves = jax.tree.leaves(first_params(name))
    assert {x.dtype for x in leaves} == {jnp.dtype("float32")}
    count = sum(x.size for x in leaves)
    assert f"{count:,} parameters with {ACTIONS} actions" in " ".join(NETWORKS.get(name).__doc__.split())


@every
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("device_class", ["cpu", "gpu"])
def test_shapes_and_types_of_the_outputs(name, device_class, dtype):
    network = make_network(NetworkConfig(name=name, compute_dtype=dtype), ACTIONS, device_class)
    for n in (1, 5):
        outputs = jax.eval_shape(network.apply, first_params(name), observation(network, random_stacks(n)))
        assert (outputs.logits.shape, outputs.value.shape) == ((n, ACTIONS), (n,))
        assert outputs.features.shape[0] == n
        assert outputs.logits.dtype == outputs.value.dtype == outputs.features.dtype == jnp.float32
        assert jax.tree.map(jnp.shape, outputs.carry) == jax.tree.map(jnp.shape, network.initial_carry(n))


@every
def test_every_parameter_gets_a_gradient(name):
    network, params, n = make_network(NetworkConfig(name=name), ACTIONS, "cpu"), first_params(name), 3
    ones = jnp.ones(n)
    samples = Samples(jnp.arange(n), -1.8 * ones, ones, jnp.array([-1.0, 0.0, 1.0]), 2 * ones)
    # In one environment: only from its second step on do the recurrent weights of a recurrent network matter.
    batch = Minibatch(observation(network, random_stacks(n), envs=1), samples, Mean.over(ones), jax.random.key(0))

    @jax.jit
    @jax.grad
    def gradient(params):
        return ppo_loss(params, network.apply, batch, PPOConfig())[0]

    for x in jax.tree.leaves(gradient(params)):
        assert x.dtype == jnp.float32
        assert np.isfinite(x).all()
        assert np.any(x)


@every
def test_acting(name):
    network, params = make_network(NetworkConfig(name=name), ACTIONS, "cpu"), perturbed(first_params(name))
    frame = random_stacks(2)[..., 0]
    carry = network.initial_carry(2)
    empty = begin_rollout(first_rollout_start(2, network.layout.shape, carry), 1)
    key, env_numbers = jax.random.key(0), jnp.arange(2)
    buffer, action = act(network, network.for_acting(params), empty, frame, np.ones(2, bool), key, env_numbers)
    assert empty.frames.is_deleted()  # a step fills the rollout in place
    stacks = arrange_stacks(network.layout, jnp.stack([frame] * 4, axis=-1))  # where games begin
    outputs = jax.jit(network.apply)(params, Observation(stacks, jnp.ones(2, bool), carry))
    np.testing.assert_allclose(buffer.acted.value[0], outputs.value, atol=1e-4)
    np.testing.assert_allclose(buffer.acted.log_prob[0], log_prob_of(outputs.logits, action), atol=1e-4)


# --- Against other layers ----------------------------------------------------------------------------------------


class Reference(nn.Module):
    """The Nature network in flax's own layers; shares nothing with the shipped code but the parameter names."""

    @nn.compact
    def __call__(self, stacks):
        torso, zeros = nn.initializers.orthogonal(2**0.5), nn.initializers.zeros
        h = stacks / 255.0
        h = nn.relu(nn.Conv(32, (8, 8), (4, 4), "VALID", kernel_init=torso, bias_init=zeros, name="conv1")(h))
        h = nn.relu(nn.Conv(64, (4, 4), (2, 2), "VALID", kernel_init=torso, bias_init=zeros, name="conv2")(h))
        h = nn.relu(nn.Conv(64, (3, 3), (1, 1), "VALID", kernel_init=torso, bias_init=zeros, name="conv3")(h))
        h = nn.relu(nn.Dense(512, kernel_init=torso, name="dense")(h.reshape(h.shape[0], -1)))
        logits = nn.Dense(ACTIONS, kernel_init=nn.initializers.orthogonal(0.01), name="policy")(h)
        return logits, nn.Dense(1, kernel_init=nn.initializers.orthogonal(1.0), name="value")(h)[:, 0]


def impala(params, stacks):
    """IMPALA's network (Espeholt et al. 2018, figure 3, right) in lax's own operations."""
    layers = (params[f"Conv_{number}"] for number in itertools.count())

    def conv(x):
        layer = next(layers)
        form = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, layer["kernel"], (1, 1), "SAME", dimension_numbers=form) + layer["bias"]

    x = stacks / 255.0
    for _ in range(3):
        x = lax.reduce_window(conv(x), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for _ in range(2):
            x = x + conv(jnp.maximum(conv(jnp.maximum(x, 0)), 0))
    x = jnp.maximum(x, 0).reshape(len(x), -1)
    x = jnp.maximum(x @ params["dense"]["kernel"] + params["dense"]["bias"], 0)
    logits, value = (x @ params[head]["kernel"] + params[head]["bias"] for head in ("policy", "value"))
    return logits, value[:, 0]


def nature(params, stacks):
    return Reference().apply({"params": params}, stacks)


def shipped(name, dtype="float32", conv="plain"):
    """`name` as its module computes it; `layers`: with gradients for CPUs."""
    module = make_module(NetworkConfig(name=name), ACTIONS, jnp.dtype(dtype))

    def outputs(params, stacks):
        with for_cpus(conv == "layers"):
            return apply_module(module, params, Observation(stacks))[:2]

    return outputs


def products(chunk, dtype="float32"):
    """The Nature network with features of `fast/by_hand.py`, on stacks of images."""
    apply = partial(apply_by_hand, NatureActorCritic(ACTIONS, jnp.dtype(dtype)), chunk)
    return lambda params, x: apply(params, Observation(arrange_stacks(BLOCKED, jnp.asarray(x))))[:2]


def gradients_and_outputs(apply):
    """Compiled: params, stacks -> gradients of a loss that weights every output differently, and the outputs."""

    def loss(params, stacks):
        logits, value = outputs = apply(params, stacks)
        weights = jnp.linspace(-1, 2, logits.size).reshape(logits.shape)
        return (jax.nn.log_softmax(logits) * weights).mean() + (value**2).mean(), outputs

    return jax.jit(jax.grad(loss, has_aux=True))


@cache
def outputs_and_gradients(apply, name, n):
    return gradients_and_outputs(apply)(perturbed(first_params(name)), random_stacks(n))[::-1]


N = 131  # five chunks of 32, the last one not full; nine of 16, which are more than `by_hand` unrolls
assert by_hand.UNROLLED < N / 16


@pytest.mark.parametrize(
    ("apply", "oracle", "n", "at_least", "at_most"),
    [
        (shipped("nature"), nature, N, 0.0, 1e-5),
        (products(32), nature, N, 0.0, 1e-5),
        (products(16), nature, N, 0.0, 1e-5),  # in a loop
        (shipped("impala"), impala, 2, 0.0, 1e-5),
        (shipped("nature", conv="layers"), nature, N, 0.0, 1e-5),
        (shipped("nature", "bfloat16"), nature, N, 1e-4, 0.02),
        (products(16, "bfloat16"), nature, N, 1e-4, 0.02),
        (shipped("impala", "bfloat16"), impala, 2, 1e-4, 0.2),
    ],
)
def test_outputs_and_gradients_equal_those_of_other_layers(apply, oracle, n, at_least, at_most):
    """In bfloat16 they are close, and not equal: it computed in another type."""
    got, expected = (jax.tree.leaves(outputs_and_gradients(x, oracle.__name__, n)) for x in (apply, oracle))
    for x, y in zip(got, expected, strict=True):
        assert x.dtype == jnp.float32
        assert at_least <= float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)) < at_most


class ImpalaTorso(nn.Module):
    @nn.compact
    def __call__(self, stacks):
        return networks.impala_torso(stacks, jnp.float64)


DRAWS = 5


@pytest.mark.long
def test_gradients_of_impala_for_cpus_are_those_of_plain_layers():
    """In float64, in every draw: no two numbers of a max pooling are equal up to rounding there."""
    with jax.enable_x64(True):
        params = ImpalaTorso().init(jax.random.key(0), random_stacks(1))["params"]

        def gradients(for_cpu):
            def loss(params, stacks):
                with for_cpus(for_cpu):
                    y = ImpalaTorso().apply({"params": params}, stacks)
                return (y * jnp.linspace(-1, 2, y.size).reshape(y.shape)).mean()

            gradient = jax.jit(jax.grad(loss))
            return [gradient(params, stacks) for stacks in np.split(random_stacks(2 * DRAWS), DRAWS)]

        def check(got, expected):
            assert float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected)) < 1e-6

        jax.tree.map(check, gradients(True), gradients(False))


def test_gradients_of_impala_for_cpus_equal_those_of_other_layers_but_for_ties():
    """In float32. A tie in a max pooling decides a draw, whose gradients then differ by up to 1e-2."""
    params = perturbed(first_params("impala"))
    computed = [gradients_and_outputs(apply) for apply in (shipped("impala", conv="layers"), impala)]

    def error(got, expected):
        return float(jnp.linalg.norm(got - expected) / jnp.linalg.norm(expected))

    errors = []
    for stacks in np.split(random_stacks(2 * DRAWS), DRAWS):
        errors.append(jax.tree.leaves(jax.tree.map(error, *(compute(params, stacks) for compute in computed))))
    assert (np.median(errors, axis=0) < 1e-5).all()


def test_the_first_parameters_do_not_depend_on_the_threads_of_blas():
    """Neither on the cores of a machine nor on `OMP_NUM_THREADS`, which Ray sets."""

    def first_params_with(threads):
        with threadpool_limits(threads, user_api="blas"):
            arrays = first_arrays(Config(), ACTIONS, jax.devices("cpu")[0])
        return jax.device_get(arrays.train_state.params)

    jax.tree.map(np.testing.assert_array_equal, first_params_with(1), first_params_with(2))


@pytest.mark.parametrize("name", ["nature", "impala"])
def test_a_second_derivative_on_a_cpu_is_refused(name):
    """It was wrong in bfloat16 without an error. With `network.conv = plain` it is JAX's own."""
    params = first_params(name)

    def penalty(params, network):
        def value(params):
            return network.apply(params, observation(network, random_stacks(2))).value.sum()

        return sum(jnp.sum(gradient**2) for gradient in jax.tree.leaves(jax.grad(value)(params)))

    fast, plain = (make_network(NetworkConfig(name=name, conv=conv), ACTIONS, "cpu") for conv in ("auto", "plain"))
    message = "gradients for CPUs have no second derivatives; choose --network.conv plain"
    with pytest.raises(UserError, match=message):
        jax.eval_shape(jax.grad(partial(penalty, network=fast)), params)
    jax.eval_shape(jax.grad(partial(penalty, network=plain)), params)


def test_initialisation():
    """Nature: bit for bit that of flax's layers. Impala: orthogonal, with the same gains."""
    expected = jax.jit(Reference().init)(jax.random.key(1), random_stacks(1))["params"]
    jax.tree.map(np.testing.assert_array_equal, first_params("nature"), expected)
    for name, gain in (("Conv_14", 2**0.5), ("policy", 0.01)):
        kernel = np.asarray(first_params("impala")[name]["kernel"])
        kernel = kernel.reshape(-1, kernel.shape[-1])
        np.testing.assert_allclose(kernel.T @ kernel, gain**2 * np.eye(kernel.shape[1]), atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_acting_params_change_no_bit_of_the_outputs(dtype):
    params, run = perturbed(first_params("nature")), jax.jit(products(32, dtype))
    prepared = by_hand.for_acting(params, jnp.dtype(dtype))
    assert prepared["dense"]["kernel"].dtype == dtype
    jax.tree.map(np.testing.assert_array_equal, run(prepared, random_stacks(16)), run(params, random_stacks(16)))


# --- The Nature network with features by hand, and its edits -----------------------------------------------------


def test_a_network_with_memory_has_its_features_by_hand():
    """The same outputs and gradients as its layers give, in three environments of which one starts a game."""
    config = NetworkConfig(name="nature_lstm")
    fast = make_network(config, ACTIONS, "cpu")
    plain = make_network(dataclasses.replace(config, conv="plain"), ACTIONS, "cpu")
    assert (fast.layout, plain.layout) == (BLOCKED, PLAIN)

    def outputs_and_gradients(network):
        seen = observation(network, random_stacks(6), envs=3)
        seen = seen._replace(carry=jax.tree.map(lambda x: x + 0.5, seen.carry))

        def loss(params):
            outputs = network.apply(params, seen)
            return (outputs.logits**2).mean() + outputs.value.mean() + outputs.carry[0].mean(), outputs

        return jax.jit(jax.grad(loss, has_aux=True))(perturbed(first_params("nature_lstm")))

    for x, y in zip(*(jax.tree.leaves(outputs_and_gradients(each)) for each in (fast, plain)), strict=True):
        assert float(jnp.linalg.norm(x - y)) <= 1e-5 * float(jnp.linalg.norm(y))


def edited(call):
    """The Nature network after an edit of its `__call__`."""
    return type("Edited", (NatureActorCritic,), {"__call__": call})


def sharper(self, stacks):
    outputs = NatureActorCritic.__call__(self, stacks)
    return outputs._replace(logits=1.1 * outputs.logits)


def other_features(self, stacks):
    outputs = NatureActorCritic.__call__(self, stacks)
    return outputs._replace(features=outputs.logits)


def stopped(self, stacks):
    """Other gradients, the same outputs."""
    outputs = NatureActorCritic.__call__(self, stacks)
    return outputs._replace(value=jax.lax.stop_gradient(outputs.value))


@nn.compact
def one_more_layer(self, stacks):
    x = networks.nature_features(self, stacks)
    return networks.heads(nn.relu(networks.dense(64, 1.0, "more", jnp.float32)(x)), self.num_actions)


def sharper_on_cpus(self, stacks):
    outputs = NatureActorCritic.__call__(self, stacks)
    return outputs._replace(logits=1.1 * outputs.logits) if for_cpus.value else outputs


@nn.compact
def other_for_some(self, stacks):
    """Other heads for 2 to 9 samples, as a user may write it."""
    features = networks.nature_features(self, stacks)
    x = features.reshape(len(features), -1)
    return networks.heads(1.1 * x if 2 <= len(x) < 10 else x, self.num_actions)


EDITS_BEHIND = [sharper, other_features, stopped, one_more_layer, sharper_on_cpus, other_for_some]


@pytest.mark.parametrize("call", EDITS_BEHIND)
def test_an_edit_behind_the_features_keeps_them_by_hand(call, monkeypatch):
    """And it is computed."""
    monkeypatch.setattr(networks, "NatureActorCritic", edited(call))
    network = make_network(NetworkConfig(), ACTIONS, "cpu")
    assert network.layout == BLOCKED
    assert not network_advice(NetworkConfig(), ACTIONS, "cpu")
    written = edited(call)(ACTIONS)
    params = perturbed(jax.jit(partial(init_params, written))(jax.random.key(1)))

    def outputs_and_gradients(apply, layout):
        seen = Observation(arrange_stacks(layout, jnp.asarray(random_stacks(3))))

        def loss(params):
            outputs = apply(params, seen)
            return outputs.logits.std() + outputs.value.sum() + outputs.features.std(), outputs

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    got = outputs_and_gradients(network.apply, BLOCKED)
    with for_cpus(True):
        expected = outputs_and_gradients(partial(apply_module, written), PLAIN)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * float(jnp.abs(y).max()))


@nn.compact
def narrow(self, stacks):
    """Fewer channels and layers, and flax's own convolution."""
    x = nn.Conv(16, (8, 8), 4, padding="VALID", name="conv1")(stacks.astype(self.dtype) / 255)
    x = nn.relu(x).reshape(len(x), -1)
    return nn.Dense(self.num_actions, name="policy")(x), nn.Dense(1, name="value")(x)[..., 0]


def brighter(self, stacks):
    """It changes the pixels, whose layout it would not know."""
    return NatureActorCritic.__call__(self, stacks // 2)


@nn.compact
def and_a_pixel(self, stacks):
    """It begins with the features, but also reads the stacks itself."""
    features = networks.nature_features(self, stacks)
    return networks.heads(features + stacks[:, :1, 0, 0].astype(jnp.float32), self.num_actions)


@nn.compact
def and_their_mean(self, stacks):
    """As `and_a_pixel`, by a function of JAX."""
    features = networks.nature_features(self, stacks)
    return networks.heads(features + jnp.mean(stacks, (1, 2, 3))[:, None], self.num_actions)


@nn.compact
def other_name(self, stacks):
    x = networks.nature_torso(stacks, self.dtype).reshape(stacks.shape[0], -1)
    return networks.heads(
        nn.relu(networks.dense(512, 2**0.5, "fully_connected", jnp.float32)(x)), self.num_actions
    )


@nn.compact
def array_called_dense(self, stacks):
    x = stacks.reshape(stacks.shape[0], -1) / 255 * self.param("dense", nn.initializers.ones, (), jnp.float32)
    return networks.heads(x[:, :8], self.num_actions)


SLOWER = "training is slower than with the features as shipped"
EDITED = f"networks.NatureFeatures, or a layer of it, was edited: {SLOWER}"
NOT_COMPARED = "the features of Again cannot be compared with those by hand ("
READS_STACKS = (
    "the features of Edited cannot be computed by hand, for which it must use its frame stacks in"
    " networks.nature_features(self, stacks) alone ("
)


def edited_features(**changes):
    """The Nature network after an edit of what `nature_features` is made of: name in `networks` -> a new value."""

    def edit(monkeypatch):
        for name, value in changes.items():
            monkeypatch.setattr(networks, name, value)
        return type("Again", (NatureActorCritic,), {})  # another class, because the programs of one are kept

    return edit


torso, hidden_layer = networks.nature_torso, networks.hidden_layer


def of_size(**sizes):
    """A torso whose layers have other sizes: name -> (outputs, (height, width), stride)."""

    def torso(x, dtype):
        layers = {"conv1": (32, (8, 8), 4), "conv2": (64, (4, 4), 2), "conv3": (64, (3, 3), 1)} | sizes
        for name, (outputs, size, stride) in layers.items():
            x = nn.relu(Conv(outputs, size, stride, padding="VALID", dtype=dtype, name=name)(x))
        return x

    return edited_features(nature_torso=torso)


def other_for_many(x, n, dtype):
    """Another hidden layer for more than 32 samples."""
    return (1.1 if len(x) > 32 else 1.0) * hidden_layer(x, n, dtype)


def other_torso_for_some(x, dtype):
    """Another torso for 33 to 99 samples."""
    return (1.1 if 32 < x.shape[0] < 100 else 1.0) * torso(x, dtype)


def edited_copy(_monkeypatch):
    """A network with a copy of `NatureFeatures`, as in a copy of networks.py, which was edited."""

    class NatureFeatures(networks.NatureFeatures):
        def __call__(self, stacks):
            return 1.1 * super().__call__(stacks)

    @nn.compact
    def call(self, stacks):
        features = NatureFeatures(self.dtype)
        nn.share_scope(self, features)
        return networks.heads(features(stacks), self.num_actions)

    return edited(call)


def edited_call(call):
    return lambda monkeypatch: edited(call)


@pytest.mark.parametrize(
    ("edit", "device_class", "said"),
    [
        (edited_features(nature_torso=lambda *args, **kwargs: 1.1 * torso(*args, **kwargs)), "cpu", EDITED),
        (edited_features(hidden_layer=lambda x, *args: hidden_layer(lax.stop_gradient(x), *args)), "cpu", EDITED),
        (of_size(conv1=(16, (8, 8), 4)), "cpu", EDITED),
        (of_size(conv1=(32, (4, 4), 4)), "cpu", EDITED),
        (of_size(conv2=(64, (3, 3), 2)), "cpu", EDITED),
        (of_size(conv3=(32, (3, 3), 1)), "cpu", EDITED),
        (of_size(conv3=(64, (4, 4), 1)), "cpu", EDITED),
        (edited_features(hidden_layer=lambda x, n, dtype: hidden_layer(x, n // 2, dtype)), "cpu", EDITED),
        (edited_call(other_name), "cpu", "Edited lacks one of the layers conv1, conv2, conv3, dense of networks."),
        (edited_call(array_called_dense), "cpu", "Edited lacks one of the layers conv1, conv2, conv3, dense of"),
        # In float32 what it was, so that only a comparison in the arithmetic in force sees it.
        (edited_features(hidden_layer=lambda x, n, dtype: hidden_layer(x, n, jnp.float32)), "amx cpu", EDITED),
        (edited_call(narrow), "cpu", "the gradients of conv1 are many times slower"),
        (edited_call(brighter), "cpu", READS_STACKS + "TypeError: unsupported operand"),
        (edited_call(and_a_pixel), "cpu", READS_STACKS + "TypeError: 'HiddenStacks' object is not subscriptable"),
        (edited_call(and_their_mean), "cpu", READS_STACKS),
        (edited_features(hidden_layer=other_for_many), "cpu", NOT_COMPARED + "TypeError: "),
        (
            edited_features(nature_torso=other_torso_for_some),
            "cpu",
            f"'samples' > '32' is inconclusive.): {SLOWER}",
        ),
        (edited_copy, "cpu", READS_STACKS + "TypeError: it asks for `dtype`"),
    ],
)
def test_an_edit_of_the_features_is_what_a_cpu_computes(edit, device_class, said, monkeypatch):
    assert is_by_hand(make_network(NetworkConfig(), ACTIONS, device_class))
    monkeypatch.setattr(networks, "NatureActorCritic", edit(monkeypatch))
    network = make_network(NetworkConfig(), ACTIONS, device_class)
    module = make_module(NetworkConfig(), ACTIONS, network.dtype)
    assert network.layout == PLAIN
    seen = observation(network, random_stacks(2))
    params = perturbed(jax.jit(partial(init_params, module))(jax.random.key(1)))
    got, expected = network.apply(params, seen), apply_module(module, params, seen)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=0.02, atol=0.02), got, expected)
    advice = network_advice(NetworkConfig(), ACTIONS, device_class)
    assert said in advice
    assert "\n" not in advice


def is_by_hand(network):
    return network.layout == BLOCKED


def test_any_network_may_begin_with_the_features_by_hand():
    """It needs no field for it."""

    class Both(nn.Module):
        num_actions: int
        dtype: object = jnp.float32

        @nn.compact
        def __call__(self, stacks):
            assert stacks.shape[0] == len(stacks)
            features = networks.nature_features(self, stacks).reshape(len(stacks), -1)
            return networks.heads(features, self.num_actions)

    assert is_by_hand(registered("both", Both))
    assert not network_advice(NetworkConfig(name="both"), ACTIONS, "cpu")


def test_the_shape_of_the_stacks_is_the_same_where_the_features_are_by_hand():
    class Shaped(nn.Module):
        num_actions: int
        dtype: object = jnp.float32

        @nn.compact
        def __call__(self, stacks):
            n, *image = stacks.shape
            assert (n, len(stacks.shape), image) == (len(stacks), 4, [84, 84, 4])
            return networks.heads(networks.nature_features(self, stacks) * stacks.shape[-1], self.num_actions)

    fast = registered("shaped", Shaped)
    plain = make_network(NetworkConfig(name="shaped", conv="plain"), ACTIONS, "cpu")
    assert is_by_hand(fast)
    assert not is_by_hand(plain)
    params = plain.init(jax.random.key(0))
    values = [network.apply(params, observation(network, random_stacks(3))).value for network in (fast, plain)]
    np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attribute", ["dtype", "ndim", "size"])
def test_a_network_that_asks_its_stacks_for_more_has_its_layers(attribute):
    class Asks(nn.Module):
        num_actions: int
        dtype: object = jnp.float32

        @nn.compact
        def __call__(self, stacks):
            features = networks.nature_features(self, stacks)
            return networks.heads(features if hasattr(stacks, attribute) else 2 * features, self.num_actions)

    assert not is_by_hand(registered("asks", Asks))
    advice = network_advice(NetworkConfig(name="asks"), ACTIONS, "cpu")
    assert f"(TypeError: it asks for `{attribute}` of its frame stacks)" in advice


@pytest.mark.parametrize("compare", [operator.eq, operator.ne])
def test_a_network_that_compares_its_stacks_has_its_layers(compare):
    """Python compared the objects, so the features by hand were those of another network."""

    class Compares(nn.Module):
        num_actions: int
        dtype: object = jnp.float32

        @nn.compact
        def __call__(self, stacks):
            features = networks.nature_features(self, stacks)
            found = jnp.any(compare(stacks, 255))
            return networks.heads(jnp.where(found, features, -features), self.num_actions)

    assert not is_by_hand(registered("compares", Compares))
    advice = network_advice(NetworkConfig(name="compares"), ACTIONS, "cpu")
    assert "(TypeError: it compares its frame stacks)" in advice


def test_features_in_a_type_of_their_own_are_not_computed_in_that_of_the_session():
    class Mixed(nn.Module):
        num_actions: int
        dtype: object = jnp.float32

        @nn.compact
        def __call__(self, stacks):
            features = networks.NatureFeatures(jnp.float32)
            nn.share_scope(self, features)
            return networks.heads(features(stacks), self.num_actions)

    network_interface.register_network("mixed", Mixed)
    assert is_by_hand(make_network(NetworkConfig(name="mixed", compute_dtype="float32"), ACTIONS, "cpu"))
    config = NetworkConfig(name="mixed", compute_dtype="bfloat16")
    assert not is_by_hand(make_network(config, ACTIONS, "cpu"))
    assert "NatureFeatures has another dtype than the network" in network_advice(config, ACTIONS, "cpu")


def test_a_comparison_that_fails_is_not_called_an_edit(monkeypatch):
    """The network is as it was, but JAX makes no programs for a number of samples that is a symbol."""

    def fails(*_):
        raise NotImplementedError("no such\nprogram")

    monkeypatch.setattr(jax.export, "symbolic_shape", fails)
    monkeypatch.setattr(networks, "NatureActorCritic", type("Again", (NatureActorCritic,), {}))  # none is kept
    network = make_network(NetworkConfig(), ACTIONS, "cpu")
    assert not is_by_hand(network)
    expected = f"{NOT_COMPARED}NotImplementedError: no such): {SLOWER}"
    advice = network_advice(NetworkConfig(), ACTIONS, "cpu")
    assert expected in advice
    assert "edited" not in advice


def test_an_edit_of_the_layer_is_what_a_cpu_computes(monkeypatch):
    """`layers.Conv`, of which the module is made and its copy is not."""
    convolve = Conv.__call__
    monkeypatch.setattr(Conv, "__call__", lambda layer, x: 0.5 * convolve(layer, x))
    monkeypatch.setattr(networks, "NatureActorCritic", type("Again", (NatureActorCritic,), {}))  # none is kept
    for device_class in ("cpu", "amx cpu"):
        network = make_network(NetworkConfig(), ACTIONS, device_class)
        assert not is_by_hand(network)
        assert EDITED in network_advice(NetworkConfig(), ACTIONS, device_class)


def test_an_edit_that_computes_the_same_costs_nothing(monkeypatch):
    class Renamed(NatureActorCritic):
        """Another comment, another name."""

    monkeypatch.setattr(networks, "NatureActorCritic", Renamed)
    assert is_by_hand(make_network(NetworkConfig(), ACTIONS, "cpu"))


@pytest.mark.parametrize(("classes", "conv"), [(["gpu"], "layers"), (["gpu", "cpu"], "by_hand")])
def test_a_gpu_that_computes_the_gradients_for_cpus_is_no_secret(classes, conv):
    assert f"network.conv = {conv}: a GPU learns or acts" in network_advice(
        NetworkConfig(conv=conv), ACTIONS, *classes
    )


def test_the_shipped_networks_with_features_by_hand_are_known_by_name():
    by_hand_ones = {name for name in SHIPPED if is_by_hand(make_network(NetworkConfig(name=name), ACTIONS, "cpu"))}
    assert by_hand_ones == NATURE


@every
@pytest.mark.parametrize("device_class", ["cpu", "gpu"])
def test_there_is_no_advice_on_a_shipped_network(name, device_class):
    assert not network_advice(NetworkConfig(name=name), ACTIONS, device_class)


def registered(name, network):
    """The form of a user's network for CPUs."""
    network_interface.register_network(name, network)
    return make_network(NetworkConfig(name=name), ACTIONS, "cpu")


def test_a_network_of_the_users_has_gradients_for_cpus():
    """If its convolutions are `layers.Conv`; if not, a line says so."""

    class Small(nn.Module):
        num_actions: int
        dtype: type = jnp.float32

        @nn.compact
        def __call__(self, stacks):
            x = Conv(4, (8, 8), 4, dtype=self.dtype)(stacks).reshape(len(stacks), -1)
            return nn.Dense(self.num_actions)(x), nn.Dense(1)(x)[..., 0]

    class Without(nn.Module):
        num_actions: int
        dtype: type = jnp.float32

        @nn.compact
        def __call__(self, stacks):
            x = nn.Conv(4, (8, 8), 4, dtype=self.dtype)(stacks / 255).reshape(len(stacks), -1)
            return nn.Dense(self.num_actions)(x), nn.Dense(1)(x)[..., 0]

    params = jax.eval_shape(partial(init_params, Small(ACTIONS)), jax.random.key(0))

    def program(network):
        gradient = jax.grad(lambda params: network.apply(params, Observation(random_stacks(2))).value.sum())
        return str(jax.make_jaxpr(gradient)(params))

    fast, slow = registered("small", Small), registered("without", Without)
    assert "optimization_barrier" in program(fast)  # `layers.kernel_gradient`
    assert "optimization_barrier" not in program(slow)
    assert not network_advice(NetworkConfig(name="small"), ACTIONS, "cpu")
    advice = network_advice(NetworkConfig(name="without"), ACTIONS, "cpu")
    assert "Without: the gradients of Conv_0 are many times slower" in advice
    assert "those of jaxrl_atari.layers.Conv; see docs/idea.md" in advice
    assert not network_advice(NetworkConfig(name="without"), ACTIONS, "gpu")  # it is about CPUs


def test_the_advice_names_each_slow_layer_once_and_by_its_path():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            conv = nn.Conv(4, (3, 3))
            return conv(conv(x))

    class Blocks(nn.Module):
        num_actions: int
        dtype: type = jnp.float32

        @nn.compact
        def __call__(self, stacks):
            x = nn.Conv(4, (8, 8), 8)(stacks / 255)
            for _ in range(2):
                x = Block()(x)
            x = x.reshape(len(stacks), -1)
            return nn.Dense(self.num_actions)(x), nn.Dense(1)(x)[..., 0]

    registered("blocks", Blocks)
    advice = network_advice(NetworkConfig(name="blocks"), ACTIONS, "cpu")
    assert "the gradients of Conv_0, Block_0/Conv_0, Block_1/Conv_0 are many times slower" in advice


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (partial(nn.BatchNorm, use_running_average=False), "it also has the collection batch_stats"),
        (partial(nn.Dropout, 0.5, deterministic=False), "flax says: "),
    ],
)
def test_a_network_with_more_than_parameters_is_refused(layer, said):
    class Layered(nn.Module):
        @nn.compact
        def __call__(self, stacks):
            x = layer()(stacks.reshape(len(stacks), -1) / 255)
            return nn.Dense(ACTIONS)(x), nn.Dense(1)(x)[..., 0]

    def outputs():
        params = init_params(Layered(), jax.random.key(0))
        return apply_module(Layered(), params, Observation(random_stacks(1)))

    with pytest.raises(InterfaceError, match="network = 'Layered': expected parameters alone") as error:
        jax.eval_shape(outputs)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_frames_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"shape of frames = \[5, 64, 64, 1\]: expected \[..., 84, 84, 1\]"):
        as_images(jnp.zeros((5, 64, 64, 1), jnp.uint8))


def test_the_form_by_hand_refuses_stacks_of_another_layout():
    """Plain stacks have as many bytes as blocked ones."""
    network = make_network(NetworkConfig(), ACTIONS, "cpu")
    assert network.layout is BLOCKED
    with pytest.raises(AssertionError, match="shape"):
        network.apply(first_params("nature"), Observation(jnp.asarray(random_stacks(2))))


def carry_without_memory(self, stacks):
    return NatureActorCritic.__call__(self, stacks)._replace(carry=jnp.zeros((len(stacks), 2)))


def logits_in_bfloat16(self, stacks):
    outputs = NatureActorCritic.__call__(self, stacks)
    return outputs.logits.astype(jnp.bfloat16), outputs.value


def column_of_values(self, stacks):
    outputs = NatureActorCritic.__call__(self, stacks)
    return outputs.logits, outputs.value[:, None]


def three_outputs(self, stacks):
    outputs = NatureActorCritic.__call__(self, stacks)
    return outputs.logits, outputs.value, outputs.features


def logits_alone(self, stacks):
    return NatureActorCritic.__call__(self, stacks).logits


def half_the_logits(self, stacks):
    outputs = NatureActorCritic.__call__(self, stacks)
    return outputs._replace(logits=outputs.logits[:, :3])


def mean_in_extra(self, stacks):
    outputs = NatureActorCritic.__call__(self, stacks)
    return outputs._replace(extra={"second_value": outputs.value, "penalty": outputs.value.mean()})


def features_of_all_samples(self, stacks):
    outputs = NatureActorCritic.__call__(self, stacks)
    return outputs._replace(features=outputs.features.mean(0))


def value_that_is_missing(self, stacks):
    return NatureActorCritic.__call__(self, stacks)._replace(value=None)


def complex_logits(self, stacks):
    outputs = NatureActorCritic.__call__(self, stacks)
    return outputs._replace(logits=outputs.logits + 0j)


def text_in_extra(self, stacks):
    return NatureActorCritic.__call__(self, stacks)._replace(extra={"name": "own"})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (value_that_is_missing, "value of network Edited = 'NoneType': expected float32[5]; such as nn.Dense"),
        (complex_logits, "logits of network Edited = 'complex64[5, 6]': expected float32[5, 6]; heads compute in"),
        (text_in_extra, "extra['name'] of network Edited = 'str': expected one row per sample, of shape [5, ...]"),
        (
            three_outputs,
            "outputs of network Edited = '(float32[5, 6], float32[5], float32[5, 512])': expected Out",
        ),
        (
            logits_alone,
            "outputs of network Edited = 'float32[5, 6]': expected Outputs, as in Outputs(logits, value",
        ),
        (
            column_of_values,
            "value of network Edited = 'float32[5, 1]': expected float32[5]; such as nn.Dense(1)(x)",
        ),
        (half_the_logits, "logits of network Edited = 'float32[5, 3]': expected float32[5, 6]"),
        (
            logits_in_bfloat16,
            "logits of network Edited = 'bfloat16[5, 6]': expected float32[5, 6]; heads compute in",
        ),
        (
            carry_without_memory,
            "carry of network Edited = 'float32[5, 2]': expected none; a network with a memory ",
        ),
        (
            mean_in_extra,
            "extra['penalty'] of network Edited = 'float32[]': expected one row per sample, of shape [",
        ),
        (features_of_all_samples, "features of network Edited = 'float32[512]': expected one row per sample, of"),
    ],
)
def test_a_network_that_returns_something_else_is_refused(call, message):
    """A third value was taken for the carry of a recurrent network, and trained on minibatches of whole games."""
    module = edited(call)(ACTIONS)
    stacks = jnp.zeros((5, 84, 84, 4), jnp.uint8)
    with pytest.raises(InterfaceError, match=re.escape(message)):
        jax.eval_shape(partial(apply_module, module), first_params("nature"), Observation(stacks))


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda carry: (), r"\(\)"),
        (lambda carry: carry[0], r"'float32\[5, 256\]'"),
        (
            lambda carry: jax.tree.map(lambda x: x.astype(jnp.bfloat16), carry),
            r"\('bfloat16\[5, 256\]', 'bfloat16",
        ),
    ],
)
def test_a_recurrent_network_returns_a_memory_of_the_form_that_it_is_given(change, got):
    def call(self, stacks, first, carry):
        outputs = NatureLSTM.__call__(self, stacks, first, carry)
        return outputs._replace(carry=change(outputs.carry))

    module = type("Edited", (NatureLSTM,), {"__call__": call})(ACTIONS)
    observation = Observation(jnp.zeros((5, 84, 84, 4), jnp.uint8), jnp.ones(5, bool), module.initial_carry(5))
    expected = (
        rf"carry of network Edited = {got}.*: expected .*float32.*, the shapes and types of the carry that it"
    )
    with pytest.raises(InterfaceError, match=expected):
        jax.eval_shape(partial(apply_module, module), first_params("nature_lstm"), observation)


@pytest.mark.parametrize(
    ("carry", "got"),
    [
        (lambda num_envs: 0.0, r"float32\[\]"),
        (lambda num_envs: jnp.zeros(256), r"float32\[256\]"),
        (lambda num_envs: (jnp.zeros((num_envs, 2)), "own"), "str"),
    ],
    ids=["number", "no environments", "text"],
)
def test_a_memory_has_one_row_per_environment(carry, got):
    """These were errors of JAX, within the network or when its rollout was made."""
    network = type("Own", (NatureLSTM,), {"initial_carry": lambda self, num_envs: carry(num_envs)})
    expected = (
        rf"initial_carry of network Own = '{got}': expected arrays with one row per environment, .*\[1, ...\]"
    )
    with pytest.raises(InterfaceError, match=expected):
        init_params(network(ACTIONS), jax.random.key(0))


def test_a_network_without_parameters_is_refused():
    """It was a `KeyError`."""

    class Constant(nn.Module):
        @nn.compact
        def __call__(self, stacks):
            return jnp.zeros((len(stacks), ACTIONS)), jnp.zeros(len(stacks))

    with pytest.raises(InterfaceError, match=r"network = 'Constant': expected parameters .*no layer of it has"):
        init_params(Constant(), jax.random.key(0))


def test_a_network_whose_parameters_are_in_bfloat16_is_refused():
    """It trained in bfloat16, in which most steps would not move a parameter."""

    class Short(nn.Module):
        @nn.compact
        def __call__(self, stacks):
            x = nn.Dense(2, param_dtype=jnp.bfloat16)(stacks.reshape(len(stacks), -1) / 255)
            return networks.heads(x.astype(jnp.float32), ACTIONS)

    message = (
        "parameter ['Dense_0']['bias'] of network Short = 'bfloat16[2]': expected float32; the type of the arith"
    )
    with pytest.raises(InterfaceError, match=re.escape(message)):
        jax.eval_shape(partial(init_params, Short()), jax.random.key(0))


def test_a_network_whose_memory_is_empty_is_refused():
    """As one with a switch for its memory may have it."""
    network = type("Switched", (NatureLSTM,), {"initial_carry": lambda self, num_envs: ()})
    expected = r"initial_carry of network Switched = \(\): expected one array or more; a network without a memory"
    with pytest.raises(InterfaceError, match=expected):
        init_params(network(ACTIONS), jax.random.key(0))


def test_a_recurrent_network_without_a_memory_is_refused():
    module = make_module(NetworkConfig(name="nature_lstm"), ACTIONS, jnp.float32)
    with pytest.raises(ValueError, match="NatureLSTM is recurrent: its Observation needs `first` and `carry`"):
        apply_module(module, first_params("nature_lstm"), Observation(jnp.asarray(random_stacks(1))))


# --- The layer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(
    ("size", "stride", "shape"),
    [(8, 4, (20, 20)), (4, 2, (9, 10)), (3, 1, (7, 6)), (5, 3, (11, 13)), (2, 3, (9, 8))],
)
def test_a_convolution_and_its_gradients_are_those_of_flax(size, stride, shape, padding):
    """In float64, where the naive loops of XLA are fast enough for images of this size."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, *shape, 2))
    params = {"kernel": rng.standard_normal((size, size, 2, 5)), "bias": rng.standard_normal(5)}
    with jax.enable_x64(True):
        conv = Conv(5, (size, size), stride, padding, dtype=jnp.float64)
        oracle = nn.Conv(5, (size, size), stride, padding, dtype=jnp.float64)
        g = rng.standard_normal(oracle.apply({"params": params}, x).shape)

        def outputs_and_gradients(module):
            y, pull = jax.vjp(lambda params, x: module.apply({"params": params}, x), params, x)
            return y, pull(g.astype(y.dtype))

        expected = outputs_and_gradients(oracle)
        with for_cpus(True):
            got = outputs_and_gradients(conv)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10), got, expected)
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12), outputs_and_gradients(conv), expected
        )


def test_strides_are_those_of_flax_where_they_are_equal():
    x = jnp.zeros((1, 9, 9, 2))
    params = Conv(3, (3, 3), strides=(2, 2)).init(jax.random.key(0), x)
    assert Conv(3, (3, 3), strides=(2, 2)).apply(params, x).shape == (1, 5, 5, 3)
    assert Conv(3, (3, 3), strides=np.int64(2)).apply(params, x).shape == (1, 5, 5, 3)


@pytest.mark.parametrize("for_cpu", [False, True])
@pytest.mark.parametrize("strides", [(2, 1), (2,), (2, 2, 2), (0, 0)])
def test_strides_are_refused_alike_on_every_device(strides, for_cpu):
    expected = r"Conv conv: strides = \(.*\): expected one number from 1 on, or two equal ones"
    with for_cpus(for_cpu), pytest.raises(ValueError, match=expected):
        Conv(3, (3, 3), strides=strides, name="conv").init(jax.random.key(0), jnp.zeros((1, 9, 9, 2)))


@pytest.mark.parametrize("size", [3, (3,), (3, 3, 3), (0, 3)])
def test_a_kernel_is_of_an_image(size):
    """`nn.Conv` takes one number, too: as a kernel of one dimension."""
    expected = r"^Conv conv: kernel_size = .*: expected \(height, width\), such as \(3, 3\)"
    with pytest.raises(ValueError, match=expected):
        Conv(3, size, name="conv").init(jax.random.key(0), jnp.zeros((1, 9, 9, 2)))


@pytest.mark.parametrize("padding", [1, ((1, 1), (1, 1)), "CIRCULAR"])
def test_paddings_of_flax_that_are_refused(padding):
    expected = r"^Conv conv: padding = .*: expected one of SAME, SAME_LOWER, VALID"
    with pytest.raises(ValueError, match=expected):
        Conv(3, padding=padding, name="conv").init(jax.random.key(0), jnp.zeros((1, 9, 9, 2)))


def test_a_float32_kernel_has_gradients_in_float64():
    """Parameters stay float32 where the arithmetic is float64."""
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        x = rng.standard_normal((2, 7, 6, 3))
        params = {"kernel": rng.standard_normal((3, 3, 3, 4), np.float32), "bias": np.zeros(4, np.float32)}

        def gradients(layer):
            return jax.grad(lambda *inputs: (layer.apply({"params": inputs[0]}, inputs[1]) ** 2).sum(), (0, 1))(
                params, x
            )

        with for_cpus(True):
            got = gradients(Conv(4, dtype=jnp.float64))
        expected = gradients(nn.Conv(4, (3, 3), dtype=jnp.float64))
        assert got[0]["kernel"].dtype == jnp.float32
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), got, expected)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.uint16, jnp.uint32, bool])
def test_what_is_neither_pixels_nor_floats_is_refused(dtype):
    with pytest.raises(TypeError, match=r"Conv conv: expected an input of uint8 \(pixels\) or floats, got"):
        Conv(3, name="conv").init(jax.random.key(0), jnp.ones((1, 6, 6, 4), dtype))


def test_a_jit_within_a_network_knows_the_form():
    """What `nn.jit` and `nn.remat` have traced for one form is not used for the other."""

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.remat(nn.jit(Conv))(3, name="conv")(x)

    x = np.random.default_rng(3).standard_normal((2, 6, 5, 4)).astype(np.float32)
    params = Net().init(jax.random.key(0), x)

    def gradient(for_cpu):
        def loss(params):
            with for_cpus(for_cpu):
                return (Net().apply(params, x) ** 2).sum()

        return jax.jit(jax.grad(loss))

    plain, fast = gradient(False), gradient(True)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), plain(params), fast(params))
    assert "optimization_barrier" not in str(jax.make_jaxpr(plain)(params))
    assert "optimization_barrier" in str(jax.make_jaxpr(fast)(params))


@pytest.mark.parametrize("samples", [1, 32, 33, 300])
def test_chunks_change_nothing(samples):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return in_chunks(lambda x: Conv(3, name="conv")(x), self, x)

    x = np.random.default_rng(3).integers(0, 256, (samples, 6, 5, 4), dtype=np.uint8)
    params = Net().init(jax.random.key(0), x[:1])
    expected = Net().apply(params, x)
    with for_cpus(True):
        got = Net().apply(params, x)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


class Methods(nn.Module):
    """A torso that is a method, called in one of two ways."""

    direct: bool = True

    def torso(self, x):
        return Conv(3)(x)

    @nn.compact
    def __call__(self, x):
        return in_chunks(self.torso if self.direct else lambda x: self.torso(x), self, x)


def test_a_torso_may_be_a_method():
    """With more than a chunk of samples, flax refused the second of two equal names."""
    x = np.random.default_rng(3).integers(0, 256, (33, 6, 5, 4), dtype=np.uint8)
    params = Methods().init(jax.random.key(0), x[:1])
    expected = Methods().apply(params, x)
    with for_cpus(True):
        got = Methods().apply(params, x)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_a_torso_that_calls_a_method_is_refused():
    x = jnp.zeros((33, 6, 5, 4), jnp.uint8)
    params = Methods(direct=False).init(jax.random.key(0), x[:1])
    message = "torso of in_chunks = .*: expected the method itself, such as self.torso"
    with for_cpus(True), pytest.raises(InterfaceError, match=message):
        Methods(direct=False).apply(params, x)


@pytest.mark.parametrize("for_cpu", [False, True])
def test_no_samples_have_no_outputs(for_cpu):
    """It was a `ZeroDivisionError` on a CPU."""
    params = Methods().init(jax.random.key(0), jnp.zeros((1, 6, 5, 4), jnp.uint8))
    with for_cpus(for_cpu):
        assert Methods().apply(params, jnp.zeros((0, 6, 5, 4), jnp.uint8)).shape == (0, 6, 5, 3)


@pytest.mark.parametrize("for_cpu", [False, True])
def test_images_smaller_than_the_kernel_are_refused(for_cpu):
    """They were no error on a GPU, whose features were empty."""
    message = "Conv conv: expected images of at least 8x8 pixels, .*they have 9x7"
    with for_cpus(for_cpu), pytest.raises(ValueError, match=message):
        Conv(3, (8, 8), 4, padding="VALID", name="conv").init(jax.random.key(0), jnp.zeros((1, 9, 7, 4)))


def test_features_of_vectors():
    """A torso need not end with an image."""

    class Flat(nn.Module):
        @nn.compact
        def __call__(self, x):
            return networks.hidden_layer(x, 5, jnp.float32)

    y, _ = Flat().init_with_output(jax.random.key(0), jnp.ones((2, 7)))
    assert y.shape == (2, 5)


# --- The choice --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "learner", "actor", "expected"),
    [
        (NetworkConfig(), "cpu", "cpu", ("float32", BLOCKED)),
        (NetworkConfig(), "gpu", "gpu", ("float32", PLAIN)),
        (NetworkConfig(), "bfloat16 cpu", "bfloat16 cpu", ("bfloat16", BLOCKED)),
        (NetworkConfig(), "amx cpu", "bfloat16 cpu", ("bfloat16", BLOCKED)),
        (NetworkConfig(), "gpu", "cpu", ("float32", PLAIN)),  # acting on a CPU for a GPU: one layout for both
        # The policy that acts is the one that learns.
        (NetworkConfig(), "gpu", "bfloat16 cpu", ("float32", PLAIN)),
        (NetworkConfig(compute_dtype="bfloat16"), "gpu", "gpu", ("bfloat16", PLAIN)),
        (NetworkConfig(conv="layers"), "bfloat16 cpu", "amx cpu", ("bfloat16", PLAIN)),
        (NetworkConfig(conv="layers"), "gpu", "gpu", ("float32", PLAIN)),
        # Every network computes in the same arithmetic, so that they can be compared.
        (NetworkConfig(name="impala"), "bfloat16 cpu", "bfloat16 cpu", ("bfloat16", PLAIN)),
        (NetworkConfig(conv="plain"), "bfloat16 cpu", "bfloat16 cpu", ("float32", PLAIN)),
        (NetworkConfig(compute_dtype="float32"), "bfloat16 cpu", "bfloat16 cpu", ("float32", BLOCKED)),
        (NetworkConfig(compute_dtype="bfloat16", conv="plain"), "cpu", "cpu", ("bfloat16", PLAIN)),
        (NetworkConfig(compute_dtype="float32", conv="by_hand"), "gpu", "gpu", ("float32", PLAIN)),
    ],
)
def test_form_and_arithmetic_suit_the_platforms(config, learner, actor, expected):
    network = make_network(config, 6, learner, actor)
    assert (network.dtype.name, network.layout) == expected


# --- Frames ------------------------------------------------------------------------------------------------------


def test_blocks():
    frames = np.random.default_rng(5).integers(0, 256, (3, 84, 84), dtype=np.uint8)
    blocks = block_frames(jnp.asarray(frames))
    assert (blocks.shape, blocks.dtype) == ((3, 21, 21, 16), jnp.uint8)
    for y, x in ((0, 0), (50, 33), (83, 83)):  # block row and column, then the pixel's place in the block
        np.testing.assert_array_equal(blocks[:, y // 4, x // 4, 4 * (y % 4) + x % 4], frames[:, y, x])


@pytest.mark.parametrize("layout", [PLAIN, BLOCKED], ids=["plain", "blocked"])
def test_gather_stacks_equals_naive_loop(layout):
    steps, envs = 7, 3
    rng = np.random.default_rng(4)
    frames = rng.integers(0, 256, (steps + 3, envs, 84, 84), dtype=np.uint8)
    age = rng.integers(0, 4, (steps, envs))
    assert set(age.ravel()) == {0, 1, 2, 3}
    index = rng.permutation(steps * envs)
    expected = np.zeros((len(index), 84, 84, 4), np.uint8)
    for row, sample in enumerate(index):
        t, b = sample // envs, sample % envs
        for channel, j in enumerate((3, 2, 1, 0)):
            expected[row, :, :, channel] = frames[t + 3 - min(j, age[t, b]), b]
    stored = layout.arrange(jnp.asarray(frames))
    assert stored.shape[2:] == layout.shape
    got = gather_stacks(stored, jnp.asarray(age), jnp.asarray(index))
    np.testing.assert_array_equal(got, arrange_stacks(layout, jnp.asarray(expected)))


@pytest.mark.parametrize("layout", [PLAIN, BLOCKED], ids=["plain", "blocked"])
def test_pictures_are_changed_in_any_layout(layout):
    stacks = jnp.asarray(random_stacks(2))
    shifted = map_images(lambda x: jnp.roll(x, 3, axis=1), arrange_stacks(layout, stacks))
    np.testing.assert_array_equal(shifted, arrange_stacks(layout, jnp.roll(stacks, 3, axis=1)))


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda x: 0.9 * x, r"float32\[2, 84, 84, 4\]"),
        (lambda x: x[:, 2:-2], r"uint8\[2, 80, 84, 4\]"),
        (lambda x: None, "NoneType"),
    ],
)
def test_pictures_stay_bytes_of_the_same_shape(function, got):
    """A network would not divide floats by 255, and they would be 255 times too large."""
    with pytest.raises(InterfaceError, match=rf"map_images = '{got}': expected uint8\[2, 84, 84, 4\]") as error:
        map_images(function, jnp.asarray(random_stacks(2)))
    assert "astype(jnp.uint8)" in str(error.value)
    with pytest.raises(ValueError, match=r"shape of stacks = \[2, 84, 84, 3\]: expected a last axis of 4 frames"):
        map_images(function, jnp.zeros((2, 84, 84, 3), jnp.uint8))


class MaxPooled(nn.Module):
    """A network of a user that takes maxima over windows."""

    num_actions: int
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, stacks):
        x = nn.max_pool(stacks.astype(self.dtype), (4, 4), (4, 4)).reshape(len(stacks), -1)
        return Outputs(nn.Dense(self.num_actions)(x), nn.Dense(1)(x)[:, 0])


network_interface.register_network("max_pooled", MaxPooled)


@pytest.mark.parametrize(
    ("name", "gpu", "refused"),
    [("impala", "auto", True), ("max_pooled", 0, True), ("impala", False, False), ("nature", "auto", False)],
)
def test_a_network_with_max_pooling_is_not_deterministic_on_a_gpu(name, gpu, refused):
    devices = DevicesConfig(gpu=gpu, deterministic=True)
    config = Config(network=NetworkConfig(name=name), devices=devices)
    message = f"devices.deterministic = True: expected false with {name}; XLA has no .* none is needed"
    with pytest.raises(ConfigError, match=message) if refused else contextlib.nullcontext():
        check_names_and_minibatches(config)
