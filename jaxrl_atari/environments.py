"""The environments of a session: made in groups for the devices that learn, and continued from a checkpoint."""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jaxrl_atari.config import Config
from jaxrl_atari.devices import Placement
from jaxrl_atari.envs import make_pool
from jaxrl_atari.envs.record import GamesInProgress, Segment, default_anchor_steps, join, split
from jaxrl_atari.errors import UserError
from jaxrl_atari.networks import Network, make_network
from jaxrl_atari.rollout import EnvGroup
from jaxrl_atari.runs.checkpoints import Checkpoint
from jaxrl_atari.runs.progress import Progress


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
                network = make_network(config.network, pool.num_actions, *placement.device_classes)
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
        taken = [group.cut_segment() for group in self._all()]
        recorded = [each for each in taken if each is not None]
        if len(recorded) < len(taken):
            return {}, []
        games, segments = zip(*recorded, strict=True)
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


def start_environments(
    config: Config,
    placement: Placement,
    *,
    seed: int,
    progress: Progress,
    resumed: Checkpoint | None,
    say: Callable[[str], object],
) -> Environments:
    """Makes the environments of a session. The games of its checkpoint continue if they can; else new games start.

    Args:
        seed: seed of the session, from which that of new games derives.
        progress: how far the session has come.
        resumed: the checkpoint that the session resumes from; None for a new session.
        say: receives a line for the user if the games of a checkpoint cannot continue.
    """
    why_new = ""
    if resumed is not None:
        envs_before = resumed.meta["config"]["env"]["num_envs"]
        if config.unrecorded_reason:
            why_new = config.unrecorded_reason
        elif "games" not in resumed.items:
            why_new = "the checkpoint has none: the back end ale records them, in a single process"
        elif envs_before != config.env.num_envs:
            why_new = f"env.num_envs {envs_before} -> {config.env.num_envs}"
        else:
            # `first_step` is 0: the games are played again from their start, which counts their steps.
            environments = Environments(config, placement, resumed.meta["game_seed"])
            try:
                environments.resume(resumed.items)
                return environments
            except UserError as error:
                environments.close()
                why_new = str(error)
        say(f"new games are started ({why_new})")
    game_seed = int(np.random.SeedSequence([seed, progress.updates]).generate_state(1)[0] >> 1)
    return Environments(config, placement, game_seed, first_step=progress.steps_per_env, why_new=why_new)
