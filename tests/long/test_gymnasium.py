"""The back end `gymnasium` plays ALE's games by the rules of a protocol, also in processes of its own."""

import numpy as np
import pytest
from known_environments import pool_of
from played_games import assert_equal, make_pool, play, random_actions

from jaxrl_atari.envs.protocols import PROTOCOLS

WITHOUT_CHANCE = PROTOCOLS["classic"]._replace(noop_max=0, fire_on_reset=False)


@pytest.mark.parametrize(
    ("rule", "value"), [("sticky_actions", 1.0), ("full_action_space", True), ("max_frames", 80)]
)
def test_a_game_of_ale_keeps_to_the_rules(rule, value):
    rules = WITHOUT_CHANCE._replace(**{rule: value})
    pools = [
        make_pool("ale", "Breakout", 1, seed=0, rules=rules),
        pool_of(1, "BreakoutNoFrameskip-v4", rules=rules),
    ]
    assert pools[0].num_actions == pools[1].num_actions == (18 if rule == "full_action_space" else 4)
    left, right = (play(pool, random_actions(pools[0], 60)) for pool in pools)
    if rule == "max_frames":  # in the last step, `ale` leaves out a frame (envs/__init__.py)
        assert np.flatnonzero(right.truncated).tolist() == np.flatnonzero(left.truncated).tolist() == [20, 41]
    else:
        assert_equal(left, right)


def test_processes_play_the_same():
    actions = np.random.default_rng(0).integers(4, size=(40, 2))
    options = {"rules": WITHOUT_CHANCE, "game": "ALE/Breakout-v5", "options": {"mode": 12}}
    assert_equal(*(play(pool_of(vectorization_mode=mode, **options), actions) for mode in ("sync", "async")))
