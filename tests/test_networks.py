"""The networks against flax's own layers, in both forms, and the frame layouts against a naive loop."""

import itertools
from functools import partial
from typing import Any, get_args

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxrl_atari.config import NetworkConfig, NetworkName
from jaxrl_atari.errors import ConfigError
from jaxrl_atari.evaluate import policy
from jaxrl_atari.fast import cpu_conv, forms
from jaxrl_atari.fast.cpu_conv import UNROLLED, acting_params, chunk_size
from jaxrl_atari.fast.forms import compute_dtype, make_network, uses_cpu_conv
from jaxrl_atari.fast.frames import (
    BLOCKED,
    PLAIN,
    arrange_stacks,
    block_frames,
    empty_window,
    gather_stacks,
    push_frame,
)
from jaxrl_atari.networks import NETWORKS, NatureActorCritic, init_params

ACTIONS = 6


class Reference(nn.Module):
    """The network in flax's own layers; shares nothing with the shipped code but the parameter names."""

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


def perturbed(params):
    """Parameters with non-zero biases and a policy head of ordinary size, so that an error anywhere shows."""
    rng = np.random.default_rng(2)
    return jax.tree.map(lambda x: x + 0.02 * rng.standard_normal(x.shape, np.float32), params)


@pytest.fixture(scope="module")
def stacks():
    """Several chunks of the CPU form, the last one not full: in float32 without a loop, in bfloat16 with one."""
    n = UNROLLED * chunk_size("cpu", "bfloat16") + 3
    assert chunk_size("cpu", "float32") < n <= UNROLLED * chunk_size("cpu", "float32")
    return np.random.default_rng(0).integers(0, 256, (n, 84, 84, 4), dtype=np.uint8)


@pytest.fixture(scope="module")
def variables(stacks):
    return {"params": perturbed(jax.jit(Reference().init)(jax.random.key(1), stacks[:1])["params"])}


def scalar(outputs):
    """A loss that depends on every output with a different weight."""
    logits, value = outputs
    return (jax.nn.log_softmax(logits) * jnp.linspace(-1, 2, logits.size).reshape(logits.shape)).mean() + (
        value**2
    ).mean()


@pytest.fixture(scope="module")
def expected(stacks, variables):
    """The outputs of flax's layers, and the gradients of `scalar` of them."""

    def loss(variables, stacks):
        outputs = Reference().apply(variables, stacks)
        return scalar(outputs), outputs

    gradients, outputs = jax.jit(jax.grad(loss, has_aux=True))(variables, stacks)
    return outputs, gradients


def network(conv, dtype="float32", platform="cpu"):
    """The Nature network in a form, as training makes it on a CPU."""
    return make_network(NetworkConfig(conv=conv, compute_dtype=dtype), ACTIONS, platform)


def apply(conv, dtype="float32", platform="cpu"):
    """A function of variables and stacks of images."""
    made = network(conv, dtype, platform)
    return lambda v, x: made.apply(v["params"], arrange_stacks(made.layout, jnp.asarray(x)))


def test_parameters_are_those_of_flax_layers(stacks):
    params = jax.jit(partial(init_params, NetworkConfig(), ACTIONS))(jax.random.key(1))
    assert sum(x.size for x in jax.tree.leaves(params)) == 1_687_719
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
    expected = jax.jit(Reference().init)(jax.random.key(1), stacks[:1])["params"]
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize(("conv", "unrolled"), [("plain", UNROLLED), ("matmul", UNROLLED), ("matmul", 1)])
def test_outputs_and_gradients_equal_flax_layers(conv, unrolled, stacks, variables, expected, monkeypatch):
    monkeypatch.setattr(cpu_conv, "UNROLLED", unrolled)  # 1: the chunks are computed in a loop
    expected_outputs, expected_gradients = expected
    forward = apply(conv)
    outputs = jax.jit(forward)(variables, stacks)
    for got, want in zip(outputs, expected_outputs, strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, atol=1e-5)

    gradients = jax.jit(jax.grad(lambda *given: scalar(forward(*given))))(variables, stacks)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, atol=1e-5 * float(jnp.abs(want).max())),
        gradients,
        expected_gradients,
    )


@pytest.mark.parametrize("conv", ["plain", "matmul"])
@pytest.mark.parametrize("batch", [1, 16])
def test_small_batches(conv, batch, variables):
    x = np.random.default_rng(3).integers(0, 256, (batch, 84, 84, 4), dtype=np.uint8)
    logits, value = apply(conv)(variables, x)
    assert (logits.shape, value.shape) == ((batch, ACTIONS), (batch,))
    expected = Reference().apply(variables, x)
    np.testing.assert_allclose(logits, expected[0], atol=1e-5)
    np.testing.assert_allclose(value, expected[1], atol=1e-5)


@pytest.mark.parametrize(("conv", "platform"), [("plain", "cpu"), ("matmul", "cpu"), ("matmul", "amx cpu")])
def test_bfloat16_is_close(conv, platform, stacks, variables, expected):
    (expected_logits, expected_value), expected_gradients = expected
    forward = apply(conv, "bfloat16", platform)
    logits, value = forward(variables, stacks)
    assert logits.dtype == value.dtype == jnp.float32
    assert float(jnp.abs(logits - expected_logits).max()) < 0.05 * float(jnp.abs(expected_logits).max())
    assert float(jnp.abs(value - expected_value).max()) < 0.05 * float(jnp.abs(expected_value).max())
    assert float(jnp.abs(logits - expected_logits).max()) > 1e-5  # it did compute in another type

    gradients = jax.jit(jax.grad(lambda *given: scalar(forward(*given))))(variables, stacks)
    error = jax.tree.map(
        lambda got, want: jnp.linalg.norm(got - want) / jnp.linalg.norm(want), gradients, expected_gradients
    )
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(gradients))
    assert max(map(float, jax.tree.leaves(error))) < 0.1, error


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_acting_params_change_no_bit_of_the_outputs(dtype, stacks, variables):
    prepared = acting_params(variables["params"], jnp.dtype(dtype))
    assert prepared["dense"]["kernel"].dtype == dtype
    run = jax.jit(apply("matmul", dtype))
    for output, expected in zip(run({"params": prepared}, stacks), run(variables, stacks), strict=True):
        np.testing.assert_array_equal(output, expected)


@pytest.mark.parametrize(("platform", "size"), [("cpu", 16), ("bfloat16 cpu", 16), ("amx cpu", 64), ("gpu", 64)])
def test_small_chunks_are_for_cpus_without_amx(platform, size):
    torso, sizes = cpu_conv._torso, []

    def sees_chunks(*arguments):
        sizes.append(arguments[2].shape[0])
        return torso(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_conv, "_torso", sees_chunks)
        made = make_network(NetworkConfig(conv="matmul", compute_dtype="bfloat16"), ACTIONS, platform)
        params = jax.eval_shape(lambda: init_params(NetworkConfig(), ACTIONS, jax.random.key(0)))
        jax.eval_shape(made.apply, params, jax.ShapeDtypeStruct((256, 21, 21, 64), jnp.uint8))
    assert set(sizes) == {size}


class GeluActorCritic(NatureActorCritic):
    """The module after an edit: another activation."""

    def __call__(self, stacks):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn, "relu", nn.gelu)
            return NatureActorCritic.__call__(self, stacks)


class DetachedActorCritic(NatureActorCritic):
    """The module after an edit: the value does not train the torso."""

    def __call__(self, stacks):
        dense = nn.Dense.__call__
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nn.Dense, "__call__", lambda layer, x: dense(layer, stopped(layer, x)))
            return NatureActorCritic.__call__(self, stacks)


def stopped(layer, x):
    return lax.stop_gradient(x) if layer.name == "value" else x


class NarrowActorCritic(nn.Module):
    """The module after an edit: fewer channels and one layer less."""

    num_actions: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, stacks):
        x = nn.Conv(16, (8, 8), 4, padding="VALID", name="conv1")(stacks.astype(self.dtype) / 255)
        x = nn.relu(x).reshape(len(x), -1)
        return nn.Dense(self.num_actions, name="policy")(x), nn.Dense(1, name="value")(x)[..., 0]


@pytest.mark.parametrize("edited", [GeluActorCritic, DetachedActorCritic, NarrowActorCritic])
def test_an_edit_that_a_cpu_would_not_compute_is_refused(edited, monkeypatch):
    monkeypatch.setitem(NETWORKS, "nature", edited)
    monkeypatch.setattr(forms, "_cpu_conv_agrees", forms._cpu_conv_agrees.__wrapped__)  # it has a cache
    make = make_network.__wrapped__
    monkeypatch.setattr(policy, "make_network", make)
    with pytest.raises(ConfigError, match=r"network\.conv = .*: expected plain, since NatureActorCritic was edited"):
        make(NetworkConfig(), ACTIONS, "cpu")
    assert make(NetworkConfig(conv="plain"), ACTIONS, "cpu").layout == PLAIN
    assert make(NetworkConfig(), ACTIONS, "gpu").layout == PLAIN
    # A GPU has trained it: its games can be played on a CPU.
    assert policy.evaluation_network(NetworkConfig(), ACTIONS, jax.devices("cpu")[0]).layout == PLAIN
    with pytest.raises(ConfigError):
        policy.evaluation_network(NetworkConfig(conv="matmul"), ACTIONS, jax.devices("cpu")[0])


# --- The choice ------------------------------------------------------------------------------------------------------


def test_every_network_can_be_chosen():
    assert set(get_args(NetworkName)) == set(NETWORKS)


def test_the_impala_network(stacks):
    """15 convolutions (Espeholt et al. 2018, figure 3): their kernels and biases, the dense layer and the heads."""
    made = make_network(NetworkConfig(name="impala"), ACTIONS, "cpu")
    params = jax.jit(partial(init_params, NetworkConfig(name="impala"), ACTIONS))(jax.random.key(0))
    convolutions, channels_in = 0, 4
    for channels in (16, 32, 32):
        convolutions += 9 * channels_in * channels + channels + 4 * (9 * channels * channels + channels)
        channels_in = channels
    dense = 11 * 11 * 32 * 256 + 256
    heads = 256 * ACTIONS + ACTIONS + 256 + 1
    assert sum(x.size for x in jax.tree.leaves(params)) == convolutions + dense + heads
    assert sum(x.ndim == 4 for x in jax.tree.leaves(params)) == 15
    assert (made.layout, uses_cpu_conv(NetworkConfig(name="impala"), "cpu")) == (PLAIN, False)

    for name, gain in (("Conv_0", 2**0.5), ("Conv_14", 2**0.5), ("policy", 0.01), ("value", 1.0)):  # orthogonal
        kernel = np.asarray(params[name]["kernel"])
        kernel = kernel.reshape(-1, kernel.shape[-1])
        np.testing.assert_allclose(kernel.T @ kernel, gain**2 * np.eye(kernel.shape[1]), atol=1e-5)

    params = perturbed(params)
    half = make_network(NetworkConfig(name="impala", compute_dtype="bfloat16"), ACTIONS, "gpu")
    program = str(jax.make_jaxpr(half.apply)(params, stacks[:2]))
    convolutions = [line for line in program.splitlines() if "conv_general_dilated" in line]
    assert len(convolutions) == 15
    assert all(":bf16[" in line for line in convolutions)
    logits, value = jax.jit(made.apply)(params, stacks[:2])
    assert (logits.shape, logits.dtype, value.shape, value.dtype) == ((2, ACTIONS), jnp.float32, (2,), jnp.float32)
    for output, expected in zip((logits, value), jax.jit(impala)(params, stacks[:2]), strict=True):
        np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "platform", "peer", "expected"),
    [
        (NetworkConfig(), "cpu", None, ("float32", BLOCKED)),
        (NetworkConfig(), "gpu", None, ("bfloat16", PLAIN)),
        (NetworkConfig(), "cpu", "gpu", ("float32", PLAIN)),  # acting on a CPU for a GPU: one layout for both
        (NetworkConfig(), "bfloat16 cpu", None, ("bfloat16", BLOCKED)),
        (NetworkConfig(), "amx cpu", "bfloat16 cpu", ("bfloat16", BLOCKED)),
        (NetworkConfig(), "bfloat16 cpu", "gpu", ("float32", PLAIN)),  # plain convolutions are slow in bfloat16
        (NetworkConfig(name="impala"), "bfloat16 cpu", None, ("float32", PLAIN)),
        (NetworkConfig(compute_dtype="float32"), "bfloat16 cpu", None, ("float32", BLOCKED)),
        (NetworkConfig(), "gpu", "cpu", ("float32", PLAIN)),  # the policy that acts is the one that learns
        (NetworkConfig(), "gpu", "bfloat16 cpu", ("float32", PLAIN)),
        (NetworkConfig(), "gpu", "old gpu", ("float32", PLAIN)),
        (NetworkConfig(), "old gpu", "gpu", ("float32", PLAIN)),
        (NetworkConfig(compute_dtype="bfloat16", conv="plain"), "cpu", None, ("bfloat16", PLAIN)),
        (NetworkConfig(compute_dtype="float32", conv="matmul"), "gpu", None, ("float32", BLOCKED)),
    ],
)
def test_form_and_arithmetic_suit_the_platform(config, platform, peer, expected):
    assert (compute_dtype(config, platform, peer).name, make_network(config, 6, platform, peer).layout) == expected


# --- Frames ----------------------------------------------------------------------------------------------------------


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
    if layout is PLAIN:
        np.testing.assert_array_equal(got, expected)


def test_pushed_frames_make_naive_stacks():
    """Over the starts of new games: a young game's stack is filled with its first frame."""
    rng = np.random.default_rng(6)
    window, age = empty_window(2)
    expected = [[], []]
    for number in range(12):
        frame = rng.integers(0, 256, (2, 84, 84), dtype=np.uint8)
        first = np.array([number in (0, 5, 7), number in (0, 9)])
        window, age, stacks = push_frame(window, age, frame, first)
        for i, seen in enumerate(expected):
            seen[:] = [frame[i]] * 4 if first[i] else [*seen[1:], frame[i]]
            np.testing.assert_array_equal(stacks[i], np.stack(seen, axis=-1))
