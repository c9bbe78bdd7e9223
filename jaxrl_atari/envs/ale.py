"""Pools of Atari games: NumPy in, NumPy out. The only module that imports an emulator.

Two back ends play one protocol (Machado et al., 2018, arXiv:1709.06009, section 5): an env step is 4 emulator
frames, seen as the pixel-wise maximum of the last two in luminance, reduced to 84x84 by area averaging; sticky
actions 0.25 (`protocol="v5"`) or none (`"classic"`); up to 30 no-ops and FIRE at the start of a game; minimal
action set; cut off after 108,000 emulator frames. Frames are not stacked here.

`ale` is ale-py's `AtariVectorEnv` (ALE 0.12.1), `envpool` is envpool's Atari (ALE 0.7.5). From the same start and
actions both give the same frames and rewards in the games that the tests replay. They differ in this:

- Start of a game. `ale`: FIRE, then 0 to 28 no-ops (a game without FIRE: 0 to 29). `envpool`: 0 to 29 no-ops,
  then FIRE (1 to 30). So the same seed starts different games.
- Cut-off. `ale` leaves the last emulator frame of the step that reaches `max_frames` out of the picture: it is
  the maximum of the third frame and the previous step's picture. `envpool`'s is as usual.
- Screens that are not 210 lines high (13 games: Adventure, AirRaid, Carnival, JourneyEscape, KeystoneKapers,
  KingKong, Klax, LaserGates, MrDo, Pacman, Pooyan, SirLancelot, SpaceWar): `envpool` sees the upper 210 only.
"""

import importlib
import importlib.util
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import ale_py
import numpy as np
from ale_py import roms
from ale_py.registration import rom_id_to_name
from ale_py.vector_env import AtariVectorEnv

from jaxrl_atari.envs.pool import BasePool, EnvPool, RawStep
from jaxrl_atari.errors import ConfigError, UserError

FRAME_SIZE = 84
SCREEN_SHAPE = (210, 160, 3)
FRAME_SKIP = 4
NOOP_MAX = 30
STICKY = {"v5": 0.25, "classic": 0.0}
MULTIPLAYER_ONLY = {"combat", "joust", "maze_craze", "warlords"}


class _Games(NamedTuple):
    """What a back end makes a pool of; see `make_pool`."""

    rom_id: str
    seeds: list[int]  # one for each environment
    num_threads: int
    sticky: float  # probability that the action before is taken once more
    max_frames: int
    screen: bool


@cache
def _rom_ids() -> dict[str, str]:
    """CamelCase name -> ALE's rom id, for the games that one player can play."""
    ids = (rom for rom in roms.get_all_rom_ids() if rom not in MULTIPLAYER_ONLY)
    return {rom_id_to_name(rom): rom for rom in sorted(ids)}


def _rom_path(rom_id: str) -> Path:
    path = roms.get_rom_path(rom_id)
    assert path is not None  # the ids are ale-py's own
    return path


def _minimal_actions(rom_id: str) -> tuple[str, ...]:
    game = ale_py.ALEInterface()
    game.loadROM(_rom_path(rom_id))
    return tuple(action.name for action in game.getMinimalActionSet())


def list_games() -> tuple[str, ...]:
    """The games that the installed ale-py has, in ALE's CamelCase (`MsPacman`)."""
    return tuple(_rom_ids())


def env_seeds(seed: int, num_envs: int) -> list[int]:
    """`num_envs` different seeds in [0, 2**31) from one. The i-th one does not depend on `num_envs`."""
    words = np.random.SeedSequence(seed).generate_state(2 * num_envs) >> 1  # twice as many: some may be equal
    return list(dict.fromkeys(words.tolist()))[:num_envs]


class AlePool(BasePool):
    """ale-py's `AtariVectorEnv`. Its arrays are made anew by each step, so nothing is copied here."""

    def __init__(self, games: _Games):
        def make(**shape) -> AtariVectorEnv:
            return AtariVectorEnv(
                games.rom_id,
                len(games.seeds),
                num_threads=games.num_threads,
                max_num_frames_per_episode=games.max_frames,
                repeat_action_probability=games.sticky,
                stack_num=1,
                frameskip=FRAME_SKIP,
                maxpool=True,
                noop_max=NOOP_MAX,
                episodic_life=False,  # True would reset the whole game at each life
                life_loss_info=False,  # so that `terminated` is the end of the game; lives come from info
                reward_clipping=False,
                use_fire_reset=True,
                **shape,
            )

        self._games = make(img_height=FRAME_SIZE, img_width=FRAME_SIZE, grayscale=True)
        height, width, _ = SCREEN_SHAPE
        # The emulator is deterministic: a twin with the same seeds and actions is the same in colour.
        self._twin = make(img_height=height, img_width=width, grayscale=False) if games.screen else None
        self._screen: np.ndarray | None = None
        self._seeds: np.ndarray | None = np.array(games.seeds)
        super().__init__(len(games.seeds), tuple(action.name for action in self._games.ale.get_action_set()))

    def screen(self) -> np.ndarray:
        """uint8 [n, 210, 160, 3]: the colour screens of the newest step (also the maximum of two frames)."""
        if self._screen is None:
            raise RuntimeError("EnvPool.screen: needs make_pool(..., screen=True) and a reset()")
        return self._screen

    def _reset(self) -> RawStep:
        frame, info = self._games.reset(seed=self._seeds)
        if self._twin is not None:
            self._screen = self._twin.reset(seed=self._seeds)[0][:, 0]
        self._seeds = None
        zeros = np.zeros(self.num_envs, bool)
        return RawStep(frame[:, 0], zeros, zeros, zeros, info["lives"])

    def _send(self, actions: np.ndarray) -> None:
        self._games.send(actions)
        if self._twin is not None:
            self._twin.send(actions)

    def _recv(self) -> RawStep:
        frame, reward, terminated, truncated, info = self._games.recv()
        if self._twin is not None:
            screen, twin_reward, *_, twin_info = self._twin.recv()
            same = np.array_equal(reward, twin_reward) and all(
                np.array_equal(info[key], twin_info[key]) for key in ("lives", "frame_number")
            )
            if not same:
                raise RuntimeError("EnvPool.screen: the colour games are no longer in step with the played ones")
            self._screen = screen[:, 0]
        return RawStep(frame[:, 0], reward, terminated, truncated, info["lives"])

    def _free(self) -> None:
        del self._games, self._twin


@cache
def _import_envpool() -> Any:
    """envpool's Atari module alone.

    Raises:
      UserError: envpool is not installed.
    """
    if importlib.util.find_spec("envpool") is None:
        raise UserError("env.backend = 'envpool': envpool is not installed; pip install 'jaxrl_atari[envpool]'")
    if "envpool" in sys.modules:
        return importlib.import_module("envpool.atari")
    # `import envpool` runs envpool.entry, which registers every family of tasks: that takes seconds and needs
    # 230 MiB of MuJoCo assets. An empty module stands in for it, and goes again so that others can import it.
    sys.modules["envpool.entry"] = ModuleType("envpool.entry")
    try:
        return importlib.import_module("envpool.atari")
    finally:
        del sys.modules["envpool.entry"]


class EnvpoolPool(BasePool):
    """envpool's Atari games. Its arrays are also made anew by each step, so nothing is copied here."""

    def __init__(self, games: _Games):
        if games.screen:
            raise ConfigError("env.backend", "envpool", "ale, the back end that has colour screens")
        envpool_atari = _import_envpool()
        actions = _minimal_actions(games.rom_id)
        self._max_steps = games.max_frames // FRAME_SKIP
        with tempfile.TemporaryDirectory() as assets:  # envpool reads the ROM once, when the pool is made
            Path(assets, "atari").mkdir()
            Path(assets, "atari", "roms").symlink_to(_rom_path(games.rom_id).parent)
            config = envpool_atari.AtariEnvSpec.gen_config(
                task=games.rom_id,
                base_path=assets,
                num_envs=len(games.seeds),
                num_threads=games.num_threads,
                env_seed=games.seeds,
                max_episode_steps=self._max_steps,
                repeat_action_probability=games.sticky,
                stack_num=1,
                frame_skip=FRAME_SKIP,
                noop_max=NOOP_MAX,
                episodic_life=False,  # True would put a dummy step after each lost life
                reward_clip=False,
                use_fire_reset=True,
                img_height=FRAME_SIZE,
                img_width=FRAME_SIZE,
            )
            self._games = envpool_atari.AtariGymnasiumEnvPool(envpool_atari.AtariEnvSpec(config))
        super().__init__(len(games.seeds), actions)

    def _reset(self) -> RawStep:
        frame, info = self._games.reset()
        return self._raw(frame, info)

    def _send(self, actions: np.ndarray) -> None:
        self._games.send(actions)

    def _recv(self) -> RawStep:
        frame, _, _, _, info = self._games.recv()
        return self._raw(frame, info)

    def _raw(self, frame: np.ndarray, info: dict[str, np.ndarray]) -> RawStep:
        cut_off = info["elapsed_step"] >= self._max_steps
        return RawStep(frame[:, 0], info["reward"], info["terminated"].astype(bool), cut_off, info["lives"])

    def _free(self) -> None:
        del self._games


BACKENDS = {"ale": AlePool, "envpool": EnvpoolPool}


def make_pool(
    backend: str,
    game: str,
    num_envs: int,
    *,
    seed: int,
    first_env: int = 0,
    num_threads: int = 0,
    protocol: str = "v5",
    screen: bool = False,
    max_frames: int = 108_000,
) -> EnvPool:
    """Makes `num_envs` copies of `game`.

    Args:
      backend: "ale" or "envpool".
      game: ALE's CamelCase name, one of `list_games()`.
      seed: >= 0. Environment i is seeded with number `first_env + i` of `env_seeds(seed, ...)`: a pool may be a
        part of a larger one. The same seed and actions give the same steps bit for bit, for any number of threads.
      num_threads: emulation threads; 0 = one a core.
      protocol: "v5" (sticky actions 0.25) or "classic" (NoFrameskip-v4: none).
      screen: also offer `pool.screen()`, colour screens for videos (`ale` only; twice the work).
      max_frames: emulator frames after which a game is cut off, a multiple of 4.

    Raises:
      ConfigError: a value that is not possible.
      UserError: envpool is asked for and not installed.
    """
    if game not in _rom_ids():
        raise ConfigError("env.game", game, f"one of ale-py's {len(_rom_ids())} games in CamelCase, such as MsPacman")
    if protocol not in STICKY:
        raise ConfigError("env.protocol", protocol, f"one of {', '.join(STICKY)}")
    if max_frames < FRAME_SKIP or max_frames % FRAME_SKIP:
        raise ConfigError("env.max_frames", max_frames, f"a positive multiple of {FRAME_SKIP}")
    for field, value, least in (
        ("env.num_envs", num_envs, 1),
        ("num_threads", num_threads, 0),
        ("seed", seed, 0),
        ("first_env", first_env, 0),
    ):
        if value < least:
            raise ConfigError(field, value, f"an integer >= {least}")
    if backend not in BACKENDS:
        raise ConfigError("env.backend", backend, f"one of {', '.join(BACKENDS)}")
    games = _Games(
        rom_id=_rom_ids()[game],
        seeds=env_seeds(seed, first_env + num_envs)[first_env:],
        num_threads=num_threads,
        sticky=STICKY[protocol],
        max_frames=max_frames,
        screen=screen,
    )
    return BACKENDS[backend](games)
