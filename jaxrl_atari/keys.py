"""Random keys: their implementation, and the streams that derive from a seed.

    key = new_key(seed)                     the seed of a session, or of an evaluation
    fold_in(key, u)    u < 2**31            update u, split into one key to act and one to learn
    fold_in(key, NETWORK_STREAM)            first parameters of the network
    fold_in(key, ALGORITHM_STREAM)          what `Algorithm.init` draws
    fold_in(key, EVALUATION_STREAM)         of an evaluation, its actions

The key to act is folded with the step and the environment (`rollout.py`); `update.update` lists the streams of
the key to learn. Seeds of games come from NumPy (`envs/__init__.py`).
"""

import jax

IMPLEMENTATION = "threefry2x32"
"""The implementation of all random keys, whatever JAX_DEFAULT_PRNG_IMPL says: a checkpoint holds one."""

NETWORK_STREAM = 2**31
EVALUATION_STREAM = 2**31 + 1
ALGORITHM_STREAM = 2**31 + 2


def new_key(seed: int) -> jax.Array:
    """The typed key of a seed, []."""
    return jax.random.key(seed, impl=IMPLEMENTATION)


def key_of_data(data: jax.Array) -> jax.Array:
    """The typed keys of their integers, as `jax.random.key_data` returns them: uint32 [..., 2] -> [...]."""
    return jax.random.wrap_key_data(data, impl=IMPLEMENTATION)
