"""The back end `ale`: ale-py's `AtariVectorEnv`. Also the ROMs of ale-py, which `envpool` uses too."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from ale_py import roms
from ale_py.registration import rom_id_to_name
from ale_py.vector_env import AtariVectorEnv

from jaxrl_atari.envs.games import GAMES
from jaxrl_atari.envs.pool import FRAME_SIZE, FRAME_SKIP, EnvPool, RawStep
from jaxrl_atari.envs.protocols import Rules
from jaxrl_atari.envs.record import GameRecord
from jaxrl_atari.errors import UserError

SCREEN_SHAPE = (210, 160, 3)


@cache
def rom_ids() -> dict[str, str]:
    """CamelCase name -> ALE's ROM id, for every single-player game."""
    named = {rom_id_to_name(rom): rom for rom in roms.get_all_rom_ids()}
    return {name: rom for name, rom in named.items() if name in GAMES}


def rom_path(game: str) -> Path:
    """The file of a game's ROM. Raises `UserError` if it is missing or not ale-py's."""
    try:
        path = roms.get_rom_path(rom_ids()[game])
    except OSError as error:
        raise UserError(
            f"env.game = {game!r}: its ROM cannot be read ({error}); "
            "install ale-py again, or unset ALE_ROMS_DIR if it names a folder without ROMs"
        ) from error
    assert path is not None  # the ids are ale-py's own
    return path


class AlePool(EnvPool):
    """A pool on ale-py's `AtariVectorEnv`.

    It copies no arrays, because `AtariVectorEnv` returns new ones at every step. `action_names` has ALE's names,
    such as `FIRE`.

    Args:
        colour: make `frame` the colour screen, uint8 [n, 210, 160, 3], for videos. Like the grey frame, it is the
            maximum of two emulator frames. With the same seeds and actions, the games are those of a grey pool.
    """

    def __init__(
        self, game: str, seeds: Sequence[int], num_threads: int, rules: Rules,
        record: GameRecord | None = None, colour: bool = False,
    ):  # fmt: skip
        rom_path(game)  # `AtariVectorEnv` finds it in the same way
        height, width, _ = SCREEN_SHAPE if colour else (FRAME_SIZE, FRAME_SIZE, 1)
        envs = AtariVectorEnv(
            rom_ids()[game],
            len(seeds),
            num_threads=num_threads,
            max_num_frames_per_episode=rules.max_frames,
            repeat_action_probability=rules.sticky_actions,
            full_action_space=rules.full_action_space,
            img_height=height,
            img_width=width,
            grayscale=not colour,
            stack_num=1,
            frameskip=FRAME_SKIP,
            maxpool=True,
            noop_max=rules.noop_max,
            episodic_life=False,  # True would reset the whole game at each life
            life_loss_info=False,  # so that `terminated` is the end of the game; lives come from info
            reward_clipping=False,
            use_fire_reset=rules.fire_on_reset,
        )
        self._seeds = np.array(seeds)
        actions = envs.ale.get_action_set()
        self.action_names = [action.name for action in actions]
        super().__init__(envs, len(seeds), num_actions=len(actions), record=record)

    def _reset(self) -> RawStep:
        return self._reseed(np.ones(self.num_envs, bool), self._seeds)

    def _recv(self) -> RawStep:
        frame, reward, terminated, truncated, info = self._envs.recv()
        return RawStep(frame[:, 0], reward, terminated, truncated, info["lives"])

    def _reseed(self, envs: np.ndarray, seeds: np.ndarray) -> RawStep:
        frame, info = self._envs.reset(seed=seeds, options={"reset_mask": envs})
        return RawStep.start(frame[:, 0], info["lives"])


class FilmedAlePool(AlePool):
    """A pool without a record whose `screen` is in colour. A second pool plays the same games in colour."""

    def __init__(self, game: str, seeds: Sequence[int], num_threads: int, rules: Rules):
        super().__init__(game, seeds, num_threads, rules)
        self._colour = AlePool(game, seeds, num_threads, rules, colour=True)
        self._screens = np.zeros((len(seeds), *SCREEN_SHAPE), np.uint8)

    def _reseed(self, envs: np.ndarray, seeds: np.ndarray) -> RawStep:
        self._screens = self._colour._reseed(envs, seeds).frame
        return super()._reseed(envs, seeds)

    def _send(self, actions: np.ndarray) -> None:
        self._colour._send(actions)
        super()._send(actions)

    def _recv(self) -> RawStep:
        self._screens = self._colour._recv().frame
        return super()._recv()

    def screen(self) -> np.ndarray:
        """The colour screen of environment 0, uint8 [210, 160, 3]."""
        return self._screens[0]

    def close(self) -> None:
        """Frees the emulators of both pools. Call it once."""
        self._colour.close()
        super().close()
