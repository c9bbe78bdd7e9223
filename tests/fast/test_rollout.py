"""Acting against naive frame stacks of what the pool gave, on the real emulator too, and the windows of the
scores."""

from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_pools import NoisePool, Recorded, group_of

from jaxrl_atari.config import EnvConfig, NetworkConfig
from jaxrl_atari.envs import FinishedGame, make_pool
from jaxrl_atari.envs.protocols import PROTOCOLS
from jaxrl_atari.frames import gather_stacks
from jaxrl_atari.networks import Observation, make_network
from jaxrl_atari.rollout import act, begin_rollout, collect
from jaxrl_atari.runs.progress import EpisodeStatistics, return_ma_window

V5 = PROTOCOLS["v5"]
LENGTH = 6
NUM_ROLLOUTS = 6


def naive_stacks(steps):
    """What a frame stack of 4 shows after each of the pool's steps: [len(steps), B, 84, 84, 4]."""
    num_envs = len(steps[0].first)
    queues = [deque(maxlen=4) for _ in range(num_envs)]
    seen = []
    for step in steps:
        for i, queue in enumerate(queues):
            queue.extend([step.frame[i]] * (4 if step.first[i] else 1))
        seen.append([np.stack(queue, axis=-1) for queue in queues])
    return np.array(seen)


def play(pool, num_rollouts=NUM_ROLLOUTS, rules=V5):
    """Rollouts of a pool; the network and its parameters; all that was collected."""
    network = make_network(NetworkConfig(), pool.num_actions, "cpu")
    params = network.init(jax.random.key(0))
    params["policy"]["kernel"] *= 100  # so that the actions depend on what is seen
    group = group_of(pool, network, rules=rules)
    keys = jax.random.split(jax.random.key(0), num_rollouts)
    collected = [collect([[group]], [params], key, LENGTH, n * LENGTH) for n, key in enumerate(keys)]
    return [each.rollouts[0] for each in collected], (network, params), collected


@pytest.fixture(scope="module", params=["noise", "emulator"])
def played(request):
    """A few rollouts with many ends of games, and the record of the pool that they were played on."""
    if request.param == "noise":
        pool = Recorded(NoisePool(4, seed=1))
    else:  # games of a few steps: the emulator's frames before the first action count too
        pool = Recorded(make_pool(EnvConfig(game="Breakout", num_threads=1, max_frames=32), 4, seed=1))
    yield pool, *play(pool)
    pool.close()


def test_the_policy_and_the_update_see_naive_frame_stacks(played):
    pool, rollouts, (network, params), _ = played
    assert sum(step.first.sum() for step in pool.steps[1:]) > 3
    stacks = [jnp.asarray(x) for x in naive_stacks(pool.steps)]
    actions, apply = np.array(pool.actions), jax.jit(network.apply)
    for number, rollout in enumerate(rollouts):
        start = number * LENGTH  # step t of the rollout sees what the pool gave as its step start + t
        seen = gather_stacks(rollout.frames, rollout.age, jnp.arange(LENGTH * pool.num_envs))
        np.testing.assert_array_equal(seen, jnp.concatenate(stacks[start : start + LENGTH]))
        np.testing.assert_array_equal(rollout.action, actions[start : start + LENGTH])
        for t in range(LENGTH):
            logits, value, *_ = apply(params, Observation(stacks[start + t]))
            np.testing.assert_allclose(rollout.value[t], value, atol=1e-5)
            log_prob = jax.nn.log_softmax(logits)[jnp.arange(pool.num_envs), rollout.action[t]]
            np.testing.assert_allclose(rollout.log_prob[t], log_prob, atol=1e-5)
        _, value, *_ = apply(params, Observation(stacks[start + LENGTH]))
        np.testing.assert_allclose(rollout.bootstrap_value, value, atol=1e-5)


def test_outcomes_of_the_steps(played):
    pool, rollouts, _, collected = played
    steps = pool.steps[1:]  # step t of the pool answers action t
    names = ("reward", "terminated", "truncated", "weight")
    whole = {name: np.concatenate([np.asarray(getattr(rollout, name)) for rollout in rollouts]) for name in names}
    total, length, games = np.zeros(pool.num_envs), np.zeros(pool.num_envs, int), []
    for t, step in enumerate(steps):
        np.testing.assert_array_equal(
            whole["reward"][t], np.sign(step.reward) * np.minimum(np.abs(step.reward), 1)
        )
        np.testing.assert_array_equal(whole["terminated"][t], step.terminated | step.life_lost)
        np.testing.assert_array_equal(whole["truncated"][t], step.truncated)
        np.testing.assert_array_equal(whole["weight"][t], 1.0 - step.first)
        for i in np.flatnonzero(~step.first):
            total[i] += step.reward[i]
            length[i] += 1
            if step.terminated[i] or step.truncated[i]:
                games.append((t, i, total[i], length[i], step.truncated[i]))
                total[i] = length[i] = 0
    assert [tuple(game) for each in collected for game in each.games] == games  # raw rewards, over lives
    env_steps = sum(each.env_steps for each in collected)
    assert env_steps == whole["weight"].sum() < len(steps) * pool.num_envs


@pytest.mark.parametrize(("rule", "field"), [("life_loss_terminal", "terminated"), ("clip_rewards", "reward")])
def test_a_rule_changes_what_learning_sees_and_not_the_score(rule, field):
    pool = Recorded(NoisePool(4, seed=1))
    (off,), _, (scored,) = play(pool, num_rollouts=1, rules=V5._replace(**{rule: False}))
    (on,), _, (expected,) = play(NoisePool(4, seed=1), num_rollouts=1)
    seen = np.array([getattr(step, field) for step in pool.steps[1:]])
    assert (seen != getattr(on, field)).any()
    jax.tree.map(np.testing.assert_array_equal, off, on._replace(**{field: seen}))  # nothing else differs
    assert scored.games == expected.games


@pytest.mark.parametrize(("budget", "window"), [(1_300_000, 130_000), (20_000_000, 1_000_000)])
def test_return_ma_is_the_mean_of_return_mean_over_the_last_tenth_of_the_budget(budget, window):
    rng, games, env_steps, means = np.random.default_rng(0), [], [], []
    statistics = EpisodeStatistics(return_ma_window(budget))
    assert np.isnan(statistics.to_row()["return_ma"])
    for update in range(1, 131):
        ended = [FinishedGame(0, 0, rng.normal(), int(rng.integers(1000))) for _ in range(rng.integers(1, 4))]
        games += ended
        env_steps.append(10_000 * update)
        means.append(np.mean([game.episode_return for game in games[-100:]]))
        statistics.count(ended, env_steps[-1])
        start = max(env_steps[0], env_steps[-1] - window)
        between = np.linspace(start, env_steps[-1], 20_001)  # the mean is linear from one update to the next
        row = statistics.to_row()
        np.testing.assert_allclose(
            row["return_ma"], np.interp(between, env_steps, means).mean(), rtol=1e-3, atol=1e-3
        )
        np.testing.assert_allclose(row["return_mean"], means[-1])
        np.testing.assert_allclose(row["episode_length"], np.mean([game.length for game in games[-100:]]))
    assert row["episodes"] == len(games) > 200


def test_every_step_and_every_environment_draws_for_itself():
    """Where the policy has no preference and sees always the same, only the keys decide."""
    network = make_network(NetworkConfig(), 4, "cpu")
    params = jax.tree.map(jnp.zeros_like, network.init(jax.random.key(0)))
    start = group_of(NoisePool(8, seed=0), network).rollout_start
    buffer, frame, first = begin_rollout(start, 8), np.zeros((8, 84, 84), np.uint8), np.zeros(8, bool)
    for _ in range(8):
        before = buffer
        buffer, _ = act(network, params, before, frame, first, jax.random.key(0), jnp.arange(8))
        assert before.frames.is_deleted(), "a step fills the rollout in place"
    action = np.asarray(buffer.action[:8])
    for draws in (action, action.T):
        assert len({row.tobytes() for row in draws.copy()}) == 8
