"""The back end `envpool`: envpool's Atari games."""

import importlib
import sys
import tempfile
from pathlib import Path
from types import ModuleType

import numpy as np
from ale_py import roms

from jaxrl_atari.config import EnvConfig
from jaxrl_atari.envs.ale_pool import rom_ids
from jaxrl_atari.envs.pool import FRAME_SIZE, FRAME_SKIP, EnvPool, RawStep
from jaxrl_atari.errors import require_package


class EnvpoolPool(EnvPool):
    """A pool on envpool. It copies no arrays, because envpool returns new ones at every step."""

    def __init__(self, env: EnvConfig, seeds: list[int], num_threads: int):
        require_package("envpool", "envpool", "env.backend = 'envpool'")
        # `envpool.entry` would register all families of tasks, which takes seconds and 230 MiB of MuJoCo assets.
        sys.modules.setdefault("envpool.entry", ModuleType("envpool.entry"))
        envpool_atari = importlib.import_module("envpool.atari")
        rules = env.rules
        self._max_steps = rules.max_frames // FRAME_SKIP
        rom = rom_ids()[env.game_name]
        rom_path = roms.get_rom_path(rom)
        assert rom_path is not None  # the ids are ale-py's own
        with tempfile.TemporaryDirectory() as assets:  # envpool reads the ROM once, when the pool is made
            Path(assets, "atari").mkdir()
            Path(assets, "atari", "roms").symlink_to(rom_path.parent.absolute())
            config = envpool_atari.AtariEnvSpec.gen_config(
                task=rom,
                base_path=assets,
                num_envs=len(seeds),
                num_threads=num_threads,
                env_seed=seeds,
                max_episode_steps=self._max_steps,
                repeat_action_probability=rules.sticky_actions,
                full_action_space=rules.full_action_space,
                stack_num=1,
                frame_skip=FRAME_SKIP,
                noop_max=rules.noop_max,  # FIRE counts as one of them
                episodic_life=False,  # True would put a dummy step after each lost life
                reward_clip=False,
                use_fire_reset=rules.fire_on_reset,
                img_height=FRAME_SIZE,
                img_width=FRAME_SIZE,
            )
            envs = envpool_atari.AtariGymnasiumEnvPool(envpool_atari.AtariEnvSpec(config))
        super().__init__(envs, len(seeds), num_actions=int(envs.action_space.n))

    def _reset(self) -> tuple[np.ndarray, np.ndarray]:
        frame, info = self._envs.reset()
        return frame[:, 0], info["lives"]

    def _recv(self) -> RawStep:
        frame, *_, info = self._envs.recv()
        truncated = info["elapsed_step"] >= self._max_steps
        return RawStep(frame[:, 0], info["reward"], info["terminated"].astype(bool), truncated, info["lives"])
