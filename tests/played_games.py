"""Games that a test plays: through a pool, and through an independent emulation of it."""

import importlib.util
from functools import cache
from typing import NamedTuple

import ale_py
import numpy as np
import pytest
from ale_py import roms

from jaxrl_atari import envs
from jaxrl_atari.config import EnvConfig
from jaxrl_atari.envs.pool import EnvStep
from jaxrl_atari.envs.protocols import PROTOCOLS


def make_pool(backend, game, num_envs, *, seed, rules=PROTOCOLS["v5"], num_threads=0, **options):
    """A pool with these rules; `options` are those of `envs.make_pool`."""
    env = EnvConfig(game=game, backend=backend, num_threads=num_threads, **rules._asdict())
    return envs.make_pool(env, num_envs, seed=seed, **options)


needs_envpool = pytest.mark.skipif(
    importlib.util.find_spec("envpool") is None, reason="needs envpool: pip install 'jaxrl_atari[envpool]'"
)
both = pytest.mark.parametrize("backend", ["ale", pytest.param("envpool", marks=needs_envpool)])


def random_actions(pool, num_steps):
    return np.random.default_rng(0).integers(pool.num_actions, size=(num_steps, pool.num_envs))


def stacked(steps):
    """One `EnvStep`, each field [T, n, ...]."""
    return EnvStep(*map(np.stack, zip(*steps, strict=True)))


def play(pool, actions):
    """reset() and all steps, stacked. Closes the pool."""
    steps = [pool.reset(), *map(pool.step, actions)]
    pool.close()
    return stacked(steps)


def assert_equal(left, right):
    for name in EnvStep._fields:
        np.testing.assert_array_equal(getattr(left, name), getattr(right, name), err_msg=name)


# The independent emulation: ale_py's single game, stepped frame by frame, and a resize by exact pixel areas.


@cache
def area_weights(size, new_size):
    """[new_size, size]: the fraction of each new pixel that each old pixel covers."""
    edges = np.arange(new_size + 1) * size / new_size
    overlap = np.minimum.outer(edges[1:], np.arange(1, size + 1)) - np.maximum.outer(edges[:-1], np.arange(size))
    return np.maximum(overlap, 0) * new_size / size


def area_resize(screen):
    lines, columns = screen.shape
    return area_weights(lines, 84) @ screen.astype(np.float64) @ area_weights(columns, 84).T


SEED = 13  # few no-ops, so that the search for their number is short


class Raw(NamedTuple):
    screens: list[np.ndarray]  # uint8 [lines, 160], every emulator frame of the step
    reward: int
    lives: int
    game_over: bool


def frame_of(screens):
    """float [84, 84]: the maximum of the last two screens, resized."""
    return area_resize(np.max(screens[-2:], axis=0))


def replay(game, backend, rules, noops, actions):
    """Plays the game of a pool with one environment and seed SEED on the raw emulator.

    Yields the reset, then a step for each of the actions, int [T, 1].
    """
    rom = roms.get_rom_path(game.lower())
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    emulator = ale_py.ALEInterface()
    emulator.setFloat("repeat_action_probability", rules.sticky_actions)
    emulator.setInt("random_seed", envs.env_seeds(SEED, 1)[0])
    emulator.loadROM(rom)
    action_set = emulator.getLegalActionSet() if rules.full_action_space else emulator.getMinimalActionSet()
    emulator.reset_game()
    fire = [ale_py.Action.FIRE] if rules.fire_on_reset and ale_py.Action.FIRE in action_set else []
    start = [ale_py.Action.NOOP] * noops
    for action in fire + start if backend == "ale" else start + fire:
        emulator.act(action)
    yield Raw([emulator.getScreenGrayscale()], 0, emulator.lives(), False)
    for action in actions[:, 0]:
        reward, screens = 0, []
        for _ in range(4):
            reward += emulator.act(action_set[action])
            screens.append(emulator.getScreenGrayscale())
        yield Raw(screens, reward, emulator.lives(), emulator.game_over())
        if emulator.game_over():
            return


def agreement(steps, game):
    """The steps of the replay before the first one that differs from the pool's only game."""
    same = []
    for step, raw in enumerate(game):
        if raw.reward != steps.reward[step, 0]:
            break
        # 0.5: the pool's grey levels are the exact area averages, rounded. The last picture of a game that ends
        # within a step is not compared, because the back ends stop the step differently.
        if not raw.game_over and np.abs(frame_of(raw.screens) - steps.frame[step, 0]).max() > 0.501:
            break
        same.append(raw)
    return same


def find_game(game, backend, rules, steps, actions):
    """(number of no-ops, replay) of the start that reproduces all steps of a pool with one game and seed SEED."""
    for noops in range(31):
        same = agreement(steps, replay(game, backend, rules, noops, actions))
        if len(same) == len(steps.frame) or (same and same[-1].game_over):
            return noops, same
    raise AssertionError("no number of no-ops reproduces these steps")
