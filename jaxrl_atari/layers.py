"""`Conv`: flax's `nn.Conv` of images, with gradients that are fast on a CPU. `in_chunks`: a torso in chunks of
samples.

XLA's CPU backend compiles the gradients of a convolution inside `lax.scan`, where an update computes them, to
naive loops (https://github.com/jax-ml/jax/issues/12868), 10 to 30 times slower than they need be. A forward
convolution is fast there. So on a CPU `Conv` writes its gradients out (`jax.custom_vjp`):

- **Space-to-depth.** Padding and cutting an image into blocks of stride x stride pixels makes any convolution one
  of stride 1, with zeros in the kernel where the stride does not divide its size.
- **The gradient for the input** of a convolution of stride 1 is a forward convolution of the output's gradient
  with the turned kernel. A barrier hides from XLA that the kernel is turned: it would else see a gradient, and
  compute the naive loop.
- **The gradient for the kernel** is a matrix product. A row of one matrix holds the columns of a window side by
  side; the other has the output's gradient, shifted for each row of the window.

Outside `cpu_gradients()`, as on a GPU, `Conv` is a plain convolution.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

CHUNK = 32
"""Samples of a chunk: activations of a chunk stay in a CPU's caches. 16 and 64 were no faster."""

UNROLLED = 8
"""Up to this many chunks are compiled without a loop: XLA runs them in parallel."""

FORM = ("NHWC", "HWIO", "NHWC")
"""Axes of images, kernels and outputs."""

Pads = tuple[tuple[int, int], tuple[int, int]]

_for_cpu: ContextVar[bool] = ContextVar("for_cpu", default=False)


@contextlib.contextmanager
def cpu_gradients(wanted: bool = True) -> Iterator[None]:
    """While a network is traced in this context, `Conv` has its gradients for CPUs, and `in_chunks` makes
    chunks."""
    token = _for_cpu.set(wanted)
    try:
        yield
    finally:
        _for_cpu.reset(token)


class Conv(nn.Module):
    """`nn.Conv` of images, with its parameters: `kernel` [height, width, C, features] and `bias` [features],
    float32.

    An input of type uint8 is divided by 255.
    """

    features: int
    kernel_size: tuple[int, int] = (3, 3)
    stride: int = 1
    padding: str = "SAME"
    kernel_init: Callable = nn.initializers.lecun_normal()
    dtype: Any = jnp.float32
    """Type of the arithmetic; the bias is added in float32."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """`[N, H, W, C]` -> float32 `[N, h, w, features]`."""
        kernel = self.param(
            "kernel", self.kernel_init, (*self.kernel_size, x.shape[-1], self.features), jnp.float32
        )
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        strides = (self.stride, self.stride)
        top_bottom, left_right = lax.padtype_to_pads(x.shape[-3:-1], self.kernel_size, strides, self.padding)
        pads = (top_bottom, left_right)
        pixels = jnp.issubdtype(x.dtype, jnp.integer)
        if _for_cpu.get():
            scaled = kernel / 255 if pixels else kernel
            y: Any = convolve(x, scaled, self.stride, pads, jnp.dtype(self.dtype))
            return y + bias
        x = x.astype(self.dtype) / 255 if pixels else x.astype(self.dtype)
        y = lax.conv_general_dilated(x, kernel.astype(self.dtype), strides, pads, dimension_numbers=FORM)
        return y + bias


def in_chunks(torso: Callable[[jax.Array], jax.Array], module: nn.Module, x: jax.Array) -> jax.Array:
    """`torso(x)` for images `[N, H, W, C]`, on a CPU in chunks of samples.

    Args:
        torso: a function of each sample alone, which uses layers of `module`. Its layers need names.
        module: the module in whose `__call__` this is.
    """
    count = -(-len(x) // CHUNK) if _for_cpu.get() else 1
    if count == 1:
        return torso(x)
    filled = jnp.pad(x, ((0, -len(x) % count), *[(0, 0)] * (x.ndim - 1)))
    body = nn.scan(
        lambda module, carry, chunk: (carry, torso(chunk)),
        variable_broadcast="params",
        split_rngs={"params": False},
        unroll=count if count <= UNROLLED else 1,
    )
    _, y = body(module, None, filled.reshape(count, -1, *x.shape[1:]))
    return y.reshape(-1, *y.shape[2:])[: len(x)]


# --- The convolution and its gradients ---------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def convolve(x: jax.Array, kernel: jax.Array, stride: int, pads: Pads, dtype: Any) -> jax.Array:
    """The convolution: uint8 or float `[N, H, W, C]`, float32 `[kh, kw, C, O]` -> float32 `[N, h, w, O]`."""
    return _forward(x, kernel, stride, pads, dtype)[0]


def _forward(x: jax.Array, kernel: jax.Array, stride: int, pads: Pads, dtype: Any) -> tuple[jax.Array, Any]:
    blocks = _block(kernel.shape, stride, pads, _as_words(x))
    y = lax.conv_general_dilated(
        _from_words(blocks).astype(dtype),
        _block_kernel(stride, kernel).astype(dtype),
        (1, 1),
        "VALID",
        dimension_numbers=FORM,
        preferred_element_type=_sum_type(dtype),
    )
    return y, (x, kernel)


def _backward(stride: int, pads: Pads, dtype: Any, saved: Any, g: jax.Array) -> tuple[Any, jax.Array]:
    x, kernel = saved
    g = g.astype(dtype)
    w, kernel_gradient = jax.vjp(partial(_block_kernel, stride), kernel)
    height, width, channels, outputs = w.shape
    block = partial(_block, kernel.shape, stride, pads)

    # For the kernel: (height * O) x (width * C), a product of shifted gradients and the columns of each window.
    # Transposed in two halves, and concatenated: XLA would else repeat the transposition for each shift.
    halves = [jnp.moveaxis(half, -1, 0) for half in jnp.array_split(_as_words(g), 2)]
    channels_first = jnp.concatenate(halves, axis=1)
    shifts = [((0, 0), (0, 0), (i, height - 1 - i), (0, 0)) for i in range(height)]
    shifted = _from_words(jnp.concatenate([jnp.pad(channels_first, shift) for shift in shifts]))
    columns = _columns(block(_as_words(x)), width).astype(dtype)
    dw = jnp.matmul(
        shifted.reshape(height * outputs, -1),
        columns.reshape(-1, width * channels),
        preferred_element_type=_sum_type(dtype),
    )
    dw = lax.optimization_barrier(dw).reshape(height, outputs, width, channels)
    (d_kernel,) = kernel_gradient(dw.transpose(0, 2, 3, 1))
    if jnp.issubdtype(x.dtype, jnp.integer):
        return np.zeros(x.shape, jax.dtypes.float0), d_kernel  # JAX's type for the gradient of an integer input

    # For the input, in blocks; then undo the blocks.
    turned = lax.optimization_barrier(w[::-1, ::-1].swapaxes(2, 3).astype(dtype))
    edges = ((height - 1, height - 1), (width - 1, width - 1))
    d_blocks = lax.conv_general_dilated(
        g, turned, (1, 1), edges, dimension_numbers=FORM, preferred_element_type=_sum_type(dtype)
    )
    (dx,) = jax.linear_transpose(block, jax.ShapeDtypeStruct(x.shape, d_blocks.dtype))(d_blocks)
    return dx.astype(x.dtype), d_kernel


convolve.defvjp(_forward, _backward)


def _sum_type(dtype: Any) -> Any:
    """Products are added in float32, or in a wider type of the arithmetic."""
    return jnp.promote_types(dtype, jnp.float32)


def _block(size: tuple[int, ...], stride: int, pads: Pads, x: jax.Array) -> jax.Array:
    """Padded, then space-to-depth: `[N, H, W, C]` -> `[N, rows, columns, stride * stride * C]`.

    Args:
        size: height and width of the kernel first.
    """
    lengths = []
    edges = []
    for kernel, (before, after), pixels in zip(size[:2], pads, x.shape[1:3], strict=True):
        outputs = (pixels + before + after - kernel) // stride + 1
        length = outputs + -(-kernel // stride) - 1
        lengths.append(length)
        # A negative edge cuts off what no window reads.
        edges.append((before, length * stride - before - pixels, 0))
    if any(map(any, edges)):
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
    if stride == 1:
        return x
    rows, columns = lengths
    x = x.reshape(-1, rows, stride, columns, stride, x.shape[-1])
    return x.swapaxes(2, 3).reshape(len(x), rows, columns, -1)


def _block_kernel(stride: int, w: jax.Array) -> jax.Array:
    """`[kh, kw, C, O]` -> `[rows, columns, stride * stride * C, O]`, with zeros where the stride does not divide
    k."""
    rows, columns = (-(-k // stride) for k in w.shape[:2])
    edges = ((0, rows * stride - w.shape[0]), (0, columns * stride - w.shape[1]), (0, 0), (0, 0))
    w = jnp.pad(w, edges).reshape(rows, stride, columns, stride, *w.shape[2:])
    return w.swapaxes(1, 2).reshape(rows, columns, -1, w.shape[-1])


def _columns(x: jax.Array, width: int) -> jax.Array:
    """The columns of each window side by side: `[N, H, w + width - 1, C]` -> `[N, H, w, width * C]`."""
    w = x.shape[2] - width + 1
    return _from_words(jnp.stack([x[:, :, j : j + w] for j in range(width)], axis=-2).reshape(*x.shape[:2], w, -1))


def _as_words(x: jax.Array) -> jax.Array:
    """A view in integers, in which XLA's CPU backend moves data fast: bfloat16 as uint16, four uint8 as one
    uint32."""
    if x.dtype == jnp.uint8 and x.shape[-1] % 4 == 0:
        return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 4), jnp.uint32)
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def _from_words(x: jax.Array) -> jax.Array:
    """The inverse of `_as_words`."""
    if x.dtype == jnp.uint32:
        return lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1)
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
