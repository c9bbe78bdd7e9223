"""Frame storage: a rollout holds each frame once, and stacks of four are gathered when they are needed.

The *age* of a frame is the number of earlier frames of the same game, at most 3. It limits how far back a stack
may reach: where a game is younger than a stack, its first frame fills the rest.

A `FrameLayout` is the form in which frames are stored. `PLAIN` keeps the image. `BLOCKED` is its space-to-depth
form, which `cpu_conv.py` reads: the frame is cut into 21x21 blocks of 4x4 pixels, and the 16 pixels of a block
become 16 channels, `[84, 84] -> [21, 21, 16]`. Nothing is computed; pixels only change places.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_atari.envs.pool import FRAME_SIZE
from jaxrl_atari.networks import STACK


class FrameLayout(NamedTuple):
    """The form in which frames are stored; the last axis is the one along which frames are stacked."""

    shape: tuple[int, int, int]
    arrange: Callable[[jax.Array], jax.Array]  # uint8 [..., 84, 84] -> uint8 [..., *shape]


def block_frames(frames: jax.Array) -> jax.Array:
    """Space-to-depth of single frames: `[..., 84, 84]` -> `[..., 21, 21, 16]`, channel = 4 * row + column."""
    *batch, _, _ = frames.shape
    return frames.reshape(*batch, 21, 4, 21, 4).swapaxes(-3, -2).reshape(*batch, 21, 21, 16)


PLAIN = FrameLayout((FRAME_SIZE, FRAME_SIZE, 1), lambda frames: frames[..., None])
BLOCKED = FrameLayout((21, 21, 16), block_frames)


def arrange_stacks(layout: FrameLayout, stacks: jax.Array) -> jax.Array:
    """Stacks of images, uint8 `[N, 84, 84, 4]`, as `gather_stacks` returns them in a layout."""
    return jnp.concatenate([layout.arrange(stacks[..., j]) for j in range(STACK)], axis=-1)


def images(frames: jax.Array) -> jax.Array:
    """Stored frames as images: uint8 `[..., *layout.shape]` of any layout -> `[..., 84, 84]`."""
    *batch, height, _, _ = frames.shape
    if height == FRAME_SIZE:
        return frames[..., 0]
    return frames.reshape(*batch, 21, 21, 4, 4).swapaxes(-3, -2).reshape(*batch, FRAME_SIZE, FRAME_SIZE)


def map_images(function: Callable[[jax.Array], jax.Array], stacks: jax.Array) -> jax.Array:
    """`function` of frame stacks as images, uint8 `[N, 84, 84, 4]` -> the same, for stacks of any layout.

    On a CPU, the stacks of `nature` are stored in blocks. A loss that changes pictures, for example by a random
    shift, changes them through this function.

    Args:
        stacks: `Observation.stacks`.
    """
    if stacks.shape[-3] == FRAME_SIZE:
        return function(stacks)
    frames = stacks.reshape(*stacks.shape[:-1], STACK, -1)
    pictures = jnp.stack([images(frames[..., j, :]) for j in range(STACK)], axis=-1)
    return arrange_stacks(BLOCKED, function(pictures))


def next_age(age: jax.Array, first: jax.Array) -> jax.Array:
    """Ages of the newest frames, int32 `[B]`, from those of the frames before them.

    Args:
        age: int32 `[B]`.
        first: bool `[B]`, true where the newest frame starts a game.
    """
    return jnp.where(first, 0, jnp.minimum(age + 1, STACK - 1))


def gather_stacks(frames: jax.Array, age: jax.Array, index: jax.Array) -> jax.Array:
    """The frame stacks of chosen samples of a rollout.

    Args:
        frames: uint8 `[T + 3 or more, B, H, W, C]`; `frames[t + 3]` is the newest frame of step t.
        age: int32 `[T, B]`, the age of the newest frame of each step.
        index: int `[N]`, samples as `t * B + b`.

    Returns:
        uint8 `[N, H, W, 4 * C]`: frame `t + 3 - min(j, age)` for j = 3, 2, 1, 0, the oldest first.
    """
    t, b = jnp.divmod(index, age.shape[1])
    back = jnp.minimum(jnp.arange(STACK - 1, -1, -1), age[t, b][:, None])
    # Four gathers side by side: on a CPU, one gather of `[N, 4, ...]` and a transposition take 6 times as long. A
    # stack on the last axis but one is faster than a concatenation: rule 5 of `cpu_conv.py`.
    stacks = jnp.stack([frames[t + STACK - 1 - back[:, j], b] for j in range(STACK)], axis=-2)
    return stacks.reshape(*stacks.shape[:-2], -1)


@jax.jit
def push_frame(window: jax.Array, age: jax.Array, frame: jax.Array, first: jax.Array) -> tuple[jax.Array, ...]:
    """Stacks for acting outside a rollout, as in an evaluation.

    Args:
        window: uint8 `[4, B, 84, 84, 1]`, the last four frames; age: int32 `[B]`, of the last one. See
            `empty_window`.
        frame: uint8 `[B, 84, 84]`, the newest frame; first: bool `[B]`, true where it starts a game.

    Returns:
        The new window and ages, and the stacks, uint8 `[B, 84, 84, 4]`.
    """
    window = jnp.concatenate([window[1:], PLAIN.arrange(frame)[None]])
    age = next_age(age, first)
    return window, age, gather_stacks(window, age[None], jnp.arange(len(age)))


def empty_window(num_envs: int) -> tuple[np.ndarray, np.ndarray]:
    """The window and ages that `push_frame` starts from."""
    return np.zeros((STACK, num_envs, *PLAIN.shape), np.uint8), np.zeros(num_envs, np.int32)
