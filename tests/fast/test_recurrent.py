"""The memory of a recurrent network: its types, and its form in a checkpoint."""

import jax
import jax.numpy as jnp
from fake_pools import NoisePool, group_of
from small_networks import Recurrent, make

from jaxrl_atari.rollout import act, collect


class WeaklyTyped(Recurrent):
    @staticmethod
    def initial_carry(num_envs):
        return jnp.full((num_envs, 32), 0.0), jnp.full((num_envs, 32), 0.0)


def test_a_memory_has_fixed_types_from_the_start():
    """Otherwise its programs would be compiled again once they have computed it."""
    params, network = make(WeaklyTyped, NoisePool.num_actions)
    assert not any(x.weak_type for x in jax.tree.leaves(network.initial_carry(4)))
    group = group_of(NoisePool(4, seed=0), network)
    collect([[group]], [params], jax.random.key(0), 2)
    before = act._cache_size()
    collect([[group]], [params], jax.random.key(1), 2)
    assert act._cache_size() == before
