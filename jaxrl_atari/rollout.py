"""Acting: groups of environments and a policy -> a `Rollout` [T, B], and the games that ended meanwhile.

`collect` is the loop; `act` is the policy's step, compiled. In each step the host moves one frame per environment
to the device and one action back; frames are stored, stacked and turned into actions on the device.

**Groups.** The environments of a device are dealt to groups that take turns: one steps its emulators while the
policy acts for the other. Seeds, actions and minibatches depend on the numbers of the environments alone, so the
number of devices and groups does not change what is computed, beyond the rounding of sums.

**Timeline.** In step t the policy sees frame t, and the emulators answer its action with frame t + 1. After T
steps the policy is applied once more, to frame T, for the value that the targets bootstrap from:

    rollout          step 0    step 1    ...    step T-1    step T (only its value is used)
    next rollout                                            step 0    step 1    ...

Frame T is thus seen twice: in step T, and as step 0 of the next rollout, with the parameters of that time. A
recurrent network must not remember it twice, so the next rollout starts from the memory *before* step T.
"""

import itertools
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_atari.categorical import sample_action
from jaxrl_atari.devices import check_placement
from jaxrl_atari.envs import EnvPool, EnvStep, EpisodeCounter, FinishedGame
from jaxrl_atari.envs.protocols import Rules
from jaxrl_atari.envs.record import GamesInProgress, Segment
from jaxrl_atari.envs.replay import replay
from jaxrl_atari.fast.forms import Network
from jaxrl_atari.fast.frames import gather_stacks, next_age
from jaxrl_atari.hardware.distributed import gather_rows, sum_over_processes
from jaxrl_atari.keys import new_key
from jaxrl_atari.minibatches import Rollout
from jaxrl_atari.networks import STACK, Observation

# --- The policy's step, on the device ----------------------------------------------------------------------------


class Steps(NamedTuple):
    """What the policy does in steps 0 .. T of a rollout; step T only gives the bootstrap value."""

    age: jax.Array  # int32 [T + 1, B]
    action: jax.Array  # int32 [T + 1, B]
    log_prob: jax.Array  # float32 [T + 1, B]
    value: jax.Array  # float32 [T + 1, B]


class ActorState(NamedTuple):
    """The part of a rollout of T steps that is filled on the device."""

    step: jax.Array  # int32 []: the step that comes next
    key: jax.Array
    env_index: jax.Array  # int32 [B]: the environments' numbers in the session
    last_age: jax.Array  # int32 [B]: age of the step before
    frames: jax.Array  # uint8 [T + 4, B, *frame]: 3 from before, then the newest frames of steps 0..T
    steps: Steps
    # The memory of a recurrent network, [B, ...]; empty for others.
    rollout_carry: Any = ()  # before step 0: the learner starts from it
    last_carry: Any = ()  # before the newest step: after step T, the next rollout starts from it
    carry: Any = ()  # after the newest step


def empty_state(
    rollout_length: int, num_envs: int, frame_shape: tuple[int, ...], first_env: int = 0
) -> ActorState:
    """The state before the first frame, of environments `first_env`, `first_env + 1`, ... of the session.

    Args:
        frame_shape: `FrameLayout.shape` of the network.
    """
    per_step = (rollout_length + 1, num_envs)
    dtypes = (jnp.int32, jnp.int32, jnp.float32, jnp.float32)
    return ActorState(
        step=jnp.zeros((), jnp.int32),
        key=new_key(0),
        env_index=first_env + jnp.arange(num_envs, dtype=jnp.int32),
        last_age=jnp.zeros(num_envs, jnp.int32),
        frames=jnp.zeros((rollout_length + STACK, num_envs, *frame_shape), jnp.uint8),
        steps=Steps(*(jnp.zeros(per_step, dtype) for dtype in dtypes)),
    )


def with_carry(state: ActorState, carry: Any) -> ActorState:
    """The state before step 0 of a rollout, in which the network remembers `carry`, [B, ...]."""
    first, last, now = (jax.tree.map(jnp.copy, carry) for _ in range(3))  # `act` donates each of them
    return state._replace(rollout_carry=first, last_carry=last, carry=now)


@jax.jit
def begin_rollout(state: ActorState, key: jax.Array) -> ActorState:
    """An empty rollout that continues where `state`, a full one, ended.

    It shares no array with `state`, which the learner still reads while `act` consumes the new one.
    """
    length = len(state.steps.age) - 1
    empty = empty_state(length, len(state.last_age), state.frames.shape[2:])
    return with_carry(empty, state.last_carry)._replace(
        key=key,
        env_index=state.env_index,
        last_age=state.steps.age[length - 1],
        frames=empty.frames.at[: STACK - 1].set(state.frames[length : length + STACK - 1]),
    )


@partial(jax.jit, static_argnames="network", donate_argnames="state")
def act(
    network: Network, params: Any, state: ActorState, frame: jax.Array, first: jax.Array
) -> tuple[ActorState, jax.Array]:
    """One step of the policy: stores the newest frames and samples an action for each environment.

    Args:
        params: what `network.acting_params` returned.
        state: it is consumed.
        frame: uint8 [B, 84, 84].
        first: bool [B], true where the frame starts a game.

    Returns:
        The state with this step filled in, and the actions, int32 [B].
    """
    t = state.step
    age = next_age(state.last_age, first)
    # Not `.at[t].set`, which on a GPU launches kernels of its own to check whether t is in range.
    write = partial(lax.dynamic_update_index_in_dim, axis=0)
    frames = write(state.frames, network.layout.arrange(frame), index=t + STACK - 1)
    window = lax.dynamic_slice_in_dim(frames, t, STACK)
    stacks = gather_stacks(window, age[None], jnp.arange(len(age)))
    outputs = network.apply(params, Observation(stacks, first, state.carry))
    # Each environment draws with a key of its own, whatever group or device it belongs to.
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.fold_in(state.key, t), state.env_index)
    action, log_prob = sample_action(keys, outputs.logits)
    steps = jax.tree.map(partial(write, index=t), state.steps, Steps(age, action, log_prob, outputs.value))
    state = state._replace(
        step=t + 1, last_age=age, frames=frames, steps=steps, last_carry=state.carry, carry=outputs.carry
    )
    return state, action


class Outcome(NamedTuple):
    """Results of the emulators for each step of a rollout: NumPy, [T, B]. See `Rollout`."""

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    weight: np.ndarray


@jax.jit
def finish_rollout(groups: Sequence[tuple[ActorState, Outcome]]) -> Rollout:
    """The rollout over all groups of a device, from each group's full state and outcome (`EnvGroup.finish`)."""
    parts = [(state.frames, state.steps, outcome) for state, outcome in groups]
    frames, steps, outcome = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *parts)
    taken = jax.tree.map(lambda array: array[:-1], steps)
    carry = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *(state.rollout_carry for state, _ in groups))
    return Rollout(frames, **taken._asdict(), **outcome._asdict(), bootstrap_value=steps.value[-1], carry=carry)


# --- The loop, on the host ---------------------------------------------------------------------------------------


class EnvGroup:
    """Environments that step together, and the policy's state for them on one device.

    For each rollout, `collect` calls `begin`; in each step `choose` (the policy starts), `send` (its actions go to
    the emulators) and `receive` (what they answer is recorded); `choose` once more for the bootstrap value; and
    `finish`.

    Args:
        pool: the emulators; whoever made it closes it.
        network: the network that acts.
        device: where it acts.
        rules: rules of the protocol; they define which rewards and terminals learning sees.
        first_env: number of the first environment in the session.
        check: assert at every step that what acting uses lies on `device`.
    """

    def __init__(
        self,
        pool: EnvPool,
        network: Network,
        rollout_length: int,
        device: jax.Device,
        rules: Rules,
        first_env: int = 0,
        check: bool = False,
    ):
        self._rules = rules
        self.first_env = first_env
        self.pool = pool
        self.device = device
        self.rollout_length = rollout_length
        self._network = network
        self._check = check
        self._restart(pool.reset(), EpisodeCounter(pool.num_envs))
        # Of the rollout in progress.
        self._outcome = self._no_outcome()
        self._action: jax.Array | None = None  # the newest one of each environment
        self.waited_seconds = 0.0  # for the emulators
        self.env_steps = 0  # auto-reset steps do not count

    def _restart(self, step: EnvStep, episodes: EpisodeCounter) -> None:
        self._newest = step
        self._episodes = episodes
        with jax.default_device(self.device):
            shape = self._network.layout.shape
            state = empty_state(self.rollout_length, self.pool.num_envs, shape, self.first_env)
            state = with_carry(state, self._network.initial_carry(self.pool.num_envs))
        self._state = jax.device_put(state, self.device)

    def take_games(self) -> tuple[GamesInProgress, Segment] | None:
        """The games in progress, between two rollouts, and the actions since the last call.

        Returns:
            None if the back end keeps no record of its games.
        """
        record = self.pool.record
        if record is None:
            return None
        return record.take(self._newest.frame, self.pool.lives, self._episodes.in_progress)

    def in_progress(self) -> np.ndarray:
        """Return and env steps of each game in progress, float64 [B, 2]."""
        return self._episodes.in_progress

    def carry(self) -> Any:
        """Between two rollouts, what the next one starts from: a network's memory, [B, ...]; `()` without one."""
        return self._state.last_carry

    def resume(self, games: GamesInProgress, carry: Any = ()) -> None:
        """Plays the games of a checkpoint again, and goes on with them. See `envs.replay.replay`.

        Args:
            carry: what `carry` returned when the checkpoint was written.
        """
        step, past_frames, past_age, episodes = replay(self.pool, games)
        self._restart(step, episodes)
        past = self._network.layout.arrange(jnp.asarray(past_frames))
        end = self.rollout_length
        self._state = self._state._replace(
            frames=self._state.frames.at[end : end + STACK - 1].set(past),
            steps=self._state.steps._replace(age=self._state.steps.age.at[end - 1].set(past_age)),
        )
        self._state = with_carry(self._state, jax.device_put(carry, self.device))

    def begin(self, key: jax.Array) -> None:
        """Starts a rollout whose actions derive from `key`."""
        self._state = begin_rollout(self._state, jax.device_put(key, self.device))
        self._outcome = self._no_outcome()
        self.waited_seconds = 0.0
        self.env_steps = 0

    def _no_outcome(self) -> Outcome:
        shape = (self.rollout_length, self.pool.num_envs)
        return Outcome(
            reward=np.zeros(shape, np.float32),
            terminated=np.zeros(shape, bool),
            truncated=np.zeros(shape, bool),
            weight=np.zeros(shape, np.float32),
        )

    def choose(self, params: Any) -> None:
        """Starts the policy on the newest frames.

        The frames go to the compiled call as NumPy arrays, and `send` reads the actions with `np.asarray`.
        Explicit `device_put` and `device_get` would add 0.5 ms to a 6 ms step on two cores, whose caches the
        emulators keep cold. So the transfer guard makes an exception for both transfers.
        """
        if self._check:
            check_placement("acting", {"params": params, "state": self._state}, [self.device])
        step = self._newest
        with jax.transfer_guard_host_to_device("allow"):
            self._state, self._action = act(self._network, params, self._state, step.frame, step.first)

    def send(self) -> None:
        """Waits for the actions and starts the emulators."""
        with jax.transfer_guard_device_to_host("allow"):
            actions = np.asarray(self._action)
        self.pool.send(actions)

    def receive(self, t: int) -> list[FinishedGame]:
        """Waits for the emulators and records step t. Returns the games that it ended, their `step` being t."""
        start = time.perf_counter()
        step = self.pool.recv()
        self.waited_seconds += time.perf_counter() - start
        self._newest = step
        reward = step.reward
        if self._rules.clip_rewards:
            reward = np.clip(reward, -1.0, 1.0)
        terminated = step.terminated
        if self._rules.life_loss_terminal:
            terminated = terminated | step.life_lost
        counts = ~step.first  # an auto-reset step does not
        outcome = self._outcome
        outcome.reward[t] = reward
        outcome.terminated[t] = terminated
        outcome.truncated[t] = step.truncated
        outcome.weight[t] = counts
        self.env_steps += int(np.sum(counts))
        return [game._replace(env=self.first_env + game.env) for game in self._episodes.count(step, t)]

    def finish(self) -> tuple[ActorState, Outcome]:
        """The full rollout. The state is still needed by the next `begin`."""
        return self._state, jax.device_put(self._outcome, self.device)


class Collected(NamedTuple):
    """Result of `collect`."""

    rollouts: list[Rollout]  # one for each of this process's learner devices
    env_steps: int  # over all processes; auto-reset steps do not count
    games: list[FinishedGame]  # over all processes, by step, then by environment
    seconds: tuple[float, float]  # since the first actions: waiting for the emulators, and the rest


def collect(
    groups: Sequence[Sequence[EnvGroup]], params: Sequence[Any], key: jax.Array, first_step: int = 0
) -> Collected:
    """One rollout: T steps of every environment.

    Args:
        groups: for each of this process's learner devices, its groups of environments.
        params: for each of them, the parameters to act with, on the device that acts.
        key: the source of all actions of this rollout.
        first_step: steps that each environment has made in the session, for `FinishedGame.step`.
    """
    all_groups = list(itertools.chain(*groups))
    length = all_groups[0].rollout_length
    # The first groups of all devices take their turn together, then the second ones: devices act in lockstep. A
    # turn is a list of (group, parameters), one for each device.
    turns = [list(zip(turn, params, strict=True)) for turn in zip(*groups, strict=True)]
    games: list[FinishedGame] = []
    started = 0.0
    for group in all_groups:
        group.begin(key)
    for t in range(length):
        for turn in turns:
            for group, group_params in turn:
                if t > 0:
                    games += group.receive(t - 1)
                group.choose(group_params)
            for group, _ in turn:
                group.send()
        if t == 0:  # the first actions have waited for the update
            started = time.perf_counter()
    for turn in turns:
        for group, group_params in turn:
            games += group.receive(length - 1)
            group.choose(group_params)  # for the bootstrap value; the next rollout draws its own action
    waited = sum(group.waited_seconds for group in all_groups)
    rest = time.perf_counter() - started - waited
    return Collected(
        rollouts=[finish_rollout([group.finish() for group in on_device]) for on_device in groups],
        env_steps=sum_over_processes(sum(group.env_steps for group in all_groups)),
        games=gather_games(games, first_step),
        seconds=(waited, rest),
    )


def gather_games(games: Sequence[FinishedGame], first_step: int) -> list[FinishedGame]:
    """The games of all processes, by step, then by environment.

    Args:
        games: those of this process, by their steps in the rollout.
        first_step: step of the session with which the rollout began.
    """
    rows = gather_rows(np.array(games, np.float64).reshape(-1, len(FinishedGame._fields)))
    return sorted(
        FinishedGame(first_step + int(step), int(env), episode_return, int(length), bool(truncated))
        for step, env, episode_return, length, truncated in rows.tolist()
    )
