"""The features of the Nature network as matrix products, written by hand for XLA's CPU backend. Skip it at first.

Without it, `nature` trains at 0.75 of its speed in float32 and at 0.51 in bfloat16 (benchmarks/NOTES.md, "The
layer and the form by hand"). Delete it once a network of `conv.Conv` trains at least 0.95 times as fast.

`features` computes what `networks.NatureFeatures` computes, from the same parameters:

    result      function       input                    output
    out1        first_layer    uint8 [N, 21, 21, 64]    [N, 10, 10, 128]
    out2        layer          out1                     [N, 9, 9, 64]
    out3        layer          out2                     [N, 7, 7, 64]
    features    dense          out3 as [N, 3136]        [N, 512]

`torso` is the first three, with one gradient for all of them. Each function is followed by its gradient.

**Equations.** A layer is Y = relu(X W + b). X [M, size * size * C] has a row for each of the M windows of all
samples, W [size * size * C, O] is the kernel as a matrix, and Y is [M, O]. With G, the gradient for Y where Y > 0
and else 0, and ' for transposed:

    dW = X' G        db = the sum of G's rows        dX = G W'        dx = for each pixel, the sum over its windows

`layer` and `layer_backward` compute these. `dense` is the product x W alone; the bias and the relu of the dense
layer are in `features`.

The first layer does not make X, which would be 3.6 times the input in floating point. It multiplies each block by
the weights W_p of all four places p that a block has in a window, and adds the products. The window at pixel q of
the output has the blocks x_{q+p}, so

    Y_q = relu(sum_p x_{q+p} W_p + b)        dW_p = sum_q x_{q+p}' G_q

**Types.** `dtype` is float32 or bfloat16. If it is float32, only the cast of the pixels does anything. Parameters,
and the arrays of their gradients, are float32. The rest is computed so:

- Operands of a product are cast to `dtype`, and products are added up in float32 (`product`).
- A bias is added in float32. The output of a convolution is then cast to `dtype`: it is kept, and is an operand of
  the next layer. That of the dense layer stays float32: what follows the features computes in float32.
- Gradients are kept in float32. They are rounded to `dtype` only where they enter a product; `db` is summed
  before.
- As in flax, two gradients of the dense layer are rounded to `dtype`: those of its input, out3, and of its bias.
  The bias itself is rounded too, before it is added.
- `torso` returns float32 arrays that hold values of `dtype`, because JAX hands its gradient function a gradient in
  the type of the output, and `layer_backward` takes it in float32.

**Blocks and windows.** `block_kernels` draws how blocks of pixels make each stride 1; `windows` draws X.

**Rules.** What XLA's CPU backend does badly is at the top of `conv.py`: the rules "words", "halves",
"stack" and "moved transpose". The code refers to them by these names. Two more are for this file:

    remade windows      JAX's own derivative keeps the windows for the backward pass. In a loop over chunks it is
                        faster to make them again than to read them from memory, so only the input and the outputs
                        of the layers are kept. Where chunks are unrolled, XLA itself decides, and keeps the
                        windows.
    kept halves         In a loop over chunks, XLA fuses the read of the saved out1 into the code that makes its
                        windows, which then takes 10 times as long. So out1 is saved in two halves, which are
                        concatenated, as in the rule "halves".
"""

import functools
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_atari.cpu.conv import UNROLLED, as_words, block_kernel, from_words, in_chunks, once_differentiable
from jaxrl_atari.errors import require_interface
from jaxrl_atari.frames import BLOCK, STACK, to_blocks

KERNELS = {"conv1": (8, 8, STACK, 32), "conv2": (4, 4, 32, 64), "conv3": (3, 3, 64, 64), "dense": (3136, 512)}
"""The shapes of the kernels from which this file computes."""


def features(params: Any, stacks: jax.Array, dtype: Any, chunk: int) -> jax.Array:
    """What `networks.NatureFeatures` computes in its plain form.

    Args:
        params: of that module, or `for_acting` of them.
        stacks: uint8 [N, 84, 84, 4].
        dtype: type of the arithmetic, float32 or bfloat16.
        chunk: `chunk_size`.

    Returns:
        float32 [N, 512].

    Raises:
        InterfaceError: the kernels have other shapes than `KERNELS`.
    """
    shapes = {layer: params[layer]["kernel"].shape for layer in KERNELS}
    hint = "cpu/nature.py computes layers of these sizes alone; see the branch in NatureFeatures"
    require_interface(shapes == KERNELS, "kernels of networks.NatureFeatures", shapes, str(KERNELS), hint)
    loop = len(stacks) > UNROLLED * chunk
    of_chunk = partial(torso, block_kernels(params), dtype, loop)
    # The cast changes no value, and rounds the gradient to `dtype` ("Types", at the top).
    out3 = in_chunks(of_chunk, to_blocks(stacks), chunk).astype(dtype)
    # The product is float32. The bias is rounded to `dtype` all the same, because flax's `nn.Dense` rounds it.
    return nn.relu(dense(out3, params["dense"]["kernel"]) + params["dense"]["bias"].astype(dtype))


def for_acting(params: Any, dtype: Any) -> Any:
    """The parameters with the kernel of `dense` in `dtype` already. Acting reads it at every step.

    It has 1.6 of the 1.7 million parameters of `nature`.
    """
    return {**params, "dense": {**params["dense"], "kernel": params["dense"]["kernel"].astype(dtype)}}


def chunk_size(cpu: str, dtype: Any) -> int:
    """The largest number of samples in a chunk, whose activations stay in the CPU's caches.

    These sizes were the fastest (benchmarks/NOTES.md, "On Intel" and "On Zen 4"): in bfloat16, AMX (Intel's
    matrix units) needs large products, and other CPUs gain more from their caches.

    Args:
        cpu: class of the CPUs that compute (`devices.device_class`).
        dtype: type of the torso's arithmetic.
    """
    if jnp.dtype(dtype) == jnp.float32:
        return 32
    return 64 if cpu == "amx cpu" else 16


# --- The torso ---------------------------------------------------------------------------------------------------


class Kernels(NamedTuple):
    """Kernels and biases of the convolutions in the order of the blocked images, float32."""

    w1: jax.Array  # [64, 4 * 32]: channel of a block; place of the block in the window, output
    b1: jax.Array  # [32]
    w2: jax.Array  # [4 * 128, 64]: place of the block in the window, channel of the block; output
    b2: jax.Array  # [64]
    w3: jax.Array  # [9 * 64, 64]: place of the pixel in the window, channel; output
    b3: jax.Array  # [64]


def block_kernels(params: Any) -> Kernels:
    """The kernels [height, width, in, out] in the order of the blocks.

    A window that moves by its stride becomes a window that moves by 1 once the image is cut into blocks of
    stride x stride pixels, whose pixels become channels (space-to-depth). In one dimension, with 8 pixels, windows
    of 4 pixels and stride 2:

        pixels    0 1 2 3 4 5 6 7       windows of 4 pixels, stride 2:   0123   2345   4567
        blocks   |0 1|2 3|4 5|6 7|      windows of 2 blocks, stride 1:   ab     bc     cd
                   a   b   c   d

    The first layer adds products of blocks and weights, so its sums are here a W_0 + b W_1, b W_0 + c W_1 and
    c W_0 + d W_1. In two dimensions, with the sizes of this network:

        layer     image                         windows         blocks                          windows of blocks
        first     84x84 pixels of 4 frames      8x8, stride 4   21x21 of 4x4x4 = 64 numbers     2x2, stride 1
        second    20x20 pixels of 32 channels   4x4, stride 2   10x10 of 2x2x32 = 128 numbers   2x2, stride 1
        third     9x9 pixels of 64 channels     3x3, stride 1   none: its stride is 1

    The division of pixels by 255 is applied to the first kernel.
    """
    k1, k2, k3 = (params[name]["kernel"] for name in ("conv1", "conv2", "conv3"))
    b1, b2, b3 = (params[name]["bias"] for name in ("conv1", "conv2", "conv3"))
    # [place, pixel of a block, frame, output] -> the order of the blocks of frames, in which the frame is first.
    w1 = block_kernel(k1, BLOCK).reshape(4, BLOCK * BLOCK, STACK, -1).transpose(2, 1, 0, 3)
    w1 = w1.reshape(STACK * BLOCK * BLOCK, -1) / 255
    w2 = block_kernel(k2, 2).reshape(-1, k2.shape[-1])
    w3 = k3.reshape(-1, k3.shape[-1])
    return Kernels(w1, b1, w2, b2, w3, b3)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def torso(kernels: Kernels, dtype: Any, loop: bool, blocks: jax.Array) -> jax.Array:
    """The three convolutions of one chunk: uint8 [N, 21, 21, 64] -> float32 [N, 3136].

    Args:
        loop: whether it is computed for one chunk after another in a loop, where rule "kept halves" applies.
    """
    return torso_forward(kernels, dtype, loop, blocks)[0]


class Saved(NamedTuple):
    """What the gradient of `torso` needs (rule "remade windows"). Outputs are saved as words (rule "words")."""

    blocks: jax.Array  # uint8 [N, 21, 21, 64]
    w2: jax.Array
    w3: jax.Array
    out1: list[jax.Array]  # [N, 10, 10, 128], in a loop as two halves (rule "kept halves")
    out2: jax.Array  # [N, 9, 9, 64]
    out3: jax.Array  # [N, 7, 7, 64]


def torso_forward(kernels: Kernels, dtype: Any, loop: bool, blocks: jax.Array) -> tuple[jax.Array, Saved]:
    """out3, float32 [N, 3136], and what its gradient needs."""
    out1 = first_layer(blocks, kernels.w1, kernels.b1, dtype)  # [N, 10, 10, 128]
    out2 = layer(out1, kernels.w2, kernels.b2, 2)  # [N, 9, 9, 64]
    out3 = layer(out2, kernels.w3, kernels.b3, 3)  # [N, 7, 7, 64]
    parts1 = jnp.array_split(as_words(out1), 2 if loop else 1)  # rule "kept halves"
    saved = Saved(blocks, kernels.w2, kernels.w3, parts1, as_words(out2), as_words(out3))
    return out3.reshape(len(out3), -1).astype(jnp.float32), saved


def torso_backward(dtype: Any, loop: bool, saved: Saved, g: jax.Array) -> tuple[Kernels, Any]:
    """The gradients for the kernels and the input (there is none), from g for out3, float32 [N, 3136]."""
    saved, g = once_differentiable((saved, g))
    blocks = saved.blocks
    out1, out2, out3 = map(from_words, (jnp.concatenate(saved.out1), saved.out2, saved.out3))
    # g3, g2 and g1 are the gradients for out3, out2 and out1.
    g3 = g.reshape(out3.shape)  # [N, 7, 7, 64]
    g2, dw3, db3 = layer_backward(out2, saved.w3, out3, g3, 3)  # [N, 9, 9, 64]
    g1, dw2, db2 = layer_backward(out1, saved.w2, out2, g2, 2)  # [N, 10, 10, 128]
    dw1, db1 = first_layer_backward(blocks, out1, g1)
    no_gradient = np.zeros(blocks.shape, jax.dtypes.float0)  # JAX's type for the gradient of an integer input
    return Kernels(dw1, db1, dw2, db2, dw3, db3), no_gradient


torso.defvjp(torso_forward, torso_backward)


# --- First layer -------------------------------------------------------------------------------------------------


def first_layer(blocks: jax.Array, w: jax.Array, b: jax.Array, dtype: Any) -> jax.Array:
    """`Y_q = relu(sum_p x_{q+p} W_p + b)`, a convolution with 2x2 windows; Y is blocked for the second layer.

    Args:
        blocks: uint8 [N, 21, 21, 64].
        w: `Kernels.w1`.

    Returns:
        [N, 10, 10, 128] in `dtype`; a channel is (row in the block, column in the block, output).
    """
    n, rows, columns, channels = blocks.shape
    height, width = rows - 1, columns - 1  # pixels of the output
    # x_q W_p of each block q and place p: float32 [N, 21, 21, 4, 32].
    products = product(blocks.reshape(-1, channels).astype(dtype), w.astype(dtype))
    products = products.reshape(n, rows, columns, 4, -1)
    # Y_q sums the products x_{q+p} W_p over p = (i, j): [N, 20, 20, 32].
    shifted = [products[:, i : i + height, j : j + width, place] for place, (i, j) in enumerate(places(2))]
    out = nn.relu(functools.reduce(jnp.add, shifted) + b).astype(dtype)
    # Blocks of 2x2 pixels: of each pixel of the block one array [N, 10, 10, 32], side by side. Rules "words" and
    # "stack".
    words = as_words(out)
    of_place = [words[:, i::2, j::2] for i, j in places(2)]
    return from_words(jnp.stack(of_place, axis=-2).reshape(n, height // 2, width // 2, -1))


def first_layer_backward(blocks: jax.Array, out: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradients of `first_layer`: `dW_p = sum_q x_{q+p}' G_q`, and `db`, the sum of G.

    Args:
        out: its output.
        g: float32 [N, 10, 10, 128], the gradient for its output.

    Returns:
        dW, as [64, 4 * 32], and db, float32.
    """
    g = jnp.where(out > 0, g, 0)  # G
    db = g.sum((0, 1, 2)).reshape(4, -1).sum(0)  # over samples, blocks and the pixels of a block
    # G without blocks and transposed, [32, N, 20, 20], in two halves of the samples (rules "words", "halves").
    words = as_words(g.astype(out.dtype))
    halves = [unblocked_outputs_first(half) for half in jnp.array_split(words, 2)]
    channels_first = jnp.concatenate(halves, axis=1)
    # For each place p = (i, j), G shifted by p, so that G_q lies at the block q + p: [4 * 32, N * 21 * 21].
    pads = [((0, 0), (0, 0), (i, 1 - i), (j, 1 - j)) for i, j in places(2)]
    shifted = jnp.concatenate([jnp.pad(channels_first, pad) for pad in pads])
    shifted = from_words(shifted.reshape(len(shifted), -1))
    dw = product(shifted, blocks.reshape(-1, blocks.shape[-1]).astype(out.dtype))  # dW', [4 * 32, 64]
    return lax.optimization_barrier(dw).T, db  # rule "moved transpose"


def unblocked_outputs_first(g: jax.Array) -> jax.Array:
    """A gradient for the output of `first_layer`, [N, 10, 10, 128], without blocks: [32, N, 20, 20].

    It is `g.reshape(-1, 10, 10, 2, 2, 32).transpose(5, 0, 1, 3, 2, 4).reshape(32, -1, 20, 20)`, in two moves of
    fewer axes. A block's channels are (row, column, output), so its columns lie side by side already: first the
    rows are brought together, by a stack of the two halves of the channels, and then the outputs to the front.
    """
    n, rows, columns, channels = g.shape
    half = channels // 2
    pixels = jnp.stack([g[..., :half], g[..., half:]], axis=2).reshape(n, 2 * rows, 2 * columns, channels // 4)
    return jnp.moveaxis(pixels, -1, 0)


# --- Second and third layer --------------------------------------------------------------------------------------


def layer(x: jax.Array, w: jax.Array, b: jax.Array, size: int) -> jax.Array:
    """`Y = relu(X W + b)`: a convolution with windows of size x size and stride 1.

    Args:
        x: [N, rows + size - 1, columns + size - 1, C].
        w: W, float32 [size * size * C, O].

    Returns:
        Y as [N, rows, columns, O] in the type of x.
    """
    n, height, width, _ = x.shape
    out = nn.relu(product(windows(x, size), w.astype(x.dtype)) + b).astype(x.dtype)
    return out.reshape(n, height - size + 1, width - size + 1, -1)


def layer_backward(
    x: jax.Array, w: jax.Array, out: jax.Array, g: jax.Array, size: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of `layer`: `dW = X' G`, `db`, the sum of G, and `dX = G W'`, added up in dx.

    Args:
        out: its output, [N, rows, columns, O].
        g: float32, the gradient for its output.

    Returns:
        dx, dW and db: the gradients for x, w and b, float32.
    """
    n, rows, columns, outputs = g.shape
    g = jnp.where(out > 0, g, 0)  # G
    db = g.sum((0, 1, 2))
    g = g.astype(x.dtype)
    dw = lax.optimization_barrier(product(transposed(g), windows(x, size))).T  # (G' X)': rule "moved transpose"
    w_transposed = transposed(w.astype(x.dtype).reshape(size * size, -1, outputs))  # W', [O, size * size * C]
    # dX, float32 [N, rows, columns, size * size, C]: for each window, the gradients of the pixels at its places.
    d_windows = product(g.reshape(-1, outputs), w_transposed).reshape(n, rows, columns, size * size, -1)
    # dx: a pixel is at place (i, j) of the window that begins i rows and j columns before it.
    pads = [((0, 0), (i, size - 1 - i), (j, size - 1 - j), (0, 0)) for i, j in places(size)]
    shifted = [jnp.pad(d_windows[..., place, :], pad) for place, pad in enumerate(pads)]
    return functools.reduce(jnp.add, shifted), dw, db


# --- Dense layer -------------------------------------------------------------------------------------------------


@jax.custom_vjp
def dense(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w` in the type of x: [N, 3136], [3136, O] -> float32 [N, O]. w is float32, or has that type already.

    JAX's own gradient would compute the products in float32, and transposed.
    """
    return dense_forward(x, w)[0]


def dense_forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, Any]:
    """The output, and what the gradient needs."""
    w = w.astype(x.dtype)
    return product(x, w), (x, w)


def dense_backward(saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradients for x, `g w'` in the type of x, and for w, `x' g` in float32."""
    (x, w), g = once_differentiable((saved, g))
    g = g.astype(x.dtype)
    # g w': over the last axis of both. XLA's CPU kernels read a right operand that is transposed as it lies.
    dx = lax.dot_general(g, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    # Rule "moved transpose". The result is large here, so x' is moved instead, by way of three axes.
    n, features = x.shape
    by_pixel = as_words(x).reshape(n, -1, KERNELS["conv3"][-1])  # [N, 49, 64]
    x_transposed = from_words(by_pixel.transpose(1, 2, 0).reshape(features, n))
    return dx.astype(x.dtype), product(x_transposed, g)


dense.defvjp(dense_forward, dense_backward)


# --- Building blocks ---------------------------------------------------------------------------------------------


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a @ b`, added up in float32: [M, K], [K, N] -> float32 [M, N]."""
    return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def transposed(x: jax.Array) -> jax.Array:
    """The transpose of the matrix whose rows are the last axis of x: [..., C], three or more axes -> [C, K].

    Rule "moved transpose": `moveaxis` on three or more axes moves the data; the `.T` of a matrix would be a change
    of layout.
    """
    return from_words(jnp.moveaxis(as_words(x), -1, 0).reshape(x.shape[-1], -1))


def places(size: int) -> list[tuple[int, int]]:
    """The places in a window of size x size, as (row, column)."""
    return [(i, j) for i in range(size) for j in range(size)]


def windows(x: jax.Array, size: int) -> jax.Array:
    """X, every window of x as a row: [N, rows + size - 1, columns + size - 1, C] -> [M, size * size * C].

    With stride 1 the windows of an image are shifted views of it, so X costs one copy. An image of 3x3 pixels, and
    windows of 2x2:

        a b c         X =  a b d e     window at row 0, column 0
        d e f              b c e f     window at row 0, column 1
        g h i              d e g h     window at row 1, column 0
                           e f h i     window at row 1, column 1

    The columns of X are the places (0, 0), (0, 1), (1, 0), (1, 1) in a window (`places`). The column of place
    (i, j) is the image from row i and column j on. The gradient goes the same way back: e is in four windows, at
    another place in each, so its gradient is the sum of four numbers of dX (`layer_backward`).
    """
    _, height, width, channels = x.shape
    rows, columns = height - size + 1, width - size + 1
    shifted = [as_words(x)[:, i : i + rows, j : j + columns] for i, j in places(size)]
    return from_words(jnp.stack(shifted, axis=-2).reshape(-1, size * size * channels))  # rule "stack"
