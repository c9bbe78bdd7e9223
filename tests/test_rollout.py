"""Acting against naive frame stacks of what the pool gave, on the real emulator too, and the windows of the scores."""

import json
from collections import deque

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_pools import NoisePool, Recorded

from jaxrl_atari.envs.ale import make_pool
from jaxrl_atari.networks import NatureActorCritic, gather_stacks, unblock_stacks
from jaxrl_atari.rollout import Actor, EpisodeStatistics, empty_actor_state, finish_rollout, make_actor_functions

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


def play(pools, seed=0, num_rollouts=NUM_ROLLOUTS):
    """Acts as the trainer does: the pools are groups of one session. Returns a list of rollouts."""
    network = NatureActorCritic(pools[0].num_actions)
    params = network.init(jax.random.key(seed), jnp.zeros((1, 84, 84, 4), jnp.uint8))["params"]
    params["policy"]["kernel"] *= 100  # so that the actions depend on what is seen
    functions, device = make_actor_functions(network), jax.devices()[0]
    first_env, actors = 0, []
    for pool in pools:
        actors.append(Actor(pool, functions, LENGTH, device, first_env))
        first_env += pool.num_envs
    statistics, rollouts, transitions = EpisodeStatistics(), [], 0
    finish = jax.jit(finish_rollout)
    for number in range(num_rollouts):
        for actor in actors:
            actor.begin(jax.random.fold_in(jax.random.key(seed), number))
        for t in range(LENGTH):
            for actor in actors:
                actor.choose(params)
                actor.send()
            for actor in actors:
                for game in actor.receive(t):
                    statistics.game_over(*game)
        for actor in actors:
            actor.choose(params)
        transitions += sum(actor.transitions() for actor in actors)
        rollouts.append(finish(*zip(*(actor.finish() for actor in actors), strict=True)))
    return rollouts, (network, params), statistics, transitions


@pytest.fixture(scope="module", params=["noise", "emulator"])
def played(request):
    """A few rollouts with many ends of games, and the record of the pool that they were played on."""
    if request.param == "noise":
        pool = Recorded(NoisePool(4, seed=1))
    else:  # games of a few steps: the emulator's frames before the first action count too
        pool = Recorded(make_pool("ale", "Breakout", 3, seed=1, num_threads=1, max_frames=32))
    yield pool, *play([pool])
    pool.close()


def test_the_policy_sees_naive_frame_stacks(played):
    pool, rollouts, (network, params), _, _ = played
    stacks = naive_stacks(pool.steps)
    assert sum(step.first.sum() for step in pool.steps[1:]) > 3
    apply = jax.jit(lambda x: network.apply({"params": params}, x))
    for number, rollout in enumerate(rollouts):
        start = number * LENGTH  # step t of the rollout sees what the pool gave as its step start + t
        for t in range(LENGTH + 1):
            logits, value = apply(stacks[start + t])
            if t == LENGTH:
                np.testing.assert_allclose(rollout.bootstrap_value, value, atol=1e-5)
                continue
            np.testing.assert_allclose(rollout.value[t], value, atol=1e-5)
            action = pool.actions[start + t]
            np.testing.assert_array_equal(rollout.action[t], action)
            log_prob = jax.nn.log_softmax(logits)[jnp.arange(len(action)), action]
            np.testing.assert_allclose(rollout.log_prob[t], log_prob, atol=1e-5)


def test_the_update_sees_the_stacks_that_the_policy_saw(played):
    pool, rollouts, *_ = played
    stacks = naive_stacks(pool.steps)
    for number, rollout in enumerate(rollouts):
        blocks = gather_stacks(rollout.frames, rollout.age, jnp.arange(LENGTH * pool.num_envs))
        seen = np.asarray(unblock_stacks(blocks)).reshape(LENGTH, pool.num_envs, 84, 84, 4)
        np.testing.assert_array_equal(seen, stacks[number * LENGTH : (number + 1) * LENGTH])


def test_outcomes_of_the_steps(played):
    pool, rollouts, _, statistics, transitions = played
    steps = pool.steps[1:]  # step t of the pool answers action t
    names = ("reward", "terminated", "truncated", "weight")
    whole = {name: np.concatenate([np.asarray(getattr(rollout, name)) for rollout in rollouts]) for name in names}
    for t, step in enumerate(steps):
        np.testing.assert_array_equal(whole["reward"][t], np.sign(step.reward) * np.minimum(np.abs(step.reward), 1))
        np.testing.assert_array_equal(whole["terminated"][t], step.terminated | step.life_lost)
        np.testing.assert_array_equal(whole["truncated"][t], step.truncated)
        np.testing.assert_array_equal(whole["weight"][t], 1.0 - step.first)
        if t > 0:  # a step is none exactly where the game before it had just ended
            np.testing.assert_array_equal(step.first, steps[t - 1].terminated | steps[t - 1].truncated)
    assert transitions == whole["weight"].sum() < len(steps) * pool.num_envs

    returns, lengths = [], []
    total, length = np.zeros(pool.num_envs), np.zeros(pool.num_envs, int)
    for step in steps:
        for i in range(pool.num_envs):
            if step.first[i]:
                continue
            total[i] += step.reward[i]
            length[i] += 1
            if step.terminated[i] or step.truncated[i]:
                returns.append(total[i])
                lengths.append(length[i])
                total[i] = length[i] = 0
    assert list(statistics.returns) == returns  # raw rewards, over lives
    assert list(statistics.lengths) == lengths
    assert statistics.episodes == len(returns)


def test_groups_play_what_one_group_plays():
    """Environments 0, 1 and 2, 3 in two groups: the same rollouts as all four in one."""

    class Part(NoisePool):
        """Some environments of a pool whose games do not depend on each other."""

        def __init__(self, members):
            super().__init__(len(members), seed=0)
            self._each = [np.random.default_rng(100 + member) for member in members]

        def _play(self, i, action):
            self._rng = self._each[i]
            return super()._play(i, action)

        def _frame(self, i):
            return self._each[i].integers(0, 256, (84, 84), dtype=np.uint8)

    together, *_, transitions = play([Part([0, 1, 2, 3])], num_rollouts=2)
    apart, *_, transitions_apart = play([Part([0, 1]), Part([2, 3])], num_rollouts=2)
    assert transitions == transitions_apart
    for one, other in zip(together, apart, strict=True):
        for name, x, y in zip(one._fields, one, other, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-5, err_msg=name)
        np.testing.assert_array_equal(one.action, other.action)
        np.testing.assert_array_equal(one.frames, other.frames)


def test_same_seed_same_rollouts_bit_for_bit():
    def rollouts(seed):
        return play([NoisePool(4, seed=1)], seed, num_rollouts=2)[0]

    one, again, other = rollouts(0), rollouts(0), rollouts(1)
    jax.tree.map(np.testing.assert_array_equal, one, again)
    assert not np.array_equal(one[1].action, other[1].action)
    assert not np.array_equal(one[0].action, one[1].action)


def test_return_ma_is_the_mean_of_the_last_100_means_of_the_last_100_games():
    rng = np.random.default_rng(0)
    statistics, games, lengths, points = EpisodeStatistics(), [], [], []
    empty = statistics.log_point()
    assert empty["episodes"] == 0
    assert np.isnan([empty["return_mean"], empty["return_ma"], empty["episode_length"]]).all()
    for number in range(130):
        for _ in range(rng.integers(4)):
            games.append(float(rng.normal()))
            lengths.append(int(rng.integers(1000)))
            statistics.game_over(games[-1], lengths[-1])
        if number == 60:  # through a checkpoint
            saved, statistics = json.dumps(statistics.to_dict()), EpisodeStatistics()
            statistics.load(json.loads(saved))
        point = statistics.log_point()
        if games:
            points.append(np.mean(games[-100:]))
            np.testing.assert_allclose(point["return_mean"], points[-1])
            np.testing.assert_allclose(point["return_ma"], np.mean(points[-100:]))
            np.testing.assert_allclose(point["episode_length"], np.mean(lengths[-100:]))
        assert point["episodes"] == len(games)
    assert len(games) > 150  # both windows were full
    assert len(points) > 110


def test_every_step_and_every_environment_draws_for_itself():
    """Where the policy has no preference and sees always the same, only the keys decide."""
    network = NatureActorCritic(4)
    shapes = jax.eval_shape(network.init, jax.random.key(0), jnp.zeros((1, 84, 84, 4), jnp.uint8))["params"]
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    functions = make_actor_functions(network)
    state = functions.begin(empty_actor_state(16, 8), jax.random.key(0))
    for _ in range(16):
        state, _ = functions.act(params, state, jnp.zeros((8, 84, 84), jnp.uint8), jnp.zeros(8, bool))
    action = np.asarray(state.action[:16])
    assert (action != action[:, :1]).any(axis=1).all()
    assert (action != action[:1]).any(axis=0).all()
    assert len({row.tobytes() for row in action}) == 16
