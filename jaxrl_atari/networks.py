"""Nature-DQN actor-critic (Mnih et al. 2015; heads and initialisation as in PPO, Schulman et al. 2017).

uint8 frame stacks `[..., 84, 84, 4]` in (channel 0 is the oldest frame), float32 logits `[..., A]` and
values `[...]` out.

Two forms of the same network share one set of parameters:

- `plain`: `lax.conv_general_dilated`, which is what a GPU wants (cuDNN).
- `matmul`: each convolution is one matrix product (`_first_layer`, `_layer`), and so is each of its gradients. XLA's
  CPU backend compiles the gradient of a convolution inside `lax.scan` to a naive loop
  (https://github.com/jax-ml/jax/issues/12868), 10 to 30 times slower than this form.

**Space-to-depth.** Cut a frame of 84x84 pixels into 21x21 blocks of 4x4 pixels and write the 16 pixels of a
block as 16 channels: `[84, 84] -> [21, 21, 16]`. Nothing is computed, pixels only change places. A
convolution with an 8x8 window that moves by 4 pixels then is a convolution with a 2x2 window that moves by
1 block, because 8 = 2 blocks and 4 = 1 block; the weights only change places, too. The second layer (4x4
window that moves by 2) becomes a 2x2 window that moves by 1 in the same way, with blocks of 2x2.

A rollout stores every frame once. `block_frames` blocks it once for all epochs, still in uint8, and
`gather_stacks` puts the four frames of each sample of a minibatch side by side: `[N, 21, 21, 4 * 16]`, the
input of `NatureActorCritic.from_blocks`.
"""

import functools
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

STACK = 4  # frames a stack
BLOCKED = (21, 21, 16)  # shape of a frame after `block_frames`
CHUNK = 16  # samples that the matmul form works on at a time: their activations stay in the CPU's caches


def conv_form(platform: str) -> str:
    """The form of the convolutions that is fast on a platform ("cpu", "gpu", ...): "matmul" or "plain"."""
    return "matmul" if platform == "cpu" else "plain"


def block_frames(frames: jax.Array) -> jax.Array:
    """Space-to-depth of single frames: `[..., 84, 84]` -> `[..., 21, 21, 16]`, channel = 4 * row + column."""
    *batch, _, _ = frames.shape
    return frames.reshape(*batch, 21, 4, 21, 4).swapaxes(-3, -2).reshape(*batch, 21, 21, 16)


def block_stacks(stacks: jax.Array) -> jax.Array:
    """Space-to-depth of stacks: `[..., 84, 84, 4]` -> `[..., 21, 21, 64]`, 64 = (frame, row, column)."""
    blocks = block_frames(jnp.moveaxis(stacks, -1, -3))
    return jnp.moveaxis(blocks, -4, -2).reshape(*stacks.shape[:-3], 21, 21, 16 * STACK)


def unblock_stacks(blocks: jax.Array) -> jax.Array:
    """The inverse of `block_stacks`: `[..., 21, 21, 64]` -> `[..., 84, 84, 4]`."""
    batch = blocks.shape[:-3]
    pixels = blocks.reshape(*batch, 21, 21, STACK, 4, 4)
    n = len(batch)
    order = (*range(n), n, n + 3, n + 1, n + 4, n + 2)  # block row, row, block column, column, frame
    return pixels.transpose(order).reshape(*batch, 84, 84, STACK)


def gather_stacks(frames: jax.Array, age: jax.Array, index: jax.Array) -> jax.Array:
    """Blocked stacks of chosen samples of a rollout that stores each frame once.

    Args:
      frames: `[T + 3, B, 21, 21, 16]`, from `block_frames`; `frames[t + 3]` is the newest frame at step t.
      age: int `[T, B]`, frames of the same game seen before step t, clipped at 3;
        the oldest of them fills the stack.
      index: int `[N]`, samples as `t * B + b`.

    Returns:
      `[N, 21, 21, 64]`: frame `t + 3 - min(j, age)` for j = 3, 2, 1, 0, oldest first.
    """
    t, b = jnp.divmod(index, age.shape[1])
    back = jnp.minimum(jnp.arange(STACK - 1, -1, -1), age[t, b][:, None])
    # Four gathers side by side: XLA's CPU backend takes 6 times as long over one of `[N, 4, ...]` and a transposition.
    return jnp.concatenate([frames[t + STACK - 1 - back[:, j], b] for j in range(STACK)], axis=-1)


def _bits(x: jax.Array) -> jax.Array:
    """bfloat16 as uint16: XLA's CPU backend moves bfloat16 by way of float32, and integers as they are."""
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _numbers(x: jax.Array) -> jax.Array:
    """The inverse of `_bits`."""
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a @ b`, summed up in float32: `[M, K]`, `[K, N]` -> float32 `[M, N]`."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _columns(x: jax.Array) -> jax.Array:
    """`[..., C]` of three or more axes as the transposed matrix of its rows, `[C, K]`, moved in memory.

    Of a matrix's `x.T` XLA makes one that lies column by column, with which a product takes up to twice as long.
    """
    return _numbers(jnp.moveaxis(_bits(x), -1, 0).reshape(x.shape[-1], -1))


def _places(size: int) -> list[tuple[int, int]]:
    """Places in a square window, row by row."""
    return [(i, j) for i in range(size) for j in range(size)]


def _patches(x: jax.Array, size: int) -> jax.Array:
    """Every window of `[N, H, W, C]` as a row: `[N * (H-size+1) * (W-size+1), size * size * C]`."""
    _, height, width, channels = x.shape
    h, v = height - size + 1, width - size + 1
    windows = [_bits(x)[:, i : i + h, j : j + v] for i, j in _places(size)]
    return _numbers(jnp.concatenate(windows, axis=-1).reshape(-1, size * size * channels))


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
    """The gradients for x, w and b of `_layer`, float32, from `g` for its output."""
    n, h, v, outputs = g.shape
    g = jnp.where(out > 0, g, 0)
    db = g.sum((0, 1, 2))
    g = g.astype(x.dtype)
    # Patches are quicker made again than read from memory. The barrier: XLA would make it patches.T @ g.
    dw = lax.optimization_barrier(_product(_columns(g), _patches(x, size))).T
    w_columns = _columns(w.astype(x.dtype).reshape(size * size, -1, outputs))
    dx = _product(g.reshape(-1, outputs), w_columns).reshape(n, h, v, size * size, -1)
    pads = [((0, 0), (i, size - 1 - i), (j, size - 1 - j), (0, 0)) for i, j in _places(size)]
    return functools.reduce(jnp.add, [jnp.pad(dx[..., place, :], pad) for place, pad in enumerate(pads)]), dw, db


def _first_layer(blocks: jax.Array, w: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    """`relu(convolution(blocks, w) + b)` with a 2x2 window, and space-to-depth of the result for the next layer.

    Each block is multiplied by the weights of all four places that it takes in a window, and the shifted products are
    added up. Patches of the input, four times as large and in float, are never written to memory.

    Args:
      blocks: uint8 `[N, 21, 21, 64]`; w: float32 `[64, 4 * 32]`, place by place; b: float32 `[32]`.

    Returns:
      `[N, 10, 10, 4 * 32]`
    """
    products = _product(blocks.reshape(-1, 64).astype(dtype), w.astype(dtype)).reshape(-1, 21, 21, 4, 32)
    shifted = [products[:, i : i + 20, j : j + 20, place] for place, (i, j) in enumerate(_places(2))]
    out = _bits(nn.relu(functools.reduce(jnp.add, shifted) + b).astype(dtype))
    return _numbers(jnp.concatenate([out[:, i::2, j::2] for i, j in _places(2)], axis=-1))


def _first_layer_backward(blocks: jax.Array, out: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradients for w and b of `_first_layer`, float32, from `g` for its output."""
    g = jnp.where(out > 0, g, 0)
    db = g.sum((0, 1, 2)).reshape(4, 32).sum(0)
    g = _bits(g.astype(out.dtype))
    g = jnp.stack([g[..., :64], g[..., 64:]], axis=2).reshape(-1, 20, 20, 32)  # depth-to-space
    # Each product was used in one shifted place: shift the gradient back to it, with zeros around.
    g = jnp.moveaxis(g, -1, 0)
    pads = [((0, 0), (0, 0), (i, 1 - i), (j, 1 - j)) for i, j in _places(2)]
    g_products = _numbers(jnp.concatenate([jnp.pad(g, pad) for pad in pads]).reshape(4 * 32, -1))
    dw = _product(g_products, blocks.reshape(-1, 64).astype(out.dtype))
    return lax.optimization_barrier(dw).T, db


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _torso(dtype: Any, blocks: jax.Array, *weights: jax.Array) -> jax.Array:
    """The three convolutions: uint8 `[N, 21, 21, 64]` -> features, float32 `[N, 3136]`.

    `weights` are w and b of each layer. For the gradient only the input and the layers' outputs are saved.
    """
    return _torso_forward(dtype, blocks, *weights)[0]


def _torso_forward(dtype: Any, blocks: jax.Array, *weights: jax.Array) -> tuple[jax.Array, Any]:
    w1, b1, w2, b2, w3, b3 = weights
    out1 = _first_layer(blocks, w1, b1, dtype)
    out2 = _layer(out1, w2, b2, 2)
    out3 = _layer(out2, w3, b3, 3)
    return out3.reshape(-1, 3136).astype(jnp.float32), (blocks, w2, w3, [_bits(x) for x in (out1, out2, out3)])


def _torso_backward(dtype: Any, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    blocks, w2, w3, outs = saved
    out1, out2, out3 = map(_numbers, outs)
    g, dw3, db3 = _layer_backward(out2, w3, out3, g.reshape(out3.shape), 3)
    g, dw2, db2 = _layer_backward(out1, w2, out2, g, 2)
    dw1, db1 = _first_layer_backward(blocks, out1, g)
    return np.zeros(blocks.shape, jax.dtypes.float0), dw1, db1, dw2, db2, dw3, db3


_torso.defvjp(_torso_forward, _torso_backward)


@jax.custom_vjp
def _dense(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w` as `_product`, and its gradients as products of the same type: `[N, 3136]`, `[3136, O]` -> `[N, O]`."""
    return _product(x, w)


def _dense_forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    return _product(x, w), (x, w)


def _dense_backward(saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    g = g.astype(x.dtype)
    dx = _product(g, _columns(w.reshape(49, 64, -1)))
    x_columns = _numbers(_bits(x).reshape(-1, 49, 64).transpose(1, 2, 0).reshape(3136, -1))
    return dx.astype(x.dtype), _product(x_columns, g).astype(w.dtype)


_dense.defvjp(_dense_forward, _dense_backward)


def acting_params(params: Any, dtype: Any) -> Any:
    """The parameters as acting reads them at every step: the dense layer's weights, 95% of all, in `dtype` already.

    With the network's compute dtype its outputs are the same bit for bit.
    """
    return {**params, "dense": {**params["dense"], "kernel": params["dense"]["kernel"].astype(dtype)}}


class _Weights(nn.Module):
    """`kernel` and `bias` named, shaped and initialised as in `nn.Conv` and `nn.Dense`, float32."""

    shape: tuple[int, ...]
    scale: float

    @nn.compact
    def __call__(self, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
        kernel = self.param("kernel", nn.initializers.orthogonal(self.scale), self.shape)
        bias = self.param("bias", nn.initializers.zeros, self.shape[-1:])
        return kernel.astype(dtype), bias.astype(dtype)


class NatureActorCritic(nn.Module):
    """Policy and value of stacked frames. `conv` is "plain" or "matmul": see `conv_form`.

    Parameters are float32. The torso computes in `compute_dtype`, both heads in float32.
    """

    num_actions: int
    compute_dtype: Any = jnp.float32
    conv: str = "plain"

    def setup(self) -> None:
        self.conv1 = _Weights((8, 8, STACK, 32), 2**0.5)
        self.conv2 = _Weights((4, 4, 32, 64), 2**0.5)
        self.conv3 = _Weights((3, 3, 64, 64), 2**0.5)
        self.dense = _Weights((3136, 512), 2**0.5)
        self.policy = _Weights((512, self.num_actions), 0.01)
        self.value = _Weights((512, 1), 1.0)

    def __call__(self, stacks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """uint8 `[..., 84, 84, 4]` -> logits float32 `[..., A]`, value float32 `[...]`."""
        batch = stacks.shape[:-3]
        stacks = stacks.reshape(-1, 84, 84, STACK)
        if self.conv == "matmul":
            return self._heads(self._matmul_torso(block_stacks(stacks)), batch)
        return self._heads(self._plain_torso(stacks), batch)

    def from_blocks(self, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The same for stacks that are blocked already: uint8 `[..., 21, 21, 64]`."""
        batch = blocks.shape[:-3]
        blocks = blocks.reshape(-1, 21, 21, 16 * STACK)
        if self.conv == "matmul":
            return self._heads(self._matmul_torso(blocks), batch)
        return self._heads(self._plain_torso(unblock_stacks(blocks)), batch)

    def _plain_torso(self, stacks: jax.Array) -> jax.Array:
        h = stacks.astype(self.compute_dtype) / 255
        for layer, stride in ((self.conv1, 4), (self.conv2, 2), (self.conv3, 1)):
            kernel, bias = layer()
            h = lax.conv_general_dilated(
                h,
                kernel.astype(self.compute_dtype),
                (stride, stride),
                "VALID",
                dimension_numbers=("NHWC", "HWIO", "NHWC"),
            )
            # The sum in float32, for that is how the gradient of the bias then adds up its thousands of terms.
            h = nn.relu(h.astype(jnp.float32) + bias).astype(self.compute_dtype)
        return h.reshape(-1, 3136)

    def _matmul_torso(self, blocks: jax.Array) -> jax.Array:
        # The weights in the order of the blocked input: (place, channel), the channels being (frame, row, column).
        k1, b1 = self.conv1()
        w1 = k1.reshape(2, 4, 2, 4, STACK, 32).transpose(4, 1, 3, 0, 2, 5).reshape(64, 4 * 32) / 255
        k2, b2 = self.conv2()
        w2 = k2.reshape(2, 2, 2, 2, 32, 64).transpose(0, 2, 1, 3, 4, 5).reshape(-1, 64)
        k3, b3 = self.conv3()
        w3 = k3.reshape(-1, 64)

        def torso(chunk: jax.Array) -> jax.Array:
            return _torso(self.compute_dtype, chunk, w1, b1, w2, b2, w3, b3)

        n = blocks.shape[0]
        if n <= CHUNK:
            return torso(blocks)
        filled = jnp.pad(blocks, ((0, -n % CHUNK), (0, 0), (0, 0), (0, 0)))
        return lax.map(torso, filled.reshape(-1, CHUNK, *blocks.shape[1:])).reshape(-1, 3136)[:n]

    def _heads(self, features: jax.Array, batch: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        kernel, bias = self.dense(self.compute_dtype)
        features = features.astype(self.compute_dtype)
        h = _dense(features, kernel) if self.conv == "matmul" else features @ kernel
        h = nn.relu(h + bias).astype(jnp.float32)
        kernel, bias = self.policy(jnp.float32)
        logits = h @ kernel + bias
        kernel, bias = self.value(jnp.float32)
        value = h @ kernel + bias
        return logits.reshape(*batch, self.num_actions), value.reshape(batch)
