"""The `ale` back end: ale-py's `AtariVectorEnv`. Also the ROMs, which both back ends read from ale-py."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from ale_py import roms
from ale_py.registration import rom_id_to_name
from ale_py.vector_env import AtariVectorEnv

from jaxrl_atari.envs.games import TWO_PLAYER_GAMES
from jaxrl_atari.envs.pool import FRAME_SIZE, FRAME_SKIP, EnvPool, RawStep
from jaxrl_atari.envs.protocols import Rules
from jaxrl_atari.envs.record import GameRecord
from jaxrl_atari.errors import UserError

SCREEN_SHAPE = (210, 160, 3)


@cache
def rom_ids() -> dict[str, str]:
    """CamelCase name -> ALE's rom id, for the games that one player can play."""
    ids = (rom for rom in roms.get_all_rom_ids() if rom not in TWO_PLAYER_GAMES)
    return {rom_id_to_name(rom): rom for rom in sorted(ids)}


def rom_path(game: str) -> Path:
    """The file of a game's ROM. Raises `UserError` if it is missing or not ale-py's."""
    try:
        path = roms.get_rom_path(rom_ids()[game])
    except OSError as error:
        raise UserError(
            f"env.game = {game!r}: its ROM cannot be read ({' '.join(str(error).split())}); install ale-py again, or"
            " unset ALE_ROMS_DIR if it names a folder without ROMs"
        ) from error
    assert path is not None  # the ids are ale-py's own
    return path


class AlePool(EnvPool):
    """A pool on ale-py's `AtariVectorEnv`, which returns new arrays at every step: nothing needs to be copied.

    Args:
        colour: also keep `screen`, for videos (twice the work).
    """

    screen: np.ndarray
    """uint8 [n, 210, 160, 3]: the colour screens of the newest step (also the maximum of two frames)."""

    def __init__(
        self, game: str, seeds: Sequence[int], num_threads: int, rules: Rules,
        record: GameRecord | None = None, colour: bool = False,
    ):  # fmt: skip
        rom_path(game)  # `AtariVectorEnv` finds it in the same way

        def make(**shape) -> AtariVectorEnv:
            return AtariVectorEnv(
                rom_ids()[game],
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
                **shape,
            )

        self._envs = make(img_height=FRAME_SIZE, img_width=FRAME_SIZE, grayscale=True)
        height, width, _ = SCREEN_SHAPE
        # The emulator is deterministic: a twin with the same seeds and actions plays the same games, in colour.
        self._twin = make(img_height=height, img_width=width, grayscale=False) if colour else None
        self._seeds = np.array(seeds)
        super().__init__(len(seeds), len(self._envs.ale.get_action_set()), record)

    def _reset(self) -> RawStep:
        if self._twin is not None:
            self.screen = self._twin.reset(seed=self._seeds)[0][:, 0]
        return self._reseed(np.ones(self.num_envs, bool), self._seeds)

    def _send(self, actions: np.ndarray) -> None:
        self._envs.send(actions)
        if self._twin is not None:
            self._twin.send(actions)

    def _recv(self) -> RawStep:
        frame, reward, terminated, truncated, info = self._envs.recv()
        if self._twin is not None:
            screen, twin_reward, *_, twin_info = self._twin.recv()
            same = np.array_equal(reward, twin_reward) and all(
                np.array_equal(info[key], twin_info[key]) for key in ("lives", "frame_number")
            )
            if not same:
                raise RuntimeError("AlePool.screen: the colour games are no longer in step with the played ones")
            self.screen = screen[:, 0]
        return RawStep(frame[:, 0], reward, terminated, truncated, info["lives"])

    def _reseed(self, envs: np.ndarray, seeds: np.ndarray) -> RawStep:
        frame, info = self._envs.reset(seed=seeds, options={"reset_mask": envs})
        zeros = np.zeros(self.num_envs, bool)
        return RawStep(frame[:, 0], zeros, zeros, zeros, info["lives"])

    def close(self) -> None:
        del self._envs, self._twin
