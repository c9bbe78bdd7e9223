"""The memory of a recurrent network: its types, and its form in a checkpoint."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_pools import NoisePool, group_of
from small_networks import Recurrent, make

from jaxrl_atari.errors import UserError
from jaxrl_atari.rollout import act, collect, join_carries, split_carry


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


def test_a_memory_of_another_form_does_not_go_on():
    group = group_of(NoisePool(4, seed=0), make(Recurrent, NoisePool.num_actions)[1])
    saved = join_carries([group.rollout_start.carry])
    jax.tree.map(np.testing.assert_array_equal, split_carry(saved, group), group.rollout_start.carry)
    for other in ({"0": saved["0"]}, saved | {"1": saved["1"][:, :-1]}):
        with pytest.raises(UserError, match="the memory of the network has other shapes"):
            split_carry(other, group)
