"""The back end `ale`: ale-py's `AtariVectorEnv`. Also the names of ale-py's ROMs, which `envpool` uses too."""

from collections.abc import Sequence
from functools import cache, partial

import numpy as np
from ale_py import roms
from ale_py.registration import rom_id_to_name
from ale_py.vector_env import AtariVectorEnv

from jaxrl_atari.config import EnvConfig
from jaxrl_atari.envs.pool import FRAME_SIZE, FRAME_SKIP, EnvPool, RawStep
from jaxrl_atari.envs.record import GameRecord


@cache
def rom_ids() -> dict[str, str]:
    """CamelCase name -> ALE's ROM id, for every game."""
    return {rom_id_to_name(rom): rom for rom in roms.get_all_rom_ids()}


class AlePool(EnvPool):
    """A pool on ale-py's `AtariVectorEnv`.

    It copies no arrays, because `AtariVectorEnv` returns new ones at every step. `action_names` has ALE's names,
    such as `FIRE`.

    Args:
        screens: `screen` will be called. A second vector environment plays the same games in colour. Like the grey
            frame, a screen is the maximum of two emulator frames.
    """

    def __init__(
        self, env: EnvConfig, seeds: Sequence[int], num_threads: int, record: GameRecord | None, screens: bool
    ):
        rules = env.rules
        make = partial(
            AtariVectorEnv,
            rom_ids()[env.game_name],
            len(seeds),
            num_threads=num_threads,
            max_num_frames_per_episode=rules.max_frames,
            repeat_action_probability=rules.sticky_actions,
            full_action_space=rules.full_action_space,
            stack_num=1,
            frameskip=FRAME_SKIP,
            maxpool=True,
            noop_max=rules.noop_max,
            episodic_life=False,  # True would reset the whole game at each life
            life_loss_info=False,  # so that `terminated` is the end of the game; lives come from info
            reward_clipping=False,
            use_fire_reset=rules.fire_on_reset,
        )
        envs = make(img_height=FRAME_SIZE, img_width=FRAME_SIZE, grayscale=True)
        self._colour = make(img_height=210, img_width=160, grayscale=False) if screens else None
        self._screens = np.zeros(0, np.uint8)  # of the newest step
        self._seeds = np.array(seeds)
        actions = envs.ale.get_action_set()
        self.action_names = [action.name for action in actions]
        super().__init__(envs, len(seeds), num_actions=len(actions), record=record)

    def _reset(self) -> tuple[np.ndarray, np.ndarray]:
        return self._reseed(np.ones(self.num_envs, bool), self._seeds)

    def _send(self, actions: np.ndarray) -> None:
        super()._send(actions)
        if self._colour is not None:
            self._colour.send(actions)

    def _recv(self) -> RawStep:
        frame, reward, terminated, truncated, info = self._envs.recv()
        if self._colour is not None:
            self._screens = self._colour.recv()[0]
        return RawStep(frame[:, 0], reward, terminated, truncated, info["lives"])

    def _reseed(self, envs: np.ndarray, seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        options = {"reset_mask": envs}
        frame, info = self._envs.reset(seed=seeds, options=options)
        if self._colour is not None:
            self._screens, _ = self._colour.reset(seed=seeds, options=options)
        return frame[:, 0], info["lives"]

    def screen(self) -> np.ndarray:
        """The colour screen of environment 0, uint8 [210, 160, 3]."""
        return self._screens[0, 0]

    def close(self) -> None:
        """Frees the emulators."""
        self._colour = None
        super().close()
