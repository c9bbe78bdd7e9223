"""Frame stacks: a rollout holds each frame once, and stacks of four are gathered when they are needed.

The *age* of a frame is the number of earlier frames of the same game, at most 3. It limits how far back a stack
may reach: where a game is younger than a stack, its first frame fills the rest.

A `FrameLayout` is the form in which frames are stored; a network reads stacks of one of them. `PLAIN` keeps the
image. `BLOCKED`, which the Nature network reads where it is computed by hand (`network_forms.py`), is the image
cut into 21x21 blocks of 4x4 pixels (space-to-depth): the 16 pixels of a block become 16 channels, [84, 84] ->
[21, 21, 16]. Nothing is computed; pixels only change places.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_atari.envs.pool import FRAME_SIZE, STACK
from jaxrl_atari.errors import require_interface

# --- Layouts -----------------------------------------------------------------------------------------------------

BLOCK = 4
"""Height and width of a block in pixels."""

BLOCKS = FRAME_SIZE // BLOCK
"""Blocks in a row of an image, and in a column: 21."""


class FrameLayout(NamedTuple):
    """The form in which frames are stored; the last axis is the one along which frames are stacked."""

    shape: tuple[int, int, int]
    arrange: Callable[[jax.Array], jax.Array]  # images, uint8 [..., 84, 84] -> frames, uint8 [..., *shape]
    to_images: Callable[[jax.Array], jax.Array]  # the inverse


def block_frames(images: jax.Array) -> jax.Array:
    """Space-to-depth: [..., 84, 84] -> [..., 21, 21, 16], channel = 4 * row + column in the block."""
    *batch, _, _ = images.shape
    blocks = images.reshape(*batch, BLOCKS, BLOCK, BLOCKS, BLOCK).swapaxes(-3, -2)
    return blocks.reshape(*batch, BLOCKS, BLOCKS, BLOCK * BLOCK)


def unblock_frames(frames: jax.Array) -> jax.Array:
    """The inverse of `block_frames`."""
    *batch, _, _, _ = frames.shape
    blocks = frames.reshape(*batch, BLOCKS, BLOCKS, BLOCK, BLOCK)
    return blocks.swapaxes(-3, -2).reshape(*batch, FRAME_SIZE, FRAME_SIZE)


PLAIN = FrameLayout((FRAME_SIZE, FRAME_SIZE, 1), lambda images: images[..., None], lambda frames: frames[..., 0])
BLOCKED = FrameLayout((BLOCKS, BLOCKS, BLOCK * BLOCK), block_frames, unblock_frames)


# --- Stacks ------------------------------------------------------------------------------------------------------


def next_age(age: jax.Array, first: jax.Array) -> jax.Array:
    """Ages of the newest frames, int32 [B], from those of the frames before them.

    Args:
        age: int32 [B].
        first: bool [B], true where the newest frame starts a game.
    """
    return jnp.where(first, 0, jnp.minimum(age + 1, STACK - 1))


def gather_stacks(frames: jax.Array, age: jax.Array, index: jax.Array) -> jax.Array:
    """The frame stacks of chosen samples of a rollout.

    Args:
        frames: uint8 [S + 3 or more, B, H, W, C], of S steps; `frames[t + 3]` is the newest frame of step t.
        age: int32 [S, B], the age of the newest frame of each step.
        index: int [N], samples as `t * B + b`, with t below S.

    Returns:
        uint8 [N, H, W, 4 * C]: frame `t + 3 - min(j, age)` for j = 3, 2, 1, 0, the oldest first.
    """
    t, b = jnp.divmod(index, age.shape[1])
    back = jnp.minimum(jnp.arange(STACK - 1, -1, -1), age[t, b][:, None])
    # For XLA's CPU backend. Four gathers side by side: one gather of [N, 4, ...] and a transposition take 6
    # times as long. Stacked on the last axis but one: a concatenation along the last copies each operand first.
    stacks = jnp.stack([frames[t + STACK - 1 - back[:, j], b] for j in range(STACK)], axis=-2)
    return stacks.reshape(*stacks.shape[:-2], -1)


# --- Images of any layout: for videos, tests and losses of your own ----------------------------------------------


def layout_of(shape: tuple[int, ...]) -> FrameLayout:
    """The layout of stored frames, by the shape [..., H, W, C] of one or more of them.

    Raises:
        ValueError: no layout has this shape.
    """
    for layout in (PLAIN, BLOCKED):
        if layout.shape == tuple(shape[-3:]):
            return layout
    raise ValueError(
        f"shape of frames = {list(shape)}: expected [..., 84, 84, 1] or [..., 21, 21, 16]; the last axis of stacks"
        f" is {STACK} times as long"
    )


def as_images(frames: jax.Array) -> jax.Array:
    """Stored frames as images: uint8 [..., H, W, C] of any layout -> [..., 84, 84]."""
    return layout_of(frames.shape).to_images(frames)


def arrange_stacks(layout: FrameLayout, stacks: jax.Array) -> jax.Array:
    """Stacks of images, uint8 [N, 84, 84, 4], as `gather_stacks` returns them in a layout."""
    frames = [layout.arrange(stacks[..., j]) for j in range(STACK)]
    arranged = jnp.stack(frames, axis=-2)  # not along the last axis: see `gather_stacks`
    return arranged.reshape(*arranged.shape[:-2], -1)


def map_images(function: Callable[[jax.Array], jax.Array], stacks: jax.Array) -> jax.Array:
    """Applies a function of images to frame stacks of any layout.

    A loss that changes pictures, for example by a random shift, changes them through this function.

    Args:
        function: stacks of images, uint8 [N, 84, 84, 4] -> the same. Networks divide only bytes by 255.
        stacks: `Observation.stacks`.

    Returns:
        The changed stacks, in the layout of `stacks`.

    Raises:
        InterfaceError: the function returns another type or shape.
        ValueError: `stacks` are of no layout.
    """
    if stacks.shape[-1] % STACK:
        raise ValueError(f"shape of stacks = {list(stacks.shape)}: expected a last axis of {STACK} frames")
    frames = stacks.reshape(*stacks.shape[:-1], STACK, -1)
    layout = layout_of(frames[..., 0, :].shape)
    pictures = jnp.stack([layout.to_images(frames[..., j, :]) for j in range(STACK)], axis=-1)
    changed = function(pictures)
    expected = f"uint8{list(pictures.shape)}, as the function was given: end it with .astype(jnp.uint8)"
    got = f"{changed.dtype}{list(changed.shape)}" if isinstance(changed, jax.Array) else type(changed).__name__
    same = got == f"uint8{list(pictures.shape)}"
    require_interface(same, "result of the function of map_images", got, expected)
    return arrange_stacks(layout, changed)
