"""Groups of environments: emulators that step together, and the policy that acts in them.

A group lasts as long as its session and is made by `make_groups`. `rollout.py` plays its rollouts; a checkpoint
between two of them keeps its games.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_atari.config import Config
from jaxrl_atari.devices import Placement
from jaxrl_atari.envs import EnvPool, EnvStep, EpisodeCounter, FinishedGame, make_pool
from jaxrl_atari.envs.protocols import Rules
from jaxrl_atari.envs.record import GamesInProgress, Segment, default_anchor_steps
from jaxrl_atari.envs.replay import restore_games
from jaxrl_atari.frames import STACK
from jaxrl_atari.network_interface import Network

# --- A group -----------------------------------------------------------------------------------------------------


class RolloutStart(NamedTuple):
    """What a rollout starts from: what the policy saw and remembers before step 0."""

    frames: jax.Array  # uint8 [3, B, *frame]: the last three frames before step 0, the oldest first
    age: jax.Array  # int32 [B]: age of the last of them
    carry: Any = ()  # [B, ...]: the memory of a recurrent network; empty for others


def first_rollout_start(num_envs: int, frame_shape: tuple[int, ...], carry: Any = ()) -> RolloutStart:
    """What the first rollout starts from: black frames, which no stack shows, since its games start there.

    Args:
        frame_shape: `FrameLayout.shape` of the network.
        carry: `Network.initial_carry` of the environments.
    """
    frames = jnp.zeros((STACK - 1, num_envs, *frame_shape), jnp.uint8)
    return RolloutStart(frames, jnp.zeros(num_envs, jnp.int32), carry)


class EnvGroup:
    """Environments that step together, and the network and the device with which a policy acts in them.

    A new group resets its emulators: its first rollout starts new games. What the next rollout starts from:

        newest_step     the emulators' newest step
        episodes        counts of the games in progress
        rollout_start   what the policy saw and remembers before that step

    A rollout (`rollout.RolloutInProgress`) changes the first two with each step, and the last when it is finished.
    Between two rollouts a checkpoint takes what `cut_segment` returns, and `rollout_start.carry`. A group that is
    made later continues from these (`resume`).

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
        self.rules = rules
        self.first_env = first_env
        self.check = check
        numbers = np.arange(first_env, first_env + pool.num_envs, dtype=np.int32)
        self.env_numbers = jax.device_put(numbers, device)
        """Numbers of the environments in the session, int32 [B]."""

        # What the next rollout starts from.
        self.newest_step = pool.reset()
        self.episodes = EpisodeCounter(pool.num_envs)
        with jax.default_device(device):
            start = first_rollout_start(pool.num_envs, network.layout.shape, network.initial_carry(pool.num_envs))
        self.rollout_start = jax.device_put(start, device)

    def advance(self, newest_step: EnvStep, t: int) -> list[FinishedGame]:
        """Goes on to the newest step of the emulators. Returns the games that it ended.

        Args:
            t: number of the step, for `FinishedGame.step`.
        """
        self.newest_step = newest_step
        return [game._replace(env=self.first_env + game.env) for game in self.episodes.count(newest_step, t)]

    def finish_rollout(self, start: RolloutStart) -> None:
        """Ends the rollout of the group: its next one begins from `start`."""
        self.rollout_start = start

    def cut_segment(self) -> tuple[GamesInProgress, Segment] | None:
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
        return record.cut_segment(self.newest_step.frame, self.pool.lives, self.episodes.so_far)

    def resume(self, games: GamesInProgress, carry: Any = ()) -> None:
        """Plays the games of a checkpoint again in a new group, and continues them. See `replay.restore_games`.

        Args:
            games: the first part of what `cut_segment` returned when the checkpoint was written.
            carry: `rollout_start.carry` of that time.
        """
        self.newest_step, frames, age, self.episodes = restore_games(self.pool, self.newest_step, games)
        with jax.default_device(self.device):
            start = RolloutStart(self.network.layout.arrange(jnp.asarray(frames)), jnp.asarray(age), carry)
        self.rollout_start = jax.device_put(start, self.device)


# --- All groups of a session -------------------------------------------------------------------------------------


def make_groups(
    config: Config, placement: Placement, network_for: Callable[[int], Network], seed: int, first_step: int = 0
) -> list[list[EnvGroup]]:
    """All environments of a session, as `rollout.collect` takes them.

    They are numbered 0 .. B-1. Each of the learner's devices has a block of consecutive numbers, which is divided
    among its groups.

    Whoever calls it closes their pools. If a group cannot be made, the pools before it are closed here.

    Args:
        network_for: number of actions -> the network of the session, which is the same for all groups.
        seed: seed of the games.
        first_step: steps that each environment made before a resume that starts new games.

    Returns:
        For each of this process's learner devices, its groups.
    """
    env = config.env
    envs_per_device = env.num_envs // len(placement.learner)
    size = envs_per_device // (env.num_groups or 1)
    groups: list[list[EnvGroup]] = []
    with ExitStack() as pools:
        for learner, actor in zip(placement.local_learner, placement.actors, strict=True):
            first_of_device = placement.learner.index(learner) * envs_per_device
            on_device: list[EnvGroup] = []
            for first_env in range(first_of_device, first_of_device + envs_per_device, size):
                pool = _make_pool(config, size, seed=seed, first_env=first_env, first_step=first_step)
                pools.callback(pool.close)
                network = network_for(pool.num_actions)
                group = EnvGroup(
                    pool, network, device=actor, rules=env.rules, first_env=first_env, check=config.devices.check
                )
                on_device.append(group)
            groups.append(on_device)
        pools.pop_all()  # all groups are made: none is closed
    return groups


def _make_pool(config: Config, num_envs: int, *, seed: int, first_env: int, first_step: int) -> EnvPool:
    """The emulators of a group, as the config describes them."""
    env = config.env
    anchor_steps = 0  # no record of the games
    if not config.unrecorded_reason:
        anchor_steps = env.anchor_steps or default_anchor_steps(env.num_envs)
    return make_pool(
        env.backend,
        env.game_name,
        num_envs,
        seed=seed,
        first_env=first_env,
        num_threads=env.num_threads,
        rules=env.rules,
        anchor_steps=anchor_steps,
        first_step=first_step,
        gymnasium=env.gymnasium,
    )
