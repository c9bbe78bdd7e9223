"""The trainer on the real emulator: one result however the work is spread, one update of lag, nothing misplaced."""

import dataclasses
import threading

import jax
import numpy as np
import pytest

from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, NetworkConfig, PPOConfig
from jaxrl_atari.devices import PlacementError, check_placement, place
from jaxrl_atari.envs.ale import make_pool
from jaxrl_atari.evaluate.policy import Policy
from jaxrl_atari.trainer import Trainer, make_network, num_groups

SMALL = Config(
    env=EnvConfig(game="Qbert", num_envs=8),
    ppo=PPOConfig(rollout_length=8, minibatch_size=16, epochs=2),
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


def trained(config, updates=3, seed=0):
    """Parameters and metrics after some updates; the trainer is closed."""
    trainer = Trainer(config, seed, place(config.devices))
    try:
        metrics = [trainer.iterate() for _ in range(updates)]
        last = trainer.settle()
        values = [jax.device_get(m) for m in (*metrics, last) if m is not None]
        return jax.device_get(trainer.learner.params()), values, trainer.env_steps
    finally:
        trainer.close()


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
def one_device():
    return trained(small())


def test_same_seed_same_parameters_bit_for_bit(one_device):
    assert_equal(one_device[0], trained(small())[0])


def test_another_seed_other_parameters(one_device):
    other = trained(small(), seed=1)[0]
    assert np.abs(one_device[0]["dense"]["kernel"] - other["dense"]["kernel"]).max() > 1e-2


@pytest.mark.parametrize("devices", [2, 8])
def test_the_split_over_devices_changes_nothing(one_device, devices):
    params, metrics, env_steps = trained(small(data_parallel=devices))
    assert_close(one_device[0], params)
    assert env_steps == one_device[2]
    assert metrics[-1]["loss"] == pytest.approx(one_device[1][-1]["loss"], abs=1e-5)


def test_the_split_into_groups_changes_nothing(one_device):
    assert_close(one_device[0], trained(small(num_groups=2))[0])


def test_parameters_are_the_same_on_all_devices():
    config = small(data_parallel=4)
    trainer = Trainer(config, 0, place(config.devices))
    try:
        for _ in range(2):
            jax.block_until_ready(trainer.iterate())
        copies = [jax.device_get(trainer.learner.params(i)) for i in range(4)]
    finally:
        trainer.close()
    for copy in copies[1:]:
        assert_equal(copies[0], copy)


def test_a_number_of_devices_that_does_not_divide_is_refused():
    with pytest.raises(ValueError, match=r"devices\.data_parallel = 3: expected a divisor of env\.num_envs = 8"):
        small(data_parallel=3)


def test_overlap_acts_with_the_parameters_before_the_update_under_way():
    """Rollout u is of the parameters after update u - 2: one update behind those that the strict order would use."""
    config = small(overlap="update")
    trainer = Trainer(config, 0, place(config.devices))
    acted_with, learned = [], []
    learn = trainer.learner.update

    def spy(rollouts, hyper, key):
        metrics = learn(rollouts, hyper, key)
        learned.append(jax.device_get(trainer.learner.params())["policy"]["kernel"])
        return metrics

    trainer.learner.update = spy
    try:
        initial = jax.device_get(trainer.learner.params())["policy"]["kernel"]
        for _ in range(4):
            acted_with.append(jax.device_get(trainer._acting_params[0])["policy"]["kernel"])
            trainer.iterate()
        trainer.settle()
    finally:
        trainer.close()
    for kernel, expected in zip(acted_with, [initial, initial, learned[0], learned[1]], strict=True):
        np.testing.assert_array_equal(kernel, expected)
    assert not np.array_equal(learned[0], learned[1])


def test_overlap_is_reproducible_and_its_first_update_is_the_strict_one(one_device):
    first, again = trained(small(overlap="update")), trained(small(overlap="update"))
    assert_equal(first[0], again[0])
    assert len(first[1]) == 3
    assert first[1][0]["loss"] == pytest.approx(one_device[1][0]["loss"], abs=1e-6)
    assert first[1][1]["loss"] == pytest.approx(first[1][1]["loss"])
    assert np.abs(first[0]["dense"]["kernel"] - one_device[0]["dense"]["kernel"]).max() > 1e-6


@pytest.mark.parametrize("stepwise", [False, True])
def test_overlap_on_several_devices_is_as_on_one(stepwise):
    alone = trained(small(overlap="update"))
    config = small(overlap="update", data_parallel=2)
    trainer = Trainer(config, 0, place(config.devices))
    trainer.learner._stepwise = stepwise
    try:
        for _ in range(3):
            trainer.iterate()
        metrics = jax.device_get(trainer.settle())
        assert_close(alone[0], jax.device_get(trainer.learner.params()))
    finally:
        trainer.close()
    assert metrics["loss"] == pytest.approx(alone[1][-1]["loss"], abs=1e-5)


def test_minibatch_by_minibatch_is_the_same_update(one_device):
    config = small()
    trainer = Trainer(config, 0, place(config.devices))
    trainer.learner._stepwise = True
    try:
        for _ in range(3):
            metrics = jax.device_get(trainer.iterate())
        assert_close(one_device[0], jax.device_get(trainer.learner.params()))
    finally:
        trainer.close()
    assert metrics["loss"] == pytest.approx(one_device[1][-1]["loss"], abs=1e-5)


@pytest.mark.parametrize("side", ["learner", "actor"])
@pytest.mark.timeout(60)
def test_a_failure_on_either_side_of_the_overlap_is_raised_and_nothing_hangs(side):
    config = small(overlap="update")
    trainer = Trainer(config, 0, place(config.devices))

    def fail(*_):
        raise RuntimeError("planted")

    try:
        trainer.iterate()
        if side == "learner":
            trainer.learner.update = fail
        else:
            trainer.actors[0][0].send = fail
        with pytest.raises(RuntimeError, match="planted"):  # noqa: PT012 (the step after may be the one that raises)
            for _ in range(3):
                trainer.iterate()
    finally:
        trainer.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("learner")]


def test_acting_on_another_device_than_learning(one_device):
    config = small(actor="learner")
    placement = place(config.devices)
    elsewhere = jax.devices("cpu")[3]
    trainer = Trainer(config, 0, placement._replace(actors=(elsewhere,)))
    try:
        for _ in range(3):
            jax.block_until_ready(trainer.iterate())
        assert trainer.actors[0][0].state.frames.devices() == {elsewhere}
        assert trainer.learner.state.params["dense"]["kernel"].devices() == {placement.home}
        assert_close(one_device[0], jax.device_get(trainer.learner.params()))
    finally:
        trainer.close()


def test_the_checker_names_a_misplaced_array():
    here, there = jax.devices("cpu")[:2]
    trainer = Trainer(small(), 0, place(SMALL.devices))
    try:
        trainer.iterate()
        params = trainer._acting_params[0]
        trainer._acting_params[0] = {**params, "value": jax.device_put(params["value"], there)}
        with pytest.raises(PlacementError, match=rf"acting: params/value/bias is on {there}; expected on {here}"):
            trainer.iterate()
    finally:
        trainer.close()


def test_the_checker_watches_evaluation(tmp_path):
    here, there = jax.devices("cpu")[:2]
    trainer = Trainer(small(), 0, place(SMALL.devices))
    trainer.close()
    config = dataclasses.replace(SMALL, devices=DevicesConfig(gpu=False, check=True))
    network = make_network(config, trainer.num_actions, "cpu")
    policy = Policy(config, network, jax.device_put(trainer.learner.params(), there), there, tmp_path, 0)
    frames = np.zeros((2, 84, 84, 4), np.uint8)
    assert policy.act(frames, jax.random.key(0)).shape == (2,)
    policy = dataclasses.replace(
        policy, params={**policy.params, "value": jax.device_put(policy.params["value"], here)}
    )
    with pytest.raises(PlacementError, match=rf"evaluating: params/value/bias is on {here}; expected on {there}"):
        policy.act(frames, jax.random.key(0))


def test_the_checker_sees_arrays_on_the_host():
    with pytest.raises(PlacementError, match="learning: x is on the host; expected on"):
        check_placement("learning", {"x": np.zeros(2)}, [jax.devices("cpu")[0]])


def test_the_steady_loop_makes_no_implicit_transfers():
    trainer = Trainer(small(), 0, place(SMALL.devices))
    try:
        trainer.iterate()
        with jax.transfer_guard("disallow"):
            for _ in range(2):
                trainer.iterate()
            with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
                trainer.learner.params()["policy"]["bias"] + np.ones(6)
    finally:
        trainer.close()


def test_the_learning_rate_is_a_line_to_zero():
    trainer = Trainer(small(), 0, place(SMALL.devices))
    try:
        assert trainer.learning_rate == pytest.approx(2.5e-4)
        trainer.env_steps = 160
        assert trainer.learning_rate == pytest.approx(2.5e-4 * 0.75)
        trainer.env_steps = 700
        assert trainer.learning_rate == 0.0
    finally:
        trainer.close()


def test_groups_on_a_device():
    def groups(num_envs, devices, platform, chosen=0):
        return num_groups(EnvConfig(num_envs=num_envs, num_groups=chosen), devices, platform)

    assert [groups(16, 1, "cpu"), groups(16, 1, "gpu"), groups(16, 8, "gpu")] == [1, 2, 2]
    assert [groups(1, 1, "gpu"), groups(15, 1, "gpu"), groups(8, 8, "gpu")] == [1, 1, 1]  # no halves
    assert groups(16, 1, "gpu", chosen=4) == 4


def test_what_the_config_says_reaches_the_update_and_the_games(monkeypatch):
    config = dataclasses.replace(
        small(),
        env=EnvConfig(game="BreakoutNoFrameskip-v4", num_envs=8, num_groups=1, num_threads=1, max_frames=400),
        ppo=PPOConfig(
            rollout_length=8, minibatch_size=16, learning_rate=1e-3, anneal_learning_rate=False,
            gamma=0.9, clip_epsilon=0.2, entropy_coef=0.03, value_coef=0.6,
        ),
    )  # fmt: skip
    asked = []

    def spy(*arguments, **options):
        asked.append((arguments, options))
        return make_pool(*arguments, **options)

    monkeypatch.setattr("jaxrl_atari.trainer.make_pool", spy)

    def made(seed, restored=None):
        trainer = Trainer(config, seed, place(config.devices), restored)
        trainer.close()
        return trainer

    trainer = made(0)
    trainer.env_steps = 320  # half of the budget
    expected = (1e-3, 0.9, 0.7, 0.2, 0.03, 0.6)  # 0.7: the lambda tuned for Breakout
    assert trainer.hyperparameters() == tuple(map(np.float32, expected))
    (arguments, options) = asked[0]
    assert arguments == ("ale", "Breakout", 8)
    assert (options["protocol"], options["num_threads"], options["max_frames"]) == ("classic", 1, 400)
    # Another seed plays other games, and so does a resumed session.
    made(1)
    made(0, (trainer.arrays(), trainer.meta() | {"updates": 5}))
    assert len({options["seed"] for _, options in asked}) == 3


def test_every_update_has_keys_of_its_own():
    trainer = Trainer(small(), 0, place(SMALL.devices))
    keys = []
    trainer.collect = lambda key: keys.append(key)
    trainer.learner.update = lambda rollouts, hyper, key: keys.append(key)
    try:
        for _ in range(3):
            trainer.iterate()
    finally:
        trainer.close()
    assert len({tuple(jax.random.key_data(key).tolist()) for key in keys}) == 6


@pytest.mark.parametrize(
    ("network", "platform", "expected"),
    [
        (NetworkConfig(), "cpu", ("float32", "matmul")),
        (NetworkConfig(), "gpu", ("bfloat16", "plain")),
        (NetworkConfig(compute_dtype="bfloat16", conv="plain"), "cpu", ("bfloat16", "plain")),
        (NetworkConfig(compute_dtype="float32", conv="matmul"), "gpu", ("float32", "matmul")),
    ],
)
def test_form_and_arithmetic_are_the_chosen_ones(network, platform, expected):
    made = make_network(dataclasses.replace(SMALL, network=network), 6, platform)
    assert (made.compute_dtype.name, made.conv) == expected


def test_the_checker_watches_learning():
    trainer = Trainer(small(), 0, place(SMALL.devices))
    try:
        state = trainer.learner.state
        there = jax.device_put(state.params["value"], jax.devices("cpu")[1])
        trainer.learner.state = state.replace(params={**state.params, "value": there})
        with pytest.raises(PlacementError, match="learning: train_state/params/value/bias is on"):
            trainer.iterate()
    finally:
        trainer.close()


def test_every_metric_is_over_all_devices(one_device):
    (metrics,) = trained(small(data_parallel=2), updates=1)[1]
    for name, value in one_device[1][0].items():
        assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
