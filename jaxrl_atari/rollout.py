"""Acting: a policy plays groups of environments; the result is a `Rollout` [T, B] and the games that ended.

`collect` is the loop; `act` is the policy's step, compiled. In each step the host moves one frame per environment
to the device and one action back; frames are stored, stacked and turned into actions on the device.

**Timeline.** In step t the policy sees frame t, and the emulators answer its action with frame t + 1. After T
steps the policy is applied once more, to frame T, for the value that the targets bootstrap from:

    rollout          step 0    step 1    ...    step T-1    step T (only its value is used)
    next rollout                                            step 0    step 1    ...

Frame T is thus seen twice: in step T, and as step 0 of the next rollout, with the parameters of that time. A
rollout therefore hands to the next one (`RolloutStart`) the frames that it saw and the memory that it had *before*
step T. Step T runs the same compiled program as the other steps, although its actions are not used, because this
saves compiling a second one.

**The end of a game.** Where a game ends in step t, the emulators start the next one in the step after, which is
called an auto-reset step:

    step                      t                 t + 1                 t + 2
    the policy sees           frame t           frame t + 1,          frame t + 2, marked `first`:
                                                the game's last       the next game's first
    age of that frame         a, at most 3      a + 1, at most 3      0: it fills the whole stack
    carry (the memory)        is kept           is kept               is cleared by the network, which gets `first`
    the action                ends the game     is ignored            is played
    terminated or truncated   true              false                 false
    weight                    1                 0                     1

The emulators mark frame t + 2 as `first` in their answer to step t + 1, which therefore has weight 0. The value of
step t + 1 is that of the game's last frame: if the game was cut off, the targets bootstrap from it (`ppo.gae`).
A lost life that is a terminal (`env.life_loss_terminal`) sets `terminated` and nothing else, as the game goes on.

Rollouts do not interrupt this: if a game ends in step T - 1, step 0 of the next rollout is the auto-reset step.

**Groups.** The environments of a device can be dealt to several groups (`env.num_groups`), which take turns: one
steps its emulators while the policy acts for another. The seed of an environment's games and the keys of its
actions depend only on its number. So with the same parameters, the number of devices and groups does not change
what is played, except that outputs of the network can round differently in batches of another size.

With several processes, the games differ from those of one: an environment then gets no new seeds at anchors
(`envs/record.py`), because several processes keep no record of their games.

**The file** reads from the top: the loop, what it calls on the host, and what runs on the device. The data become,
one after the other:

    EnvGroup            emulators that step together, and what their next rollout starts from (`groups.py`)
    RolloutInProgress   a rollout of a group while it is played; `RolloutBuffer` is its part on the device
    Rollout             the rollouts of a device's groups, joined: what an update learns from (`algorithm.py`)
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

from jaxrl_atari.algorithm import Rollout
from jaxrl_atari.devices import check_placement
from jaxrl_atari.envs import EnvStep, FinishedGame
from jaxrl_atari.envs.protocols import Rules
from jaxrl_atari.frames import STACK, gather_stacks, next_age
from jaxrl_atari.groups import EnvGroup, RolloutStart
from jaxrl_atari.hardware.distributed import gather_items, sum_over_processes
from jaxrl_atari.network_interface import Network, Observation
from jaxrl_atari.ppo import log_prob_of

# --- The loop ----------------------------------------------------------------------------------------------------


class Collected(NamedTuple):
    """Result of `collect`.

    The times count from when the first actions were sent to the end of the loop. The policy of step T may still be
    running then.
    """

    rollouts: list[Rollout]  # one for each of this process's learner devices
    env_steps: int  # over all processes; auto-reset steps do not count
    games: list[FinishedGame]  # over all processes, by step, then by environment
    waiting_seconds: float  # for the emulators
    other_seconds: float  # the rest: policy, transfers, bookkeeping


def collect(
    groups: Sequence[Sequence[EnvGroup]], params: Sequence[Any], key: jax.Array, length: int, first_step: int = 0
) -> Collected:
    """One rollout: T steps of every environment.

    Args:
        groups: for each of this process's learner devices, its groups of environments.
        params: for each of them, the parameters to act with, on the device that acts.
        key: the source of all actions of this rollout.
        length: T.
        first_step: steps that each environment has made in the session, for `FinishedGame.step`.
    """
    rollouts = [
        [RolloutInProgress(group, key, device_params, length) for group in device_groups]
        for device_groups, device_params in zip(groups, params, strict=True)
    ]
    # A turn is one group of each device: the first groups take the first turn, the second groups the next.
    turns = list(zip(*rollouts, strict=True))
    games: list[FinishedGame] = []
    start = 0.0
    # A turn ends when the actions are sent: these emulators run while the other groups take their turns.
    for t in range(length + 1):
        for turn in turns:
            # Receive and start one device after the other: the policy of one runs while the host waits for the
            # emulators of the next. The host waits for actions only when all policies have been started.
            for rollout in turn:
                if t > 0:
                    games += rollout.receive(t - 1)
                rollout.start_policy()
            if t < length:  # the actions of step T are not sent: the next rollout draws its own
                for rollout in turn:
                    rollout.send()
        if t == 0:  # the clock starts here, because the first actions also wait for the update
            start = time.perf_counter()
    all_rollouts = list(itertools.chain(*rollouts))
    waiting = sum(rollout.waited_seconds for rollout in all_rollouts)
    other = time.perf_counter() - start - waiting
    return Collected(
        rollouts=[finish_rollouts(device_rollouts) for device_rollouts in rollouts],
        env_steps=sum_over_processes(sum(rollout.env_steps for rollout in all_rollouts)),
        games=gather_games(games, first_step),
        waiting_seconds=waiting,
        other_seconds=other,
    )


def gather_games(games: Sequence[FinishedGame], first_step: int) -> list[FinishedGame]:
    """The games of all processes, by step, then by environment.

    Args:
        games: those of this process, by their steps in the rollout.
        first_step: step of the session with which the rollout began.
    """
    everywhere = [FinishedGame(*game) for game in gather_items(games)]
    return sorted(game._replace(step=first_step + game.step) for game in everywhere)


# --- The rollout of a group, on the host -------------------------------------------------------------------------


class RolloutInProgress:
    """A rollout of one group while it is played.

    `collect` begins it. In each step 0 to T - 1, it then calls

        start_policy    starts `act`, and does not wait for the actions
        send            waits for the actions, and gives them to the emulators
        receive         waits for the emulators, and records what they answer; this begins the group's next turn

    and in step T `start_policy` alone, for the bootstrap value. Last, it calls `finish_rollouts`.

    Args:
        group: its environments. The rollout carries their state on, in each step (`EnvGroup.advance`) and at the
            end (`EnvGroup.finish_rollout`). So a group has one rollout at a time.
        key: the source of its actions.
        params: what `Network.for_acting` returned, on the group's device.
        length: T.
    """

    def __init__(self, group: EnvGroup, key: jax.Array, params: Any, length: int):
        self.group = group
        self._pool = group.pool
        self._network = group.network
        self._params = params
        self._key = jax.device_put(key, group.device)
        self._env_numbers = group.env_numbers
        self.start = group.start_rollout()
        self.buffer = begin_rollout(self.start, length)
        self._action: jax.Array | None = None  # int32 [B]: of the newest frames; computed or still to come
        self.outcomes: list[Outcome] = []  # of the steps so far
        self.waited_seconds = 0.0  # for the emulators
        self.env_steps = 0  # auto-reset steps do not count

    def start_policy(self) -> None:
        """Starts the policy on the newest frames: an action for each environment, which `send` waits for.

        The frames go to the compiled call as NumPy arrays, and `send` reads the actions with `np.asarray`.
        Explicit `device_put` and `device_get` would add 0.5 ms to a 6 ms step on two cores, whose caches the
        emulators keep cold (benchmarks/NOTES.md). So the transfer guard is lifted for both transfers.
        """
        if self.group.check:
            check_placement("acting", {"params": self._params, "rollout": self.buffer}, [self.group.device])
        newest = self.group.newest_step
        with jax.transfer_guard_host_to_device("allow"):
            self.buffer, self._action = act(
                self._network, self._params, self.buffer, newest.frame, newest.first, self._key, self._env_numbers
            )

    def send(self) -> None:
        """Waits for the actions and starts the emulators. On the transfer, see `start_policy`."""
        with jax.transfer_guard_device_to_host("allow"):
            actions = np.asarray(self._action)
        self._pool.send(actions)

    def receive(self, t: int) -> list[FinishedGame]:
        """Waits for the emulators and records step t. Returns the games that it ended, their `step` being t."""
        start = time.perf_counter()
        newest_step = self._pool.recv()
        self.waited_seconds += time.perf_counter() - start
        self.outcomes.append(outcome_of(newest_step, self.group.rules))
        self.env_steps += int(np.sum(~newest_step.first))
        return self.group.advance(newest_step, t)


def finish_rollouts(rollouts: Sequence[RolloutInProgress]) -> Rollout:
    """Ends the rollouts of a device's groups after their step T. Returns them as one rollout.

    Each group gets what its next rollout starts from.
    """
    outcomes = [jax.tree.map(lambda *arrays: np.stack(arrays), *rollout.outcomes) for rollout in rollouts]
    joined = join_groups(
        [rollout.buffer for rollout in rollouts],
        jax.device_put(outcomes, rollouts[0].group.device),
        [rollout.start.carry for rollout in rollouts],
    )
    for rollout in rollouts:
        rollout.group.finish_rollout(next_rollout_start(rollout.buffer))
    return joined


class Outcome(NamedTuple):
    """What learning sees of the emulators' answer to a step, [B], or of all answers in a rollout, [T, B].

    The fields are those of `Rollout`. They are NumPy arrays until `finish_rollouts` puts them on the device.
    """

    reward: np.ndarray | jax.Array  # float32
    terminated: np.ndarray | jax.Array  # bool
    truncated: np.ndarray | jax.Array  # bool
    weight: np.ndarray | jax.Array  # float32


def outcome_of(step: EnvStep, rules: Rules) -> Outcome:
    """What learning sees of a step. The rules say whether rewards are clipped and lost lives are terminals.

    It keeps arrays of the step, which a pool makes anew for each step.
    """
    return Outcome(
        reward=np.clip(step.reward, -1.0, 1.0) if rules.clip_rewards else step.reward,
        terminated=step.terminated | step.life_lost if rules.life_loss_terminal else step.terminated,
        truncated=step.truncated,
        weight=(~step.first).astype(np.float32),
    )


# --- The policy, on the device -----------------------------------------------------------------------------------


class Acted(NamedTuple):
    """What acting yields in a step, [B], or in all steps of a rollout, [T + 1, B].

    The frames are in `RolloutBuffer.frames`. The action of step T and its `log_prob` are not used.
    """

    age: jax.Array  # int32: of the newest frame
    action: jax.Array  # int32
    log_prob: jax.Array  # float32: of the action
    value: jax.Array  # float32


class RolloutBuffer(NamedTuple):
    """A rollout of T steps on the device, as far as `act` has filled it."""

    t: jax.Array  # int32 []: the step that comes next
    last_age: jax.Array  # int32 [B]: age of the newest frame of the step before
    frames: jax.Array  # uint8 [T + 4, B, *frame]: 3 from before, then the newest frames of steps 0..T
    acted: Acted
    # The memory of a recurrent network, [B, ...]; empty for others.
    carry_before: Any = ()  # before the newest step: after step T, the next rollout starts from it
    carry: Any = ()  # after the newest step


@partial(jax.jit, static_argnames="length")
def begin_rollout(start: RolloutStart, length: int) -> RolloutBuffer:
    """A rollout of `length` steps before its step 0."""
    # `act` donates the buffer, so each of its arrays must be new: none of the inputs, and no array twice.
    last_age, carry_before, carry = jax.tree.map(jnp.copy, (start.age, start.carry, start.carry))
    per_step = (length + 1, len(start.age))
    frames = jnp.zeros((length + STACK, *start.frames.shape[1:]), jnp.uint8)
    return RolloutBuffer(
        t=jnp.zeros((), jnp.int32),
        last_age=last_age,
        frames=frames.at[: STACK - 1].set(start.frames),
        acted=Acted(
            age=jnp.zeros(per_step, jnp.int32),
            action=jnp.zeros(per_step, jnp.int32),
            log_prob=jnp.zeros(per_step, jnp.float32),
            value=jnp.zeros(per_step, jnp.float32),
        ),
        carry_before=carry_before,
        carry=carry,
    )


@partial(jax.jit, static_argnames="network", donate_argnames="buffer")
def act(
    network: Network,
    params: Any,
    buffer: RolloutBuffer,
    frame: jax.Array,
    first: jax.Array,
    key: jax.Array,
    env_numbers: jax.Array,
) -> tuple[RolloutBuffer, jax.Array]:
    """One step of the policy: stores the newest frames and samples an action for each environment.

    Args:
        params: what `network.for_acting` returned.
        buffer: it is consumed.
        frame: uint8 [B, 84, 84].
        first: bool [B], true where the frame starts a game.
        key: the source of the actions of the whole rollout.
        env_numbers: int32 [B], of the environments in the session.

    Returns:
        The buffer with this step filled in, and the actions, int32 [B].
    """
    t = buffer.t
    age = next_age(buffer.last_age, first)
    # Not `.at[t].set`, which on a GPU launches kernels of its own to check whether t is in range.
    write = partial(lax.dynamic_update_index_in_dim, axis=0)
    frames = write(buffer.frames, network.layout.arrange(frame), index=t + STACK - 1)
    window = lax.dynamic_slice_in_dim(frames, t, STACK)
    stacks = gather_stacks(window, age[None], jnp.arange(len(age)))
    outputs = network.apply(params, Observation(stacks, first, buffer.carry))
    # Each environment draws with a key of its own, whatever group or device it belongs to.
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.fold_in(key, t), env_numbers)
    action, log_prob = sample_action(keys, outputs.logits)
    acted = Acted(age, action, log_prob, outputs.value)
    buffer = buffer._replace(
        t=t + 1,
        last_age=age,
        frames=frames,
        acted=jax.tree.map(partial(write, index=t), buffer.acted, acted),
        carry_before=buffer.carry,
        carry=outputs.carry,
    )
    return buffer, action


def sample_action(keys: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Draws an action from each row's categorical distribution, with a key for each row.

    Args:
        keys: [B].
        logits: float32 [B, A].

    Returns:
        The actions, int32 [B], and their log probabilities, float32 [B].
    """
    action = jax.vmap(jax.random.categorical)(keys, logits).astype(jnp.int32)
    return action, log_prob_of(logits, action)


@jax.jit
def next_rollout_start(buffer: RolloutBuffer) -> RolloutStart:
    """What the next rollout starts from. Call it after step T of this one, which is step 0 of the next."""
    # The frames of steps T - 3 to T - 1, and the age in step T - 1.
    return RolloutStart(frames=buffer.frames[-STACK:-1], age=buffer.acted.age[-2], carry=buffer.carry_before)


@jax.jit
def join_groups(buffers: Sequence[RolloutBuffer], outcomes: Sequence[Outcome], carries: Sequence[Any]) -> Rollout:
    """The rollout of all groups of a device: their environments side by side.

    Args:
        buffers: of each group, after step T.
        outcomes: of each group, [T, B].
        carries: of each group, the memory before step 0, [B, ...]: the learner starts from it.
    """
    per_step = [(buffer.frames, buffer.acted, outcome) for buffer, outcome in zip(buffers, outcomes, strict=True)]
    frames, acted, outcome = jax.tree.map(lambda *arrays: jnp.concatenate(arrays, axis=1), *per_step)
    carry = jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *carries)
    return Rollout(
        frames=frames,
        age=acted.age,
        action=acted.action[:-1],
        log_prob=acted.log_prob[:-1],
        value=acted.value[:-1],
        bootstrap_value=acted.value[-1],
        **outcome._asdict(),
        carry=carry,
    )
