"""The environments of a session.

Their games start anew or continue from a checkpoint. Each new checkpoint saves the games in progress.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_atari.config import EnvConfig
from jaxrl_atari.envs.pool import FinishedGame
from jaxrl_atari.envs.record import GamesInProgress, Segment, join, split
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.hardware.distributed import gather_items
from jaxrl_atari.networks import Network
from jaxrl_atari.output import say_traceback
from jaxrl_atari.rollout import EnvGroup
from jaxrl_atari.runs.checkpoints import Checkpoints, ResumedCheckpoint
from jaxrl_atari.runs.progress import Progress

MakeGroups = Callable[[int, int], list[list[EnvGroup]]]
"""(seed of the games, steps that each environment has made already) -> all groups of environments."""


class SessionEnvironments:
    """The environments of a session, and the games that have ended in them since its last checkpoint.

    Args:
        groups: for each learner device of this process, its groups of environments.
        game_seed: seed of the games.
        why_new: why the games of a checkpoint could not continue; empty if they do, or there were none.
    """

    def __init__(self, groups: list[list[EnvGroup]], game_seed: int, why_new: str = ""):
        self.groups = groups
        self.game_seed = game_seed
        self.why_new = why_new
        self._finished: list[FinishedGame] = []

    def _all(self) -> list[EnvGroup]:
        return list(itertools.chain(*self.groups))

    @property
    def num_actions(self) -> int:
        """Number of the game's actions."""
        return self.groups[0][0].pool.num_actions

    @property
    def network(self) -> Network:
        """The network that acts in all of them."""
        return self.groups[0][0].network

    def games_so_far(self) -> np.ndarray:
        """Return and env steps so far of each game in progress, float64 [B, 2]."""
        return np.concatenate([group.episodes.so_far for group in self._all()])

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

    def cut_segments(self) -> tuple[dict[str, Any], list[Segment]]:
        """Takes what a checkpoint keeps of the games in progress, and the steps since the last call.

        Returns:
            The items of the checkpoint: `games` and, for a network with a memory, `carry`. Then the steps of each
            group. Both are empty if the back end does not record its games.
        """
        taken = [group.cut_segment() for group in self._all()]
        recorded = [each for each in taken if each is not None]
        if len(recorded) < len(taken):
            return {}, []
        games, segments = zip(*recorded, strict=True)
        items: dict[str, Any] = {"games": join(games)._asdict()}
        carry = join_carries([group.rollout_start.carry for group in self._all()])
        if carry:
            items["carry"] = carry
        return items, list(segments)

    def add_finished(self, games: Iterable[FinishedGame]) -> None:
        """Keeps the games that ended in a rollout, for the next checkpoint."""
        self._finished.extend(games)

    def take_finished(self) -> list[FinishedGame]:
        """Takes the games that have ended since the last call."""
        finished = self._finished
        self._finished = []
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

    Of several processes, either all continue their games or none does.

    Args:
        seed: seed of the session, from which that of new games derives.
        progress: how far the session has come.
        resumed: the checkpoint that the session resumes from; None for a new session.
        say: receives a line for the user if the games of a checkpoint cannot continue.
    """
    why_new = ""
    if resumed is not None:
        why_new = games_problem(env, resumed.meta)
        if not why_new:
            game_seed = resumed.meta["game_seed"]
            # 0 steps so far: the games are played again from their start, which counts their steps.
            environments = SessionEnvironments(make(game_seed, 0), game_seed)
            why_new = _continue_games(environments, checkpoints, resumed)
            if not why_new:
                return environments
            environments.close()
        say(f"new games are started ({why_new})")
    game_seed = int(np.random.SeedSequence([seed, progress.updates]).generate_state(1)[0] >> 1)
    return SessionEnvironments(make(game_seed, progress.steps_per_env), game_seed, why_new)


def _continue_games(
    environments: SessionEnvironments, checkpoints: Checkpoints, resumed: ResumedCheckpoint
) -> str:
    """Continues the games of a checkpoint. If a bug prevents it, the traceback is printed.

    Returns:
        Why they cannot continue, in this process or in another; empty if they do, in all processes.
    """
    why_new = ""
    try:
        environments.resume(*_saved_games(checkpoints, resumed))
    except Exception as error:  # a hostile item may raise any type; the pool checks every action
        say_traceback(error)
        why_new = reason(error)
    return next(filter(None, gather_items([why_new])), "")


def _saved_games(
    checkpoints: Checkpoints, resumed: ResumedCheckpoint
) -> tuple[GamesInProgress, dict[str, np.ndarray]]:
    """The games of a checkpoint, and the carry; see `SessionEnvironments.resume`."""
    games = GamesInProgress(**checkpoints.restore(resumed.env_steps, item="games"))
    carry = {}
    if "carry" in resumed.meta["items"]:
        carry = checkpoints.restore(resumed.env_steps, item="carry")
    return games, carry


def join_carries(carries: Sequence[Any]) -> dict[str, np.ndarray]:
    """The carries of all groups as an item of a checkpoint: number of a leaf -> `[B, ...]`. May be empty."""
    leaves = [jax.tree.leaves(jax.device_get(carry)) for carry in carries]
    return {str(number): np.concatenate(parts) for number, parts in enumerate(zip(*leaves, strict=True))}


def split_carry(saved: dict[str, np.ndarray], group: EnvGroup) -> Any:
    """The carry of a group, from what `join_carries` returned.

    Raises:
        UserError: the network has a memory of another form.
    """
    envs = slice(group.first_env, group.first_env + group.pool.num_envs)
    leaves, structure = jax.tree.flatten(group.rollout_start.carry)
    own = {str(number): leaf for number, leaf in enumerate(leaves)}
    found, expected = ({name: x.shape[1:] for name, x in carry.items()} for carry in (saved, own))
    if found != expected:
        raise UserError(f"the memory of the network has other shapes: {found} -> {expected}")
    return structure.unflatten([saved[name][envs] for name in own])


def games_problem(env: EnvConfig, meta: dict[str, Any]) -> str:
    """Why the games of a checkpoint cannot continue in these environments; empty if they can."""
    if "games" not in meta["items"]:
        return "the checkpoint has none: the back end ale records them, in a single process"
    before = meta["config"]["env"]
    now = {"num_envs": env.num_envs, "backend": env.backend}
    changed = [f"env.{name} {before.get(name)} -> {now[name]}" for name in now if before.get(name) != now[name]]
    return ", ".join(changed)
