"""Groups of environments: emulators that step together, and the policy that acts in them.

A group lasts as long as its session and is made by `make_groups`. `rollout.py` plays its rollouts; a checkpoint
between two of them keeps its games.
"""

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
from jaxrl_atari.network_forms import make_network
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
        self._is_playing = False

    def start_rollout(self) -> RolloutStart:
        """Begins a rollout of the group, which ends with `finish_rollout`. Returns what it starts from.

        Raises:
            RuntimeError: the rollout before is not finished. If an error ended it, the games have gone on, but
                `rollout_start` has not, so the group cannot continue.
        """
        if self._is_playing:
            raise RuntimeError("a rollout of this group of environments is not finished: make new groups")
        self._is_playing = True
        return self.rollout_start

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
        self._is_playing = False

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


def make_groups(config: Config, placement: Placement, seed: int, first_step: int = 0) -> list[list[EnvGroup]]:
    """All environments of a session, as `rollout.collect` takes them, with one network for all.

    They are numbered 0 .. B-1. Each of the learner's devices has a block of consecutive numbers, which is divided
    among its groups.

    The caller closes the pools of the groups. If a group cannot be made, all pools are closed here.

    Args:
        seed: seed of the games.
        first_step: steps that each environment made before a resume that starts new games.

    Returns:
        For each of this process's learner devices, its groups.
    """
    with ExitStack() as exits:
        pools = _make_pools(config, placement, seed, first_step, exits)
        num_actions = pools[0][0].pool.num_actions
        network = make_network(config.network, num_actions, *placement.device_classes)
        groups = [
            [
                EnvGroup(
                    pool,
                    network,
                    device=actor,
                    rules=config.env.rules,
                    first_env=first_env,
                    check=config.devices.check,
                )
                for first_env, pool in device_pools
            ]
            for device_pools, actor in zip(pools, placement.actors, strict=True)
        ]
        exits.pop_all()  # all groups are made: no pool is closed
    return groups


class _NumberedPool(NamedTuple):
    first_env: int  # number of the first environment in the session
    pool: EnvPool


def _make_pools(
    config: Config, placement: Placement, seed: int, first_step: int, exits: ExitStack
) -> list[list[_NumberedPool]]:
    """The emulators of a session: for each of this process's learner devices, those of its groups.

    Args:
        seed, first_step: as `make_groups` takes them.
        exits: closes the pools.
    """
    env = config.env
    envs_per_device = env.num_envs // len(placement.learner)
    size = envs_per_device // (env.num_groups or 1)
    anchor_steps = 0  # no record of the games
    if not config.unrecorded_reason:
        anchor_steps = env.anchor_steps or default_anchor_steps(env.num_envs)
    pools: list[list[_NumberedPool]] = []
    for learner in placement.local_learner:
        first_of_device = placement.learner.index(learner) * envs_per_device
        device_pools: list[_NumberedPool] = []
        for first_env in range(first_of_device, first_of_device + envs_per_device, size):
            pool = make_pool(
                env.backend,
                env.game_name,
                size,
                seed=seed,
                first_env=first_env,
                num_threads=env.num_threads,
                rules=env.rules,
                anchor_steps=anchor_steps,
                first_step=first_step,
                gymnasium=env.gymnasium,
            )
            exits.callback(pool.close)
            device_pools.append(_NumberedPool(first_env, pool))
        pools.append(device_pools)
    return pools
