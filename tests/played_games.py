"""Games that a test plays through a pool."""

from functools import partial

import numpy as np

from jaxrl_atari import envs
from jaxrl_atari.envs.pool import EnvStep
from jaxrl_atari.envs.protocols import PROTOCOLS

make_pool = partial(envs.make_pool, rules=PROTOCOLS["v5"])


def random_actions(pool, num_steps):
    return np.random.default_rng(0).integers(pool.num_actions, size=(num_steps, pool.num_envs))


def stacked(steps):
    """One `EnvStep`, each field [T, n, ...]."""
    return EnvStep(*map(np.stack, zip(*steps, strict=True)))


def play(pool, actions):
    """reset() and all steps, stacked. Closes the pool."""
    steps = [pool.reset(), *map(pool.step, actions)]
    pool.close()
    return stacked(steps)


def assert_equal(left, right):
    for name in EnvStep._fields:
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)
