"""The environments of a session. Their games start anew or continue from a checkpoint; the next one saves them."""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_atari.config import EnvConfig
from jaxrl_atari.envs.pool import FinishedGame
from jaxrl_atari.envs.record import GamesInProgress, Segment, join, split
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.groups import EnvGroup
from jaxrl_atari.runs.checkpoints import Checkpoints, ResumedCheckpoint
from jaxrl_atari.runs.early_runs import items_of
from jaxrl_atari.runs.progress import Progress

_log = logging.getLogger(__name__)

MakeGroups = Callable[[int, int], list[list[EnvGroup]]]
"""(seed of the games, steps that each environment has made already) -> all groups of environments."""


class SessionEnvironments:
    """The environments of a session, and the games that have ended in them since its last checkpoint.

    Args:
        groups: for each learner device of this process, its groups of environments.
        seed: seed of the games.
        why_new: why the games of a checkpoint could not continue; empty if they do, or there were none.
    """

    def __init__(self, groups: list[list[EnvGroup]], seed: int, why_new: str = ""):
        self.groups = groups
        self.seed = seed
        self.why_new = why_new
        self.finished: list[FinishedGame] = []

    def _all(self) -> list[EnvGroup]:
        return list(itertools.chain(*self.groups))

    @property
    def num_actions(self) -> int:
        """Number of the game's actions."""
        return self.groups[0][0].pool.num_actions

    def in_progress(self) -> np.ndarray:
        """Return and env steps so far of each game in progress, float64 [B, 2]."""
        return np.concatenate([group.episodes.in_progress for group in self._all()])

    def resume(self, games: GamesInProgress, carry: dict[str, np.ndarray]) -> None:
        """Plays the games of a checkpoint again up to where they were, so that they continue there.

        Args:
            games: games of all environments.
            carry: what `join_carries` returned; empty if the network has no memory.
        """
        for group in self._all():
            group.resume(
                split(games, first_env=group.first_env, num_envs=group.pool.num_envs), split_carry(carry, group)
            )

    def take_for_checkpoint(self) -> tuple[dict[str, Any], list[Segment]]:
        """Takes what a checkpoint keeps of the games in progress, and the steps since the last call.

        Returns:
            The items of the checkpoint: `games` and, for a network with a memory, `carry`. Then the steps of each
            group. Both are empty if the back end does not record its games.
        """
        taken = [group.take_games() for group in self._all()]
        recorded = [each for each in taken if each is not None]
        if len(recorded) < len(taken):
            return {}, []
        games, segments = zip(*recorded, strict=True)
        items: dict[str, Any] = {"games": join(games)._asdict()}
        carry = join_carries([group.past.carry for group in self._all()])
        if carry:
            items["carry"] = carry
        return items, list(segments)

    def take_finished(self) -> list[FinishedGame]:
        """Takes the games that have ended since the last call."""
        finished = self.finished
        self.finished = []
        return finished

    def close(self) -> None:
        """Frees the emulators."""
        for group in self._all():
            group.pool.close()


def start_environments(
    make: MakeGroups,
    env: EnvConfig,
    *,
    seed: int,
    progress: Progress,
    checkpoints: Checkpoints,
    resumed: ResumedCheckpoint | None,
    say: Callable[[str], object],
) -> SessionEnvironments:
    """Makes environments in which the games of a checkpoint continue if that is possible; else new games start.

    Args:
        seed: seed of the session, from which that of new games derives.
        progress: how far the session has come.
        resumed: the checkpoint that the session resumes from; None for a new session.
        say: receives a line for the user if the games of a checkpoint cannot continue.
    """
    problem = ""
    if resumed is not None:
        try:
            return continue_games(make, env, checkpoints, resumed)
        except GamesCannotContinue as error:
            problem = str(error)
            say(f"new games are started ({problem})")
    game_seed = int(np.random.SeedSequence([seed, progress.updates]).generate_state(1)[0] >> 1)
    return SessionEnvironments(make(game_seed, progress.steps_per_env), game_seed, problem)


class GamesCannotContinue(UserError):
    """The games of a checkpoint cannot continue; the message is the reason."""


def continue_games(
    make: MakeGroups, env: EnvConfig, checkpoints: Checkpoints, resumed: ResumedCheckpoint
) -> SessionEnvironments:
    """Makes environments in which the games of a checkpoint continue.

    Raises:
        GamesCannotContinue: it has none, they need other environments, or they cannot be played again.
    """
    problem = games_problem(env, resumed.meta)
    if problem:
        raise GamesCannotContinue(problem)
    game_seed = resumed.meta["game_seed"]
    # 0: playing the games again brings the count of steps back. New games continue it.
    environments = SessionEnvironments(make(game_seed, 0), game_seed)
    try:
        saved = GamesInProgress(**checkpoints.restore(resumed.env_steps, item="games"))
        carry = {}
        if "carry" in resumed.meta["items"]:
            carry = checkpoints.restore(resumed.env_steps, item="carry")
        environments.resume(saved, carry)
    except Exception as error:  # a damaged or hostile item may raise any type; the pool checks every action
        _log.info("the games of the checkpoint cannot continue", exc_info=True)
        environments.close()
        raise GamesCannotContinue(reason(error)) from error
    return environments


def join_carries(carries: Sequence[Any]) -> dict[str, np.ndarray]:
    """The carries of all groups as an item of a checkpoint: number of a leaf -> `[B, ...]`. May be empty."""
    leaves = [jax.tree.leaves(jax.device_get(carry)) for carry in carries]
    return {str(number): np.concatenate(parts) for number, parts in enumerate(zip(*leaves, strict=True))}


def split_carry(saved: dict[str, np.ndarray], group: EnvGroup) -> Any:
    """The carry of a group, from what `join_carries` returned."""
    envs = slice(group.first_env, group.first_env + group.pool.num_envs)
    leaves, structure = jax.tree.flatten(group.past.carry)
    return structure.unflatten([saved[str(number)][envs] for number in range(len(leaves))])


def games_problem(env: EnvConfig, meta: dict[str, Any]) -> str:
    """Why the games of a checkpoint cannot continue in these environments; empty if they can."""
    if "games" not in items_of(meta):
        return "the checkpoint has none: the back end ale records them, in a single process"
    before = meta["config"]["env"]
    now = {"num_envs": env.num_envs, "backend": env.backend}
    changed = [f"env.{name} {before.get(name)} -> {now[name]}" for name in now if before.get(name) != now[name]]
    return ", ".join(changed)
