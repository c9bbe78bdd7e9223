"""The two forms of the network against flax's own layers, and the frame layout against a naive loop."""

import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_atari.networks import (
    CHUNK,
    NatureActorCritic,
    acting_params,
    block_frames,
    block_stacks,
    conv_form,
    gather_stacks,
    unblock_stacks,
)

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


@pytest.fixture(scope="module")
def stacks():
    """More than one chunk of the matmul form, and the last one not full."""
    n = CHUNK + 5
    return np.random.default_rng(0).integers(0, 256, (n, 84, 84, 4), dtype=np.uint8)


@pytest.fixture(scope="module")
def variables(stacks):
    """Parameters with non-zero biases and a policy head of ordinary size, so that an error anywhere shows."""
    params = Reference().init(jax.random.key(1), stacks)["params"]
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    return {
        "params": tree.unflatten([x + 0.02 * jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)])
    }


def scalar(outputs):
    """A loss that depends on every output with a different weight."""
    logits, value = outputs
    return (jax.nn.log_softmax(logits) * jnp.linspace(-1, 2, logits.size).reshape(logits.shape)).mean() + (
        value**2
    ).mean()


def apply(conv, method="__call__", dtype=jnp.float32):
    return lambda v, x: NatureActorCritic(ACTIONS, dtype, conv).apply(v, x, method=method)


def test_parameters_are_those_of_flax_layers(stacks):
    params = NatureActorCritic(ACTIONS, conv="matmul").init(jax.random.key(1), stacks)["params"]
    assert sum(x.size for x in jax.tree.leaves(params)) == 1_687_719
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(params))
    expected = Reference().init(jax.random.key(1), stacks)["params"]
    jax.tree.map(np.testing.assert_array_equal, params, expected)


@pytest.mark.parametrize("conv", ["plain", "matmul"])
@pytest.mark.parametrize("method", ["__call__", "from_blocks"])
def test_outputs_and_gradients_equal_flax_layers(conv, method, stacks, variables):
    x = block_stacks(stacks) if method == "from_blocks" else stacks
    outputs = jax.jit(apply(conv, method))(variables, x)
    expected = Reference().apply(variables, stacks)
    for got, want in zip(outputs, expected, strict=True):
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, atol=1e-5)

    gradients = jax.jit(jax.grad(lambda v: scalar(apply(conv, method)(v, x))))(variables)
    expected = jax.grad(lambda v: scalar(Reference().apply(v, stacks)))(variables)
    jax.tree.map(
        lambda got, want: np.testing.assert_allclose(got, want, atol=1e-5 * float(jnp.abs(want).max())),
        gradients,
        expected,
    )


@pytest.mark.parametrize("conv", ["plain", "matmul"])
@pytest.mark.parametrize("batch", [(), (1,), (2, 2), (70,)])
def test_any_batch_shape(conv, batch, variables):
    x = np.random.default_rng(3).integers(0, 256, (*batch, 84, 84, 4), dtype=np.uint8)
    logits, value = apply(conv)(variables, x)
    assert (logits.shape, value.shape) == ((*batch, ACTIONS), batch)
    expected = Reference().apply(variables, x.reshape(-1, 84, 84, 4))
    np.testing.assert_allclose(logits.reshape(-1, ACTIONS), expected[0], atol=1e-5)
    np.testing.assert_allclose(value.reshape(-1), expected[1], atol=1e-5)


@pytest.mark.parametrize("conv", ["plain", "matmul"])
def test_bfloat16_is_close(conv, stacks, variables):
    logits, value = apply(conv, dtype=jnp.bfloat16)(variables, stacks)
    assert logits.dtype == value.dtype == jnp.float32
    expected = Reference().apply(variables, stacks)
    assert float(jnp.abs(logits - expected[0]).max()) < 0.05 * float(jnp.abs(expected[0]).max())
    assert float(jnp.abs(value - expected[1]).max()) < 0.05 * float(jnp.abs(expected[1]).max())
    assert float(jnp.abs(logits - expected[0]).max()) > 1e-5  # it did compute in another type

    gradients = jax.jit(jax.grad(lambda v: scalar(apply(conv, dtype=jnp.bfloat16)(v, stacks))))(variables)
    expected = jax.grad(lambda v: scalar(Reference().apply(v, stacks)))(variables)
    error = jax.tree.map(lambda got, want: jnp.linalg.norm(got - want) / jnp.linalg.norm(want), gradients, expected)
    assert all(g.dtype == jnp.float32 for g in jax.tree.leaves(gradients))
    assert max(map(float, jax.tree.leaves(error))) < 0.1, error


@pytest.mark.parametrize("conv", ["plain", "matmul"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_acting_params_change_no_bit_of_the_outputs(conv, dtype, stacks, variables):
    prepared = acting_params(variables["params"], dtype)
    assert prepared["dense"]["kernel"].dtype == dtype
    run = jax.jit(apply(conv, dtype=dtype))
    for output, expected in zip(run({"params": prepared}, stacks), run(variables, stacks), strict=True):
        np.testing.assert_array_equal(output, expected)


def test_blocks_and_back(stacks):
    blocks = block_stacks(jnp.asarray(stacks))
    assert (blocks.shape, blocks.dtype) == ((len(stacks), 21, 21, 64), jnp.uint8)
    np.testing.assert_array_equal(unblock_stacks(blocks), stacks)
    n, y, x, frame = 3, 50, 33, 2  # one pixel, its place worked out by hand
    assert blocks[n, 12, 8, 16 * frame + 4 * 2 + 1] == stacks[n, y, x, frame]


def test_gather_stacks_equals_naive_loop():
    steps, envs = 7, 3
    rng = np.random.default_rng(4)
    frames = rng.integers(0, 256, (steps + 3, envs, 84, 84), dtype=np.uint8)
    age = rng.integers(0, 4, (steps, envs))
    assert set(age.ravel()) == {0, 1, 2, 3}
    index = rng.permutation(steps * envs)
    got = unblock_stacks(gather_stacks(block_frames(jnp.asarray(frames)), jnp.asarray(age), jnp.asarray(index)))
    for row, sample in enumerate(index):
        t, b = sample // envs, sample % envs
        for channel, j in enumerate((3, 2, 1, 0)):
            np.testing.assert_array_equal(got[row, :, :, channel], frames[t + 3 - min(j, age[t, b]), b])


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the slow path is XLA's CPU backend's")
def test_no_convolution_in_compiled_loop_on_cpu(stacks, variables):
    def compiled(conv):
        def loss(v, x):
            return scalar(apply(conv)(v, x))

        def step(v, x):
            return jax.tree.map(lambda p, g: p - 0.1 * g, v, jax.grad(loss)(v, x)), None

        return jax.jit(lambda v, xs: jax.lax.scan(step, v, xs)[0]).lower(variables, stacks[None]).compile().as_text()

    pattern = re.compile(r"= \S+ convolution\(")
    assert not pattern.search(compiled(conv_form("cpu")))
    assert pattern.search(compiled("plain"))  # the pattern does find one


def test_form_of_platforms():
    assert conv_form("cpu") == "matmul"
    assert conv_form("gpu") == conv_form("tpu") == "plain"
