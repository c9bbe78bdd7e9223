"""Training on the real emulator: a failing pool, nothing misplaced."""

import contextlib
import itertools
import threading

import jax
import numpy as np
import pytest
from small_training import TINY, change

from jaxrl_atari import rollout
from jaxrl_atari.devices import PlacementError
from jaxrl_atari.session import iterations, open_session

OVERLAP = change(TINY, overlap="update")


@pytest.fixture
def open_run(tmp_path):
    """Prepares a session, trains some updates, and closes it at the end."""
    with contextlib.ExitStack() as exits:

        def open_run(config, updates=0):
            run = exits.enter_context(open_session(config, tmp_path / "session_0"))
            for metrics in itertools.islice(iterations(run), updates):
                metrics()
            return run

        yield open_run


def test_a_failure_of_a_pool_beside_an_overlapped_update_is_raised_and_nothing_hangs(tmp_path):
    def fail(*_, **__):
        raise RuntimeError("planted")

    with open_session(OVERLAP, tmp_path / "session_0") as run:
        trained = iterations(run)
        next(trained)
        run.environments.groups[0][0].pool.send = fail
        with pytest.raises(RuntimeError, match="planted"):
            list(trained)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("learner")]


def test_the_checker_names_what_is_misplaced(open_run):
    here, there = jax.devices("cpu")[:2]
    run = open_run(TINY, 1)
    (params,) = run.learner.acting_params()
    run.learner.acting_params = lambda: [params | {"value": jax.device_put(params["value"], there)}]
    with pytest.raises(PlacementError, match=rf"acting: params/value/bias is on {there}; expected on {here}"):
        next(iterations(run))


@pytest.mark.parametrize("place", ["rollout", "learner"])
def test_the_steady_loop_makes_no_implicit_transfers(place, open_run, monkeypatch):
    """`devices.check` guards it, in the thread of an overlapped update, too; a transfer planted there is
    refused."""
    run = open_run(OVERLAP if place == "learner" else TINY, 2)  # the guard is on from the second iteration
    bias = run.learner.state.params["policy"]["bias"] + 0

    def careless(function):
        return lambda *arguments, **named: (bias + np.ones(4), function(*arguments, **named))[1]

    owner, name = (rollout, "begin_rollout") if place == "rollout" else (run.learner, "_update")
    monkeypatch.setattr(owner, name, careless(getattr(owner, name)))
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        list(iterations(run))
