"""Networks: outputs and gradients against layers that are not ours, and what is refused."""

import itertools
from functools import cache, partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from small_networks import perturbed
from small_training import first_arrays
from threadpoolctl import threadpool_limits

from jaxrl_atari import networks
from jaxrl_atari.algorithm import Mean, Minibatch
from jaxrl_atari.config import Config, NetworkConfig, PPOConfig
from jaxrl_atari.cpu import nature as nature_by_hand
from jaxrl_atari.cpu.conv import Conv, for_cpu, module_in_chunks
from jaxrl_atari.errors import InterfaceError, UserError
from jaxrl_atari.frames import BLOCKED
from jaxrl_atari.networks import (
    SHIPPED,
    NatureActorCritic,
    NatureLSTM,
    Network,
    Observation,
    make_network,
)
from jaxrl_atari.ppo import Samples, ppo_loss

ACTIONS = 6
every = pytest.mark.parametrize("name", SHIPPED)


@cache
def first_params(name):
    return jax.jit(make_network(NetworkConfig(name=name), ACTIONS).init)(jax.random.key(1))


def random_stacks(n):
    return np.random.default_rng(0).integers(0, 256, (n, 84, 84, 4), dtype=np.uint8)


def observation(network, stacks, envs=None):
    """What a network sees; a recurrent one, as first steps in `envs` environments."""
    n = len(stacks)
    return Observation(jnp.asarray(stacks), jnp.arange(n) % 3 == 0, network.initial_carry(envs or n))


def error(got, expected):
    """The relative error of each array of a tree."""
    errors = jax.tree.map(lambda x, y: float(jnp.linalg.norm(x - y) / jnp.linalg.norm(y)), got, expected)
    return np.array(jax.tree.leaves(errors))


# --- Every network -----------------------------------------------------------------------------------------------


@every
def test_every_form_keeps_the_rules_of_a_network(name):
    """Which `Network.apply` checks, but for the features."""
    for dtype, device_class in itertools.product(("float32", "bfloat16"), ("cpu", "gpu")):
        network = make_network(NetworkConfig(name=name, compute_dtype=dtype), ACTIONS, device_class)
        outputs = jax.eval_shape(network.apply, first_params(name), observation(network, random_stacks(5)))
        assert (len(outputs.features), outputs.features.dtype) == (5, jnp.float32)


@every
def test_every_parameter_gets_a_gradient(name):
    network, params, n = make_network(NetworkConfig(name=name), ACTIONS, "cpu"), first_params(name), 3
    ones = jnp.ones(n)
    samples = Samples(jnp.arange(n), -1.8 * ones, ones, jnp.array([-1.0, 0.0, 1.0]), 2 * ones)
    # In one environment: only from its second step on do the recurrent weights of a recurrent network matter.
    batch = Minibatch(observation(network, random_stacks(n), envs=1), samples, Mean.over(ones), jax.random.key(0))
    gradient = jax.jit(jax.grad(lambda params: ppo_loss(params, network.apply, batch, PPOConfig())[0]))(params)
    for x in jax.tree.leaves(gradient):
        assert x.dtype == jnp.float32
        assert np.isfinite(x).all()
        assert np.any(x)


# --- Against other layers ----------------------------------------------------------------------------------------


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


def shipped(name, dtype="float32", cpu=None):
    """`name`, computed plainly or for a class of CPUs."""
    network = Network(SHIPPED[name](ACTIONS, jnp.dtype(dtype)), cpu)
    return lambda params, stacks: network.apply(params, Observation(stacks))[:2]


def gradients_and_outputs(apply):
    """Compiled: params, stacks -> gradients of a loss that weights every output differently, and the outputs."""

    def loss(params, stacks):
        logits, value = outputs = apply(params, stacks)
        weights = jnp.linspace(-1, 2, logits.size).reshape(logits.shape)
        return (jax.nn.log_softmax(logits) * weights).mean() + (value**2).mean(), outputs

    return jax.jit(jax.grad(loss, has_aux=True))


@cache
def outputs_and_gradients(apply, name, n):
    return gradients_and_outputs(apply)(perturbed(first_params(name)), random_stacks(n))


@pytest.mark.parametrize(
    ("name", "apply", "oracle", "n", "at_least", "at_most"),
    [
        # `test_ppo.py` compares Nature in float32 with NumPy.
        ("nature", shipped("nature", "bfloat16", "amx cpu"), shipped("nature"), 5, 1e-4, 0.05),
        ("impala", shipped("impala"), impala, 2, 0.0, 1e-5),
        ("impala", shipped("impala", "bfloat16"), impala, 2, 1e-4, 0.2),
    ],
)
def test_outputs_and_gradients_equal_those_of_other_layers(name, apply, oracle, n, at_least, at_most):
    """In bfloat16 they are close, and not equal: it computed in another type."""
    errors = error(*(outputs_and_gradients(x, name, n) for x in (apply, oracle)))
    assert ((at_least <= errors) & (errors < at_most)).all()


def test_gradients_of_impala_for_cpus_equal_those_of_other_layers_but_for_ties():
    """In float32. A tie in a max pooling decides a draw, whose gradients then differ by up to 1e-2."""
    params = perturbed(first_params("impala"))
    computed = [gradients_and_outputs(apply) for apply in (shipped("impala", cpu="cpu"), impala)]
    errors = [error(*(compute(params, x) for compute in computed)) for x in np.split(random_stacks(10), 5)]
    assert (np.median(errors, axis=0) < 1e-5).all()


@pytest.mark.parametrize(
    ("dtype", "chunk", "at_most"), [("float32", 32, 1e-5), ("float32", 4, 1e-5), ("bfloat16", 4, 0.03)]
)
def test_features_by_hand_are_those_of_the_plain_form(dtype, chunk, at_most):
    """With their gradients, in two chunks and in a loop over nine. An edit of one form alone fails here."""
    params = perturbed(first_params("nature"))
    params = {name: params[name] for name in nature_by_hand.KERNELS}
    stacks = random_stacks(35)

    def features_and_gradients(features):
        def loss(params):
            y = features(params)
            return (y * jnp.linspace(-1, 2, y.size).reshape(y.shape)).mean(), y

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    plain = networks.NatureFeatures(jnp.dtype(dtype))
    expected = features_and_gradients(lambda params: plain.apply({"params": params}, stacks))
    by_hand = partial(nature_by_hand.features, stacks=stacks, dtype=jnp.dtype(dtype), chunk=chunk)
    assert (error(features_and_gradients(by_hand), expected) < at_most).all()


@pytest.mark.parametrize("name", ["nature", "impala"])
def test_initialisation(name):
    """Orthogonal, with a gain of sqrt(2) except for the heads; biases are 0."""
    gains = {"policy": 0.01, "value": 1.0}
    for layer, arrays in first_params(name).items():
        kernel = np.asarray(arrays["kernel"]).reshape(-1, arrays["bias"].size) / gains.get(layer, 2**0.5)
        np.testing.assert_allclose(kernel.T @ kernel, np.eye(kernel.shape[1]), atol=5e-6, err_msg=layer)
        assert not arrays["bias"].any()


def test_the_first_parameters_do_not_depend_on_the_threads_of_blas():
    """Neither on the cores of a machine nor on `OMP_NUM_THREADS`, which Ray sets."""

    def first_params_with(threads):
        with threadpool_limits(threads, user_api="blas"):
            return jax.device_get(first_arrays(Config(), ACTIONS, jax.devices("cpu")[0])["train_state"].params)

    jax.tree.map(np.testing.assert_array_equal, first_params_with(1), first_params_with(2))


@pytest.mark.parametrize("name", ["nature", "nature_lstm"])
def test_acting_params_change_no_bit_of_the_outputs(name):
    for dtype in ("float32", "bfloat16"):
        network = make_network(NetworkConfig(name=name, compute_dtype=dtype), ACTIONS, "cpu")
        params, run = perturbed(first_params(name)), jax.jit(network.apply)
        prepared = network.for_acting(params)
        assert prepared["dense"]["kernel"].dtype == dtype
        got, expected = (run(each, observation(network, random_stacks(3))) for each in (prepared, params))
        jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize("name", ["nature", "impala"])
def test_a_second_derivative_on_a_cpu_is_refused(name):
    """It was wrong in bfloat16 without an error. With `network.conv = plain` it is JAX's own."""
    params = first_params(name)

    def penalty(params, network):
        gradients = jax.grad(lambda x: network.apply(x, observation(network, random_stacks(2))).value.sum())(
            params
        )
        return sum(jnp.sum(gradient**2) for gradient in jax.tree.leaves(gradients))

    fast, plain = (make_network(NetworkConfig(name=name, conv=conv), ACTIONS, "cpu") for conv in ("auto", "plain"))
    with pytest.raises(UserError, match="no second derivatives"):
        jax.eval_shape(jax.grad(partial(penalty, network=fast)), params)
    jax.eval_shape(jax.grad(partial(penalty, network=plain)), params)


def test_heads_and_memory_compute_in_float32_on_a_gpu():
    """Not in TF32, so that the policy that learns is the one that acted."""
    network = make_network(NetworkConfig("nature_lstm", "float32"), ACTIONS, "gpu")
    arguments = first_params("nature_lstm"), observation(network, random_stacks(2))
    program = jax.jit(network.apply).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    products = [line for line in program.splitlines() if "stablehlo.dot_general" in line]
    assert len(products) >= 5  # the dense layer, two of the cell, two heads
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)


# --- Networks of a user ------------------------------------------------------------------------------------------


def returning(change, base=NatureActorCritic):
    """A shipped network after a change of what it returns."""

    def call(self, *args):
        return change(base.__call__(self, *args))

    return type("Edited", (base,), {"__call__": call})(ACTIONS)


def layer_of(make):
    """A network with a layer of its own."""

    class Layered(nn.Module):
        num_actions: int = ACTIONS

        @nn.compact
        def __call__(self, stacks):
            x = make()(stacks.reshape(len(stacks), -1) / 255).astype(jnp.float32)
            return nn.Dense(ACTIONS)(x), nn.Dense(1)(x)[..., 0]

    return Layered()


REFUSED = {
    "statistics": (layer_of(partial(nn.BatchNorm, use_running_average=False)), "batch_stats"),
    "parameters in bfloat16": (layer_of(partial(nn.Dense, 2, param_dtype=jnp.bfloat16)), "expected float32"),
    "a column": (returning(lambda x: (x.logits, x.value[:, None])), r"value .*float32\[5, 1\]"),
    "bfloat16": (returning(lambda x: (x.logits.astype(jnp.bfloat16), x.value)), r"logits .*bfloat16\[5, 6\]"),
    "another carry": (returning(lambda x: x._replace(carry=x.carry[0]), NatureLSTM), "carry of network"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_network_that_breaks_a_rule_is_refused(case):
    """Each would train silently on something else, or end in an error of JAX far from its cause."""
    module, message = REFUSED[case]
    network = Network(module)

    def outputs():
        return network.apply(network.init(jax.random.key(0)), observation(network, random_stacks(5)))

    with pytest.raises(InterfaceError, match=message) as refused:
        jax.eval_shape(outputs)
    assert "\n" not in str(refused.value)


# --- The layer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "stride", "shape"),
    [(8, 4, (20, 20)), (3, 1, (7, 6)), (2, 3, (9, 8))],
)
def test_a_convolution_and_its_gradients_are_those_of_flax(size, stride, shape):
    """In float64, where the naive loops of XLA are fast enough for images of this size."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, *shape, 2))
    params = {"kernel": rng.standard_normal((size, size, 2, 5)), "bias": rng.standard_normal(5)}
    with jax.enable_x64(True):
        for padding in ("SAME", "VALID"):
            conv = Conv(5, (size, size), stride, padding, dtype=jnp.float64)
            oracle = nn.Conv(5, (size, size), stride, padding, dtype=jnp.float64)
            g = rng.standard_normal(oracle.apply({"params": params}, x).shape)

            def outputs_and_gradients(module, g=g):
                y, pull = jax.vjp(lambda params, x: module.apply({"params": params}, x), params, x)
                return y, pull(g.astype(y.dtype))

            expected = outputs_and_gradients(oracle)
            for cpu in ("cpu", None):
                with for_cpu(cpu):
                    got = outputs_and_gradients(conv)
                jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-10, atol=1e-10), got, expected)


def test_chunks_change_nothing():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return module_in_chunks(Conv(3, name="conv"), x)

    x = np.random.default_rng(3).integers(0, 256, (300, 6, 5, 4), dtype=np.uint8)
    params = Net().init(jax.random.key(0), x[:1])
    for samples in (1, 32, 33, 300):
        with for_cpu("cpu"):
            got = Net().apply(params, x[:samples])
        np.testing.assert_allclose(got, Net().apply(params, x[:samples]), rtol=1e-5, atol=1e-5)


# --- The choice --------------------------------------------------------------------------------------------------


def test_form_and_arithmetic_suit_the_devices():
    cpu, bfloat16, amx = "cpu", "bfloat16 cpu", "amx cpu"
    by_hand_in = {
        # network.compute_dtype, network.conv, learner, actor: arithmetic, features by hand
        ("float32", "auto", cpu, cpu): ("float32", True),
        ("bfloat16", "auto", amx, bfloat16): ("bfloat16", True),
        ("bfloat16", "plain", cpu, cpu): ("bfloat16", False),
        ("float32", "auto", "gpu", "gpu"): ("float32", False),
        ("float32", "auto", "gpu", cpu): ("float32", False),  # the policy that acts is the one that learns
    }
    for (dtype, conv, *devices), expected in by_hand_in.items():
        network = make_network(NetworkConfig(compute_dtype=dtype, conv=conv), ACTIONS, *devices)
        assert (network.dtype.name, network.frame_shape == BLOCKED) == expected
