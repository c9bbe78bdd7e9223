"""Training on the real emulator: one result however the work is spread over threads, groups and devices."""

import itertools

import jax
import numpy as np
import pytest
from small_training import TINY, Lines, change

from jaxrl_atari import rollout, session
from jaxrl_atari.devices import place
from jaxrl_atari.errors import InterfaceError
from jaxrl_atari.session import iterations, open_session

SMALL = change(
    TINY,
    total_env_steps=640,
    env={"num_envs": 8, "num_groups": 1},
    ppo={"epochs": 2},
    network={"compute_dtype": "float32"},  # in which results of other splits differ least
)
OVERLAP = change(SMALL, overlap="update")
TWO = {"data_parallel": 2}


@pytest.fixture(scope="module", autouse=True)
def _weights_that_differ():
    """Environments 0 to 3 have weight in every other step only: devices differ in it, as where a game ends."""
    receive = rollout.EnvGroup.receive

    def with_gaps(group, step):
        games = receive(group, step)
        group.outcomes[-1]["weight"][group.first_env + np.arange(group.pool.num_envs) < 4] *= step % 2
        return games

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout.EnvGroup, "receive", with_gaps)
        yield


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Trains for some updates: parameters, metrics and env steps afterwards."""

    def train(config, updates=4):
        with open_session(config, tmp_path_factory.mktemp("run") / "session_0") as run:
            metrics = [read() for read in itertools.islice(iterations(run), updates)]
            return jax.device_get(run.learner.state.params), metrics, run.progress.env_steps

    return train


@pytest.fixture(scope="module")
def one_device(train):
    return train(SMALL)


def assert_close(params, other):
    """Within 1% of the longest way that Adam can have gone, root mean square.

    Not closer: where a unit sits at the kink of its ReLU, another order of a sum turns its tiny gradient off, and
    Adam makes whole steps of tiny gradients.
    """
    longest_way = 4 * 2 * 4 * 2.5e-4
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(other), strict=True):
        assert np.sqrt(np.mean(np.square(a - b))) < 0.01 * longest_way


def assert_equal(params, other):
    jax.tree.map(np.testing.assert_array_equal, params, other)


def test_the_split_over_devices_and_groups_changes_nothing(one_device, train):
    for groups in (1, 2):
        params, metrics, env_steps = train(change(SMALL, env={"num_groups": groups}, devices=TWO))
        assert_close(one_device[0], params)
        assert env_steps == one_device[2]
        assert metrics[-1]["loss"] == pytest.approx(one_device[1][-1]["loss"], abs=1e-4)
        for name, value in one_device[1][0].items():  # every metric is over all devices
            assert metrics[0][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_overlap_is_reproducible_on_any_devices_and_its_first_update_is_the_strict_one(one_device, train):
    params, metrics, _ = train(OVERLAP)
    assert_equal(params, train(OVERLAP)[0])
    assert_equal(train(OVERLAP, updates=1)[0], train(SMALL, updates=1)[0])
    assert np.abs(params["dense"]["kernel"] - one_device[0]["dense"]["kernel"]).max() > 1e-6
    together = train(change(OVERLAP, devices=TWO))
    assert_close(params, together[0])
    assert together[1][-1]["loss"] == pytest.approx(metrics[-1]["loss"], abs=1e-4)


def test_acting_on_another_device_than_learning(one_device, train, monkeypatch):
    elsewhere = jax.devices("cpu")[3]
    monkeypatch.setattr(session, "place", lambda config: place(config)._replace(actors=(elsewhere,)))
    assert_close(one_device[0], train(SMALL)[0])


def test_a_state_that_differs_between_devices_is_not_saved(tmp_path):
    config = change(SMALL, devices=TWO, log={"checkpoint_every_env_steps": 10**6})
    with open_session(config, tmp_path / "session_0") as run:
        next(iterations(run))
        rows = run.learner._state.params
        other = jax.tree.map(lambda x: x * np.array([1.0, 1.1]).reshape(2, *[1] * (x.ndim - 1)), rows)
        run.learner._state = run.learner._state.replace(params=other)
        with pytest.raises(InterfaceError, match=r"params.* = 'another value on each device'"):
            run.finish()
        assert not run.checkpoints.env_steps()


def test_optimizer_steps_of_a_row_are_those_of_the_train_state(tmp_path):
    """Also where `target_kl` has left out epochs of the newest update."""
    rows, counters = Lines(), []
    config = change(SMALL, ppo={"target_kl": 0.0}, log={"every_env_steps": 1})
    with open_session(config, tmp_path / "session_0", writers=[rows]) as run:
        for _ in itertools.islice(iterations(run), 3):
            counters.append(int(run.learner.state.optimizer_steps))
    taken = SMALL.num_minibatches  # of one epoch of two, in each update
    assert [row["optimizer_steps"] for row in rows.rows] == counters == [taken, 2 * taken, 3 * taken]
