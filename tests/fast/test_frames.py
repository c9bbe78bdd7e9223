"""Frame stacks against a naive loop, and the shapes in which frames are stored."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_atari.frames import BLOCKED, PLAIN, as_frames, as_images, gather_stacks


@pytest.mark.parametrize("shape", [PLAIN, BLOCKED], ids=["plain", "blocked"])
def test_gather_stacks_equals_naive_loop(shape):
    steps, envs = 7, 3
    rng = np.random.default_rng(4)
    images = rng.integers(0, 256, (steps + 3, envs, 84, 84), dtype=np.uint8)
    age = rng.integers(0, 4, (steps, envs))
    assert set(age.ravel()) == {0, 1, 2, 3}
    index = rng.permutation(steps * envs)
    expected = np.zeros((len(index), 84, 84, 4), np.uint8)
    for row, sample in enumerate(index):
        t, b = sample // envs, sample % envs
        for channel, j in enumerate((3, 2, 1, 0)):
            expected[row, :, :, channel] = images[t + 3 - min(j, age[t, b]), b]
    frames = as_frames(jnp.asarray(images), shape)
    assert frames.shape[2:] == shape
    np.testing.assert_array_equal(gather_stacks(frames, jnp.asarray(age), jnp.asarray(index)), expected)
    np.testing.assert_array_equal(as_images(frames), images)
