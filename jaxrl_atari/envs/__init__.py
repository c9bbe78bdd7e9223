"""Pools of games: NumPy in, NumPy out. No other package imports an emulator.

`ale` and `envpool` play ALE's games; `gymnasium` plays any environment of Gymnasium (`gymnasium.py`). In ALE's
games an env step is 4 emulator frames, seen as the pixel-wise maximum of the last two in luminance, reduced to
84x84 by area averaging. Frames are not stacked. `protocols.py` has the rules that differ between protocols.

`ale` is ale-py's `AtariVectorEnv` (ALE 0.12.1), `envpool` is envpool's Atari (ALE 0.7.5). From the same start and
actions both give the same frames and rewards in the games that the tests replay. They differ in this:

- Start of a game. `ale`: FIRE, then 0 to `noop_max` - 2 no-ops (without FIRE: 0 to `noop_max` - 1). `envpool`: 0
  to `noop_max` - 1 no-ops, then FIRE (without FIRE: 1 to `noop_max`). So the same seed starts different games, and
  only `ale` can start a game without either.
- Cut-off. In the step that reaches `max_frames`, `ale` leaves out the last emulator frame: its picture is the
  maximum of the third frame and the previous step's picture. `envpool` takes the last two frames as usual.
- Screens that are not 210 lines high (13 games: Adventure, AirRaid, Carnival, JourneyEscape, KeystoneKapers,
  KingKong, Klax, LaserGates, MrDo, Pacman, Pooyan, SirLancelot, SpaceWar): `envpool` sees the upper 210 only.
"""

import os

import numpy as np

from jaxrl_atari.envs.pool import EnvPool, EnvStep, EpisodeCounter, FinishedGame, GymnasiumOptions
from jaxrl_atari.envs.protocols import Rules
from jaxrl_atari.envs.record import GameRecord
from jaxrl_atari.errors import require

__all__ = [
    "THREADS",
    "EnvPool",
    "EnvStep",
    "EpisodeCounter",
    "FinishedGame",
    "GymnasiumOptions",
    "env_seeds",
    "make_pool",
]

THREADS = "JAXRL_ATARI_THREADS"
"""Variable of a process that shares the cores with others: the emulation threads of its pools."""


def env_seeds(seed: int, num_envs: int) -> list[int]:
    """`num_envs` different seeds in [0, 2**31), derived from `seed`. Seed i does not depend on `num_envs`.

    Raises:
        ConfigError: `seed` is not from 0 to 2**32 - 1, as those of JAX are.
    """
    require(0 <= seed < 2**32, "seed", seed, "a whole number from 0 to 4294967295")
    words = np.random.SeedSequence(seed).generate_state(2 * num_envs) >> 1  # twice as many: some may be equal
    return list(dict.fromkeys(words.tolist()))[:num_envs]


def describe_environment(backend: str, game: str, rules: Rules, gymnasium: GymnasiumOptions) -> str:
    """One line on what a policy gets of a Gymnasium environment, which is made once for it; empty for ALE's games.

    Raises:
        UserError: the environment is not registered, cannot be made, or does not fit.
    """
    if backend != "gymnasium":
        return ""
    from jaxrl_atari.envs import gymnasium as back_end

    return back_end.describe_environment(game, rules, gymnasium)


def make_pool(
    backend: str,
    game: str,
    num_envs: int,
    *,
    seed: int,
    first_env: int = 0,
    num_threads: int = 0,
    rules: Rules,
    anchor_steps: int = 0,
    first_step: int = 0,
    gymnasium: GymnasiumOptions = GymnasiumOptions(),  # noqa: B008
    screens: bool = False,
) -> EnvPool:
    """Makes `num_envs` copies of `game`; the arguments are a config's, which has checked them.

    Args:
        backend: "ale", "envpool" or "gymnasium".
        game: ALE's CamelCase name, such as `MsPacman`; with "gymnasium", the id of an environment.
        seed: >= 0. Environment i takes seed number `first_env + i` of `env_seeds(seed, ...)`, so a pool may be a
          part of a larger one. The same seed and actions give the same steps bit for bit, for any number of
          threads.
        num_threads: emulation threads; 0: those of the variable `THREADS`, else one per core. `gymnasium` has
            none.
        anchor_steps, first_step: keep a record of the games (`record.GameRecord`). 0: no record. `envpool`, which
            cannot start a game from a seed, and `gymnasium`, whose environments may do anything, have none.
        rules: rules of the protocol. `life_loss_terminal` and `clip_rewards` concern learning: the pool ignores
            them.
        gymnasium: options of the back end of that name.
        screens: `EnvPool.screen` is wanted. `envpool` has no such pictures.

    Raises:
        UserError: envpool is asked for and not installed, the game's ROM cannot be read, or a Gymnasium
            environment cannot be used.
    """
    seeds = env_seeds(seed, first_env + num_envs)[first_env:]
    num_threads = num_threads or int(os.environ.get(THREADS, "0"))
    # Imported here, so that the interface alone imports no emulator.
    if backend == "envpool":
        from jaxrl_atari.envs.envpool import EnvpoolPool

        return EnvpoolPool(game, seeds, num_threads, rules)
    if backend == "gymnasium":
        from jaxrl_atari.envs.gymnasium import GymnasiumPool

        return GymnasiumPool(game, seeds, rules, gymnasium, screens)
    from jaxrl_atari.envs.ale import AlePool, FilmedAlePool

    if screens:
        return FilmedAlePool(game, seeds, num_threads, rules)
    record = GameRecord(seed, seeds, first_env, anchor_steps, first_step) if anchor_steps else None
    return AlePool(game, seeds, num_threads, rules, record)
