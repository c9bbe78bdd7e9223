"""The `envpool` back end: envpool's Atari games."""

import importlib
import importlib.util
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import ale_py
import numpy as np

from jaxrl_atari.envs.ale import rom_ids, rom_path
from jaxrl_atari.envs.pool import FRAME_SIZE, FRAME_SKIP, EnvPool, RawStep
from jaxrl_atari.envs.protocols import ENVPOOL_NEEDS_A_NOOP, Rules
from jaxrl_atari.errors import ConfigError, UserError


@cache
def _import_envpool() -> Any:
    """envpool's Atari module alone.

    Raises:
        UserError: envpool is not installed.
    """
    if importlib.util.find_spec("envpool") is None:
        hint = "pip install 'jaxrl_atari[envpool]', or use the back end ale"
        raise UserError(f"env.backend = 'envpool': envpool is not installed; {hint}")
    if "envpool" in sys.modules:
        return importlib.import_module("envpool.atari")
    # `import envpool` runs envpool.entry, which registers every family of tasks: that takes seconds and needs
    # 230 MiB of MuJoCo assets. An empty module replaces it during this import; later importers get the real one.
    sys.modules["envpool.entry"] = ModuleType("envpool.entry")
    try:
        return importlib.import_module("envpool.atari")
    finally:
        del sys.modules["envpool.entry"]


class EnvpoolPool(EnvPool):
    """A pool on envpool, which also returns new arrays at every step: nothing needs to be copied."""

    def __init__(self, game: str, seeds: list[int], num_threads: int, rules: Rules):
        envpool_atari = _import_envpool()
        emulator, rom = ale_py.ALEInterface(), rom_path(game)
        emulator.loadROM(rom)
        actions = emulator.getLegalActionSet() if rules.full_action_space else emulator.getMinimalActionSet()
        fire = rules.fire_on_reset and ale_py.Action.FIRE in actions
        if rules.noop_max == 0 and not fire:  # envpool then draws from an empty range and never returns
            raise ConfigError("env.noop_max", 0, *ENVPOOL_NEEDS_A_NOOP)
        self._max_steps = rules.max_frames // FRAME_SKIP
        with tempfile.TemporaryDirectory() as assets:  # envpool reads the ROM once, when the pool is made
            Path(assets, "atari").mkdir()
            Path(assets, "atari", "roms").symlink_to(rom.parent.absolute())
            config = envpool_atari.AtariEnvSpec.gen_config(
                task=rom_ids()[game],
                base_path=assets,
                num_envs=len(seeds),
                num_threads=num_threads,
                env_seed=seeds,
                max_episode_steps=self._max_steps,
                repeat_action_probability=rules.sticky_actions,
                full_action_space=rules.full_action_space,
                stack_num=1,
                frame_skip=FRAME_SKIP,
                noop_max=max(rules.noop_max, 1),  # 1 is none with FIRE: envpool counts FIRE as one
                episodic_life=False,  # True would put a dummy step after each lost life
                reward_clip=False,
                use_fire_reset=rules.fire_on_reset,
                img_height=FRAME_SIZE,
                img_width=FRAME_SIZE,
            )
            self._envs = envpool_atari.AtariGymnasiumEnvPool(envpool_atari.AtariEnvSpec(config))
        super().__init__(len(seeds), len(actions))

    def _reset(self) -> RawStep:
        frame, info = self._envs.reset()
        return self._raw(frame, info)

    def _send(self, actions: np.ndarray) -> None:
        self._envs.send(actions)

    def _recv(self) -> RawStep:
        frame, _, _, _, info = self._envs.recv()
        return self._raw(frame, info)

    def _raw(self, frame: np.ndarray, info: dict[str, np.ndarray]) -> RawStep:
        cut_off = info["elapsed_step"] >= self._max_steps
        return RawStep(frame[:, 0], info["reward"], info["terminated"].astype(bool), cut_off, info["lives"])

    def close(self) -> None:
        del self._envs
