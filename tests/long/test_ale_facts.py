"""What ale-py does and exact resume relies on: a game is a function of its seed and its actions."""

import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv

games = pytest.mark.parametrize("game", ["breakout", "qbert"])
ENVS = 3
MIDDLE = np.arange(ENVS) == 1


class Games:
    """Three environments with sticky actions, whose games are cut off after 50 steps."""

    def __init__(self, game, seeds, num_threads=1):
        self.envs = AtariVectorEnv(
            game, ENVS, num_threads=num_threads, repeat_action_probability=0.25, max_num_frames_per_episode=200,
        )  # fmt: skip
        self.seen = []
        self.envs.reset(seed=np.array(seeds))

    def restart(self, seed):
        """Resets the environment in the middle."""
        frame, info = self.envs.reset(seed=seed, options={"reset_mask": MIDDLE})
        self.seen.append([frame, info["lives"], info["frame_number"]])
        return self

    def play(self, steps, seed, other_seed=0):
        """Random actions: of `seed` in the middle, of `other_seed` beside it."""
        actions, others = (np.random.default_rng(s).integers(4, size=(steps, ENVS)) for s in (seed, other_seed))
        for chosen in np.where(MIDDLE, actions, others):
            *arrays, info = self.envs.step(chosen)
            self.seen.append([*arrays, info["lives"], info["frame_number"]])
        return self

    def of(self, envs, steps):
        """Frames, rewards, ends, lives and frame numbers of some environments in the last steps."""
        return [np.array(x)[envs] for step in self.seen[-steps:] for x in step]


def same(ours, theirs):
    return all(map(np.array_equal, ours, theirs))


@games
def test_a_seeded_reset_fixes_all_that_follows_and_disturbs_no_other_environment(game):
    """Through auto-resets; in a used emulator and a fresh one, beside other games, with other threads."""
    seed, steps = np.array([77]), 120
    used = Games(game, [1, 2, 3]).play(60, seed=8).restart(seed).play(steps, seed=5)
    fresh = Games(game, [4, 5, 6], num_threads=2).restart(seed).play(steps, seed=5, other_seed=1)
    assert sum(truncated[1] for *_, truncated, _, _ in used.seen[-steps:]) >= 2
    assert same(used.of(MIDDLE, steps + 1), fresh.of(MIDDLE, steps + 1))
    assert not same(used.of(~MIDDLE, steps), fresh.of(~MIDDLE, steps))
    undisturbed = Games(game, [1, 2, 3]).play(60, seed=8).play(steps, seed=5)
    assert same(used.of(~MIDDLE, steps), undisturbed.of(~MIDDLE, steps))
    assert not same(used.of(MIDDLE, steps), undisturbed.of(MIDDLE, steps))
