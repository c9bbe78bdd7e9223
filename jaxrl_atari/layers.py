"""`Conv`: flax's `nn.Conv` of images, with gradients that are fast on a CPU. `in_chunks`: a torso in chunks.

Both read `for_cpus`, which `network_forms.py` sets while a network is applied. Where it is true, a `Conv` computes
as `cpu_convolution.py` says, and `in_chunks` computes a few samples at a time. Where it is false, as on a GPU, a
`Conv` is a plain convolution, and nothing is cut.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_atari.cpu_convolution import DIMENSION_NUMBERS, cpu_convolution
from jaxrl_atari.errors import InterfaceError

CHUNK = 32
"""Samples of a chunk: activations of a chunk stay in a CPU's caches. In float32, 16 and 64 were no faster."""

UNROLLED = 8
"""Up to this many chunks are compiled without a loop: XLA runs them in parallel."""

for_cpus = jax.make_user_context(False)
"""Whether convolutions are computed in the way that is fast on CPUs: `with for_cpus(True):`.

It changes outputs and gradients by rounding alone. In bfloat16 the outputs are nearer to those of float32,
because products are added and kept in float32. The value is part of the key of JAX's caches, so a function that
was compiled with one value is compiled anew for the other.
"""

PADDINGS = ("SAME", "SAME_LOWER", "VALID")
"""Paddings of a `Conv`. Those of `nn.Conv` by numbers of pixels can be had with `jnp.pad` before it."""


class Conv(nn.Module):
    """The part of `nn.Conv` that networks of images need: equal strides, no dilation, no groups, always a bias.

    Its parameters are those of `nn.Conv`, in float32: `kernel` [height, width, C, features] and `bias` [features].
    A torso of such layers is fastest on a CPU within `in_chunks`.
    """

    features: int
    kernel_size: tuple[int, int] = (3, 3)
    strides: int | tuple[int, int] = 1
    padding: str = "SAME"
    kernel_init: Callable = nn.initializers.lecun_normal()
    dtype: Any = jnp.float32
    """Type of the arithmetic; the bias is added in float32."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """[N, H, W, C], uint8 pixels, which are divided by 255, or floats -> [N, h, w, features].

        The output is float32, or float64 where `dtype` is.

        Raises:
            TypeError: the input has another type.
            ValueError: the input is no batch of images, or the images are smaller than the kernel.
            ValueError: the kernel's size is not (height, width), the strides are not two equal ones, or the
                padding is none of `PADDINGS`.
        """
        is_pixels = x.dtype == jnp.uint8
        if not is_pixels and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"Conv {self.name}: expected an input of uint8 (pixels) or floats, got {x.dtype}")
        if x.ndim != 4:
            raise ValueError(f"Conv {self.name}: expected images [N, H, W, C], got the shape {list(x.shape)}")
        size = self.kernel_size
        # One number is refused: for `nn.Conv` it is a kernel of one dimension.
        if np.shape(size) != (2,) or min(size) < 1:
            raise ValueError(f"Conv {self.name}: kernel_size = {size}: expected (height, width), such as (3, 3)")
        strides = self.strides if isinstance(self.strides, tuple) else (self.strides, self.strides)
        if len(strides) != 2 or strides[0] != strides[1] or strides[0] < 1:
            raise ValueError(
                f"Conv {self.name}: strides = {self.strides}: expected one number from 1 on, or two equal ones"
            )
        if str(self.padding).upper() not in PADDINGS:
            raise ValueError(
                f"Conv {self.name}: padding = {self.padding!r}: expected one of {', '.join(PADDINGS)}"
            )
        shape = (*size, x.shape[-1], self.features)
        kernel = self.param("kernel", self.kernel_init, shape, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        above_below, left_right = lax.padtype_to_pads(x.shape[-3:-1], size, strides, self.padding)
        pads = (above_below, left_right)
        padded = [pixels + sum(pad) for pixels, pad in zip(x.shape[1:3], pads, strict=True)]
        if padded[0] < size[0] or padded[1] < size[1]:
            raise ValueError(
                f"Conv {self.name}: expected images of at least {size[0]}x{size[1]} pixels, the size of the"
                f" kernel; with their padding, they have {padded[0]}x{padded[1]}"
            )
        if for_cpus.value and len(x):  # an empty batch has no blocks
            scaled = kernel / 255 if is_pixels else kernel
            y: jax.Array = cpu_convolution(x, scaled, strides[0], pads, jnp.dtype(self.dtype))
            return y + bias
        x = x.astype(self.dtype) / 255 if is_pixels else x.astype(self.dtype)
        kernel = kernel.astype(self.dtype)
        return lax.conv_general_dilated(x, kernel, strides, pads, dimension_numbers=DIMENSION_NUMBERS) + bias


def in_chunks(torso: Callable[[jax.Array], jax.Array], module: nn.Module, x: jax.Array) -> jax.Array:
    """`torso(x)`; where `for_cpus` is true, in chunks of at most `CHUNK` samples.

    `fast/by_hand.py` has such a loop for functions of arrays (`torso_in_chunks`).

    Args:
        torso: a function of each sample alone, which uses layers of `module`. It may be a method of `module`, such
            as `self.torso`, but no other function that calls one.
        module: the module in whose `__call__` this is.
        x: images [N, H, W, C].

    Raises:
        InterfaceError: `torso` calls a method of `module` that makes layers.
    """
    count = -(-len(x) // CHUNK) if for_cpus.value else 1
    if count <= 1:
        return torso(x)

    # flax calls it with a clone of `module`, which is then the current module. So the layers that `torso` makes
    # are the clone's, with the same names and parameters as without chunks. A method makes layers of its own
    # module, so the method of the clone is called.
    def step(clone: nn.Module, carry: None, chunk: jax.Array) -> tuple[None, jax.Array]:
        is_method = isinstance(torso, MethodType) and torso.__self__ is module
        return carry, torso.__func__(clone, chunk) if is_method else torso(chunk)

    over_chunks = nn.scan(
        step,
        variable_broadcast="params",
        split_rngs={"params": False},
        unroll=count if count <= UNROLLED else 1,
    )
    try:
        _, y = over_chunks(module, None, to_chunks(x, count))
    except flax.errors.NameInUseError as error:  # JAX traces the torso twice, and `module` keeps the layers
        expected = "the method itself, such as self.torso, where a method of the module makes the layers"
        raise InterfaceError("torso of in_chunks", torso, expected) from error
    return from_chunks(y, len(x))


def to_chunks(x: jax.Array, count: int) -> jax.Array:
    """Samples [N, ...] in `count` chunks of as many each, [count, n, ...]: zeros fill the last one."""
    filled = jnp.pad(x, ((0, -len(x) % count), *[(0, 0)] * (x.ndim - 1)))
    return filled.reshape(count, -1, *x.shape[1:])


def from_chunks(y: jax.Array, n: int) -> jax.Array:
    """The first n samples of chunks: [count, m, ...] -> [n, ...]."""
    return y.reshape(-1, *y.shape[2:])[:n]
