"""Small checkpoints with the structure of real ones."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_atari.algorithm import TrainState
from jaxrl_atari.runs.arrays import array_shapes
from jaxrl_atari.runs.checkpoints import Checkpoints

CPU = jax.devices("cpu")[0]
GAMES = {"steps": np.arange(3), "frame": np.full((3, 84, 84), 7, np.uint8)}


def small_arrays(value, actions=6):
    """A small train state."""
    params = {"policy": {"bias": jnp.full(actions, value, jnp.float32)}, "value": {"bias": jnp.zeros(1)}}
    state = TrainState(params, (jnp.full(actions, -value, jnp.float32),), jnp.int32(value))
    return {"train_state": state, "key": jax.random.key(value)}


def save(checkpoints, step, score, arrays=None):
    checkpoints.save(step, {"arrays": arrays or small_arrays(step), "games": GAMES}, {"seed": 3}, score)


def save_two(session_dir):
    """Saves checkpoints at 10 (the best) and 20."""
    for step, score in ((10, 5.0), (20, 4.0)):
        save(Checkpoints(session_dir), step, score)
    return session_dir


def newest(session_dir, actions=6):
    """The newest sound checkpoint: its env steps, its arrays, and the newer checkpoints, which are damaged."""
    checkpoint, damaged = Checkpoints(session_dir).newest(["arrays"])
    return checkpoint.env_steps, checkpoint.to_device("arrays", small_arrays(0, actions), CPU), damaged


def assert_same(a, b):
    assert array_shapes(a) == array_shapes(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(x, y)
