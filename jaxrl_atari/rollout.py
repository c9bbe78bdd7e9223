"""Acting: a policy plays groups of environments; the result is a `Rollout` [T, B] and the games that ended.

`collect` is the loop; `act` is the policy's step, compiled. In each step the host moves one frame per environment
to the device and one action back; frames are stored, stacked and turned into actions on the device.

**Timeline.** In step t the policy sees frame t, and the emulators answer its action with frame t + 1. After T
steps the policy is applied once more, to frame T, for the value that the targets bootstrap from:

    rollout          step 0    step 1    ...    step T-1    step T (only its value is used)
    next rollout                                            step 0    step 1    ...

Frame T is thus seen twice: in step T, and as step 0 of the next rollout, with the parameters of that time. A
rollout therefore hands to the next one (`Past`) the frames that it saw and the memory that it had *before* step T.

**Groups.** The environments of a device can be dealt to several groups (`env.num_groups`), which take turns: one
steps its emulators while the policy acts for the other. The seed of an environment's games and the keys of its
actions depend only on its number. So the number of devices and groups does not change what is played, except
through rounding: parameters, and outputs of the network, can round differently in batches of another size.

Several processes do play other games than a single one: they keep no record of their games, and so no anchors,
at which an environment gets a new seed (`groups.py`).

**Records.** The file reads from the top: first the loop, then what it calls on the host, then what runs on the
device. They work on these classes and records:

    EnvGroup            emulators that step together, and the policy that acts in them
        newest, episodes        on the host: the newest step, and counts of the games in progress
        past: Past              on the device: what the next rollout starts from
        outcome: Outcome        on the host, while a rollout is played: rewards and ends of games
        ActorState              on the device, while a rollout is played: what the policy sees and does
    FinishedRollout     outcome and state of a full rollout, and the memory before step 0; all on the device
    Rollout             what `join_groups` makes of the finished rollouts of a device's groups
    Collected           the result of `collect`: one `Rollout` for each learner device of this process, and the
                        games that ended, in all processes
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_atari.algorithm import Rollout
from jaxrl_atari.categorical import sample_action
from jaxrl_atari.devices import check_placement
from jaxrl_atari.envs import EnvPool, EnvStep, EpisodeCounter, FinishedGame
from jaxrl_atari.envs.protocols import Rules
from jaxrl_atari.envs.record import GamesInProgress, Segment
from jaxrl_atari.envs.replay import restore_games
from jaxrl_atari.frames import STACK, gather_stacks, next_age
from jaxrl_atari.hardware.distributed import gather_items, sum_over_processes
from jaxrl_atari.network_interface import Network, Observation

# --- The loop ----------------------------------------------------------------------------------------------------


class Collected(NamedTuple):
    """Result of `collect`."""

    rollouts: list[Rollout]  # one for each of this process's learner devices
    env_steps: int  # over all processes; auto-reset steps do not count
    games: list[FinishedGame]  # over all processes, by step, then by environment
    waiting_seconds: float  # spent waiting for the emulators, after the first actions were sent
    policy_seconds: float  # the rest of the time after that; the policy of step T may still run then


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
    length = groups[0][0].rollout_length
    for on_device, device_params in zip(groups, params, strict=True):
        for group in on_device:
            group.begin(key, device_params)
    # A turn is one group of each device: the first groups take the first turn, the second groups the next.
    turns = list(zip(*groups, strict=True))
    games: list[FinishedGame] = []
    first_actions_sent = 0.0  # the time
    # A turn ends when the actions are sent: these emulators run while the other groups take their turns.
    for t in range(length + 1):
        for turn in turns:
            # Receive and start one device after the other: the policy of one runs while the host waits for the
            # emulators of the next. The host waits for actions only when all policies have been started.
            for group in turn:
                if t > 0:
                    games += group.receive(t - 1)
                group.start_policy()
            if t < length:  # the actions of step T are not sent: the next rollout draws its own
                for group in turn:
                    group.send()
        if t == 0:  # the clock starts here, because the first actions also wait for the update
            first_actions_sent = time.perf_counter()
    all_groups = list(itertools.chain(*groups))
    waiting = sum(group.waited_seconds for group in all_groups)
    policy = time.perf_counter() - first_actions_sent - waiting
    return Collected(
        rollouts=[join_groups([group.finish() for group in on_device]) for on_device in groups],
        env_steps=sum_over_processes(sum(group.env_steps for group in all_groups)),
        games=gather_games(games, first_step),
        waiting_seconds=waiting,
        policy_seconds=policy,
    )


def gather_games(games: Sequence[FinishedGame], first_step: int) -> list[FinishedGame]:
    """The games of all processes, by step, then by environment.

    Args:
        games: those of this process, by their steps in the rollout.
        first_step: step of the session with which the rollout began.
    """
    everywhere = [FinishedGame(*game) for game in gather_items(games)]
    return sorted(game._replace(step=first_step + game.step) for game in everywhere)


# --- A group of environments, on the host ------------------------------------------------------------------------


class EnvGroup:
    """Environments that step together on one device, and the policy that acts in them.

    A new group resets its emulators: its first rollout starts new games. `collect` plays a rollout: it calls
    `begin`; then, in each step 0 to T - 1,

        start_policy    starts `act`, and does not wait for the actions
        send            waits for the actions, and gives them to the emulators
        receive         waits for the emulators, and records what they answer

    and in step T `start_policy` alone, for the bootstrap value. Then it calls `finish`.

    What the next rollout starts from:

        newest          the emulators' newest step
        episodes        counts of the games in progress
        past            what the policy saw and remembers before the newest step

    Between two rollouts a checkpoint takes what `take_games` returns, and `past.carry`. A group that is made later
    continues from these (`resume`).

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
        *,
        rollout_length: int,
        device: jax.Device,
        rules: Rules,
        first_env: int = 0,
        check: bool = False,
    ):
        self.first_env = first_env
        self.pool = pool
        self.device = device
        self.rollout_length = rollout_length
        self.network = network
        self.rules = rules
        self.check = check
        numbers = np.arange(first_env, first_env + pool.num_envs, dtype=np.int32)
        self._env_index = jax.device_put(numbers, device)
        with jax.default_device(device):
            past = empty_past(pool.num_envs, network.layout.shape, network.initial_carry(pool.num_envs))
        self._start_from(pool.reset(), EpisodeCounter(pool.num_envs), past)

    def _start_from(self, newest: EnvStep, episodes: EpisodeCounter, past: Past) -> None:
        """Sets what the next rollout starts from."""
        self.newest = newest
        self.episodes = episodes
        self.past = jax.device_put(past, self.device)

    # Between rollouts

    def take_games(self) -> tuple[GamesInProgress, Segment] | None:
        """Ends a segment of the log of actions, for a checkpoint between two rollouts.

        Call it once per checkpoint, and write what it returns. The next segment starts here, so the actions of a
        segment that is not written are missing in the log.

        Returns:
            The games in progress, and the segment: all actions since the last call. None if the back end keeps no
            record of its games.
        """
        record = self.pool.record
        if record is None:
            return None
        return record.cut_segment(self.newest.frame, self.pool.lives, self.episodes.in_progress)

    def resume(self, games: GamesInProgress, carry: Any = ()) -> None:
        """Plays the games of a checkpoint again in a new group, and continues them. See `replay.restore_games`.

        Args:
            games: the first part of what `take_games` returned when the checkpoint was written.
            carry: `past.carry` of that time.
        """
        newest, frames, age, episodes = restore_games(self.pool, self.newest, games)
        with jax.default_device(self.device):
            past = Past(self.network.layout.arrange(jnp.asarray(frames)), jnp.asarray(age), carry)
        self._start_from(newest, episodes, past)

    # A rollout

    def begin(self, key: jax.Array, params: Any) -> None:
        """Begins a rollout.

        Args:
            key: the source of its actions.
            params: what `Network.acting_params` returned, on this group's device.
        """
        key = jax.device_put(key, self.device)
        self._params = params
        self._state = begin_rollout(self.past, key, self._env_index, self.rollout_length)
        shape = (self.rollout_length, self.pool.num_envs)
        # New arrays: on a CPU, JAX may still read those of the rollout before, whose memory `device_put` shares.
        self.outcome = Outcome(
            reward=np.zeros(shape, np.float32),
            terminated=np.zeros(shape, bool),
            truncated=np.zeros(shape, bool),
            weight=np.zeros(shape, np.float32),
        )
        self.waited_seconds = 0.0  # for the emulators
        self.env_steps = 0  # auto-reset steps do not count

    def start_policy(self) -> None:
        """Starts the policy on the newest frames: an action for each environment, which `send` waits for.

        The frames go to the compiled call as NumPy arrays, and `send` reads the actions with `np.asarray`.
        Explicit `device_put` and `device_get` would add 0.5 ms to a 6 ms step on two cores, whose caches the
        emulators keep cold. So the transfer guard makes an exception for both transfers.
        """
        if self.check:
            check_placement("acting", {"params": self._params, "state": self._state}, [self.device])
        with jax.transfer_guard_host_to_device("allow"):
            self._state, self._action = act(
                self.network, self._params, self._state, self.newest.frame, self.newest.first
            )

    def send(self) -> None:
        """Waits for the actions and starts the emulators. On the transfer, see `start_policy`."""
        with jax.transfer_guard_device_to_host("allow"):
            actions = np.asarray(self._action)
        self.pool.send(actions)

    def receive(self, t: int) -> list[FinishedGame]:
        """Waits for the emulators and records step t. Returns the games that it ended, their `step` being t."""
        start = time.perf_counter()
        newest = self.pool.recv()
        self.waited_seconds += time.perf_counter() - start
        self.newest = newest
        reward = newest.reward
        if self.rules.clip_rewards:
            reward = np.clip(reward, -1.0, 1.0)
        terminated = newest.terminated
        if self.rules.life_loss_terminal:
            terminated = terminated | newest.life_lost
        counts = ~newest.first  # an auto-reset step does not
        self.outcome.reward[t] = reward
        self.outcome.terminated[t] = terminated
        self.outcome.truncated[t] = newest.truncated
        self.outcome.weight[t] = counts
        self.env_steps += int(np.sum(counts))
        return [game._replace(env=self.first_env + game.env) for game in self.episodes.count(newest, t)]

    def finish(self) -> FinishedRollout:
        """Ends the rollout, which is full. The group keeps what the next one starts from."""
        finished = FinishedRollout(self._state, jax.device_put(self.outcome, self.device), self.past.carry)
        self.past = past_of(self._state)
        # The group keeps nothing on the device: the memory of the state is freed once `join_groups` has made a
        # `Rollout` of it, and that of the parameters once the learner no longer needs them.
        del self._params, self._state, self._action
        return finished


class Outcome(NamedTuple):
    """What the emulators answer in each step of a rollout, [T, B]. See `Rollout`.

    NumPy arrays while the rollout is played; `EnvGroup.finish` puts them on the device.
    """

    reward: np.ndarray | jax.Array
    terminated: np.ndarray | jax.Array
    truncated: np.ndarray | jax.Array
    weight: np.ndarray | jax.Array


# --- The policy, on the device -----------------------------------------------------------------------------------


class Past(NamedTuple):
    """What a rollout starts from: what the policy saw and remembers before step 0."""

    frames: jax.Array  # uint8 [3, B, *frame]: the newest frames of the three steps before, the oldest first
    age: jax.Array  # int32 [B]: age of the last of them
    carry: Any = ()  # [B, ...]: the memory of a recurrent network; empty for others


def empty_past(num_envs: int, frame_shape: tuple[int, ...], carry: Any = ()) -> Past:
    """What the first rollout starts from: black frames, which no stack shows, since its games start there.

    Args:
        frame_shape: `FrameLayout.shape` of the network.
        carry: `Network.initial_carry` of the environments.
    """
    frames = jnp.zeros((STACK - 1, num_envs, *frame_shape), jnp.uint8)
    return Past(frames, jnp.zeros(num_envs, jnp.int32), carry)


class ActorState(NamedTuple):
    """The part of a rollout of T steps that `act` fills. Of step T only the frame, age and value are used."""

    step: jax.Array  # int32 []: the step that comes next
    key: jax.Array
    env_index: jax.Array  # int32 [B]: the environments' numbers in the session
    last_age: jax.Array  # int32 [B]: age of the step before
    frames: jax.Array  # uint8 [T + 4, B, *frame]: 3 from before, then the newest frames of steps 0..T
    age: jax.Array  # int32 [T + 1, B]
    action: jax.Array  # int32 [T + 1, B]
    log_prob: jax.Array  # float32 [T + 1, B]
    value: jax.Array  # float32 [T + 1, B]
    # The memory of a recurrent network, [B, ...]; empty for others.
    carry_before: Any = ()  # before the newest step: after step T, the next rollout starts from it
    carry: Any = ()  # after the newest step


class FinishedRollout(NamedTuple):
    """The rollout of a group, full: all of it is on the device.

    `join_groups` makes a `Rollout` of those of all groups in one program, which copies the frames once.
    """

    state: ActorState
    outcome: Outcome
    carry: Any = ()  # [B, ...]: the memory before step 0, from which the learner starts


@partial(jax.jit, static_argnames="rollout_length")
def begin_rollout(past: Past, key: jax.Array, env_index: jax.Array, rollout_length: int) -> ActorState:
    """A rollout before its step 0.

    Args:
        key: the source of its actions.
        env_index: int32 [B], the environments' numbers in the session.
    """
    # `act` donates the state, so each of its arrays must be new: none of the inputs, and no array twice.
    last_age, env_index, key = jax.tree.map(jnp.copy, (past.age, env_index, key))
    carry_before = jax.tree.map(jnp.copy, past.carry)
    carry = jax.tree.map(jnp.copy, past.carry)
    per_step = (rollout_length + 1, len(past.age))
    frames = jnp.zeros((rollout_length + STACK, *past.frames.shape[1:]), jnp.uint8)
    return ActorState(
        step=jnp.zeros((), jnp.int32),
        key=key,
        env_index=env_index,
        last_age=last_age,
        frames=frames.at[: STACK - 1].set(past.frames),
        age=jnp.zeros(per_step, jnp.int32),
        action=jnp.zeros(per_step, jnp.int32),
        log_prob=jnp.zeros(per_step, jnp.float32),
        value=jnp.zeros(per_step, jnp.float32),
        carry_before=carry_before,
        carry=carry,
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
    state = state._replace(
        step=t + 1,
        last_age=age,
        frames=frames,
        age=write(state.age, age, index=t),
        action=write(state.action, action, index=t),
        log_prob=write(state.log_prob, log_prob, index=t),
        value=write(state.value, outputs.value, index=t),
        carry_before=state.carry,
        carry=outputs.carry,
    )
    return state, action


@jax.jit
def past_of(state: ActorState) -> Past:
    """What the next rollout starts from, after step T of this one."""
    length = len(state.age) - 1
    frames = state.frames[length : length + STACK - 1]
    return Past(frames, state.age[length - 1], state.carry_before)


@jax.jit
def join_groups(groups: Sequence[FinishedRollout]) -> Rollout:
    """The rollout over all groups of a device: their environments side by side."""
    per_step = [
        (
            (each.state.frames, each.state.age, each.state.action, each.state.log_prob, each.state.value),
            each.outcome,
        )
        for each in groups
    ]
    joined, outcome = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *per_step)
    frames, age, action, log_prob, value = joined
    carry = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *(each.carry for each in groups))
    return Rollout(
        frames=frames,
        age=age,
        action=action[:-1],
        log_prob=log_prob[:-1],
        value=value[:-1],
        bootstrap_value=value[-1],
        **outcome._asdict(),
        carry=carry,
    )
