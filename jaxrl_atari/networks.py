"""Nature-DQN actor-critic (Mnih et al. 2015; heads and initialisation as in PPO, Schulman et al. 2017).

uint8 frame stacks `[..., 84, 84, 4]` in (channel 0 is the oldest frame), float32 logits `[..., A]` and
values `[...]` out.

Two forms of the same network share one set of parameters:

- `plain`: `lax.conv_general_dilated`, which is what a GPU wants (cuDNN).
- `matmul`: each convolution is one matrix product over patches. XLA's CPU backend compiles the gradient of
  a convolution inside `lax.scan` to a naive loop (https://github.com/jax-ml/jax/issues/12868), 10 to 30
  times slower than this form.

**Space-to-depth.** Cut a frame of 84x84 pixels into 21x21 blocks of 4x4 pixels and write the 16 pixels of a
block as 16 channels: `[84, 84] -> [21, 21, 16]`. Nothing is computed, pixels only change places. A
convolution with an 8x8 window that moves by 4 pixels then is a convolution with a 2x2 window that moves by
1 block, because 8 = 2 blocks and 4 = 1 block. Its patches are four shifted views of the blocked image side
by side, and the convolution is `patches @ weights` once the rows of the weights are put in the same order.
The second layer (4x4 window, moves by 2) is treated the same way with blocks of 2x2.

A rollout stores every frame once. `block_frames` blocks it once for all epochs, still in uint8, and
`gather_stacks` puts the four frames of each sample of a minibatch side by side: `[N, 21, 21, 4 * 16]`, the
input of `NatureActorCritic.from_blocks`.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

STACK = 4  # frames a stack


def conv_form(platform: str) -> str:
    """The form of the convolutions that is fast on a platform ("cpu", "gpu", ...): "matmul" or "plain"."""
    return "matmul" if platform == "cpu" else "plain"


def block_frames(frames: jax.Array) -> jax.Array:
    """Space-to-depth of single frames: `[..., 84, 84]` -> `[..., 21, 21, 16]`, channel = 4 * row + column."""
    *batch, _, _ = frames.shape
    return frames.reshape(*batch, 21, 4, 21, 4).swapaxes(-3, -2).reshape(*batch, 21, 21, 16)


def block_stacks(stacks: jax.Array) -> jax.Array:
    """Space-to-depth of stacks: `[..., 84, 84, 4]` -> `[..., 21, 21, 64]`, channel = 16 * frame + 4 * row + column."""
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
      age: int `[T, B]`, frames of the same game seen before step t, clipped at 3. The oldest of them fills the stack.
      index: int `[N]`, samples as `t * B + b`.

    Returns:
      `[N, 21, 21, 64]`: frame `t + 3 - min(j, age)` for j = 3, 2, 1, 0, oldest first.
    """
    t, b = jnp.divmod(index, age.shape[1])
    back = jnp.minimum(jnp.arange(STACK - 1, -1, -1), age[t, b][:, None])
    stacks = frames[t[:, None] + STACK - 1 - back, b[:, None]]  # [N, 4, 21, 21, 16]
    return jnp.moveaxis(stacks, 1, -2).reshape(-1, 21, 21, 16 * STACK)


@jax.custom_vjp
def _matmul(a: jax.Array, w: jax.Array) -> jax.Array:
    """`a [M, K] @ w [K, O]`; its weight gradient is `(g.T @ a).T`, on CPU up to 3 times faster than `a.T @ g`."""
    return a @ w


def _matmul_forward(a: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return a @ w, (a, w)


def _matmul_backward(saved: tuple[jax.Array, jax.Array], g: jax.Array) -> tuple[jax.Array, jax.Array]:
    a, w = saved
    return g @ w.T, (g.T @ a).T


_matmul.defvjp(_matmul_forward, _matmul_backward)


def _patches(x: jax.Array, size: int) -> jax.Array:
    """All windows of `size x size`, moved by 1: `[N, H, W, C]` -> `[N, H - size + 1, W - size + 1, size * size * C]`."""
    h, w = x.shape[1] - size + 1, x.shape[2] - size + 1
    return jnp.concatenate([x[:, i : i + h, j : j + w] for i in range(size) for j in range(size)], axis=-1)


class _Weights(nn.Module):
    """`kernel` and `bias` with the names, shapes and initialisation of `nn.Conv` and `nn.Dense`, in float32."""

    shape: tuple[int, ...]
    scale: float

    @nn.compact
    def __call__(self, dtype: Any) -> tuple[jax.Array, jax.Array]:
        kernel = self.param("kernel", nn.initializers.orthogonal(self.scale), self.shape)
        bias = self.param("bias", nn.initializers.zeros, self.shape[-1:])
        return kernel.astype(dtype), bias.astype(dtype)


class NatureActorCritic(nn.Module):
    """Policy and value of stacked frames. `conv` is "plain" or "matmul" (see `conv_form`); both share all parameters.

    Parameters are float32. Convolutions and the dense layer compute in `compute_dtype`, both heads in float32.
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
            kernel, bias = layer(self.compute_dtype)
            h = lax.conv_general_dilated(
                h, kernel, (stride, stride), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            h = nn.relu(h + bias)
        return h.reshape(-1, 3136)

    def _matmul_torso(self, blocks: jax.Array) -> jax.Array:
        n = blocks.shape[0]
        # The rows of the patches are ordered (block row, block column, row, column) with blocks of 2x2 outputs,
        # so that the first layer's output already is in the space-to-depth form that the second layer wants.
        kernel, bias = self.conv1(self.compute_dtype)
        patches = _patches(blocks, 2).reshape(n, 10, 2, 10, 2, 256).swapaxes(2, 3).reshape(-1, 256)
        weights = kernel.reshape(2, 4, 2, 4, STACK, 32).transpose(0, 2, 4, 1, 3, 5).reshape(256, 32)
        h = nn.relu(_matmul(patches.astype(self.compute_dtype), weights / 255) + bias)

        kernel, bias = self.conv2(self.compute_dtype)
        weights = kernel.reshape(2, 2, 2, 2, 32, 64).transpose(0, 2, 1, 3, 4, 5).reshape(512, 64)
        h = nn.relu(_matmul(_patches(h.reshape(n, 10, 10, 128), 2).reshape(-1, 512), weights) + bias)

        kernel, bias = self.conv3(self.compute_dtype)
        h = nn.relu(
            _matmul(_patches(h.reshape(n, 9, 9, 64), 3).reshape(-1, 576), kernel.reshape(576, 64)) + bias
        )
        return h.reshape(n, 3136)

    def _heads(self, features: jax.Array, batch: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
        kernel, bias = self.dense(self.compute_dtype)
        h = nn.relu(_matmul(features, kernel) + bias).astype(jnp.float32)
        kernel, bias = self.policy(jnp.float32)
        logits = h @ kernel + bias
        kernel, bias = self.value(jnp.float32)
        value = h @ kernel + bias
        return logits.reshape(*batch, self.num_actions), value.reshape(batch)
