"""`Conv`: flax's `nn.Conv` of images, with gradients that are fast on a CPU. `in_chunks`: a torso in chunks.

`for_cpu`, which `networks.Network` sets while a network is applied, says whether they compute for a CPU. If not,
as on a GPU, a `Conv` is a plain convolution, and nothing is cut.

XLA's CPU backend compiles the gradients of a convolution inside `lax.scan`, where an update computes them, to
naive loops (https://github.com/jax-ml/jax/issues/12868). With them, two gradient steps of `impala` took about 20
times as long (benchmarks/NOTES.md, "The layer and the form by hand"). A forward convolution is fast there. So
`cpu_convolution` defines its own gradients (`jax.custom_vjp`):

- **Space-to-depth** (`space_to_depth`, `block_kernel`). The image is padded and cut into *blocks* of stride x
  stride pixels, whose pixels become channels. That makes any convolution one of stride 1, with zeros in the
  kernel where the stride does not divide its size.
- **The gradient for the input** (`input_gradient`) is then a forward convolution: of the output's gradient, with
  the kernel turned by 180 degrees.
- **The gradient for the kernel** (`kernel_gradient`) is a matrix product: of the output's gradient, and the pixels
  of each row of a window, *side by side*.

What XLA's CPU backend does badly, and what is done instead. The code refers to these rules by their names, and so
does `nature.py`:

    words               Copies of bfloat16 go by way of float32; copies of integers do not, and four uint8 are
                        fastest as one uint32. So data that is only moved is viewed as integers (`as_words`).
    halves              A transposition is fused into each of its uses, and repeated there. An
                        `optimization_barrier` does not help, because XLA removes it before this backend fuses. A
                        concatenation stops the fusion. So data is transposed in two halves, which are
                        concatenated.
    stack               A concatenation along the last axis first copies every operand. So arrays are stacked on
                        the last axis but one, which takes one pass.
    moved transpose     A product with a transposed left operand, as X' G for the gradient of a kernel, takes up to
                        twice as long if XLA only relabels X as column-major. So G' X is computed, with G' copied
                        into row-major order, and its small result is transposed. An `optimization_barrier` keeps
                        XLA from simplifying this back: it stays until the algebraic simplification is over.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_atari.errors import UserError

DIMENSION_NUMBERS = ("NHWC", "HWIO", "NHWC")
"""Axes of images, kernels and outputs."""

Pads = tuple[tuple[int, int], tuple[int, int]]
"""Zeros around an image: (above, below), (left, right)."""

CHUNK = 32
"""Samples of a chunk: activations of a chunk stay in a CPU's caches. In float32, 16 and 64 were no faster."""

UNROLLED = 8
"""Up to this many chunks are compiled without a loop: XLA runs them in parallel."""

for_cpu = jax.make_user_context(None)
"""The class of the CPUs that a network is computed for, as in `with for_cpu("amx cpu"):`, or None.

It changes outputs and gradients by rounding alone. It is part of the key of JAX's caches, so a function that was
compiled with one value is compiled anew for another.
"""


# --- For networks ------------------------------------------------------------------------------------------------


class Conv(nn.Module):
    """The part of `nn.Conv` that networks of images need: equal strides, no dilation, no groups, always a bias.

    Its parameters are those of `nn.Conv`, in float32. A torso of such layers is fastest on a CPU in chunks
    (`module_in_chunks`).
    """

    features: int
    kernel_size: tuple[int, int] = (3, 3)
    strides: int = 1
    padding: str = "SAME"
    kernel_init: Callable = nn.initializers.lecun_normal()
    dtype: Any = jnp.float32
    """Type of the arithmetic; the bias is added in float32."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[N, H, W, C], uint8 pixels, which are divided by 255, or floats -> float32 [N, h, w, features]."""
        is_pixels = x.dtype == jnp.uint8
        if not is_pixels and not jnp.issubdtype(x.dtype, jnp.floating):  # `as_words` would misread it
            raise TypeError(f"Conv {self.name}: expected an input of uint8 (pixels) or floats, got {x.dtype}")
        shape = (*self.kernel_size, x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        strides = (self.strides, self.strides)
        above_below, left_right = lax.padtype_to_pads(x.shape[1:3], self.kernel_size, strides, self.padding)
        pads = (above_below, left_right)
        if for_cpu.value:
            scaled = kernel / 255 if is_pixels else kernel
            y: jax.Array = cpu_convolution(x, scaled, self.strides, pads, jnp.dtype(self.dtype))
            return y + bias
        x = x.astype(self.dtype) / 255 if is_pixels else x.astype(self.dtype)
        kernel = kernel.astype(self.dtype)
        return lax.conv_general_dilated(x, kernel, strides, pads, dimension_numbers=DIMENSION_NUMBERS) + bias


def module_in_chunks(module: nn.Module, x: jax.Array) -> jax.Array:
    """`module(x)`, a module of each sample alone; on a CPU, in chunks of at most `CHUNK` samples."""
    if not for_cpu.value or module.is_initializing():
        return module(x)
    unbound, variables = module.unbind()
    of_chunk: Any = partial(unbound.apply, variables)  # a function of arrays, which JAX's own loop can take
    return in_chunks(of_chunk, x, CHUNK)


def in_chunks(function: Callable[[jax.Array], jax.Array], x: jax.Array, chunk: int) -> jax.Array:
    """`function(x)`, a function of each sample alone, for at most `chunk` samples at a time."""
    count = -(-len(x) // chunk)
    if count <= 1:
        return function(x)
    filled = jnp.pad(x, ((0, -len(x) % count), *[(0, 0)] * (x.ndim - 1)))  # zeros fill the last chunk
    chunks = filled.reshape(count, -1, *x.shape[1:])
    _, y = lax.scan(lambda _, each: (None, function(each)), None, chunks, unroll=count <= UNROLLED)
    return y.reshape(-1, *y.shape[2:])[: len(x)]


# --- The convolution and its gradients ---------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def cpu_convolution(x: jax.Array, kernel: jax.Array, stride: int, pads: Pads, dtype: Any) -> jax.Array:
    """The convolution, with the gradients of this file.

    Args:
        x: uint8 or float [N, H, W, C].
        kernel: float32 [kh, kw, C, O].
        pads: zeros around the image: (above, below), (left, right).
        dtype: type of the arithmetic.

    Returns:
        [N, h, w, O], in `sum_type(dtype)`.
    """
    return _forward(x, kernel, stride, pads, dtype)[0]


def _forward(x: jax.Array, kernel: jax.Array, stride: int, pads: Pads, dtype: Any) -> tuple[jax.Array, Any]:
    """The output, and what its gradients need."""
    blocks = from_words(space_to_depth(as_words(x), kernel.shape[:2], stride, pads))
    w = block_kernel(kernel, stride)
    return _stride_1(blocks.astype(dtype), w.astype(dtype), "VALID", dtype), (x, kernel)


def _backward(stride: int, pads: Pads, dtype: Any, saved: Any, g: jax.Array) -> tuple[Any, jax.Array]:
    """The gradients for x and kernel, from that for the output, [N, h, w, O]."""
    (x, kernel), g = once_differentiable((saved, g))
    g = g.astype(dtype)

    def to_blocks(x: jax.Array) -> jax.Array:
        return space_to_depth(x, kernel.shape[:2], stride, pads)

    # The gradients are those of a convolution of stride 1, of w and the blocks of x. `block_kernel` and
    # `to_blocks` only move data or pad it, and JAX derives their transposes, which bring the gradients back.
    w, from_block_kernel = jax.vjp(lambda kernel: block_kernel(kernel, stride), kernel)
    dw = kernel_gradient(to_blocks(as_words(x)), g, w.shape, dtype)
    (d_kernel,) = from_block_kernel(dw.astype(w.dtype))
    if x.dtype == jnp.uint8:
        return np.zeros(x.shape, jax.dtypes.float0), d_kernel  # JAX's type for the gradient of an integer input
    d_blocks = input_gradient(w, g, dtype)
    (dx,) = jax.linear_transpose(to_blocks, jax.ShapeDtypeStruct(x.shape, d_blocks.dtype))(d_blocks)
    return dx.astype(x.dtype), d_kernel


cpu_convolution.defvjp(_forward, _backward)


def kernel_gradient(words: jax.Array, g: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """The gradient for the kernel of a convolution of stride 1, as one matrix product.

        dW[i, j, k, o] = sum over n, r, c of x[n, r, c + j, k] g[n, r - i, c, o]        (g is 0 outside)

    Here c runs over the columns of the output, but r over the rows of the input, H = h + height - 1. So only g is
    shifted for each i, and x only for each j. This is the matrix product L R of

        L[(i, o), (n, r, c)] = g[n, r - i, c, o]        [height * O, N * H * w]
        R[(n, r, c), (j, k)] = x[n, r, c + j, k]        [N * H * w, width * C]

    Args:
        words: x, the input, as `as_words` views it, [N, H, w + width - 1, C].
        g: the gradient for the output, [N, h, w, O] in `dtype`.
        shape: of the kernel, (height, width, C, O).

    Returns:
        dW, of that shape, in `sum_type(dtype)`.
    """
    height, width, channels, outputs = shape
    # Rule "halves": otherwise each shift would repeat the transposition.
    halves = [jnp.moveaxis(half, -1, 0) for half in jnp.array_split(as_words(g), 2)]
    channels_first = jnp.concatenate(halves, axis=1)  # [O, N, h, w]
    shifts = [((0, 0), (0, 0), (i, height - 1 - i), (0, 0)) for i in range(height)]
    shifted = jnp.concatenate([jnp.pad(channels_first, shift) for shift in shifts])  # [height * O, N, H, w]
    left = from_words(shifted).reshape(height * outputs, -1)
    right = side_by_side(words, width).astype(dtype).reshape(-1, width * channels)
    dw = jnp.matmul(left, right, preferred_element_type=sum_type(dtype))  # [(i, o), (j, k)]
    # Rule "moved transpose": L has G transposed, so this is dW', which the barrier keeps.
    return lax.optimization_barrier(dw).reshape(height, outputs, width, channels).transpose(0, 2, 3, 1)


def input_gradient(w: jax.Array, g: jax.Array, dtype: Any) -> jax.Array:
    """The gradient for the input of a convolution of stride 1, as a forward convolution.

        dx[n, r, c, k] = sum over i, j, o of W[i, j, k, o] g[n, r - i, c - j, o]        (g is 0 outside)

    An `optimization_barrier` hides from XLA that the kernel is turned. Without it, XLA would recognise a gradient,
    and compile the naive loop.

    Args:
        w: W, the kernel, [height, width, C, O].
        g: the gradient for the output, [N, h, w, O] in `dtype`.

    Returns:
        dx, [N, h + height - 1, w + width - 1, C], in `sum_type(dtype)`.
    """
    height, width = w.shape[:2]
    turned = lax.optimization_barrier(w[::-1, ::-1].swapaxes(2, 3).astype(dtype))
    return _stride_1(g, turned, ((height - 1, height - 1), (width - 1, width - 1)), dtype)


def _stride_1(x: jax.Array, kernel: jax.Array, pads: str | Pads, dtype: Any) -> jax.Array:
    """XLA's forward convolution of stride 1, in `sum_type(dtype)`."""
    return lax.conv_general_dilated(
        x, kernel, (1, 1), pads, dimension_numbers=DIMENSION_NUMBERS, preferred_element_type=sum_type(dtype)
    )


def sum_type(dtype: Any) -> Any:
    """The type in which products of `dtype` are added: float32, or a wider type of the arithmetic."""
    return jnp.promote_types(dtype, jnp.float32)


@jax.custom_jvp
def once_differentiable(tree: Any) -> Any:
    """Arrays from which a gradient is computed: the same arrays, of which JAX can take no further derivative.

    A second derivative would silently be wrong: JAX takes that of a view in integers (`as_words`) to be 0.
    """
    return tree


@once_differentiable.defjvp
def _no_second_derivative(primals: Any, tangents: Any) -> Any:
    raise UserError(
        "gradients for CPUs have no second derivatives; choose --network.conv plain, whose gradients are JAX's own"
    )


# --- Arranging data ----------------------------------------------------------------------------------------------


def space_to_depth(x: jax.Array, size: tuple[int, ...], stride: int, pads: Pads) -> jax.Array:
    """Pads an image and cuts it into blocks, whose pixels become channels.

    Args:
        x: [N, H, W, C].
        size: height and width of the kernel: what no window reads is cut off.

    Returns:
        [N, rows, columns, stride * stride * C]; a channel is (row in the block, column in the block, channel).
    """
    lengths = []
    edges = []
    for kernel, (before, after), pixels in zip(size, pads, x.shape[1:3], strict=True):
        outputs = (pixels + before + after - kernel) // stride + 1
        length = outputs + -(-kernel // stride) - 1
        lengths.append(length)
        edges.append((before, length * stride - before - pixels, 0))
    if any(map(any, edges)):
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
    if stride == 1:
        return x
    rows, columns = lengths
    x = x.reshape(-1, rows, stride, columns, stride, x.shape[-1])
    return x.swapaxes(2, 3).reshape(len(x), rows, columns, -1)


def block_kernel(w: jax.Array, stride: int) -> jax.Array:
    """The kernel of stride 1 that does on blocks what `w` does on the image.

    Args:
        w: [kh, kw, C, O].

    Returns:
        [rows, columns, stride * stride * C, O], with zeros where the stride does not divide kh or kw.
    """
    rows, columns = (-(-k // stride) for k in w.shape[:2])
    edges = ((0, rows * stride - w.shape[0]), (0, columns * stride - w.shape[1]), (0, 0), (0, 0))
    w = jnp.pad(w, edges).reshape(rows, stride, columns, stride, *w.shape[2:])
    return w.swapaxes(1, 2).reshape(rows, columns, -1, w.shape[-1])


def side_by_side(words: jax.Array, width: int) -> jax.Array:
    """The pixels of each row of a window side by side: [N, H, w + width - 1, C] -> [N, H, w, width * C].

    Args:
        words: the image as `as_words` views it. The result is no longer in words.
    """
    columns = words.shape[2] - width + 1
    pixels = jnp.stack([words[:, :, j : j + columns] for j in range(width)], axis=-2)  # rule "stack"
    return from_words(pixels.reshape(*words.shape[:2], columns, -1))


def as_words(x: jax.Array) -> jax.Array:
    """A view in integers (rule "words"): bfloat16 as uint16, and four uint8 as one uint32.

    Any other array is returned as it is.
    """
    if x.dtype == jnp.uint8 and x.shape[-1] % 4 == 0:
        return lax.bitcast_convert_type(x.reshape(*x.shape[:-1], -1, 4), jnp.uint32)
    return lax.bitcast_convert_type(x, jnp.uint16) if x.dtype == jnp.bfloat16 else x


def from_words(x: jax.Array) -> jax.Array:
    """The inverse of `as_words`. Any uint16 is taken for bfloat16, and any uint32 for four uint8."""
    if x.dtype == jnp.uint32:
        return lax.bitcast_convert_type(x, jnp.uint8).reshape(*x.shape[:-1], -1)
    return lax.bitcast_convert_type(x, jnp.bfloat16) if x.dtype == jnp.uint16 else x
