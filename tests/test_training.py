"""Training on the real emulator: one result however the work is spread, one update of lag, nothing misplaced."""

import contextlib
import dataclasses
import inspect
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest
from user_commands import ROOT

from jaxrl_atari import ppo, rollout, session
from jaxrl_atari import train as command
from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, NetworkConfig, PPOConfig
from jaxrl_atari.devices import PlacementError, check_placement, place
from jaxrl_atari.envs import make_pool
from jaxrl_atari.envs.protocols import PROTOCOLS
from jaxrl_atari.errors import ConfigError
from jaxrl_atari.evaluate.policy import Policy
from jaxrl_atari.fast.forms import make_network
from jaxrl_atari.learner import compiled_update
from jaxrl_atari.networks import init_params
from jaxrl_atari.rollout import num_groups
from jaxrl_atari.session import hyperparameters, learning_rate, prepare, train

SMALL = Config(
    env=EnvConfig(game="Qbert", num_envs=8),
    ppo=PPOConfig(rollout_length=8, minibatch_size=16, epochs=2),
    network=NetworkConfig(compute_dtype="float32"),  # in which results of other splits differ least
    devices=DevicesConfig(gpu=False, check=True),
    total_env_steps=640,
)


def small(num_groups=1, overlap="none", **devices):
    return dataclasses.replace(
        SMALL,
        env=dataclasses.replace(SMALL.env, num_groups=num_groups),
        devices=dataclasses.replace(SMALL.devices, **devices),
        overlap=overlap,
    )


@pytest.fixture(scope="module", autouse=True)
def _weights_that_differ():
    """Environments 0 to 3 have weight in every other step only: devices differ in it, as where a game ends."""
    receive = rollout.EnvGroup.receive

    def with_gaps(group, t):
        games = receive(group, t)
        group._outcome.weight[t, group._first_env + np.arange(group.pool.num_envs) < 4] *= t % 2
        return games

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout.EnvGroup, "receive", with_gaps)
        yield


@pytest.fixture
def open_run(tmp_path_factory):
    """Prepares sessions, each in a folder of its own, and closes them at the end."""
    with contextlib.ExitStack() as exits:

        def open_run(config=SMALL, **options):
            folder = tmp_path_factory.mktemp("run") / "session_0"
            return exits.enter_context(prepare(config, folder, quiet=True, **options))

        yield open_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Trains for some updates: parameters, metrics and env steps afterwards."""

    def trained(config, updates=3, seed=0):
        config = dataclasses.replace(config, seed=seed)
        with prepare(config, tmp_path_factory.mktemp("run") / "session_0", quiet=True) as run:
            iterations = train(run)
            metrics = [next(iterations) for _ in range(updates)]
            last = run.learner.settle()
            values = [jax.device_get(m) for m in (*metrics, last) if m is not None]
            return jax.device_get(run.learner.state.params), values, run.progress.env_steps

    return trained


def iterate(run, times):
    """Some iterations, waited for."""
    iterations = train(run)
    for _ in range(times):
        jax.block_until_ready(next(iterations))
    return run


def assert_close(params, other):
    """Within 1% of the longest way that Adam can have gone, root mean square.

    Not closer: where a unit sits at the kink of its ReLU, another order of a sum turns its tiny gradient off, and Adam
    makes whole steps of tiny gradients.
    """
    longest_way = 24 * 2.5e-4
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(other), strict=True):
        assert np.sqrt(np.mean(np.square(a - b))) < 0.01 * longest_way


def assert_equal(params, other):
    jax.tree.map(np.testing.assert_array_equal, params, other)


@pytest.fixture(scope="module")
def one_device(trained):
    return trained(small())


@pytest.fixture(scope="module")
def overlapped(trained):
    return trained(small(overlap="update"))


# --- One result ------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bits_with_any_number_of_emulator_threads(one_device, trained):
    for threads in (1, 5):
        config = dataclasses.replace(SMALL, env=dataclasses.replace(SMALL.env, num_threads=threads, num_groups=1))
        assert_equal(one_device[0], trained(config)[0])


@pytest.mark.slow
def test_the_same_number_of_threads_of_xla_gives_the_same_bits(tmp_path):
    """Through the command. NPROC is XLA's variable: it limits the threads, as fewer cores do.

    With another number, XLA divides the long sums of matrix products in other places: the last bits differ.
    """

    def trained(name, threads, emulator_threads):
        command = [
            sys.executable, "-m", "jaxrl_atari.train", "--config", "configs/qbert.py", "--run-dir", tmp_path / name,
            "--total-env-steps", 6_144, "--env.num-threads", emulator_threads, "--devices.gpu", "false",
            "--log.no-graphs", "--log.no-tensorboard",
        ]  # fmt: skip
        environment = os.environ | {"NPROC": str(threads), "JAX_COMPILATION_CACHE_DIR": str(tmp_path / f"{threads}")}
        subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, capture_output=True, check=True)
        (step,) = (tmp_path / name / "session_0" / "checkpoints").iterdir()
        return json.loads((step / "meta" / "metadata").read_text())["checksums"]

    for threads in (1, 2):
        assert trained(f"{threads}_1", threads, 1) == trained(f"{threads}_2", threads, 2)


def test_another_seed_other_parameters(one_device, trained):
    other = trained(small(), seed=1)[0]
    assert np.abs(one_device[0]["dense"]["kernel"] - other["dense"]["kernel"]).max() > 1e-2


@pytest.mark.parametrize("devices", [2, pytest.param(8, marks=pytest.mark.slow)])
def test_the_split_over_devices_changes_nothing(one_device, trained, devices):
    params, metrics, env_steps = trained(small(data_parallel=devices))
    assert_close(one_device[0], params)
    assert env_steps == one_device[2]
    assert metrics[-1]["loss"] == pytest.approx(one_device[1][-1]["loss"], abs=1e-5)
    for name, value in one_device[1][0].items():  # every metric is over all devices
        assert metrics[0][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_groups_and_devices_together_change_nothing(one_device, trained):
    assert_close(one_device[0], trained(small(num_groups=2, data_parallel=2))[0])


def test_parameters_are_the_same_on_all_devices(open_run):
    run = iterate(open_run(small(data_parallel=2)), 2)
    assert_equal(*jax.device_get(run.learner.acting_params()))


def test_a_number_of_devices_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"devices\.data_parallel = 3: expected a divisor of env\.num_envs = 8"):
        small(data_parallel=3)


def test_all_devices_that_do_not_divide_the_minibatch_are_refused(open_run):
    config = small(data_parallel="all")  # of 4 simulated devices, of which the default allows each
    config = dataclasses.replace(config, ppo=dataclasses.replace(config.ppo, minibatch_size=2))
    with pytest.raises(ConfigError, match=r"ppo\.minibatch_size = 2: expected a multiple of \d devices; change"):
        open_run(config)


# --- Overlap ---------------------------------------------------------------------------------------------------------


def test_overlap_acts_with_the_parameters_before_the_running_update(open_run, monkeypatch):
    """Rollout u is of the parameters after update u - 2: one update behind those that the strict order would use."""
    run = open_run(small(overlap="update"))
    acted_with, learned = [], []
    collect, update = rollout.collect, run.learner._update

    def spy_collect(groups, params, key):
        acted_with.append(jax.device_get(params[0])["policy"]["kernel"])
        return collect(groups, params, key)

    def spy_update(*arguments):
        state, metrics = update(*arguments)
        learned.append(jax.device_get(state.params)["policy"]["kernel"])
        return state, metrics

    monkeypatch.setattr(session, "collect", spy_collect)
    run.learner._update = spy_update
    initial = jax.device_get(run.learner.state.params)["policy"]["kernel"]
    iterations = train(run)
    for _ in range(4):
        next(iterations)
    run.learner.settle()
    for kernel, expected in zip(acted_with, [initial, initial, learned[0], learned[1]], strict=True):
        np.testing.assert_array_equal(kernel, expected)
    assert not np.array_equal(learned[0], learned[1])


def test_overlap_is_reproducible_and_its_first_update_is_the_strict_one(one_device, overlapped, trained):
    assert_equal(overlapped[0], trained(small(overlap="update"))[0])
    assert_equal(trained(small(overlap="update"), updates=1)[0], trained(small(), updates=1)[0])
    assert np.abs(overlapped[0]["dense"]["kernel"] - one_device[0]["dense"]["kernel"]).max() > 1e-6


def test_overlap_on_several_devices_is_as_on_one(overlapped, trained):
    together = trained(small(overlap="update", data_parallel=2))
    assert_close(overlapped[0], together[0])
    assert together[1][-1]["loss"] == pytest.approx(overlapped[1][-1]["loss"], abs=1e-5)


@pytest.mark.parametrize("side", ["learner", "actor"])
def test_a_failure_on_either_side_of_the_overlap_is_raised_and_nothing_hangs(side, tmp_path):
    def fail(*_):
        raise RuntimeError("planted")

    with prepare(small(overlap="update"), tmp_path / "session_0", quiet=True) as run:
        iterations = train(run)
        next(iterations)
        if side == "learner":
            run.learner._update = fail
        else:
            run.groups[0][0].send = fail
        with pytest.raises(RuntimeError, match="planted"):  # noqa: PT012 (the iteration after may be the one that raises)
            for _ in range(3):
                next(iterations)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("learner")]


# --- Placement -------------------------------------------------------------------------------------------------------


def test_acting_on_another_device_than_learning(one_device, open_run, monkeypatch):
    elsewhere = jax.devices("cpu")[3]
    monkeypatch.setattr(session, "place", lambda config: place(config)._replace(actors=(elsewhere,)))
    run = iterate(open_run(small(actor="learner")), 3)
    assert run.groups[0][0]._state.frames.devices() == {elsewhere}
    assert run.learner.state.params["dense"]["kernel"].devices() == {run.placement.home}
    assert_close(one_device[0], jax.device_get(run.learner.state.params))


def test_the_checker_names_a_misplaced_array(open_run):
    here, there = jax.devices("cpu")[:2]
    run = iterate(open_run(), 1)
    (params,) = run.learner.acting_params()
    run.learner.acting_params = lambda: [{**params, "value": jax.device_put(params["value"], there)}]
    with pytest.raises(PlacementError, match=rf"acting: params/value/bias is on {there}; expected on {here}"):
        next(train(run))


@pytest.mark.parametrize(("side", "what"), [("acting", "state"), ("learning", "rollout")])
def test_the_checker_watches_the_rollout(side, what, open_run, monkeypatch):
    run, there = iterate(open_run(), 1), jax.devices("cpu")[1]
    if side == "acting":
        group = run.groups[0][0]
        monkeypatch.setattr(group, "begin", lambda *_: None)
        group._state = group._state._replace(age=jax.device_put(group._state.age, there))
    else:
        assemble = run.learner._parallel.assemble

        def misplaced(shards):
            rollout = assemble(shards)
            if not isinstance(rollout, ppo.Rollout):
                return rollout
            return rollout._replace(age=jax.device_put(rollout.age, there))

        monkeypatch.setattr(run.learner._parallel, "assemble", misplaced)
    with pytest.raises(PlacementError, match=rf"{side}: {what}/age is on {there}"):
        next(train(run))


def test_the_checker_watches_learning(open_run):
    run = iterate(open_run(), 1)
    state = run.learner.state
    there = jax.device_put(state.params["value"], jax.devices("cpu")[1])
    run.learner._state = state.replace(params={**state.params, "value": there})
    (params,) = [state.params]
    run.learner.acting_params = lambda: [params]
    with pytest.raises(PlacementError, match="learning: train_state/params/value/bias is on"):
        next(train(run))


def test_jax_refuses_to_act_with_parameters_on_another_device(tmp_path):
    here, there = jax.devices("cpu")[:2]
    network = make_network(SMALL.network, 6, "cpu")
    params = jax.device_put(init_params(SMALL.network, 6, jax.random.key(0)), there)
    policy = Policy(SMALL, network, params, there, tmp_path, 0)
    frames = np.zeros((2, 84, 84, 4), np.uint8)
    assert policy.act(frames, jax.random.key(0)).shape == (2,)
    policy = dataclasses.replace(policy, params={**params, "policy": jax.device_put(params["policy"], here)})
    with pytest.raises(ValueError, match="incompatible devices"):
        policy.act(frames, jax.random.key(0))


def test_the_checker_sees_arrays_on_the_host():
    with pytest.raises(PlacementError, match="learning: x is on the host; expected on"):
        check_placement("learning", {"x": np.zeros(2)}, [jax.devices("cpu")[0]])


def test_the_checker_sees_an_array_on_one_of_two_devices():
    here, there = jax.devices("cpu")[:2]
    with pytest.raises(PlacementError, match=f"x is on {here}; expected on {here}, {there}"):
        check_placement("learning", {"x": jax.device_put(0.0, here)}, [here, there])


def test_the_steady_loop_makes_no_implicit_transfers(open_run, monkeypatch):
    """`devices.check` guards it; a transfer planted in the loop is refused."""
    run = iterate(open_run(), 3)  # the guard is on from the second iteration

    def careless(function):
        def called(*arguments):
            run.learner.state.params["policy"]["bias"] + np.ones(6)
            return function(*arguments)

        return called

    for owner, name in ((session, "collect"), (run.learner, "update")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, careless(getattr(owner, name)))
            with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
                next(train(run))


def test_the_guard_also_holds_in_the_thread_of_an_overlapped_update(open_run, monkeypatch):
    run = iterate(open_run(dataclasses.replace(SMALL, overlap="update")), 3)
    assemble = run.learner._parallel.assemble

    def careless(rollouts):
        run.learner._state.params["policy"]["bias"] + np.ones(6)
        return assemble(rollouts)

    monkeypatch.setattr(run.learner._parallel, "assemble", careless)
    iterations = train(run)
    next(iterations)
    with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
        next(iterations)
    monkeypatch.undo()


# --- What the config asks for ----------------------------------------------------------------------------------------


def test_the_learning_rate_is_a_line_to_zero():
    rates = [learning_rate(SMALL, env_steps) for env_steps in (0, 160, 640, 700)]
    np.testing.assert_allclose(rates, [2.5e-4, 2.5e-4 * 0.75, 0.0, 0.0])


def test_groups_on_a_device():
    def groups(num_envs, devices, platform, chosen=0):
        return num_groups(EnvConfig(num_envs=num_envs, num_groups=chosen), devices, platform)

    assert [groups(16, 1, "cpu"), groups(16, 1, "gpu"), groups(16, 8, "gpu")] == [1, 2, 2]
    assert [groups(1, 1, "gpu"), groups(15, 1, "gpu"), groups(8, 8, "gpu")] == [1, 1, 1]  # no halves
    assert groups(16, 1, "gpu", chosen=4) == 4


def test_the_config_reaches_the_update_and_the_games(monkeypatch, tmp_path):
    config = dataclasses.replace(
        small(),
        env=EnvConfig(game="BreakoutNoFrameskip-v4", num_envs=8, num_groups=1, num_threads=1, max_frames=400,
                      backend="envpool"),
        ppo=PPOConfig(
            rollout_length=8, minibatch_size=16, learning_rate=1e-3, anneal_learning_rate=False,
            gamma=0.9, clip_epsilon=0.2, entropy_coef=0.03, value_coef=0.6,
        ),
    )  # fmt: skip
    expected = (1e-3, 0.9, 0.7, 0.2, 0.03, 0.6)  # 0.7: the lambda tuned for Breakout
    assert hyperparameters(config, 320) == tuple(map(np.float32, expected))

    asked = []

    def spy(*arguments, **options):
        asked.append((arguments, options))
        return make_pool("ale", *arguments[1:], **options)

    monkeypatch.setattr(rollout, "make_pool", spy)
    monkeypatch.setattr(session, "collect", lambda *_: rollout.Collected([], 64, [], 0.0))  # nothing is compiled
    monkeypatch.setattr("jaxrl_atari.learner.Learner.update", lambda *_: {"loss": 0.0})
    with prepare(config, tmp_path / "session_0", quiet=True) as run:
        assert run.groups[0][0]._rules == config.env.rules != PROTOCOLS["v5"]
        next(train(run))
        run.finish()
    (arguments, options) = asked[0]
    assert arguments == ("envpool", "Breakout", 8)
    assert (options["rules"], options["num_threads"]) == (PROTOCOLS["classic"]._replace(max_frames=400), 1)
    with prepare(config, tmp_path / "session_0", resume=True, quiet=True) as run:
        assert run.progress.updates == 1
    first, resumed = (options["seed"] for _, options in asked)
    assert first != resumed  # it plays other games


def test_optimizer_steps_leave_out_the_epochs_that_target_kl_skips(open_run):
    config = dataclasses.replace(SMALL, ppo=dataclasses.replace(SMALL.ppo, target_kl=0.0))
    run = iterate(open_run(config), 2)
    run.log.flush()
    taken = 2 * SMALL.num_minibatches  # one epoch of two, in two updates
    assert run.progress.optimizer_steps == run.learner.state.optimizer_steps == taken


def test_another_network_trains_and_is_restored(open_run, tmp_path):
    """The IMPALA network on the real emulator: updates, a checkpoint, and a resume from it."""
    config = dataclasses.replace(
        SMALL,
        env=EnvConfig(num_envs=2, num_threads=1),
        ppo=PPOConfig(rollout_length=4, minibatch_size=8, epochs=1, weight_decay=0.0),  # gradients alone move weights
        network=NetworkConfig(name="impala"),
    )
    with prepare(config, tmp_path / "session_0", quiet=True) as run:
        before = jax.device_get(run.learner.state.params)
        iterate(run, 2)
        run.finish()
        after = jax.device_get(run.learner.state.params)
    moved = jax.tree.map(lambda x, y: np.abs(x - y).max(), before, after)
    assert all(x > 0 for x in jax.tree.leaves(moved))
    with prepare(config, tmp_path / "session_0", resume=True, quiet=True) as run:
        assert_equal(after, jax.device_get(run.learner.state.params))


def test_the_loss_is_eight_calls_from_the_command(tmp_path, monkeypatch):
    """A trial of one session takes no detour: the functions of ours that stand between `main` and `ppo_loss`."""
    package, path = Path(ppo.__file__).parent, []

    def spy(*arguments):
        frames = [frame for frame in inspect.stack() if Path(frame.filename).is_relative_to(package)]
        path[:] = [frame.function for frame in reversed(frames)]
        raise LookupError("this is all that was asked")

    monkeypatch.setattr(ppo, "ppo_loss", spy)
    compiled_update.cache_clear()
    config = tmp_path / "tiny.py"
    config.write_text(
        "from jaxrl_atari import *\n"
        "def get_config():\n"
        "    return Config(total_env_steps=16, env=EnvConfig(num_envs=2, num_threads=1), log=LogConfig(graphs=False),\n"
        "                  ppo=PPOConfig(rollout_length=8, minibatch_size=16, epochs=1))\n"
    )
    with pytest.raises(LookupError, match="this is all that was asked"):
        command.main(["--config", str(config), "--output-dir", str(tmp_path)])
    assert path[0] == "main"
    assert len(path) <= 8, path
