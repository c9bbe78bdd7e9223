"""Frame stacks: a rollout holds each frame once, and stacks of four are gathered when they are needed.

The *age* of a frame is the number of earlier frames of the same game, at most 3. It limits how far back a stack
may reach: where a game is younger than a stack, its first frame fills the rest.

Frames are stored in one of two shapes (`networks.Network.frame_shape`). `PLAIN` is the image. `BLOCKED` is the
image cut into 21x21 blocks of 4x4 pixels, whose pixels become channels (space-to-depth), as `cpu/nature.py` reads
it. Stacks are images in both: `gather_stacks` undoes the blocks, `cpu/nature.py` makes them again, and within one
compiled program XLA cancels the two moves.
"""

import jax
import jax.numpy as jnp

from jaxrl_atari.envs.pool import FRAME_SIZE, STACK

BLOCK = 4
"""Height and width of a block in pixels."""

BLOCKS = FRAME_SIZE // BLOCK
"""Blocks in a row of an image, and in a column: 21."""

PLAIN = (FRAME_SIZE, FRAME_SIZE, 1)
"""The shape of a stored frame that is an image."""

BLOCKED = (BLOCKS, BLOCKS, BLOCK * BLOCK)
"""The shape of a stored frame in blocks; a channel is (row, column) in the block."""


# --- Stored frames -----------------------------------------------------------------------------------------------


def as_frames(images: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Images uint8 [..., 84, 84] as stored frames [..., *shape], where shape is `PLAIN` or `BLOCKED`."""
    return to_blocks(images[..., None]) if shape == BLOCKED else images[..., None]


def as_images(frames: jax.Array) -> jax.Array:
    """The inverse of `as_frames`, for frames of either shape."""
    return (from_blocks(frames) if frames.shape[-3:] == BLOCKED else frames)[..., 0]


def to_blocks(images: jax.Array) -> jax.Array:
    """Images [..., 84, 84, C] in blocks, [..., 21, 21, C * 16]; a channel is (channel, row, column)."""
    pixels = images.reshape(*images.shape[:-3], BLOCKS, BLOCK, BLOCKS, BLOCK, -1)
    blocks = jnp.moveaxis(pixels, (-5, -3, -1, -4, -2), (-5, -4, -3, -2, -1))
    return blocks.reshape(*images.shape[:-3], BLOCKS, BLOCKS, -1)


def from_blocks(blocks: jax.Array) -> jax.Array:
    """The inverse of `to_blocks`."""
    pixels = blocks.reshape(*blocks.shape[:-1], -1, BLOCK, BLOCK)
    images = jnp.moveaxis(pixels, (-5, -4, -3, -2, -1), (-5, -3, -1, -4, -2))
    return images.reshape(*blocks.shape[:-3], FRAME_SIZE, FRAME_SIZE, -1)


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
        frames: uint8 [S + 3 or more, B, *shape], of S steps, where shape is `PLAIN` or `BLOCKED`;
            `frames[t + 3]` is the newest frame of step t.
        age: int32 [S, B], the age of the newest frame of each step.
        index: int [N], samples as `t * B + b`, with t below S.

    Returns:
        uint8 [N, 84, 84, 4]: frame `t + 3 - min(j, age)` for j = 3, 2, 1, 0, the oldest first.
    """
    t, b = jnp.divmod(index, age.shape[1])
    back = jnp.minimum(jnp.arange(STACK - 1, -1, -1), age[t, b][:, None])
    # For XLA's CPU backend. Four gathers side by side: one gather of [N, 4, ...] and a transposition take 6
    # times as long. Stacked on the last axis but one: a concatenation along the last copies each operand first.
    stacks = jnp.stack([frames[t + STACK - 1 - back[:, j], b] for j in range(STACK)], axis=-2)
    stacks = stacks.reshape(*stacks.shape[:-2], -1)
    return from_blocks(stacks) if frames.shape[2:] == BLOCKED else stacks
