"""Acting with a trained policy: load it from a checkpoint, choose actions, play full games.

policy = load_policy("data/qbert_20260101_120000")
actions = policy.act(frames, jax.random.key(0))                  # uint8 [n, 84, 84, 4] -> int32 [n]
result = evaluate(policy, episodes=32)                           # result.mean, result.returns, ...
"""

import dataclasses
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_atari.config import Config
from jaxrl_atari.config_files import config_from_dict
from jaxrl_atari.devices import check_placement
from jaxrl_atari.envs.ale import FRAME_SIZE, make_pool
from jaxrl_atari.envs.pool import EnvPool, EnvStep
from jaxrl_atari.errors import ConfigError, UserError
from jaxrl_atari.networks import STACK, NatureActorCritic
from jaxrl_atari.run_dir.checkpoints import Checkpoints
from jaxrl_atari.run_dir.results import session_dirs
from jaxrl_atari.trainer import abstract_arrays, make_network


@partial(jax.jit, static_argnames=("network", "greedy"))
def choose_actions(
    network: NatureActorCritic, params: Any, frames: jax.Array, key: jax.Array, greedy: bool
) -> jax.Array:
    """Actions int32 [n] for stacks uint8 [n, 84, 84, 4]: drawn from the policy, or its most probable one (`greedy`)."""
    logits, _ = network.apply({"params": params}, frames)
    actions = jnp.argmax(logits, axis=-1) if greedy else jax.random.categorical(key, logits)
    return actions.astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class Policy:
    """A trained network on a device, and what it was trained for."""

    config: Config
    network: NatureActorCritic
    params: Any
    device: jax.Device
    session_dir: Path
    env_steps: int  # of training: the checkpoint's step

    def act(self, frames: np.ndarray, key: jax.Array, greedy: bool = False) -> np.ndarray:
        """Actions for stacks of frames.

        Args:
          frames: uint8 [n, 84, 84, 4], preprocessed as in training, the oldest frame first.
          key: the source of the actions; a fresh one for each call. Not used if `greedy`.

        Returns:
          int32 [n], indices into the game's minimal action set.
        """
        frames, key = jax.device_put((frames, key), self.device)
        check = self.config.devices.check
        if check:
            check_placement("evaluating", {"params": self.params, "frames": frames, "key": key}, [self.device])
        actions = choose_actions(self.network, self.params, frames, key, greedy)
        if check:
            check_placement("evaluating", {"actions": actions}, [self.device])
        return jax.device_get(actions)


class Game(NamedTuple):
    """One full game."""

    episode_return: float  # sum of raw rewards, all lives
    length: int  # env steps
    truncated: bool  # cut off at env.max_frames


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """The games of an evaluation, in the order in which they ended."""

    games: tuple[Game, ...]

    @property
    def returns(self) -> np.ndarray:
        """float64 [episodes]."""
        return np.array([game.episode_return for game in self.games])

    @property
    def mean(self) -> float:
        """Mean return."""
        return float(self.returns.mean())

    @property
    def std(self) -> float:
        """Standard deviation of the returns over games (of these games: divided by N)."""
        return float(self.returns.std())


def find_session(run_dir: str | Path, session: int | None = None) -> tuple[Path, str]:
    """The session directory that a user means, and why it is that one.

    Args:
      run_dir: a trial's directory, or a session's.
      session: which one of the trial; None: its only one, else the one with the highest score.

    Raises:
      UserError: no such directory, no sessions in it, or none that has a checkpoint.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: no such directory; expected a run directory such as data/qbert_20260101_120000")
    if (run_dir / "checkpoints").is_dir():
        if session is not None:
            raise UserError(f"--session {session}: {run_dir} is a session's directory already; leave --session out")
        return run_dir, "the session given"
    sessions = session_dirs(run_dir)
    if not sessions:
        raise UserError(f"{run_dir}: not a run directory; expected one that holds session_0")
    if session is not None:
        directory = run_dir / f"session_{session}"
        if directory not in sessions:
            there = ", ".join(path.name.removeprefix("session_") for path in sessions)
            raise UserError(f"--session {session}: {run_dir} has no such session; there are: {there}")
        return directory, "the session chosen"
    scores = {path: score for path in sessions if (score := _best_score(path)) is not None}
    if not scores:
        raise UserError(f"{run_dir}: none of its sessions has a checkpoint yet; wait for the first one")
    if len(sessions) == 1:
        return sessions[0], "the only session"
    return max(scores, key=lambda path: scores[path]), f"the best of {len(sessions)} sessions, --session takes another"


def _best_score(session_dir: Path) -> float | None:
    """The best score at any checkpoint of a session, -inf before its first finished game, None without a checkpoint."""
    if not (session_dir / "checkpoints").is_dir():
        return None
    checkpoints = Checkpoints(session_dir, read_only=True)
    latest = checkpoints.latest_step()
    if latest is None:
        return None
    score = checkpoints.read_meta(latest)["best_score"]
    return -np.inf if score is None or np.isnan(score) else score


def load_policy(
    run_dir: str | Path,
    checkpoint: Literal["best", "latest"] | int = "best",
    device: jax.Device | None = None,
    session: int | None = None,
) -> Policy:
    """The policy of a checkpoint, whatever device it was trained on.

    Args:
      run_dir: a trial's directory, or a session's.
      checkpoint: the one with the best score, the latest one, or its env step.
      device: where to act; None: JAX's default.
      session: see `find_session`.

    Raises:
      UserError: no run directory, no such checkpoint, or one that cannot be read.
    """
    session_dir, _ = find_session(run_dir, session)
    checkpoints = Checkpoints(session_dir, read_only=True)
    step = {"best": checkpoints.best_step(), "latest": checkpoints.latest_step()}.get(str(checkpoint), checkpoint)
    if step is None:
        raise UserError(f"{session_dir}: holds no complete checkpoint yet; wait for the session's first one")
    meta = checkpoints.read_meta(int(step))
    config = config_from_dict(meta["config"])
    home = jax.devices()[0] if device is None else device
    arrays = checkpoints.restore(int(step), abstract_arrays(config, meta["num_actions"], home))
    network = make_network(config, meta["num_actions"], home.platform)
    return Policy(config, network, arrays["train_state"].params, home, session_dir, int(step))


def _push_frame(stacks: np.ndarray, step: EnvStep) -> np.ndarray:
    """Stacks [n, 84, 84, 4] with the newest frame; where a game starts, four times its first frame."""
    stacks = np.concatenate([stacks[..., 1:], step.frame[..., None]], axis=-1)
    stacks[step.first] = step.frame[step.first][..., None]
    return stacks


def make_evaluation_pool(policy: Policy, num_envs: int, seed: int, backend: str, screen: bool = False) -> EnvPool:
    env = policy.config.env
    return make_pool(
        backend,
        env.game_name,
        num_envs,
        seed=seed,
        num_threads=env.num_threads,
        protocol=env.resolved_protocol,
        screen=screen,
        max_frames=env.max_frames,
    )


def play(
    policy: Policy,
    pool: EnvPool,
    quota: np.ndarray,
    seed: int,
    greedy: bool,
    on_step: Callable[[int, Game | None], None],
    cancelled: Callable[[], bool] = lambda: False,
) -> None:
    """Plays until environment i has ended `quota[i]` games.

    Calls `on_step(i, game)` for each environment i that has games left, after the reset and after each step; `game` is
    the one that just ended, or None. Raises `CancelledError` at the first step at which `cancelled()`.
    """
    remaining = quota.copy()
    episode_return, length = np.zeros(pool.num_envs), np.zeros(pool.num_envs, np.int64)
    key, env_step = jax.random.key(seed), 0
    step = pool.reset()
    stacks = _push_frame(np.zeros((pool.num_envs, FRAME_SIZE, FRAME_SIZE, STACK), np.uint8), step)
    for i in np.flatnonzero(remaining):
        on_step(int(i), None)
    while remaining.any():
        if cancelled():
            raise CancelledError
        step = pool.step(policy.act(stacks, jax.random.fold_in(key, env_step), greedy))
        stacks = _push_frame(stacks, step)
        env_step += 1
        episode_return += step.reward
        length += ~step.first
        ended = step.terminated | step.truncated
        for i in np.flatnonzero(remaining):
            game = Game(float(episode_return[i]), int(length[i]), bool(step.truncated[i])) if ended[i] else None
            on_step(int(i), game)
        remaining -= ended & (remaining > 0)
        episode_return[ended] = length[ended] = 0


def evaluate(
    policy: Policy,
    episodes: int = 32,
    seed: int = 0,
    greedy: bool = False,
    num_envs: int = 16,
    on_game: Callable[[Game], None] = lambda game: None,
    cancelled: Callable[[], bool] = lambda: False,
) -> EvaluationResult:
    """Plays full games with raw scores under the protocol of the training.

    Each environment plays a number of games that is fixed beforehand. To take the first `episodes` games to end, from
    whichever environment, would favour short games, which mostly are the bad ones.

    Args:
      episodes: games in all.
      seed: of the games and the actions. The same seed, `num_envs` and device give the same games.
      greedy: take the most probable action instead of drawing one.
      num_envs: games played at once.
      on_game: called with each game as it ends.
      cancelled: asked at each step.

    Raises:
      CancelledError: `cancelled()` said yes.
      ConfigError: a number that is not possible.
    """
    for name, value, least in (("episodes", episodes, 1), ("num_envs", num_envs, 1), ("seed", seed, 0)):
        if value < least:
            raise ConfigError(name, value, f"a whole number >= {least}")
    num_envs = min(num_envs, episodes)
    quota = np.full(num_envs, episodes // num_envs) + (np.arange(num_envs) < episodes % num_envs)
    games: list[Game] = []

    def on_step(env: int, game: Game | None) -> None:
        if game is not None:
            games.append(game)
            on_game(game)

    pool = make_evaluation_pool(policy, num_envs, seed, policy.config.env.backend)
    try:
        play(policy, pool, quota, seed, greedy, on_step, cancelled)
    finally:
        pool.close()
    return EvaluationResult(tuple(games))
