"""The pools against independent replays on the raw emulator, and the guarantees of both back ends."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from played_games import (
    SEED,
    agreement,
    assert_equal,
    both,
    find_game,
    make_pool,
    play,
    random_actions,
    replay,
    stacked,
)

from jaxrl_atari.envs import EnvPool, env_seeds
from jaxrl_atari.envs.pool import RawStep
from jaxrl_atari.envs.protocols import PROTOCOLS
from jaxrl_atari.errors import UserError

V5, CLASSIC = PROTOCOLS["v5"], PROTOCOLS["classic"]


@both
@pytest.mark.parametrize(
    ("game", "rules", "other"),
    [("Breakout", V5, CLASSIC), ("Breakout", CLASSIC, V5), ("Freeway", V5, CLASSIC), ("Pong", CLASSIC, V5)],
)
def test_frames_and_rewards_equal_an_independent_emulation(backend, game, rules, other):
    pool = make_pool(backend, game, 1, seed=SEED, rules=rules)
    actions = random_actions(pool, 60)
    steps = play(pool, actions)
    noops, _ = find_game(game, backend, rules, steps, actions)
    # The other protocol does not reproduce these frames.
    assert len(agreement(steps, replay(game, backend, other, noops, actions))) < 61


@both
def test_overridden_rules_are_what_the_emulator_plays(backend):
    rules = V5._replace(sticky_actions=0.6, full_action_space=True, fire_on_reset=False, noop_max=3)
    pool = make_pool(backend, "Breakout", 1, seed=SEED, rules=rules)
    assert pool.num_actions == 18
    actions = random_actions(pool, 30)
    steps = play(pool, actions)
    noops, _ = find_game("Breakout", backend, rules, steps, actions)
    assert noops <= 3
    for other in ({"sticky_actions": 0.25}, {"fire_on_reset": True}):
        game = replay("Breakout", backend, rules._replace(**other), noops, actions)
        assert len(agreement(steps, game)) < 31


def test_life_marks_equal_an_independent_count_of_lives():
    pool = make_pool("ale", "Breakout", 1, seed=SEED)
    actions = random_actions(pool, 250)
    steps = play(pool, actions)
    _, game = find_game("Breakout", "ale", V5, steps, actions)
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
        *_, lives = self._recv()[:5]
        return np.zeros((1, 84, 84), np.uint8), lives


def scripted(*script):
    """Indices of the steps that were marked: (terminated, truncated, life_lost)."""
    pool = Scripted(*script)
    steps = [pool.reset(), *(pool.step(np.zeros(1, int)) for _ in script[1:])]
    return tuple(
        [t for t, step in enumerate(steps) if getattr(step, n)] for n in ("terminated", "truncated", "life_lost")
    )


def test_ends_and_lives_that_random_games_do_not_show():
    no, yes = False, True
    # The death scene of the last life has zero lives in a running game.
    assert scripted((no, no, 2), (no, no, 1), (no, no, 0), (yes, no, 0)) == ([3], [], [1])
    # An end and a cut-off together are an end.
    assert scripted((no, no, 1), (yes, yes, 0), (no, no, 3), (no, yes, 2)) == ([1], [3], [])


@both
def test_the_step_after_the_end_starts_a_game_and_ignores_its_action(backend):
    pool, other = (make_pool(backend, "Breakout", 4, seed=0, rules=CLASSIC) for _ in range(2))
    steps = [pool.reset()]
    for actions in random_actions(pool, 300):
        ended = steps[-1].terminated | steps[-1].truncated
        steps.append(pool.step(np.where(ended, (actions + 1) % 4, actions)))
    steps = stacked(steps)
    np.testing.assert_array_equal(steps.first[1:], (steps.terminated | steps.truncated)[:-1])
    assert steps.first[1:].sum() >= 4
    for mark in (steps.reward, steps.terminated, steps.truncated, steps.life_lost):
        assert not mark[steps.first].any()
    assert_equal(steps, play(other, random_actions(other, 300)))


@both
def test_a_game_that_is_cut_off_is_truncated_not_terminated(backend):
    pool = make_pool(backend, "Pong", 2, seed=0, rules=V5._replace(max_frames=80))
    steps = play(pool, random_actions(pool, 45))
    assert not steps.terminated.any()
    assert not steps.life_lost.any()
    np.testing.assert_array_equal(np.flatnonzero(steps.truncated.all(axis=1)), [20, 41])
    assert steps.truncated.sum() == 4
    np.testing.assert_array_equal(np.flatnonzero(steps.first.all(axis=1)), [0, 21, 42])


@both
def test_seeds_threads_parts_and_send_recv(backend):
    def games(**changes):
        pool = make_pool(backend, "Qbert", 3, **({"seed": 5, "num_threads": 1} | changes))
        return play(pool, random_actions(pool, 20))

    one_thread = games()
    assert_equal(one_thread, games(num_threads=2))
    assert (one_thread.frame != games(seed=6).frame).any()
    assert len({one_thread.frame[:, env].tobytes() for env in range(3)}) == 3

    pool = make_pool(backend, "Qbert", 3, seed=5)
    kept = [pool.reset()]
    copies = [kept[0].frame.copy()]
    for actions in random_actions(pool, 20):
        pool.send(actions)
        actions[:] = 0  # the caller may reuse its array while the emulators run
        kept.append(pool.recv())
        copies.append(kept[-1].frame.copy())
    assert_equal(stacked(kept), one_thread)
    np.testing.assert_array_equal(np.stack(copies), np.stack([step.frame for step in kept]))
    part = play(make_pool(backend, "Qbert", 1, seed=5, first_env=2), random_actions(pool, 20)[:, 2:])
    np.testing.assert_array_equal(part.frame, one_thread.frame[:, 2:])
    pool.close()


def test_env_seeds_are_different_and_do_not_depend_on_the_number_of_envs():
    seeds = env_seeds(0, 4096)
    assert len(set(seeds)) == 4096
    assert env_seeds(0, 16) == seeds[:16]
    assert not set(seeds[:16]) & set(env_seeds(1, 16))


@both
def test_other_actions_are_an_error_and_never_a_hang(backend):
    pool = make_pool(backend, "Breakout", 2, seed=0)
    pool.reset()
    for actions in ([0, 4], [-1, 0], [0, 0, 0]):
        with pytest.raises(ValueError, match="actions"):
            pool.send(np.array(actions))
    pool.send(np.zeros(2, int))
    pool.close()  # with a step in flight


def test_a_missing_envpool_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(UserError, match=r"pip install 'jaxrl_atari\[envpool\]'"):
        make_pool("envpool", "Qbert", 1, seed=0)
