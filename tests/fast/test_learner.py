"""The learner: which parameters act, what an update consumes, and what must be equal on all devices."""

import threading
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_pools import Corridor
from small_networks import FeedForward, make

from jaxrl_atari.config import DevicesConfig, PPOConfig
from jaxrl_atari.devices import place
from jaxrl_atari.errors import InterfaceError
from jaxrl_atari.learner import Learner, random_rollout
from jaxrl_atari.ppo import PPO, ppo_prepare
from jaxrl_atari.update import init_train_state

LENGTH, ENVS = 16, 8
CONFIG = PPOConfig(rollout_length=LENGTH, minibatch_size=2 * LENGTH, epochs=2, gae_lambda=0.95)
KEY = jax.random.key(7)
on_devices = pytest.mark.parametrize("devices", [1, 2])


@cache
def network():
    """The first parameters and the functions of a small network; one object, so that it is compiled once."""
    return make(FeedForward, Corridor.num_actions)


def first_state(algorithm=PPO):
    return init_train_state(network()[0], CONFIG, algorithm, KEY)


def learner_of(algorithm=PPO, state=None, *, devices=1, **how):
    """A learner of the small network on so many CPU devices."""
    placement = place(DevicesConfig(gpu=False, data_parallel=devices))
    return Learner(placement, network()[1], algorithm, state or first_state(algorithm), **how)


def start_update(learner, number=0, devices=1):
    """Starts an update of a learner on a rollout, of which each device has other environments."""
    keys = jax.random.split(jax.random.fold_in(KEY, number), devices)
    size = {"length": LENGTH, "num_envs": ENVS // devices}
    rollouts = [random_rollout(key, network()[1], **size) for key in keys]
    return learner.update(rollouts, jax.tree.map(np.float32, CONFIG), jax.random.fold_in(KEY, number))


def assert_equal(tree, other):
    jax.tree.map(np.testing.assert_array_equal, tree, other)


def kept(tree):
    """A copy on the host, which no update consumes."""
    return jax.tree.map(np.array, tree)


# --- What acts ---------------------------------------------------------------------------------------------------


@on_devices
def test_the_newest_parameters_act(devices):
    learner = learner_of(devices=devices)
    learned = [kept(learner.params)]
    for number in range(2):
        start_update(learner, number, devices)
        acting = learner.acting_params()
        learned.append(kept(learner.params))
        where = [params["value"]["bias"].devices() for params in acting]
        assert where == [{device} for device in jax.devices()[:devices]]
        for params in acting:
            assert_equal(params, learned[-1])
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, *learned[1:])))
    assert learner.checkpoint_items() == {}


@on_devices
def test_with_overlap_the_parameters_from_before_the_newest_update_act(devices):
    learner = learner_of(overlap=True, devices=devices)
    learned = [kept(learner.params)]
    assert_equal(learner.acting_params(), [learned[0]] * devices)
    for number in range(3):
        start_update(learner, number, devices)
        assert_equal(learner.acting_params(), [learned[-1]] * devices)
        learned.append(kept(learner.params))
    learner.close()
    # A checkpoint keeps both: the parameters that act, and the state to which they are compared.
    items = learner.checkpoint_items()
    assert items.keys() == {"acting"}
    continued = learner_of(state=learner.state, devices=devices, overlap=True, lagged_params=items["acting"])
    assert_equal(continued.acting_params(), [learned[-2]] * devices)
    assert_equal(continued.params, learned[-1])
    continued.close()


@on_devices
def test_both_learn_the_same_from_the_same_rollouts(devices):
    found = []
    for overlap in (False, True):
        learner = learner_of(devices=devices, overlap=overlap)
        metrics = [start_update(learner, number, devices)() for number in range(2)]
        found.append((metrics, kept(learner.state), learner.parameter_norm()))
        learner.close()
    assert_equal(*found)
    metrics, state, norm = found[0]
    assert all(type(value) is float for value in metrics[1].values())
    assert norm == pytest.approx(float(optax.tree.norm(state.params)))
    assert jax.tree.map(np.shape, state) == jax.tree.map(np.shape, first_state())  # that of one device
    assert state.optimizer_steps == 2 * CONFIG.epochs * ENVS * LENGTH // CONFIG.minibatch_size


# --- Errors ------------------------------------------------------------------------------------------------------


def failing_loss(params, apply, batch, options):
    raise ArithmeticError("planted")


def test_an_error_of_an_overlapped_update_is_raised_by_whatever_waits_for_it():
    learner = learner_of(PPO._replace(loss=failing_loss), overlap=True)
    before = kept(learner.params)
    pending_metrics = start_update(learner)
    waiting = {
        "its metrics": pending_metrics,
        "its metrics again": pending_metrics,
        "the next update": lambda: start_update(learner),
        "the state": lambda: learner.state,
        "the parameters": lambda: learner.params,
        "their norm": learner.parameter_norm,
    }
    for wait in waiting.values():
        with pytest.raises(ArithmeticError, match="planted"):
            wait()
    assert_equal(learner.acting_params(), [before])  # waits for nothing
    learner.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("learner")]


# --- What must be equal on all devices ---------------------------------------------------------------------------


def with_second_moments(state, change):
    adam = next(part for part in state.opt_state if hasattr(part, "nu"))
    moments = jax.tree.map(change, adam.nu)
    parts = tuple(part._replace(nu=moments) if part is adam else part for part in state.opt_state)
    return state.replace(opt_state=parts)


def test_the_state_must_be_the_same_on_all_devices():
    """The first update finds a mean that each device has computed over its own part of the rollout."""

    def prepare(state, apply, rollout, mean, options, key):
        extra = {"updates": state.extra["updates"] + 1, "mean": jnp.mean(rollout.value)}
        state = state.replace(extra=extra)
        return ppo_prepare(state, apply, rollout, mean, options, key)

    extra = {"updates": jnp.zeros((), jnp.int32), "mean": jnp.zeros(())}
    algorithm = PPO._replace(init=lambda params, key: (params, extra), prepare=prepare)
    learner = learner_of(algorithm, devices=2)
    expected = r"extra\['mean'\] of prepare = 'another value on each device': expected the same on all devices; "
    with pytest.raises(InterfaceError, match=expected):
        start_update(learner, devices=2)()
    learner.close()


@pytest.mark.parametrize(("overlap", "check"), [(False, True), (True, False)])
def test_a_difference_that_begins_later_is_found_before_a_checkpoint(overlap, check):
    """The second moments are 0 before the first update, so a factor changes nothing in it."""

    def prepare(state, apply, rollout, mean, options, key):
        factor = 1 + jnp.abs(jnp.mean(rollout.value))
        state = with_second_moments(state, lambda x: x * factor)
        return ppo_prepare(state, apply, rollout, mean, options, key)

    learner = learner_of(PPO._replace(prepare=prepare), devices=2, overlap=overlap, check=check)
    start_update(learner, devices=2)()
    learner.check_state()
    with pytest.raises(InterfaceError, match="expected the same on all devices"):  # noqa: PT012
        start_update(learner, 1, devices=2)()
        assert not check  # with `check`, the update itself has found it
        learner.check_state()
    learner.close()
