"""Training on the real emulator: one result however the work is spread, one update of lag, nothing misplaced."""

import contextlib
import inspect
import itertools
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from fake_pools import Corridor
from small_training import Lines, change

from jaxrl_atari import ppo, rollout, session
from jaxrl_atari.algorithm import Rollout
from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, NetworkConfig, PPOConfig
from jaxrl_atari.devices import PlacementError, place
from jaxrl_atari.errors import ConfigError, InterfaceError
from jaxrl_atari.learner import compiled_update
from jaxrl_atari.session import iterations, open_session, place_session
from jaxrl_atari.update import current_options, learning_rate

SMALL = Config(
    env=EnvConfig(game="Qbert", num_envs=8, num_groups=1),
    ppo=PPOConfig(rollout_length=8, minibatch_size=16, epochs=2),
    network=NetworkConfig(compute_dtype="float32"),  # in which results of other splits differ least
    devices=DevicesConfig(gpu=False, check=True),
    total_env_steps=640,
)
OVERLAP = change(SMALL, overlap="update")
TWO = {"data_parallel": 2}


@pytest.fixture(scope="module", autouse=True)
def _weights_that_differ():
    """Environments 0 to 3 have weight in every other step only: devices differ in it, as where a game ends."""
    receive = rollout.EnvGroup.receive

    def with_gaps(group, t):
        games = receive(group, t)
        group.outcomes[t]["weight"][group.first_env + np.arange(group.pool.num_envs) < 4] *= t % 2
        return games

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout.EnvGroup, "receive", with_gaps)
        yield


@pytest.fixture
def open_run(tmp_path_factory):
    """Prepares sessions, each in a folder of its own, trains some updates, and closes them at the end."""
    with contextlib.ExitStack() as exits:

        def open_run(config=SMALL, updates=0):
            folder = tmp_path_factory.mktemp("run") / "session_0"
            run = exits.enter_context(open_session(config, place_session(config), folder))
            for metrics in itertools.islice(iterations(run), updates):
                metrics()
            return run

        yield open_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains for some updates: parameters, metrics and env steps afterwards."""

    def trained(config, updates=3):
        with open_session(config, place_session(config), tmp_path_factory.mktemp("run") / "session_0") as run:
            metrics = [read() for read in itertools.islice(iterations(run), updates)]
            return jax.device_get(run.learner.state.params), metrics, run.progress.env_steps

    return trained


def assert_close(params, other):
    """Within 1% of the longest way that Adam can have gone, root mean square.

    Not closer: where a unit sits at the kink of its ReLU, another order of a sum turns its tiny gradient off, and
    Adam makes whole steps of tiny gradients.
    """
    longest_way = 24 * 2.5e-4
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(other), strict=True):
        assert np.sqrt(np.mean(np.square(a - b))) < 0.01 * longest_way


def assert_equal(params, other):
    jax.tree.map(np.testing.assert_array_equal, params, other)


@pytest.fixture(scope="module")
def one_device(trained):
    return trained(SMALL)


# --- One result --------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_seed_gives_the_same_bits_with_any_number_of_emulator_threads(one_device, trained):
    assert_equal(one_device[0], trained(change(SMALL, env={"num_threads": 5}))[0])
    other = trained(change(SMALL, seed=1))[0]
    assert np.abs(one_device[0]["dense"]["kernel"] - other["dense"]["kernel"]).max() > 1e-2


@pytest.mark.parametrize(
    "devices", [pytest.param(2, marks=pytest.mark.long), pytest.param(8, marks=pytest.mark.slow)]
)
def test_the_split_over_devices_changes_nothing(one_device, trained, devices):
    params, metrics, env_steps = trained(change(SMALL, devices={"data_parallel": devices}))
    assert_close(one_device[0], params)
    assert env_steps == one_device[2]
    assert metrics[-1]["loss"] == pytest.approx(one_device[1][-1]["loss"], abs=1e-5)
    for name, value in one_device[1][0].items():  # every metric is over all devices
        assert metrics[0][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


@pytest.mark.long
def test_groups_and_devices_together_change_nothing(one_device, open_run):
    run = open_run(change(SMALL, env={"num_groups": 2}, devices=TWO), 3)
    first, second = jax.device_get(run.learner.acting_params())
    assert_equal(first, second)
    assert_close(one_device[0], jax.device_get(run.learner.state.params))


def test_all_devices_that_do_not_divide_the_minibatch_are_refused(open_run):
    config = change(SMALL, devices={"data_parallel": "all"}, ppo={"minibatch_size": 2})
    with pytest.raises(
        ConfigError, match=r"devices\.data_parallel = 8: expected a divisor of .*minibatch_size = 2"
    ):
        open_run(config)


# --- Overlap -----------------------------------------------------------------------------------------------------


def test_overlap_acts_with_the_parameters_before_the_running_update(open_run, monkeypatch):
    """Rollout u is of the parameters after update u - 2: one update behind those that the strict order would
    use."""
    run, acted_with = open_run(OVERLAP), []

    def spy(groups, params, key, **options):
        acted_with.append(jax.device_get(params[0]["policy"]["kernel"]))
        return rollout.collect(groups, params, key, **options)

    def kernel():
        return jax.device_get(run.learner.state.params["policy"]["kernel"])

    monkeypatch.setattr(session, "collect", spy)
    initial = kernel()
    learned = [kernel() for _ in itertools.islice(iterations(run), 4)]
    assert_equal(acted_with, [initial, initial, *learned[:2]])
    assert not np.array_equal(*learned[:2])


@pytest.mark.long
def test_overlap_is_reproducible_on_any_devices_and_its_first_update_is_the_strict_one(one_device, trained):
    params, metrics, _ = trained(OVERLAP)
    assert_equal(params, trained(OVERLAP)[0])
    assert_equal(trained(OVERLAP, updates=1)[0], trained(SMALL, updates=1)[0])
    assert np.abs(params["dense"]["kernel"] - one_device[0]["dense"]["kernel"]).max() > 1e-6
    together = trained(change(OVERLAP, devices=TWO))
    assert_close(params, together[0])
    assert together[1][-1]["loss"] == pytest.approx(metrics[-1]["loss"], abs=1e-5)


@pytest.mark.parametrize("side", ["learner", "actor"])
def test_a_failure_on_either_side_of_the_overlap_is_raised_and_nothing_hangs(side, tmp_path):
    def fail(*_, **__):
        raise RuntimeError("planted")

    with open_session(OVERLAP, place_session(OVERLAP), tmp_path / "session_0") as run:
        trained = iterations(run)
        next(trained)
        if side == "learner":
            run.learner._learner._update = fail
        else:
            run.environments.groups[0][0].pool.send = fail
        with pytest.raises(RuntimeError, match="planted"):
            list(trained)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("learner")]


# --- Placement ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_acting_on_another_device_than_learning(one_device, open_run, monkeypatch):
    elsewhere = jax.devices("cpu")[3]
    monkeypatch.setattr(session, "place", lambda config: place(config)._replace(actors=(elsewhere,)))
    run = open_run(SMALL, 3)
    assert run.environments.groups[0][0].rollout_start.frames.devices() == {elsewhere}
    assert run.learner.state.params["dense"]["kernel"].devices() == {run.placement.home}
    assert_close(one_device[0], jax.device_get(run.learner.state.params))


def misplace_acting_parameters(run, there):
    (params,) = run.learner.acting_params()
    run.learner.acting_params = lambda: [params | {"value": jax.device_put(params["value"], there)}]


def misplace_rollout(run, there):
    assemble = run.learner._parallel.assemble

    def misplaced(shards):
        shards = assemble(shards)
        return shards._replace(age=jax.device_put(shards.age, there)) if isinstance(shards, Rollout) else shards

    run.learner._parallel.assemble = misplaced


def misplace_train_state(run, there):
    acting, state = run.learner.acting_params(), run.learner.state
    run.learner._state = state.replace(
        params=state.params | {"value": jax.device_put(state.params["value"], there)}
    )
    run.learner.acting_params = lambda: acting


@pytest.mark.parametrize(
    ("misplace", "what"),
    [
        (misplace_acting_parameters, "acting: params/value/bias"),
        (misplace_rollout, "learning: rollout/age"),
        (misplace_train_state, "learning: train_state/params/value/bias"),
    ],
)
def test_the_checker_names_what_is_misplaced(misplace, what, open_run):
    here, there = jax.devices("cpu")[:2]
    run = open_run(SMALL, 1)
    misplace(run, there)
    with pytest.raises(PlacementError, match=rf"{what} is on {there}; expected on {here}"):
        next(iterations(run))


@pytest.mark.long
def test_a_state_that_differs_between_devices_is_not_saved(open_run):
    run = open_run(change(SMALL, devices=TWO), 1)
    rows = run.learner._state.params
    other = jax.tree.map(lambda x: x * np.array([1.0, 1.1]).reshape(2, *[1] * (x.ndim - 1)), rows)
    run.learner._state = run.learner._state.replace(params=other)
    with pytest.raises(InterfaceError, match=r"params.* = 'another value on each device'"):
        run.finish()
    assert not run.checkpoints.env_steps()


@pytest.mark.parametrize(("config", "place"), [(SMALL, "rollout"), (SMALL, "learner"), (OVERLAP, "learner")])
def test_the_steady_loop_makes_no_implicit_transfers(config, place, open_run, monkeypatch):
    """`devices.check` guards it, in the thread of an overlapped update, too; a transfer planted there is
    refused."""
    run = open_run(config, 3)  # the guard is on from the second iteration
    bias = run.learner.state.params["policy"]["bias"] + 0

    def careless(function):
        return lambda *arguments, **named: (bias + np.ones(6), function(*arguments, **named))[1]

    learner = run.learner._learner if config is OVERLAP else run.learner
    owner, name = (rollout, "begin_rollout") if place == "rollout" else (learner, "_update")
    monkeypatch.setattr(owner, name, careless(getattr(owner, name)))
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        list(iterations(run))


# --- What the config asks for ------------------------------------------------------------------------------------


def test_the_learning_rate_is_a_line_to_zero_and_the_options_reach_the_update():
    rates = [learning_rate(SMALL, env_steps) for env_steps in (0, 160, 640, 700)]
    np.testing.assert_allclose(rates, [2.5e-4, 2.5e-4 * 0.75, 0.0, 0.0])
    config = change(SMALL, env={"game": "Breakout"}, ppo={"anneal_learning_rate": False, "gamma": 0.9})
    options = current_options(config, 320)
    assert (options.learning_rate, options.gae_lambda, options.gamma) == tuple(map(np.float32, (2.5e-4, 0.7, 0.9)))


@pytest.mark.parametrize(("fails", "pools"), [("pool", 1), ("network", 2)])
def test_pools_are_closed_where_a_later_one_or_the_network_cannot_be_made(fails, pools, monkeypatch):
    made, closed = [], []

    class Pool(Corridor):
        def close(self):
            closed.append(self)

    def make_pool(backend, game, size, **options):
        if fails == "pool" and made:
            raise OSError("no pool")
        made.append(Pool(size, seed=0))
        return made[-1]

    def make_network(config, num_actions, *device_classes):
        raise OSError("no network")

    monkeypatch.setattr(rollout, "make_pool", make_pool)
    monkeypatch.setattr(rollout, "make_network", make_network)
    with pytest.raises(OSError, match=f"no {fails}"):
        rollout.make_groups(change(SMALL, env={"num_groups": 2}), place(SMALL.devices), seed=0)
    assert len(made) == pools
    assert set(closed) == set(made)


@pytest.mark.long
def test_optimizer_steps_of_a_row_are_those_of_the_train_state(tmp_path):
    """Also where `target_kl` has left out epochs of the newest update."""
    rows, counters = Lines(), []
    config = change(SMALL, ppo={"target_kl": 0.0}, log={"every_env_steps": 1})
    with open_session(config, place_session(config), tmp_path / "session_0", writers=[rows]) as run:
        for _ in itertools.islice(iterations(run), 3):
            counters.append(int(run.learner.state.optimizer_steps))
    taken = SMALL.num_minibatches  # of one epoch of two, in each update
    assert [row["optimizer_steps"] for row in rows.rows] == counters == [taken, 2 * taken, 3 * taken]


@pytest.mark.long
def test_another_network_trains_and_is_restored(tmp_path):
    """The IMPALA network: updates, a checkpoint, and a resume from it."""
    # Gradients alone move it.
    options = {"rollout_length": 4, "minibatch_size": 8, "epochs": 1, "weight_decay": 0.0}
    config = change(SMALL, env={"num_envs": 2}, ppo=options, network={"name": "impala"})
    with open_session(config, place_session(config), tmp_path / "session_0") as run:
        before = jax.device_get(run.learner.state.params)
        list(itertools.islice(iterations(run), 2))
        run.finish()
        after = jax.device_get(run.learner.state.params)
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), before, after)
    assert all(x > 0 for x in jax.tree.leaves(moved))
    with open_session(config, place_session(config), tmp_path / "session_0", resume=True) as run:
        assert_equal(after, jax.device_get(run.learner.state.params))


def test_the_loss_is_five_calls_from_a_session(tmp_path, monkeypatch):
    package, path = Path(ppo.__file__).parent, []

    def spy(*arguments):
        frames = [frame for frame in inspect.stack() if Path(frame.filename).is_relative_to(package)]
        path[:] = [frame.function for frame in reversed(frames)]
        raise LookupError("this is all that was asked")

    monkeypatch.setattr(ppo, "PPO", ppo.PPO._replace(loss=spy))
    compiled_update.cache_clear()
    with pytest.raises(LookupError, match="this is all that was asked"):
        session.run_session(SMALL, tmp_path / "session_0")
    assert path[0] == "run_session"
    assert len(path) <= 6, path
