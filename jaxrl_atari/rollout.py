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

**The file** reads from the top: the environments, the loop, and what runs on the device. The data of a rollout are

    EnvGroup         emulators that step together, and on the host what a rollout of them has seen so far
    Environments     all groups of a session
    RolloutBuffer    the part of that rollout on the device, which `act` fills
    Rollout          the rollouts of a device's groups, joined: what an update learns from (`algorithm.py`)
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
from jaxrl_atari.config import Config
from jaxrl_atari.devices import Placement, check_placement, device_class
from jaxrl_atari.envs import EnvPool, EnvStep, EpisodeCounter, FinishedGame, make_pool
from jaxrl_atari.envs.protocols import Rules
from jaxrl_atari.envs.record import GamesInProgress, Segment, default_anchor_steps, join, split
from jaxrl_atari.envs.replay import restore_games
from jaxrl_atari.frames import STACK, as_frames, gather_stacks, next_age
from jaxrl_atari.hardware.distributed import gather_items, sum_over_processes
from jaxrl_atari.networks import Network, Observation, make_network
from jaxrl_atari.ppo import log_prob_of

# --- Environments ------------------------------------------------------------------------------------------------


class RolloutStart(NamedTuple):
    """What a rollout starts from: what the policy saw and remembers before step 0."""

    frames: jax.Array  # uint8 [3, B, *frame]: the last three frames before step 0, the oldest first
    age: jax.Array  # int32 [B]: age of the last of them
    carry: Any = ()  # [B, ...]: the memory of a recurrent network; empty for others


class EnvGroup:
    """Environments that step together, and the network and the device with which a policy acts in them.

    A new group resets its emulators: its first rollout starts new games. It lasts as long as its session. Between
    two rollouts a checkpoint takes what `cut_segment` returns, and the memory in `rollout_start`. A group that is
    made later continues from these (`resume`).

    `collect` plays its rollouts: `begin`; `start_policy`, `send` and `receive` in each step 0 to T - 1;
    `start_policy` alone in step T, for the bootstrap value; and last `finish`.

    Args:
        pool: the emulators; whoever made it closes it.
        network: the network that acts.
        device: where the network acts.
        rules: rules of the protocol; they define which rewards and terminals learning sees.
        first_env: number of the first environment in the session.
        check: assert at every step that the parameters and the state of the rollout lie on `device`.
    """

    def __init__(
        self,
        pool: EnvPool,
        network: Network,
        *,
        device: jax.Device,
        rules: Rules,
        first_env: int = 0,
        check: bool = False,
    ):
        self.pool = pool
        self.network = network
        self.device = device
        self.first_env = first_env
        self._rules = rules
        self._check = check
        numbers = np.arange(first_env, first_env + pool.num_envs, dtype=np.int32)
        self._env_numbers = jax.device_put(numbers, device)

        # What the next rollout starts from. The first one starts new games, so no stack shows its black frames.
        self._newest_step = pool.reset()
        self.episodes = EpisodeCounter(pool.num_envs)
        with jax.default_device(device):
            start = RolloutStart(
                frames=jnp.zeros((STACK - 1, pool.num_envs, *network.frame_shape), jnp.uint8),
                age=jnp.zeros(pool.num_envs, jnp.int32),
                carry=network.initial_carry(pool.num_envs),
            )
        self.rollout_start: RolloutStart = jax.device_put(start, device)

    def begin(self, params: Any, key: jax.Array, length: int) -> None:
        """Begins a rollout.

        Args:
            params: what `Network.for_acting` returned, on the group's device.
            key: the source of the actions.
            length: T.
        """
        self._params = params
        self._key = jax.device_put(key, self.device)
        self.buffer: RolloutBuffer = begin_rollout(self.rollout_start, length)
        # Of its steps so far:
        self.outcomes: list[dict[str, np.ndarray]] = []  # what learning sees (`outcome_of`)
        self.env_steps = 0  # auto-reset steps do not count
        self.waited_seconds = 0.0  # for the emulators

    def start_policy(self) -> None:
        """Starts the policy on the newest frames: an action for each environment, which `send` waits for.

        The frames go to the compiled call as NumPy arrays, and `send` reads the actions with `np.asarray`.
        Explicit `device_put` and `device_get` would be slower (benchmarks/NOTES.md, "Acting"), so the transfer
        guard is lifted for both transfers.
        """
        if self._check:
            check_placement("acting", {"params": self._params, "rollout": self.buffer}, [self.device])
        newest = self._newest_step
        with jax.transfer_guard_host_to_device("allow"):
            self.buffer, self._action = act(
                self.network, self._params, self.buffer, newest.frame, newest.first, self._key, self._env_numbers
            )

    def send(self) -> None:
        """Waits for the actions and starts the emulators. On the transfer, see `start_policy`."""
        with jax.transfer_guard_device_to_host("allow"):
            actions = np.asarray(self._action)
        self.pool.send(actions)

    def receive(self, step: int) -> list[FinishedGame]:
        """Waits for the emulators and records a step. Returns the games that it ended, with this number of it."""
        start = time.perf_counter()
        newest_step = self._newest_step = self.pool.recv()
        self.waited_seconds += time.perf_counter() - start
        self.outcomes.append(outcome_of(newest_step, self._rules))
        self.env_steps += int(np.sum(~newest_step.first))
        return [game._replace(env=self.first_env + game.env) for game in self.episodes.count(newest_step, step)]

    def finish(self) -> tuple["RolloutBuffer", dict[str, jax.Array], Any]:
        """Ends the rollout after step T: keeps what the next one starts from, and frees the memory of this one.

        Returns:
            The buffer; what learning sees of its steps, [T, B]; and the memory before step 0, [B, ...].
        """
        buffer, carry = self.buffer, self.rollout_start.carry
        outcomes = jax.tree.map(lambda *arrays: np.stack(arrays), *self.outcomes)
        self.rollout_start = next_rollout_start(buffer)
        del self.buffer, self._params
        return buffer, jax.device_put(outcomes, self.device), carry

    def cut_segment(self) -> tuple[GamesInProgress, Segment]:
        """Ends a segment of the log of actions, for a checkpoint between two rollouts. The pool has a record.

        Call it once per checkpoint, and write what it returns. The next segment starts here, so the actions of a
        segment that is not written are missing in the log.

        Returns:
            The games in progress, and the segment: all actions since the last call.
        """
        assert self.pool.record is not None
        return self.pool.record.cut_segment(self._newest_step.frame, self.pool.lives, self.episodes.so_far)

    def resume(self, games: GamesInProgress, carry: Any = ()) -> None:
        """Plays the games of a checkpoint again in a new group, and continues them. See `replay.restore_games`.

        Args:
            games: the first part of what `cut_segment` returned when the checkpoint was written.
            carry: `rollout_start.carry` of that time.
        """
        self._newest_step, frames, age, self.episodes = restore_games(self.pool, self._newest_step, games)
        with jax.default_device(self.device):
            start = RolloutStart(as_frames(jnp.asarray(frames), self.network.frame_shape), jnp.asarray(age), carry)
        self.rollout_start = jax.device_put(start, self.device)


def outcome_of(step: EnvStep, rules: Rules) -> dict[str, np.ndarray]:
    """What learning sees of a step, [B]: the fields of `Rollout` that the emulators decide.

    The rules say whether rewards are clipped and lost lives are terminals. The result keeps arrays of the step,
    which a pool makes anew for each step.
    """
    return {
        "reward": np.clip(step.learning_reward, -1.0, 1.0) if rules.clip_rewards else step.learning_reward,
        "terminated": step.terminated | step.life_lost if rules.life_loss_terminal else step.terminated,
        "truncated": step.truncated,
        "weight": (~step.first).astype(np.float32),
    }


class Environments:
    """All environments of a session, numbered 0 .. B-1.

    Each of the learner's devices has a block of consecutive numbers, which is divided among its groups.

    Args:
        game_seed: seed of the games.
        first_step: steps that each environment made before a resume that starts new games.
        why_new: why the games of a checkpoint could not continue; empty if they do, or there were none.
    """

    def __init__(
        self, config: Config, placement: Placement, game_seed: int, *, first_step: int = 0, why_new: str = ""
    ):
        self.game_seed = game_seed
        self.why_new = why_new
        self.groups: list[list[EnvGroup]] = []
        """For each of this process's learner devices, its groups."""
        env = config.env
        envs_per_device = env.num_envs // len(placement.learner)
        group_size = envs_per_device // (env.num_groups or 1)
        anchor_steps = 0  # no record of the games
        if not config.unrecorded_reason:
            anchor_steps = env.anchor_steps or default_anchor_steps(env.num_envs)
        for learner, actor in zip(placement.local_learner, placement.actors, strict=True):
            first = placement.learner.index(learner) * envs_per_device
            self.groups.append([])
            for first_env in range(first, first + envs_per_device, group_size):
                pool = make_pool(
                    env,
                    group_size,
                    seed=game_seed,
                    first_env=first_env,
                    anchor_steps=anchor_steps,
                    first_step=first_step,
                )
                network = make_network(
                    config.network, pool.num_actions, device_class(learner), device_class(actor)
                )
                group = EnvGroup(
                    pool,
                    network,
                    device=actor,
                    rules=env.rules,
                    first_env=first_env,
                    check=config.devices.check,
                )
                self.groups[-1].append(group)

    def _all(self) -> list[EnvGroup]:
        return list(itertools.chain(*self.groups))

    @property
    def network(self) -> Network:
        """The network that acts in all of them."""
        return self.groups[0][0].network

    def games_so_far(self) -> np.ndarray:
        """Return and env steps so far of each game in progress, float64 [B, 2]."""
        return np.concatenate([group.episodes.so_far for group in self._all()])

    def cut_segments(self) -> tuple[dict[str, Any], list[Segment]]:
        """Takes what a checkpoint keeps of the games in progress, and the steps since the last call.

        Returns:
            The items of the checkpoint: `games` and, for a network with a memory, `carry` (number of a leaf ->
            `[B, ...]`). Then the steps of each group. Both are empty if the back end does not record its games.
        """
        if self.groups[0][0].pool.record is None:
            return {}, []
        games, segments = zip(*(group.cut_segment() for group in self._all()), strict=True)
        items: dict[str, Any] = {"games": join(games)._asdict()}
        carries = [jax.tree.leaves(jax.device_get(group.rollout_start.carry)) for group in self._all()]
        carry = {str(leaf): np.concatenate(parts) for leaf, parts in enumerate(zip(*carries, strict=True))}
        if carry:
            items["carry"] = carry
        return items, list(segments)

    def resume(self, items: dict[str, dict[str, np.ndarray]]) -> None:
        """Plays the games of a checkpoint again up to where they were, so that they continue there.

        Args:
            items: what `cut_segments` returned when the checkpoint was written.

        Raises:
            UserError: they end otherwise than in the checkpoint.
        """
        games = GamesInProgress(**items["games"])
        carry = items.get("carry", {})
        for group in self._all():
            first, last = group.first_env, group.first_env + group.pool.num_envs
            leaves = [carry[str(leaf)][first:last] for leaf in range(len(carry))]
            structure = jax.tree.structure(group.rollout_start.carry)
            group.resume(split(games, first_env=first, num_envs=group.pool.num_envs), structure.unflatten(leaves))

    def close(self) -> None:
        """Frees the emulators."""
        for group in self._all():
            group.pool.close()


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
    logged: dict[str, float]  # means of what `env.wrapper` has given in `info["log"]` in this process


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
    for device_groups, device_params in zip(groups, params, strict=True):
        for group in device_groups:
            group.begin(device_params, key, length)
    # A turn is one group of each device: the first groups take the first turn, the second groups the next.
    turns = list(zip(*groups, strict=True))
    games: list[FinishedGame] = []
    start = 0.0
    # A turn ends when the actions are sent: these emulators run while the other groups take their turns.
    for t in range(length + 1):
        for turn in turns:
            # Receive and start one device after the other: the policy of one runs while the host waits for the
            # emulators of the next. The host waits for actions only when all policies have been started.
            for group in turn:
                if t > 0:
                    games += group.receive(first_step + t - 1)
                group.start_policy()
            if t < length:  # the actions of step T are not sent: the next rollout draws its own
                for group in turn:
                    group.send()
        if t == 0:  # the clock starts here, because the first actions also wait for the update
            start = time.perf_counter()
    all_groups = list(itertools.chain(*groups))
    waiting = sum(group.waited_seconds for group in all_groups)
    other = time.perf_counter() - start - waiting
    logged: dict[str, list[float]] = {}
    for group in all_groups:
        for name, values in group.pool.logged.items():
            logged.setdefault(name, []).extend(values)
        group.pool.logged = {}
    return Collected(
        rollouts=[join_groups([group.finish() for group in device_groups]) for device_groups in groups],
        env_steps=sum_over_processes(sum(group.env_steps for group in all_groups)),
        games=sorted(FinishedGame(*game) for game in gather_items(games)),
        waiting_seconds=waiting,
        other_seconds=other,
        logged={name: float(np.mean(values)) for name, values in logged.items() if values},
    )


# --- The policy, on the device -----------------------------------------------------------------------------------


class RolloutBuffer(NamedTuple):
    """A rollout of T steps on the device, as far as `act` has filled it."""

    t: jax.Array  # int32 []: the step that comes next
    last_age: jax.Array  # int32 [B]: age of the newest frame of the step before
    frames: jax.Array  # uint8 [T + 4, B, *frame]: 3 from before, then the newest frames of steps 0..T
    # What acting yields in each step, [T + 1, B]. The action of step T and its `log_prob` are not used.
    age: jax.Array  # int32: of the newest frame
    action: jax.Array  # int32
    log_prob: jax.Array  # float32: of the action
    value: jax.Array  # float32
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
        age=jnp.zeros(per_step, jnp.int32),
        action=jnp.zeros(per_step, jnp.int32),
        log_prob=jnp.zeros(per_step, jnp.float32),
        value=jnp.zeros(per_step, jnp.float32),
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
    frames = write(buffer.frames, as_frames(frame, network.frame_shape), index=t + STACK - 1)
    window = lax.dynamic_slice_in_dim(frames, t, STACK)
    stacks = gather_stacks(window, age[None], jnp.arange(len(age)))
    outputs = network.apply(params, Observation(stacks, first, buffer.carry))
    # Each environment draws with a key of its own, whatever group or device it belongs to.
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.fold_in(key, t), env_numbers)
    action, log_prob = sample_action(keys, outputs.logits)
    buffer = buffer._replace(
        t=t + 1,
        last_age=age,
        frames=frames,
        age=write(buffer.age, age, index=t),
        action=write(buffer.action, action, index=t),
        log_prob=write(buffer.log_prob, log_prob, index=t),
        value=write(buffer.value, outputs.value, index=t),
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
    return RolloutStart(frames=buffer.frames[-STACK:-1], age=buffer.age[-2], carry=buffer.carry_before)


@jax.jit
def join_groups(played: Sequence[tuple[RolloutBuffer, dict[str, jax.Array], Any]]) -> Rollout:
    """The rollout of all groups of a device: their environments side by side.

    Args:
        played: what `EnvGroup.finish` returned for each group.
    """
    buffers, outcomes, carries = zip(*played, strict=True)
    acted = [(each.frames, each.age, each.action, each.log_prob, each.value) for each in buffers]
    (frames, age, action, log_prob, value), outcome = jax.tree.map(
        lambda *arrays: jnp.concatenate(arrays, axis=1), *zip(acted, outcomes, strict=True)
    )
    return Rollout(
        frames=frames,
        age=age,
        action=action[:-1],
        log_prob=log_prob[:-1],
        value=value[:-1],
        bootstrap_value=value[-1],
        **outcome,
        carry=jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *carries),
    )
