"""Acting: a pool of games and a policy -> a rollout [T, B], and the returns of the games that ended.

The host loop sends actions to the emulator and hands the newest frames to the device; frames are stored, stacked and
turned into actions there. One step moves one frame an environment to the device and one action back.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_atari.devices import check_placement
from jaxrl_atari.envs.pool import EnvPool, EnvStep
from jaxrl_atari.networks import BLOCKED, STACK, NatureActorCritic, acting_params, block_frames, gather_stacks
from jaxrl_atari.ppo import Rollout, sample_action


class ActorState(NamedTuple):
    """What an actor keeps on its device while it fills a rollout of T steps; step T only gives the bootstrap value."""

    step: jax.Array  # int32 []: the step of the rollout that comes next
    key: jax.Array
    env_index: jax.Array  # int32 [B]: the environments' numbers among all of the session
    last_age: jax.Array  # int32 [B]: of the step before
    frames: jax.Array  # uint8 [T + S, B, 21, 21, 16], blocked: S - 1 from before, then the newest of steps 0..T
    age: jax.Array  # int32 [T + 1, B]
    action: jax.Array  # int32 [T + 1, B]
    log_prob: jax.Array  # float32 [T + 1, B]
    value: jax.Array  # float32 [T + 1, B]


def empty_actor_state(rollout_length: int, num_envs: int, first_env: int = 0) -> ActorState:
    """The state before anything was seen, of environments `first_env`, `first_env + 1`, ... of the session."""
    per_step = (rollout_length + 1, num_envs)
    return ActorState(
        step=jnp.zeros((), jnp.int32),
        key=jax.random.key(0),
        env_index=first_env + jnp.arange(num_envs, dtype=jnp.int32),
        last_age=jnp.zeros(num_envs, jnp.int32),
        frames=jnp.zeros((rollout_length + STACK, num_envs, *BLOCKED), jnp.uint8),
        age=jnp.zeros(per_step, jnp.int32),
        action=jnp.zeros(per_step, jnp.int32),
        log_prob=jnp.zeros(per_step, jnp.float32),
        value=jnp.zeros(per_step, jnp.float32),
    )


def begin_rollout(state: ActorState, key: jax.Array) -> ActorState:
    """A fresh rollout that goes on where `state`, a full one, ended. Reads `state` and leaves it as it is."""
    length, num_envs = state.age.shape[0] - 1, state.age.shape[1]
    history = state.frames[length : length + STACK - 1]
    fresh = empty_actor_state(length, num_envs)
    return fresh._replace(
        key=key,
        env_index=state.env_index,
        last_age=state.age[length - 1],
        frames=fresh.frames.at[: STACK - 1].set(history),
    )


def act(
    network: NatureActorCritic, params: Any, state: ActorState, frame: jax.Array, first: jax.Array
) -> tuple[ActorState, jax.Array]:
    """One step of the policy: stores the newest frames, samples actions for what each environment now sees.

    Args:
        frame: uint8 [B, 84, 84]; first: bool [B], true where the frame starts a new game.

    Returns:
        The state with this step filled in, and the actions, int32 [B].
    """
    t = state.step
    age = jnp.where(first, 0, jnp.minimum(state.last_age + 1, STACK - 1))
    store = partial(lax.dynamic_update_index_in_dim, axis=0)  # `.at[t].set` asks in kernels of its own whether t fits
    frames = store(state.frames, block_frames(frame), index=t + STACK - 1)
    window = lax.dynamic_slice_in_dim(frames, t, STACK)
    stacks = gather_stacks(window, age[None], jnp.arange(len(age)))
    logits, value = network.apply({"params": params}, stacks, method="from_blocks")
    # Each environment draws from a key of its own, whatever group or device it belongs to.
    keys = jax.vmap(jax.random.fold_in, in_axes=(None, 0))(jax.random.fold_in(state.key, t), state.env_index)
    action, log_prob = sample_action(keys, logits)
    return state._replace(
        step=t + 1,
        last_age=age,
        frames=frames,
        age=store(state.age, age, index=t),
        action=store(state.action, action, index=t),
        log_prob=store(state.log_prob, log_prob, index=t),
        value=store(state.value, value, index=t),
    ), action


class Outcome(NamedTuple):
    """What the emulator said after each step of a rollout: NumPy, [T, B]."""

    reward: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    weight: np.ndarray


def finish_rollout(states: Sequence[ActorState], outcomes: Sequence[Outcome]) -> Rollout:
    """Groups of environments, each a full state and its outcome, as one rollout over all of them."""

    def join(parts: Sequence[jax.Array], axis: int = 1) -> jax.Array:
        return jnp.concatenate(parts, axis=axis) if len(parts) > 1 else parts[0]

    def steps(name: str) -> jax.Array:
        return join([getattr(state, name)[:-1] for state in states])

    return Rollout(
        frames=join([state.frames for state in states]),
        age=steps("age"),
        action=steps("action"),
        log_prob=steps("log_prob"),
        value=steps("value"),
        **{name: join([getattr(outcome, name) for outcome in outcomes]) for name in Outcome._fields},
        bootstrap_value=join([state.value[-1] for state in states], axis=0),
    )


class EpisodeStatistics:
    """Returns of full games, and their moving averages. `return_ma` is the figure that scores are quoted in."""

    WINDOW = 100

    def __init__(self) -> None:
        self.episodes = 0
        self.returns: deque[float] = deque(maxlen=self.WINDOW)  # of the last 100 finished games
        self.lengths: deque[float] = deque(maxlen=self.WINDOW)
        self.points: deque[float] = deque(maxlen=self.WINDOW)  # of the last 100 log points

    def game_over(self, episode_return: float, length: int) -> None:
        """Counts a finished game: the sum of its raw rewards, its length in env steps."""
        self.episodes += 1
        self.returns.append(episode_return)
        self.lengths.append(length)

    def mean_return(self) -> float:
        """Mean return of the last 100 finished games; NaN before the first."""
        return float(np.mean(self.returns)) if self.returns else float("nan")

    def log_point(self, keep: bool = True) -> dict[str, float]:
        """A log point: the mean of the last 100 games; `return_ma` is the mean of the last 100 such points.

        Args:
            keep: False for one off the interval, which later ones leave out.
        """
        mean, points = self.mean_return(), self.points.copy()
        if self.returns:
            points.append(mean)
        if keep:
            self.points = points
        return {
            "episodes": self.episodes,
            "return_mean": mean,
            "return_ma": float(np.mean(points)) if points else float("nan"),
            "episode_length": float(np.mean(self.lengths)) if self.lengths else float("nan"),
        }

    def to_dict(self) -> dict[str, Any]:
        """As JSON values, for a checkpoint."""
        return {name: list(v) if isinstance(v, deque) else v for name, v in vars(self).items()}

    def load(self, values: dict[str, Any]) -> None:
        """Takes over what `to_dict` gave."""
        self.episodes = values["episodes"]
        for name in ("returns", "lengths", "points"):
            getattr(self, name).extend(values[name])


class ActorFunctions(NamedTuple):
    """The compiled functions that all actors of a session on the same kind of device share."""

    params: Callable[[Any], Any]
    begin: Callable[[ActorState, jax.Array], ActorState]
    act: Callable[[Any, ActorState, np.ndarray, np.ndarray], tuple[ActorState, jax.Array]]


def make_actor_functions(network: NatureActorCritic) -> ActorFunctions:
    """Compiles `acting_params`, `begin_rollout` and `act`, which replaces its state in place."""
    params = jax.jit(partial(acting_params, dtype=network.compute_dtype))
    return ActorFunctions(params, jax.jit(begin_rollout), jax.jit(partial(act, network), donate_argnums=1))


class Actor:
    """One group of environments on one device.

    Args:
        first_env: number of the first environment among all of the session.
        check: assert at every step that what acting uses lies on `device`.
    """

    def __init__(
        self,
        pool: EnvPool,
        functions: ActorFunctions,
        rollout_length: int,
        device: jax.Device,
        first_env: int = 0,
        check: bool = False,
    ):
        self.pool = pool
        self.device = device
        self._functions = functions
        self._length = rollout_length
        self._check = check
        self.state = jax.device_put(empty_actor_state(rollout_length, pool.num_envs, first_env), device)
        self._last: EnvStep = pool.reset()
        self._outcome = self._empty_outcome()
        self._action: jax.Array | None = None
        self._episode_return = np.zeros(pool.num_envs)
        self._episode_length = np.zeros(pool.num_envs, np.int64)

    def _empty_outcome(self) -> Outcome:
        shape = (self._length, self.pool.num_envs)
        return Outcome(
            reward=np.zeros(shape, np.float32),
            terminated=np.zeros(shape, bool),
            truncated=np.zeros(shape, bool),
            weight=np.zeros(shape, np.float32),
        )

    def begin(self, key: jax.Array) -> None:
        """Starts a rollout; `key` is the source of its actions."""
        self.state = self._functions.begin(self.state, jax.device_put(key, self.device))
        self._outcome = self._empty_outcome()

    def choose(self, params: Any) -> None:
        """Starts the policy on the newest frames, which its call takes to the device.

        The guards here and in `send` stand for `device_put` and `device_get`, which on two CPU cores take 0.5 ms of a
        step of 6 ms: between the emulators' steps Python runs with cold caches.
        """
        if self._check:
            check_placement("acting", {"params": params, "state": self.state}, [self.device])
        with jax.transfer_guard_host_to_device("allow"):
            self.state, self._action = self._functions.act(params, self.state, self._last.frame, self._last.first)
        if self._check:
            check_placement("acting", {"state": self.state, "action": self._action}, [self.device])

    def send(self) -> None:
        """Waits for the actions and starts the emulators."""
        with jax.transfer_guard_device_to_host("allow"):
            actions = np.asarray(self._action)
        self.pool.send(actions)

    def receive(self, t: int) -> list[tuple[float, int]]:
        """Waits for the emulators and keeps what they say of step t; returns and lengths of the games that it ended."""
        step = self._last = self.pool.recv()
        self._outcome.reward[t] = np.clip(step.reward, -1.0, 1.0)
        self._outcome.terminated[t] = step.terminated | step.life_lost
        self._outcome.truncated[t] = step.truncated
        self._outcome.weight[t] = ~step.first
        self._episode_return += step.reward
        self._episode_length += ~step.first
        over = np.flatnonzero(step.terminated | step.truncated)
        games = [(float(self._episode_return[i]), int(self._episode_length[i])) for i in over]
        self._episode_return[over] = self._episode_length[over] = 0
        return games

    def finish(self) -> tuple[ActorState, Outcome]:
        """The full rollout. The state is still needed for the next `begin`."""
        return self.state, jax.device_put(self._outcome, self.device)

    def transitions(self) -> int:
        """Env steps of this rollout, without the steps that were none."""
        return int(self._outcome.weight.sum())
