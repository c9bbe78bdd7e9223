"""The pools against independent replays on the raw emulator, and the guarantees of both back ends."""

import hashlib
import importlib.util
import itertools
import os
import subprocess
import sys
from functools import cache
from types import SimpleNamespace
from typing import NamedTuple

import ale_py
import numpy as np
import pytest
from ale_py import roms
from fake_pools import NoisePool
from played_games import assert_equal, make_pool, play, random_actions, stacked

from jaxrl_atari.envs import env_seeds
from jaxrl_atari.envs.ale_pool import AlePool
from jaxrl_atari.envs.pool import EnvPool, EpisodeCounter, FinishedGame, RawStep
from jaxrl_atari.envs.protocols import PROTOCOLS
from jaxrl_atari.errors import ConfigError, UserError

needs_envpool = pytest.mark.skipif(
    importlib.util.find_spec("envpool") is None, reason="needs envpool: pip install 'jaxrl_atari[envpool]'"
)
BACKENDS = ["ale", pytest.param("envpool", marks=needs_envpool)]
both = pytest.mark.parametrize("backend", BACKENDS)
V5, CLASSIC, MACHADO = (PROTOCOLS[name] for name in ("v5", "classic", "machado"))


# An independent emulation: ale_py's single game, stepped frame by frame, and a resize by exact pixel areas.


@cache
def area_weights(size, new_size):
    """[new_size, size]: the fraction of each new pixel that each old pixel covers."""
    edges = np.arange(new_size + 1) * size / new_size
    overlap = np.minimum.outer(edges[1:], np.arange(1, size + 1)) - np.maximum.outer(edges[:-1], np.arange(size))
    return np.maximum(overlap, 0) * new_size / size


def area_resize(screen):
    lines, columns = screen.shape
    return area_weights(lines, 84) @ screen.astype(np.float64) @ area_weights(columns, 84).T


class Raw(NamedTuple):
    screens: list[np.ndarray]  # uint8 [lines, 160], every emulator frame of the step
    reward: int
    lives: int
    game_over: bool


def frame_of(screens):
    """float [84, 84]: the maximum of the last two screens, resized."""
    return area_resize(np.max(screens[-2:], axis=0))


def replay(rom, backend, seed, rules, noops, actions):
    """Plays one game on the raw emulator: yields the reset, then a step for each action."""
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    game = ale_py.ALEInterface()
    game.setFloat("repeat_action_probability", rules.sticky_actions)
    game.setInt("random_seed", seed)
    game.loadROM(roms.get_rom_path(rom))
    action_set = game.getLegalActionSet() if rules.full_action_space else game.getMinimalActionSet()
    game.reset_game()
    fire = [ale_py.Action.FIRE] if rules.fire_on_reset and ale_py.Action.FIRE in action_set else []
    start = [ale_py.Action.NOOP] * noops
    for action in fire + start if backend == "ale" else start + fire:
        game.act(action)
    yield Raw([game.getScreenGrayscale()], 0, game.lives(), False)
    for action in actions:
        reward, screens = 0, []
        for _ in range(4):
            reward += game.act(action_set[action])
            screens.append(game.getScreenGrayscale())
        yield Raw(screens, reward, game.lives(), game.game_over())
        if game.game_over():
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


SEED = 13  # few no-ops, so that the search for their number is short


def find_game(rom, backend, rules, steps, actions):
    """(number of no-ops, replay) of the start that reproduces all steps of a pool with one game and seed SEED."""
    for noops in range(31):
        game = agreement(steps, replay(rom, backend, env_seeds(SEED, 1)[0], rules, noops, actions[:, 0]))
        if len(game) == len(steps.frame) or (game and game[-1].game_over):
            return noops, game
    raise AssertionError("no number of no-ops reproduces these steps")


@both
@pytest.mark.parametrize(
    ("rom", "name", "rules", "other"),
    [
        ("breakout", "Breakout", V5, CLASSIC),
        ("breakout", "Breakout", CLASSIC, V5),
        ("freeway", "Freeway", V5, CLASSIC),
        ("pong", "Pong", CLASSIC, V5),
    ],
)
def test_frames_and_rewards_equal_an_independent_emulation(backend, rom, name, rules, other):
    pool = make_pool(backend, name, 1, seed=SEED, rules=rules)
    actions = random_actions(pool, 60)
    steps = play(pool, actions)
    noops, _ = find_game(rom, backend, rules, steps, actions)
    # The other protocol does not reproduce these frames.
    assert len(agreement(steps, replay(rom, backend, env_seeds(SEED, 1)[0], other, noops, actions[:, 0]))) < 61


def test_machado_equals_an_independent_emulation():
    """Sticky actions, 18 actions, and games that start with neither no-ops nor FIRE."""
    pool = make_pool("ale", "Breakout", 1, seed=SEED, rules=MACHADO)
    assert pool.num_actions == 18
    actions = random_actions(pool, 120)
    steps = play(pool, actions)
    game = agreement(steps, replay("breakout", "ale", env_seeds(SEED, 1)[0], MACHADO, 0, actions[:, 0]))
    assert len(game) == 121
    assert steps.life_lost.any()
    for other in ({"sticky_actions": 0.0}, {"fire_on_reset": True}):
        replayed = replay("breakout", "ale", env_seeds(SEED, 1)[0], MACHADO._replace(**other), 0, actions[:, 0])
        assert len(agreement(steps, replayed)) < len(game)


@both
@pytest.mark.parametrize(
    "override",
    [{"sticky_actions": 0.6}, {"full_action_space": True}, {"fire_on_reset": False}, {"noop_max": 1}],
    ids=lambda override: next(iter(override)),
)
def test_an_overridden_rule_is_what_the_emulator_plays(backend, override):
    rules = V5._replace(**override)
    pool = make_pool(backend, "Breakout", 1, seed=SEED, rules=rules)
    assert pool.num_actions == (18 if rules.full_action_space else 4)
    actions = random_actions(pool, 30)
    steps = play(pool, actions)
    noops, _ = find_game("breakout", backend, rules, steps, actions)
    if "noop_max" in override:
        assert noops == 0
    else:
        usual = replay("breakout", backend, env_seeds(SEED, 1)[0], V5, noops, actions[:, 0] % 4)
        assert len(agreement(steps, usual)) < 31


@both
def test_life_marks_equal_an_independent_count_of_lives(backend):
    pool = make_pool(backend, "Breakout", 1, seed=SEED)
    actions = random_actions(pool, 250)
    steps = play(pool, actions)
    _, game = find_game("breakout", backend, V5, steps, actions)
    end = len(game) - 1
    assert game[end].game_over, "the game should end within the test"
    lives = np.array([raw.lives for raw in game])
    lost = np.flatnonzero(lives[1:] < lives[:-1]) + 1
    assert len(lost) == 5
    assert lost[-1] == end
    np.testing.assert_array_equal(np.flatnonzero(steps.life_lost[: end + 1, 0]), lost[:-1])
    np.testing.assert_array_equal(np.flatnonzero(steps.terminated[: end + 1, 0]), [end])
    assert not steps.truncated.any()
    # The game continues after a lost life: `agreement` compared the step after it, and a new game starts only at
    # the end.
    np.testing.assert_array_equal(np.flatnonzero(steps.first[: end + 2, 0]), [0, end + 1])


class Scripted(EnvPool):
    """A back end that reports what it is told: (terminated, truncated, lives) of each step."""

    def __init__(self, *script):
        super().__init__(SimpleNamespace(send=lambda actions: None), 1, num_actions=1)
        self._script = iter(script)

    def _recv(self):
        terminated, truncated, lives = (np.array([x]) for x in next(self._script))
        return RawStep(np.zeros((1, 84, 84), np.uint8), np.zeros(1), terminated, truncated, lives)

    def _reset(self):
        return self._recv()


def scripted(*script):
    """Indices of the steps that were marked: (terminated, truncated, life_lost)."""
    pool = Scripted(*script)
    steps = [pool.reset(), *(pool.step(np.zeros(1, int)) for _ in script[1:])]
    return tuple(
        [t for t, step in enumerate(steps) if getattr(step, n)] for n in ("terminated", "truncated", "life_lost")
    )


def test_zero_lives_in_a_running_game_is_not_a_lost_life():
    """The death scene of the last life: six random games did not contain it."""
    no = False
    assert scripted((no, no, 2), (no, no, 1), (no, no, 0), (True, no, 0)) == ([3], [], [1])


def test_an_end_and_a_cut_off_together_are_an_end():
    no, yes = False, True
    assert scripted((no, no, 1), (yes, yes, 0), (no, no, 3), (no, yes, 2)) == ([1], [3], [])


@both
def test_a_missing_rom_is_one_line(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path))
    with pytest.raises(UserError, match=r"env.game = 'Pong': its ROM cannot be read \(.*pong.bin.*ALE_ROMS_DIR"):
        make_pool(backend, "Pong", 1, seed=0)


GOLDEN = {
    ("ale", "Qbert"): "4386dffd3677e771",
    ("ale", "Breakout"): "8f641af69452b061",
    ("envpool", "Qbert"): "00e41f48a330b082",
    ("envpool", "Breakout"): "83ed7c91f34f9a5f",
}


@both
@pytest.mark.parametrize("name", ["Qbert", "Breakout"])
def test_golden_frames(backend, name):
    pool = make_pool(backend, name, 2, seed=0)
    frames = play(pool, random_actions(pool, 64)).frame
    assert hashlib.sha256(frames.tobytes()).hexdigest()[:16] == GOLDEN[backend, name]


@pytest.mark.long
@both
def test_the_step_after_the_end_starts_a_game_and_ignores_its_action(backend):
    def games(other_actions_when):
        pool = make_pool(backend, "Breakout", 4, seed=0, rules=CLASSIC)
        steps = [pool.reset()]
        for actions in random_actions(pool, 300):
            ended = steps[-1].terminated | steps[-1].truncated
            changed = ended if other_actions_when == "ended" else ~ended
            steps.append(pool.step(np.where(changed & (len(steps) > 20), (actions + 1) % 4, actions)))
        pool.close()
        return stacked(steps)

    steps = games("ended")
    ended = steps.terminated | steps.truncated
    assert ended[:-1].sum() >= 4
    np.testing.assert_array_equal(steps.first[1:], ended[:-1])
    assert steps.first[0].all()
    for mark in (steps.reward, steps.terminated, steps.truncated, steps.life_lost):
        assert not mark[steps.first].any()
    pool = make_pool(backend, "Breakout", 4, seed=0, rules=CLASSIC)
    unchanged = play(pool, random_actions(pool, 300))
    assert_equal(steps, unchanged)  # another action at those steps changes nothing
    assert (games("running").frame != unchanged.frame).any()  # at others it does


@both
def test_a_game_of_ale_has_a_limit_of_frames(backend):
    with pytest.raises(ConfigError, match=r"env\.max_frames = 0: expected a number above 0 for ALE's games"):
        make_pool(backend, "Pong", 2, seed=0, rules=V5._replace(max_frames=0))


@both
def test_a_game_that_is_cut_off_is_truncated_not_terminated(backend):
    pool = make_pool(backend, "Pong", 2, seed=0, rules=V5._replace(max_frames=200))
    steps = play(pool, random_actions(pool, 120))
    assert not steps.terminated.any()
    assert not steps.life_lost.any()
    np.testing.assert_array_equal(np.flatnonzero(steps.truncated.all(axis=1)), [50, 101])
    assert steps.truncated.sum() == 4
    np.testing.assert_array_equal(np.flatnonzero(steps.first.all(axis=1)), [0, 51, 102])


@both
def test_the_end_of_a_game_on_the_last_frame_is_terminated_not_truncated(backend):
    pool = make_pool(backend, "Breakout", 1, seed=1)
    actions = random_actions(pool, 250)
    (end, *_) = np.flatnonzero(play(pool, actions).terminated[:, 0])
    for extra_steps, terminated in ((0, True), (-1, False)):
        steps = play(
            make_pool(backend, "Breakout", 1, seed=1, rules=V5._replace(max_frames=4 * int(end + extra_steps))),
            actions,
        )
        last = end + extra_steps
        assert steps.terminated[last, 0] == terminated
        assert steps.truncated[last, 0] == (not terminated)
        assert not steps.truncated[:last].any()


@both
def test_seeds_threads_and_send_recv(backend):
    def games(seed, num_threads):
        pool = make_pool(backend, "Qbert", 4, seed=seed, num_threads=num_threads)
        return play(pool, random_actions(pool, 40))

    one_thread = games(seed=5, num_threads=1)
    assert_equal(one_thread, games(seed=5, num_threads=2))
    assert (one_thread.frame != games(seed=6, num_threads=2).frame).any()
    assert len({one_thread.frame[:, env].tobytes() for env in range(4)}) == 4

    pool = make_pool(backend, "Qbert", 4, seed=5)
    kept = [pool.reset()]
    copies = [kept[0].frame.copy()]
    for actions in random_actions(pool, 40):
        pool.send(actions)
        actions[:] = 0  # the caller may reuse its array while the emulators run
        kept.append(pool.recv())
        copies.append(kept[-1].frame.copy())
    pool.close()
    assert_equal(stacked(kept), one_thread)
    np.testing.assert_array_equal(np.stack(copies), np.stack([step.frame for step in kept]))


def test_env_seeds_are_different_and_do_not_depend_on_the_number_of_envs():
    seeds = env_seeds(0, 4096)
    assert len(set(seeds)) == 4096
    assert min(seeds) >= 0
    assert max(seeds) < 2**31
    assert env_seeds(0, 16) == seeds[:16]
    assert not set(seeds[:16]) & set(env_seeds(1, 16))


@both
def test_a_pool_can_be_a_part_of_a_larger_one(backend):
    whole = make_pool(backend, "Qbert", 4, seed=5)
    actions = random_actions(whole, 20)
    part = play(make_pool(backend, "Qbert", 2, seed=5, first_env=2), actions[:, 2:])
    np.testing.assert_array_equal(part.frame, play(whole, actions).frame[:, 2:])


@both
def test_other_actions_are_an_error_and_never_a_hang(backend):
    pool = make_pool(backend, "Breakout", 2, seed=0)
    pool.reset()
    for actions in ([0, 4], [-1, 0], [0, 0, 0]):
        with pytest.raises(ValueError, match="actions"):
            pool.send(np.array(actions))
    pool.send(np.zeros(2, int))
    pool.close()  # with a step in flight


def test_the_error_without_envpool_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(UserError, match=r"pip install 'jaxrl_atari\[envpool\]'"):
        make_pool("envpool", "Qbert", 1, seed=0)


def naive_episodes(steps, env):
    """The full games of one environment, from its whole history."""
    episodes, rewards = [], []
    for number, step in enumerate(steps):
        if step.first[env]:
            rewards = []
        else:
            rewards.append(float(step.reward[env]))
        if step.terminated[env] or step.truncated[env]:
            episodes.append(FinishedGame(number, env, sum(rewards), len(rewards), bool(step.truncated[env])))
    return episodes


@pytest.mark.parametrize("make", [lambda: NoisePool(4, seed=0), lambda: make_pool("ale", "Breakout", 4, seed=0)])
def test_episodes_equal_a_naive_count(make):
    """Over all lives, and without the auto-reset steps."""
    pool, counter = make(), EpisodeCounter(4)
    steps = [pool.reset(), *(pool.step(actions) for actions in random_actions(pool, 600))]
    pool.close()
    counted = [counter.count(step, number) for number, step in enumerate(steps)]
    for step, episodes in zip(steps, counted, strict=True):
        assert [episode.env for episode in episodes] == np.flatnonzero(step.terminated | step.truncated).tolist()
    episodes = list(itertools.chain(*counted))
    assert len(episodes) > 4
    assert sum(step.life_lost.sum() for step in steps) > 4
    for env in range(4):
        assert [episode for episode in episodes if episode.env == env] == naive_episodes(steps, env)


def test_the_colour_screens_show_the_games_that_are_played():
    pool = AlePool("Breakout", env_seeds(0, 2), 0, V5, colour=True)
    actions = random_actions(pool, 260)
    screens, played = play(pool, actions), play(make_pool("ale", "Breakout", 2, seed=0), actions)
    assert screens.frame.shape == (261, 2, 210, 160, 3)
    assert screens.frame.dtype == np.uint8
    assert played.terminated.any()
    assert played.life_lost.any()
    assert_equal(screens._replace(frame=played.frame), played)
    for step, env in itertools.product(range(0, 261, 20), range(2)):
        grey = area_resize(screens.frame[step, env] @ np.array([0.299, 0.587, 0.114]))
        assert np.abs(grey - played.frame[step, env]).mean() < 1


# The differences between the back ends, as the docstring of `envs` lists them.


@needs_envpool
def test_the_same_seed_gives_one_more_no_op_in_envpool():
    noops = {}
    for backend in ("ale", "envpool"):
        pool = make_pool(backend, "Breakout", 1, seed=SEED, rules=CLASSIC)
        actions = random_actions(pool, 40)
        noops[backend], _ = find_game("breakout", backend, CLASSIC, play(pool, actions), actions)
    assert noops["envpool"] == noops["ale"] + 1


@both
def test_the_picture_at_the_cut_off(backend):
    actions = random_actions(make_pool(backend, "Pong", 1, seed=SEED), 20)
    uncut = play(make_pool(backend, "Pong", 1, seed=SEED), actions)
    _, game = find_game("pong", backend, V5, uncut, actions)
    steps = play(make_pool(backend, "Pong", 1, seed=SEED, rules=V5._replace(max_frames=80)), actions)
    assert steps.truncated[20, 0]
    before, last = game[19].screens, game[20].screens
    usual, stale = frame_of(last), area_resize(np.max([before[2], before[3], last[2]], axis=0))
    assert np.abs(usual - stale).max() > 1  # the ball moved
    assert np.abs((stale if backend == "ale" else usual) - steps.frame[20, 0]).max() <= 0.501


@both
def test_screens_that_are_not_210_lines_high(backend):
    frame = make_pool(backend, "Adventure", 1, seed=SEED).reset().frame[0]
    # After the reset's few no-ops Adventure's picture does not change.
    (raw,) = replay("adventure", backend, env_seeds(SEED, 1)[0], V5, 1, [])
    (screen,) = raw.screens
    assert screen.shape == (250, 160)
    seen = screen if backend == "ale" else screen[:210]
    assert np.abs(area_resize(seen) - frame).max() <= 0.501


@pytest.mark.parametrize("found", ["0.11.2", "0.9.0", "0.11.0.dev3", "0.12.0"])
def test_an_older_ale_py_is_one_line_with_its_version(found, tmp_path):
    """Its metadata come first on the path, as those of a version in `PYTHONPATH` do."""
    metadata = tmp_path / "ale_py-0.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: ale-py\nVersion: {found}\n")
    code = (
        "from jaxrl_atari import cli; from jaxrl_atari.envs import make_pool\n"
        "cli.run(lambda: make_pool('ale', 'Pong', 1, seed=0, rules=None))"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    line = f"error: ale-py {found} is too old: 0.12.1 or a later one is needed; pip install -U ale-py\n"
    assert (ended.returncode, ended.stderr) == (2, line)
