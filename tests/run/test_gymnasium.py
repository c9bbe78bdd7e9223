"""The back end `gymnasium`: its steps against the back end `ale` and against environments whose answers are
known."""

import json

import gymnasium
import numpy as np
import pytest
from known_environments import CLOCK, Clock, pool_of
from played_games import assert_equal, make_pool, play, random_actions
from sample_runs import read_csv
from small_training import TINY, change

from jaxrl_atari import envs, register_wrapper, run_training
from jaxrl_atari.config import Config, EnvConfig, config_from_dict
from jaxrl_atari.envs import EpisodeCounter, check_environment
from jaxrl_atari.envs.protocols import PROTOCOLS
from jaxrl_atari.errors import UserError

WITHOUT_CHANCE = PROTOCOLS["classic"]._replace(noop_max=0, fire_on_reset=False)


# --- Steps -------------------------------------------------------------------------------------------------------


def test_a_game_of_ale_is_that_of_the_back_end_ale():
    """Without chance, both play the same game: frames, rewards, lives and ends are equal bit by bit."""
    pools = [
        make_pool("ale", "Breakout", 1, seed=0, rules=WITHOUT_CHANCE),
        *(pool_of(1, name, rules=WITHOUT_CHANCE) for name in ("ALE/Breakout-v5", "Breakout")),
    ]
    actions = random_actions(pools[0], 400)
    left, *others = (play(pool, actions) for pool in pools)
    for right in others:
        assert_equal(left, right)
    assert left.life_lost.any()
    assert left.terminated.any()


def test_a_game_starts_with_fire_and_no_ops():
    """FIRE launches Breakout's ball, which changes the picture without an action."""
    for fire in (False, True):
        rules = PROTOCOLS["classic"]._replace(fire_on_reset=fire)
        steps = play(pool_of(1, "ALE/Breakout-v5", rules=rules), np.zeros((40, 1), int))
        assert (np.ptp(steps.frame[1:], axis=0).max() > 0) == fire
    pools = [pool_of(1, "ALE/Breakout-v5", seed=seed, rules=PROTOCOLS["classic"]) for seed in (1, 2, 3)]
    assert len({pool.reset().frame.tobytes() for pool in pools}) > 1


def test_the_step_after_the_end_starts_an_episode_and_ignores_its_action():
    pool = pool_of(1, options={"length": 3})
    counter = EpisodeCounter(1)
    steps = [pool.reset(), *(pool.step(np.array([action])) for action in (0, 1, 2, 2, 1, 0))]
    assert [bool(step.first[0]) for step in steps] == [True, False, False, False, True, False, False]
    assert [float(step.reward[0]) for step in steps] == [0, 1, 2, 3, 0, 2, 1]  # Discrete(3, start=1)
    assert [bool(step.terminated[0]) for step in steps] == [False, False, False, True, False, False, False]
    (game,) = [game for step in steps for game in counter.count(step)]
    assert (game.episode_return, game.length, game.truncated) == (6.0, 3, False)
    start = int(steps[0].frame[0, 0, 0])
    assert [int(step.frame[0, 5, 7]) - start for step in steps[:4]] == [0, 1, 2, 3]
    assert not any(step.life_lost.any() for step in steps)


def test_a_time_limit_truncates():
    steps = play(pool_of(2, options={"length": 9, "max_episode_steps": 4}), np.zeros((5, 2), int))
    assert steps.truncated[:, 0].tolist() == [False] * 4 + [True, False]
    assert not steps.terminated.any()


def test_seeds():
    """Environment i plays from its own seed, in whatever pool."""
    frames = [play(pool_of(2, seed=seed), np.zeros((9, 2), int)).frame for seed in (3, 3, 4)]
    np.testing.assert_array_equal(frames[0], frames[1])
    assert (frames[0] != frames[2]).any()
    part = envs.make_pool(EnvConfig(game=CLOCK, backend="gymnasium"), 1, seed=3, first_env=1)
    np.testing.assert_array_equal(play(part, np.zeros((9, 1), int)).frame[:, 0], frames[0][:, 1])


class Halves(gymnasium.Wrapper):
    """Half the reward, less one; reports the reward, plus one."""

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, 0.5 * reward - 1.0, terminated, truncated, info | {"log": {"plus_one": reward + 1.0}}


class Twice(gymnasium.Wrapper):
    """Takes each action twice, and shows the reward of the second step."""

    def step(self, action):
        first = self.env.step(action)
        return first if first[2] or first[3] else self.env.step(action)


register_wrapper("halves", Halves)
register_wrapper("twice", Twice)


def test_learning_sees_the_reward_of_the_users_wrapper_and_the_score_is_that_of_the_game():
    """In a game of ALE under its protocol: what the emulator does is the same as without the wrapper."""
    actions = np.random.default_rng(0).integers(0, 4, (150, 2))
    pools = [pool_of(2, "ALE/Breakout-v5", wrapper=wrapper) for wrapper in (None, "halves")]
    plain, wrapped = (play(pool, actions) for pool in pools)
    assert_equal(plain, wrapped._replace(learning_reward=plain.reward))
    assert plain.reward.sum() > 0
    played = ~plain.first
    np.testing.assert_allclose(wrapped.learning_reward[played], 0.5 * plain.reward[played] - 1.0)
    assert sorted(pools[1].logged["plus_one"]) == sorted((plain.reward[played] + 1.0).tolist())


def test_the_score_has_the_rewards_of_all_steps_that_a_wrapper_makes():
    actions = np.random.default_rng(0).integers(0, 6, (150, 2))
    plain = play(pool_of(2, "ALE/Pong-v5"), np.repeat(actions, 2, axis=0))
    wrapped = play(pool_of(2, "ALE/Pong-v5", wrapper="twice"), actions)
    assert not plain.first[1:].any(), "no game ends"
    odd, even = plain.reward[1::2], plain.reward[2::2]  # row 0 is the start
    assert wrapped.reward[1:].tolist() == (odd + even).tolist()
    assert wrapped.learning_reward[1:].tolist() == even.tolist()
    assert odd.any(), "a reward would be lost"


def test_numbers_of_a_wrapper_become_columns(tmp_path):
    env = {"game": "ALE/Breakout-v5", "backend": "gymnasium", "wrapper": "halves", "num_threads": 0}
    run_training(change(TINY, env=env), tmp_path / "run")
    rows = read_csv(tmp_path / "run" / "session_0" / "metrics.csv")
    columns = [
        row["plus_one"] for row in rows
    ]  # as the metrics of the first update, in the second log point first
    assert columns == ["", *["1"] * (len(rows) - 1)], "no reward in games that are this short"
    assert {float(row["return_mean"]) for row in rows if row["return_mean"]} == {0.0}, "the score is raw"
    described = json.loads((tmp_path / "run" / "config.json").read_text())
    assert described["protocol"].startswith("v5, max_frames=128, backend=gymnasium, wrapper=halves")


# --- Pictures ----------------------------------------------------------------------------------------------------


class Noise(Clock):
    """Random RGB pictures, 168x168."""

    def __init__(self, **arguments):
        super().__init__(shape=(168, 168, 3), **arguments)

    def _observation(self):
        return np.random.default_rng(self.start + self.time).integers(0, 256, (168, 168, 3), np.uint8)


gymnasium.register("JaxrlTest/Noise-v0", Noise)


def test_colours_become_gray_and_areas_are_averaged():
    frame = pool_of(1, "JaxrlTest/Noise-v0", seed=3).reset().frame[0]
    seed = int(pool_of(1, seed=3).reset().frame[0, 0, 0])
    picture = np.random.default_rng(seed).integers(0, 256, (168, 168, 3), np.uint8)
    gray = picture @ np.array([0.2125, 0.7154, 0.0721])  # ITU-R BT.709, as scikit-image has it
    expected = gray.reshape(84, 2, 84, 2).mean(axis=(1, 3))
    assert np.abs(frame - expected).max() <= 1.5  # two roundings


@pytest.mark.parametrize("shape", [(84, 84, 1), (30, 50), (30, 50, 3)])
def test_shapes_of_pictures(shape):
    for key in (None, "screen"):
        pool = pool_of(1, options={"shape": list(shape), "key": key}, image_key=key)
        frame = pool.reset().frame
        assert (frame.shape, frame.dtype) == ((1, 84, 84), np.uint8)
        assert np.ptp(frame) == 0


def test_screens():
    pool = pool_of(2, screens=True)
    pool.reset()
    pool.step(np.array([0, 0]))
    np.testing.assert_array_equal(pool.screen(), np.full((21, 33, 3), 1))
    assert pool.steps_per_second == 7


# --- What does not fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"high": 1}, "0 to 255"),
        ({"shape": [84, 84, 4]}, "shape"),
        ({"key": "a"}, "env.image_key = None: .*: a"),
    ],
)
def test_refusals_are_one_line(options, expected):
    with pytest.raises(UserError, match=expected) as error:
        check_environment(EnvConfig(game=CLOCK, backend="gymnasium", options=options))
    assert "\n" not in str(error.value)


class Floats(Clock):
    """Declares bytes, and returns numbers from 0 to 1."""

    def _observation(self):
        return super()._observation() / 255


class NoReward(Clock):
    """Its second reward is not a number."""

    def step(self, action):
        observation, reward, *rest = super().step(action)
        return observation, np.nan if self.time == 2 else reward, *rest


gymnasium.register("JaxrlTest/Floats-v0", Floats)
gymnasium.register("JaxrlTest/NoReward-v0", NoReward)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Gymnasium's checker
def test_images_of_another_type_and_rewards_that_are_no_numbers():
    with pytest.raises(UserError, match=r"images of uint8, .* returns float64"):
        check_environment(EnvConfig(game="JaxrlTest/Floats-v0", backend="gymnasium"))
    pool = pool_of(2, "JaxrlTest/NoReward-v0")
    pool.reset()
    pool.step(np.zeros(2, int))
    with pytest.raises(UserError, match="environment 0 returned the reward nan in its step 2"):
        pool.step(np.zeros(2, int))


# --- Config ------------------------------------------------------------------------------------------------------


def env(game="Clock-v0", backend="gymnasium", **options):
    return Config(env=EnvConfig(game=game, backend=backend, **options))


@pytest.mark.parametrize(
    ("config", "game", "protocol", "gae_lambda"),
    [
        (env("pkg.envs:Clock-v0"), "Clock-v0", "gymnasium", 0.95),
        (env(options={"b": 1, "a": [True]}), "Clock-v0", 'gymnasium, options={"a": [true], "b": 1}', 0.95),
        (env("BreakoutNoFrameskip-v4"), "BreakoutNoFrameskip-v4", "classic, backend=gymnasium", 0.95),
        (
            env("ALE/Breakout-v5", options={"mode": 12}, sticky_actions=0.0),
            "ALE/Breakout-v5",
            'v5, sticky_actions=0.0, backend=gymnasium, options={"mode": 12}',
            0.7,
        ),
        (env("Breakout-v4"), "Breakout-v4", "gymnasium", 0.95),  # as it is registered: random frame skips
    ],
)
def test_protocols(config, game, protocol, gae_lambda):
    assert config.env.game_name == game
    assert config.env.resolved_protocol == protocol
    assert config.resolved_gae_lambda == gae_lambda
    assert config_from_dict(config.to_dict()) == config
