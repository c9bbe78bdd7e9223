"""The Nature-DQN actor-critic as matrix products, for XLA's CPU backend.

`apply` computes what `networks.NatureActorCritic` computes, from the same parameters. It exists because of one
defect: XLA's CPU backend compiles the gradient of a convolution inside `lax.scan` to a naive loop
(https://github.com/jax-ml/jax/issues/12868), 10 to 30 times slower than the products here.

**Convolutions as products.** The input is blocked (`frames.BLOCKED`): 84x84 pixels are 21x21 blocks of 4x4. An 8x8
window that moves by 4 pixels is then a 2x2 window that moves by 1 block, because 8 = 2 blocks and 4 = 1 block. The
output of the first layer is blocked again, 2x2, so that the second layer's 4x4 window with stride 2 becomes a 2x2
window with stride 1 as well. A window with stride 1 is cheap to lay out as a matrix row: `_patches` stacks shifted
views. `_torso_in_chunks` puts the weights in the same order, and applies the division of pixels by 255 to the
first layer's weights rather than to every pixel.

**Gradients.** They are written out (`jax.custom_vjp`), because XLA's own derivative of these programs is slow in
two ways. First, a weight gradient is `patches.T @ g`, and XLA turns `patches.T` into a layout change: a
column-major matrix, with which its product takes up to twice as long. `_layer_backward` and
`_first_layer_backward` therefore compute the transposed product `g.T @ patches` from a `g.T` that is moved in
memory, and transpose the small result. An `optimization_barrier` stops XLA from simplifying this back.
`_dense_backward`, whose result is large, moves x instead. Second, JAX's derivative saves patches for the backward
pass. In a loop over chunks, rebuilding them is faster than reading them from memory; where chunks are unrolled,
XLA itself decides, and keeps them.

**bfloat16.** XLA's CPU backend copies bfloat16 by way of float32 and integers as they are, so data that is only
moved is viewed as uint16 (`_as_uint16`). Products accumulate in float32.

**Fusion.** XLA's CPU backend fuses a transposition into each of its uses, where it is repeated. A barrier stops
the simplification, which comes first, but not fusion: this backend removes barriers before it. A concatenation
stops fusion, so `_first_layer_backward` transposes its gradient in two halves and concatenates them. Windows that
lie side by side are stacked on the last axis but one, which XLA writes in one pass; before a concatenation along
the last axis it copies every operand. In a loop over chunks, XLA also fuses the slice that reads a chunk's saved
output into the windows of it, which then take 10 times as long. There the first layer's output is saved in two
halves, to be concatenated.

**Chunks.** The torso works on a part of the samples at a time (`chunk_size`), so that activations stay in the
CPU's caches.
"""

import functools
from functools import partial
from typing import Any

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_atari.layers import Conv
from jaxrl_atari.networks import STACK, Observation, Outputs

UNROLLED = 8
"""Up to this many chunks are compiled without a loop, which would copy what each keeps for its gradient."""


class Computed(nn.Module):
    """The network that is computed here, layer by layer in float32. `forms.py` compares a network with it."""

    num_actions: int

    @nn.compact
    def __call__(self, stacks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """uint8 `[N, 84, 84, 4]` -> logits float32 `[N, A]`, value float32 `[N]`."""
        dense = partial(nn.Dense, precision="highest")
        x = stacks
        for name, features, size, stride in (("conv1", 32, 8, 4), ("conv2", 64, 4, 2), ("conv3", 64, 3, 1)):
            x = nn.relu(Conv(features, (size, size), stride, "VALID", name=name)(x))
        x = nn.relu(dense(512, name="dense")(x.reshape(*x.shape[:-3], -1)))
        return dense(self.num_actions, name="policy")(x), dense(1, name="value")(x)[..., 0]


def chunk_size(platform: str, dtype: Any) -> int:
    """The largest number of samples in a chunk.

    On CPUs these sizes were the fastest: in bfloat16, AMX (Intel's matrix units) needs large products, and other
    CPUs gain more from their caches. In bfloat16, a GPU, which has not been measured, gets fewer kernels.

    Args:
        platform: platform as `hardware.gpus.network_platform` names it.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return 32
    return 16 if platform in ("cpu", "bfloat16 cpu") else 64


def apply(params: Any, observation: Observation, dtype: Any, chunk: int) -> Outputs:
    """Policy and value of blocked frame stacks.

    Args:
        params: parameters of `networks.NatureActorCritic`.
        observation: its stacks are uint8 `[N, 21, 21, 64]`; a channel is (frame, row, column) of a block.
        dtype: type of the torso's arithmetic, float32 or bfloat16. The heads compute in float32.
        chunk: `chunk_size`.

    """
    chex.assert_type(observation.stacks, jnp.uint8)  # pixels, which are divided by 255
    features = _torso_in_chunks(params, observation.stacks, dtype, chunk).astype(dtype)
    dense = params["dense"]
    policy = params["policy"]
    value = params["value"]
    hidden = _dense(features, dense["kernel"]) + dense["bias"].astype(dtype)
    hidden = nn.relu(hidden).astype(jnp.float32)
    head = partial(jnp.matmul, hidden, precision="highest")  # on a GPU, float32 and not TF32
    logits = head(policy["kernel"]) + policy["bias"]
    return Outputs(logits, (head(value["kernel"]) + value["bias"])[:, 0], features=hidden)


def acting_params(params: Any, dtype: Any) -> Any:
    """The parameters with the dense kernel, 95% of them all, in `dtype` already: acting reads it at every step."""
    return {**params, "dense": {**params["dense"], "kernel": params["dense"]["kernel"].astype(dtype)}}


def _torso_in_chunks(params: Any, blocks: jax.Array, dtype: Any, size: int) -> jax.Array:
    """The three convolutions: uint8 `[N, 21, 21, 64]` -> float32 `[N, 3136]`."""
    # Kernels [height, width, in, out] in the order of the blocked input: (place in the 2x2 window, channel).
    k1, k2, k3 = (params[name]["kernel"] for name in ("conv1", "conv2", "conv3"))
    b1, b2, b3 = (params[name]["bias"] for name in ("conv1", "conv2", "conv3"))
    w1 = k1.reshape(2, 4, 2, 4, STACK, 32).transpose(4, 1, 3, 0, 2, 5).reshape(64, 4 * 32) / 255
    w2 = k2.reshape(2, 2, 2, 2, 32, 64).transpose(0, 2, 1, 3, 4, 5).reshape(-1, 64)
    w3 = k3.reshape(-1, 64)

    n = blocks.shape[0]
    count = -(-n // size)
    loop = count > UNROLLED

    def torso(chunk: jax.Array) -> jax.Array:
        return _torso(dtype, loop, chunk, w1, b1, w2, b2, w3, b3)

    if count == 1:
        return torso(blocks)
    filled = jnp.pad(blocks, ((0, -n % count), (0, 0), (0, 0), (0, 0)))
    chunks = filled.reshape(count, -1, *blocks.shape[1:])
    _, features = lax.scan(lambda _, chunk: (None, torso(chunk)), None, chunks, unroll=not loop)
    return features.reshape(-1, 3136)[:n]


# --- Building blocks ---------------------------------------------------------------------------------------------


def _as_uint16(x: jax.Array) -> jax.Array:
    """A bfloat16 array viewed as uint16; any other array as it is."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _as_bfloat16(x: jax.Array) -> jax.Array:
    """The inverse of `_as_uint16`."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a @ b`, accumulated in float32: `[M, K]`, `[K, N]` -> float32 `[M, N]`."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _transposed(x: jax.Array) -> jax.Array:
    """The transpose of the matrix whose rows are the last axis of x: `[..., C]`, three or more axes -> `[C, K]`.

    `moveaxis` on three or more axes moves the data; XLA turns the `.T` of a matrix into a layout change instead.
    """
    return _as_bfloat16(jnp.moveaxis(_as_uint16(x), -1, 0).reshape(x.shape[-1], -1))


def _offsets(size: int) -> list[tuple[int, int]]:
    """The (row, column) offsets in a square window."""
    return [(i, j) for i in range(size) for j in range(size)]


def _patches(x: jax.Array, size: int) -> jax.Array:
    """Every window of `[N, H, W, C]` as a row: `[N * (H-size+1) * (W-size+1), size * size * C]`."""
    _, height, width, channels = x.shape
    h = height - size + 1
    v = width - size + 1
    windows = [_as_uint16(x)[:, i : i + h, j : j + v] for i, j in _offsets(size)]
    return _as_bfloat16(jnp.stack(windows, axis=-2).reshape(-1, size * size * channels))


# --- Layers 2 and 3 ----------------------------------------------------------------------------------------------


def _layer(x: jax.Array, w: jax.Array, b: jax.Array, size: int) -> jax.Array:
    """`relu(convolution(x, w) + b)` with stride 1: `[N, H, W, C]` -> `[N, H-size+1, W-size+1, O]`.

    `w` is float32 `[size * size * C, O]`.
    """
    n, height, width, _ = x.shape
    out = nn.relu(_product(_patches(x, size), w.astype(x.dtype)) + b).astype(x.dtype)
    return out.reshape(n, height - size + 1, width - size + 1, -1)


def _layer_backward(
    x: jax.Array, w: jax.Array, out: jax.Array, g: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients for x, w and b of `_layer`, float32, from the gradient g for its output."""
    n, h, v, outputs = g.shape
    g = jnp.where(out > 0, g, 0)
    db = g.sum((0, 1, 2))
    g = g.astype(x.dtype)
    dw = lax.optimization_barrier(_product(_transposed(g), _patches(x, size))).T
    w_transposed = _transposed(w.astype(x.dtype).reshape(size * size, -1, outputs))
    dx = _product(g.reshape(-1, outputs), w_transposed).reshape(n, h, v, size * size, -1)
    # Each input was read at every place of the window: shift the gradients back and add them.
    pads = [((0, 0), (i, size - 1 - i), (j, size - 1 - j), (0, 0)) for i, j in _offsets(size)]
    shifted = [jnp.pad(dx[..., place, :], pad) for place, pad in enumerate(pads)]
    return functools.reduce(jnp.add, shifted), dw, db


# --- Layer 1 -----------------------------------------------------------------------------------------------------


def _first_layer(blocks: jax.Array, w: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    """`relu(convolution(blocks, w) + b)` with a 2x2 window, its result blocked 2x2 for the next layer.

    Each block is multiplied by the weights of all four places that it takes in a window, and the shifted products
    are added. Patches of the input, four times as large and in floating point, are never written to memory.

    Args:
        blocks: uint8 `[N, 21, 21, 64]`; w: float32 `[64, 4 * 32]`, place by place; b: float32 `[32]`.

    Returns:
        `[N, 10, 10, 4 * 32]`
    """
    products = _product(blocks.reshape(-1, 64).astype(dtype), w.astype(dtype)).reshape(-1, 21, 21, 4, 32)
    shifted = [products[:, i : i + 20, j : j + 20, place] for place, (i, j) in enumerate(_offsets(2))]
    out = _as_uint16(nn.relu(functools.reduce(jnp.add, shifted) + b).astype(dtype))
    return _as_bfloat16(
        jnp.stack([out[:, i::2, j::2] for i, j in _offsets(2)], axis=-2).reshape(-1, 10, 10, 4 * 32)
    )


def _first_layer_backward(blocks: jax.Array, out: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradients for w and b of `_first_layer`, float32, from the gradient g for its output."""
    g = jnp.where(out > 0, g, 0)
    db = g.sum((0, 1, 2)).reshape(4, 32).sum(0)
    g = _as_uint16(g.astype(out.dtype))
    half = len(g) // 2
    g = jnp.concatenate([_channels_first(g[:half]), _channels_first(g[half:])], axis=1)
    # Each product was used in one shifted place: shift the gradient back to it, with zeros around.
    pads = [((0, 0), (0, 0), (i, 1 - i), (j, 1 - j)) for i, j in _offsets(2)]
    g_products = _as_bfloat16(jnp.concatenate([jnp.pad(g, pad) for pad in pads]).reshape(4 * 32, -1))
    dw = _product(g_products, blocks.reshape(-1, 64).astype(out.dtype))
    return lax.optimization_barrier(dw).T, db


def _channels_first(g: jax.Array) -> jax.Array:
    """A gradient for the output of `_first_layer`, `[N, 10, 10, 4 * 32]`, without blocks: `[32, N, 20, 20]`."""
    # The first 64 channels are the even rows, the last 64 the odd ones; in each of these, columns interleave
    # already.
    return jnp.moveaxis(jnp.stack([g[..., :64], g[..., 64:]], axis=2).reshape(-1, 20, 20, 32), -1, 0)


# --- The torso ---------------------------------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _torso(dtype: Any, loop: bool, blocks: jax.Array, *weights: jax.Array) -> jax.Array:
    """The three convolutions of one chunk: uint8 `[N, 21, 21, 64]` -> float32 `[N, 3136]`.

    `weights` are w and b of each layer. Only the input and the layers' outputs are saved for the backward pass.
    `loop`: the chunks are computed in a loop.
    """
    return _torso_forward(dtype, loop, blocks, *weights)[0]


def _torso_forward(dtype: Any, loop: bool, blocks: jax.Array, *weights: jax.Array) -> tuple[jax.Array, Any]:
    w1, b1, w2, b2, w3, b3 = weights
    out1 = _first_layer(blocks, w1, b1, dtype)
    out2 = _layer(out1, w2, b2, 2)
    out3 = _layer(out2, w3, b3, 3)
    parts1 = jnp.array_split(_as_uint16(out1), 2 if loop else 1)
    saved2 = _as_uint16(out2)
    saved3 = _as_uint16(out3)
    return out3.reshape(-1, 3136).astype(jnp.float32), (blocks, w2, w3, parts1, saved2, saved3)


def _torso_backward(dtype: Any, loop: bool, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    blocks, w2, w3, parts1, saved2, saved3 = saved
    out1, out2, out3 = map(_as_bfloat16, (jnp.concatenate(parts1), saved2, saved3))
    g, dw3, db3 = _layer_backward(out2, w3, out3, g.reshape(out3.shape), 3)
    g, dw2, db2 = _layer_backward(out1, w2, out2, g, 2)
    dw1, db1 = _first_layer_backward(blocks, out1, g)
    no_gradient = np.zeros(blocks.shape, jax.dtypes.float0)  # JAX's type for the gradient of an integer input
    return no_gradient, dw1, db1, dw2, db2, dw3, db3


_torso.defvjp(_torso_forward, _torso_backward)


@jax.custom_vjp
def _dense(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w` in the type of x, accumulated in float32: `[N, 3136]`, `[3136, O]` -> float32 `[N, O]`.

    Its own gradient keeps both products in the type of x, row-major, and the gradient for w in float32; JAX's
    would compute the products in float32 and transposed.
    """
    return _product(x, w.astype(x.dtype))


def _dense_forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    w = w.astype(x.dtype)
    return _product(x, w), (x, w)


def _dense_backward(saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    g = g.astype(x.dtype)
    # Both are contracted over their last axis: XLA's CPU kernels read a right operand that is transposed as it
    # lies.
    dx = lax.dot_general(g, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    # A transpose by way of three axes, which moves the data; see `_transposed`.
    x_transposed = _as_bfloat16(_as_uint16(x).reshape(-1, 49, 64).transpose(1, 2, 0).reshape(3136, -1))
    return dx.astype(x.dtype), _product(x_transposed, g)


_dense.defvjp(_dense_forward, _dense_backward)
