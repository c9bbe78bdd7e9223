"""Pools of environments: NumPy in, NumPy out. In training, only this package imports emulators.

The back ends `ale` and `envpool` play ALE's games; `gymnasium` plays any Gymnasium environment
(`gymnasium_pool.py`). In ALE's games, an env step is 4 emulator frames. The observation is the grey, area-averaged
84x84 image of the pixel-wise maximum of the last two frames. Pools do not stack frames. `protocols.py` has the
rules that differ between protocols.

`ale` is ale-py's `AtariVectorEnv` (ALE 0.12.1), `envpool` is envpool's Atari (ALE 0.7.5). With the same start and
actions, both give the same frames and rewards in the games that the tests replay. They differ in three points:

- Start of a game. In a game with FIRE, `ale` presses FIRE and then plays 0 to `noop_max` - 2 no-ops, and `envpool`
  plays 0 to `noop_max` - 1 no-ops and then presses FIRE. In a game without FIRE, `ale` plays 0 to `noop_max` - 1
  no-ops, and `envpool` 1 to `noop_max`. The same seed therefore starts different games. (`gymnasium` presses FIRE,
  if there is one, and then plays 1 to `noop_max` no-ops.)
- Cut-off. In the step that reaches `max_frames`, `ale` leaves out the last emulator frame: the observation is the
  maximum of the third frame and the previous observation. `envpool` takes the last two frames as usual.
- Screens. In 13 games the screen is not 210 lines high, and `envpool` uses only its upper 210 lines: Adventure,
  AirRaid, Carnival, JourneyEscape, KeystoneKapers, KingKong, Klax, LaserGates, MrDo, Pacman, Pooyan, SirLancelot
  and SpaceWar.
"""

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from jaxrl_atari.envs.pool import EnvPool, EnvStep, EpisodeCounter, FinishedGame
from jaxrl_atari.envs.record import GameRecord
from jaxrl_atari.errors import require
from jaxrl_atari.hardware.cpu import process_threads

if TYPE_CHECKING:  # the config imports the games and the protocols of this package
    import gymnasium

    from jaxrl_atari.config import EnvConfig

__all__ = [
    "EnvPool",
    "EnvStep",
    "EpisodeCounter",
    "FinishedGame",
    "check_environment",
    "env_seeds",
    "make_pool",
    "register_wrapper",
]

WRAPPERS: dict[str, Callable[["gymnasium.Env"], "gymnasium.Env"]] = {}
"""The user's own wrappers for `env.wrapper`."""


def register_wrapper(name: str, wrapper: Callable[["gymnasium.Env"], "gymnasium.Env"]) -> None:
    """Lets a config choose a wrapper of your own, as in `--env.wrapper coins`.

    The wrapper gets an environment that the rules of the protocol hold for already. In a game of ALE it sees env
    steps and frames, uint8 [84, 84]. It must pass `info` on. Numbers that it puts into `info["log"]` become
    columns of metrics.csv, as means over the log interval.

    Args:
        name: a later wrapper of the same name replaces the earlier one.
        wrapper: such as a class of `gymnasium.Wrapper`.
    """
    WRAPPERS[name] = wrapper


def env_seeds(seed: int, num_envs: int) -> list[int]:
    """`num_envs` different seeds in [0, 2**31), derived from `seed`. Seed i does not depend on `num_envs`.

    Raises:
        ConfigError: `seed` is outside 0 to 2**32 - 1, the range of JAX's seeds.
    """
    require(0 <= seed < 2**32, "seed", seed, "a whole number from 0 to 4294967295")
    words = np.random.SeedSequence(seed).generate_state(2 * num_envs) >> 1  # twice as many, as some may be equal
    return list(dict.fromkeys(words.tolist()))[:num_envs]


def first_game_seed(seed: int, updates: int) -> int:
    """The seed of the games that a session with this seed starts after so many updates: at 0, or at a resume."""
    return int(np.random.SeedSequence([seed, updates]).generate_state(1)[0] >> 1)


def check_environment(env: "EnvConfig") -> str:
    """Makes a Gymnasium environment once, so that its errors come before training.

    Returns:
        A line on its actions; empty with another back end.

    Raises:
        UserError: as `gymnasium_pool.make_single`; or the first observation is not of the type of its space.
    """
    if env.backend != "gymnasium":
        return ""
    from jaxrl_atari.envs.gymnasium_pool import make_single

    with contextlib.closing(make_single(env)) as made:
        made.reset(seed=0)
        return f"{env.game_name}: actions {made.action_space}"


def make_pool(
    env: "EnvConfig",
    num_envs: int,
    *,
    seed: int,
    first_env: int = 0,
    anchor_steps: int = 0,
    first_step: int = 0,
    screens: bool = False,
) -> EnvPool:
    """Makes `num_envs` copies of a game.

    Args:
        env: the game, its back end and its rules. The pool ignores `life_loss_terminal` and `clip_rewards`, which
            concern learning. `num_threads` = 0 means `process_threads()`.
        num_envs: number of copies, in place of that of `env`.
        seed: from 0 on. Environment i takes seed number `first_env + i` of `env_seeds(seed, ...)`, so that a pool
            may be a part of a larger one. The same seed and actions give the same steps bit for bit, for any
            number of threads.
        first_env: number of the pool's first environment among all environments of the session.
        anchor_steps, first_step: see `record.GameRecord`. If `anchor_steps` is 0, there is no record. Only `ale`
            has one: envpool takes seeds only when a pool is made, and a Gymnasium environment may depend on more
            than its seed and actions.
        screens: `EnvPool.screen` will be called. `envpool` has no screens, so `ale` plays in its place.

    Raises:
        UserError: envpool is not installed, the game's ROM cannot be read, or a Gymnasium
            environment cannot be used.
        ConfigError: as `process_threads` and `env_seeds`.
    """
    seeds = env_seeds(seed, first_env + num_envs)[first_env:]
    num_threads = min(num_envs, env.num_threads or process_threads())
    # Imported here, so that the interface alone imports no emulator.
    if env.backend == "envpool" and not screens:
        from jaxrl_atari.envs.envpool_pool import EnvpoolPool

        return EnvpoolPool(env, seeds, num_threads)
    if env.backend == "gymnasium":
        from jaxrl_atari.envs.gymnasium_pool import GymnasiumPool

        return GymnasiumPool(env, seeds, screens)
    from jaxrl_atari.envs.ale_pool import AlePool

    record = None
    if anchor_steps:
        record = GameRecord(
            game_seed=seed, seeds=seeds, first_env=first_env, anchor_steps=anchor_steps, first_step=first_step
        )
    return AlePool(env, seeds, num_threads, record, screens)
