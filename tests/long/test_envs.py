"""More games and rules against independent replays on the raw emulator."""

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

from jaxrl_atari.envs.protocols import PROTOCOLS

V5, CLASSIC = PROTOCOLS["v5"], PROTOCOLS["classic"]


@both
@pytest.mark.parametrize(
    ("game", "rules", "other"), [("Breakout", CLASSIC, V5), ("Freeway", V5, CLASSIC), ("Pong", CLASSIC, V5)]
)
def test_frames_and_rewards_equal_an_independent_emulation(backend, game, rules, other):
    pool = make_pool(backend, game, 1, seed=SEED, rules=rules)
    actions = random_actions(pool, 60)
    steps = play(pool, actions)
    noops, _ = find_game(game, backend, rules, steps, actions)
    # The other protocol does not reproduce these frames.
    assert len(agreement(steps, replay(game, backend, other, noops, actions))) < 61


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
def test_the_end_of_a_game_on_the_last_frame_is_terminated_not_truncated(backend):
    pool = make_pool(backend, "Breakout", 1, seed=1)
    actions = random_actions(pool, 250)
    (end, *_) = np.flatnonzero(play(pool, actions).terminated[:, 0])
    for extra_steps, terminated in ((0, True), (-1, False)):
        rules = V5._replace(max_frames=4 * int(end + extra_steps))
        steps = play(make_pool(backend, "Breakout", 1, seed=1, rules=rules), actions)
        last = end + extra_steps
        assert steps.terminated[last, 0] == terminated
        assert steps.truncated[last, 0] == (not terminated)
        assert not steps.truncated[:last].any()
