"""Pools without an emulator, and a pool that records another one, with the interface of `envs.EnvPool`."""

from functools import partial

import jax
import numpy as np
from small_networks import make

from jaxrl_atari.envs.pool import EnvStep
from jaxrl_atari.envs.protocols import PROTOCOLS
from jaxrl_atari.ppo import PPO
from jaxrl_atari.rollout import EnvGroup, collect
from jaxrl_atari.update import init_train_state, update


def group_of(pool, network, first_env=0, rules=PROTOCOLS["v5"]):
    """A group with a pool, whose policy acts on the first CPU device."""
    cpu = jax.devices("cpu")[0]
    return EnvGroup(pool, network, device=cpu, rules=rules, first_env=first_env)


def games_while_learning(pool, network, config, updates, algorithm=PPO, first_seed=0):
    """Yields the games of each rollout, while a network of `small_networks` learns from them."""
    params, functions = make(network, pool.num_actions, first_seed)
    state = init_train_state(params, config, algorithm, jax.random.key(first_seed))
    learn = jax.jit(partial(update, apply=functions.apply, algorithm=algorithm), donate_argnums=0)
    group = group_of(pool, functions)
    for number in range(updates):
        act_key, update_key = jax.random.split(jax.random.fold_in(jax.random.key(1), number))
        played = collect([[group]], [state.params], act_key, config.rollout_length)
        state, _ = learn(state, played.rollouts[0], config, update_key)
        yield played.games


class FakePool:
    """Starts a new game on the step after the end of one.

    Subclasses define the game: `_play`, which returns reward, terminated, truncated and life_lost, and `_frame`.
    """

    num_actions: int

    def __init__(self, num_envs):
        self.num_envs = num_envs
        self.logged = {}
        self._over = np.ones(num_envs, bool)
        self._actions = None

    def _start(self, i):
        pass

    def reset(self):
        return self.step(np.zeros(self.num_envs, np.int32))

    def send(self, actions):
        assert self._actions is None
        assert actions.shape == (self.num_envs,)
        self._actions = np.array(actions)

    def recv(self):
        actions, self._actions = self._actions, None
        first = self._over
        played = np.zeros((self.num_envs, 4))
        for i in range(self.num_envs):
            if first[i]:
                self._start(i)
            else:
                played[i] = self._play(i, actions[i])
        reward, terminated, truncated, life_lost = played.T
        self._over = (terminated > 0) | (truncated > 0)
        frames = np.stack([self._frame(i) for i in range(self.num_envs)])
        reward = reward.astype(np.float32)
        return EnvStep(frames, reward, terminated > 0, truncated > 0, life_lost > 0, first, reward)

    def step(self, actions):
        self.send(actions)
        return self.recv()

    def close(self):
        pass


class NoisePool(FakePool):
    """Random frames, rewards, lost lives and ends of games."""

    num_actions = 4

    def __init__(self, num_envs, seed):
        super().__init__(num_envs)
        self._rng = np.random.default_rng(seed)

    def _play(self, i, action):
        event = self._rng.choice(4, p=[0.15, 0.1, 0.1, 0.65])
        return self._rng.choice([-3.0, 0.0, 0.25, 7.0]), event == 0, event == 1, event == 2

    def _frame(self, i):
        return self._rng.integers(0, 256, (84, 84), dtype=np.uint8)


class Corridor(FakePool):
    """A walk left or right from the middle of 5 cells. The end with the lamp gives 1, the other end 0.

    The frame shows the walker and the lamp.
    """

    num_actions = 2

    def __init__(self, num_envs, seed):
        super().__init__(num_envs)
        self._rng = np.random.default_rng(seed)
        self._place = np.zeros(num_envs, int)
        self._lamp = np.zeros(num_envs, int)
        self._steps = np.zeros(num_envs, int)

    def _start(self, i):
        self._place[i], self._lamp[i], self._steps[i] = 2, 4 * self._rng.integers(2), 0

    def _play(self, i, action):
        self._place[i] += 2 * action - 1
        self._steps[i] += 1
        at_end = self._place[i] in (0, 4)
        return float(self._place[i] == self._lamp[i]), at_end, not at_end and self._steps[i] == 20, False

    def _frame(self, i):
        frame = np.zeros((84, 84), np.uint8)
        frame[50:70, 16 * self._place[i] : 16 * self._place[i] + 20] = 255
        frame[10:30, 16 * self._lamp[i] : 16 * self._lamp[i] + 20] = 255
        return frame


class Recorded:
    """Another pool, with a record of its steps and actions."""

    def __init__(self, pool):
        self._pool = pool
        self.num_envs, self.num_actions = pool.num_envs, pool.num_actions
        self.steps, self.actions, self.logged = [], [], {}

    def reset(self):
        self.steps.append(self._copy(self._pool.reset()))
        return self.steps[-1]

    def send(self, actions):
        self.actions.append(np.array(actions))
        self._pool.send(actions)

    def recv(self):
        step = self._pool.recv()
        self.steps.append(self._copy(step))
        return step

    def close(self):
        self._pool.close()

    @staticmethod
    def _copy(step):
        return EnvStep(*(np.array(x) for x in step))
