"""The back end `gymnasium`: its steps against the back end `ale` and against environments whose answers are
known."""

import importlib.util
import sys

import gymnasium
import numpy as np
import pytest
from ale_py.env import AtariEnv
from gymnasium import spaces
from played_games import assert_equal, play, random_actions

from jaxrl_atari.config import Config, EnvConfig, config_from_dict
from jaxrl_atari.envs import EpisodeCounter, GymnasiumSettings, check_environment, make_pool
from jaxrl_atari.envs.gymnasium_pool import make_single
from jaxrl_atari.envs.protocols import GYMNASIUM_RULES, PROTOCOLS
from jaxrl_atari.errors import ConfigError, UserError

WITHOUT_CHANCE = PROTOCOLS["classic"]._replace(noop_max=0, fire_on_reset=False)


class Clock(gymnasium.Env):
    """Counts its steps; ends at `length`. Pictures show the seed and the time; actions from 1 on are rewards.

    Args:
        length: steps of an episode.
        shape: shape of the pictures.
        key: key of the picture in a dictionary; None: the picture alone.
        high: highest value of a pixel, which is wrong except for 255.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 7}  # noqa: RUF012

    def __init__(self, length=3, shape=(84, 84), key=None, high=255, render_mode=None):
        self.length, self.key, self.render_mode = length, key, render_mode
        self.picture = spaces.Box(0, high, shape, np.uint8)
        self.observation_space = self.picture if key is None else spaces.Dict({key: self.picture})
        self.action_space = spaces.Discrete(3, start=1)

    def _observation(self):
        value = (self.start + self.time) % 256
        picture = np.full(self.picture.shape, value, np.uint8)
        return picture if self.key is None else {self.key: picture}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.start, self.time = int(self.np_random.integers(100)), 0
        return self._observation(), {}

    def step(self, action):
        self.time += 1
        return self._observation(), float(action), self.time == self.length, False, {}

    def render(self):
        return np.full((21, 33, 3), self.time, np.uint8)


class Vector(Clock):
    """Observations that are no pictures."""

    def __init__(self, **arguments):
        super().__init__(shape=(4,), **arguments)


class Continuous(Clock):
    """Actions that are not discrete."""

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)


for name, kind in {"Clock-v0": Clock, "Vector-v0": Vector, "Continuous-v0": Continuous}.items():
    gymnasium.register(f"JaxrlTest/{name}", kind)

CLOCK = "JaxrlTest/Clock-v0"


def pool_of(num_envs=2, game=CLOCK, seed=3, screens=False, rules=GYMNASIUM_RULES, **options):
    settings = GymnasiumSettings(**options)
    return make_pool("gymnasium", game, num_envs, seed=seed, rules=rules, gymnasium=settings, screens=screens)


# --- Steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("game", ["Breakout", pytest.param("SpaceInvaders", marks=pytest.mark.long)])
def test_a_game_of_ale_is_that_of_the_back_end_ale(game):
    """Without chance, both play the same game: frames, rewards, lives and ends are equal bit by bit."""
    pools = [
        make_pool("ale", game, 1, seed=0, rules=WITHOUT_CHANCE),
        pool_of(1, f"ALE/{game}-v5", rules=WITHOUT_CHANCE),
    ]
    actions = random_actions(pools[0], 900)
    left, right = (play(pool, actions) for pool in pools)
    assert_equal(left, right)
    assert left.life_lost.any()
    assert left.terminated.any()


@pytest.mark.long
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


def test_a_game_starts_with_fire_and_no_ops():
    """FIRE launches Breakout's ball, which changes the picture without an action."""
    for fire in (False, True):
        rules = PROTOCOLS["classic"]._replace(fire_on_reset=fire)
        steps = play(pool_of(1, "ALE/Breakout-v5", rules=rules), np.zeros((40, 1), int))
        assert (np.ptp(steps.frame[1:], axis=0).max() > 0) == fire
    pools = [pool_of(1, "ALE/Breakout-v5", seed=seed, rules=PROTOCOLS["classic"]) for seed in (1, 2, 3)]
    starts = {pool.reset().frame.tobytes() for pool in pools}
    assert len(starts) > 1


def test_a_mode_is_another_game():
    usual, mode = (
        play(
            pool_of(1, "ALE/Breakout-v5", rules=WITHOUT_CHANCE, options=options),
            random_actions(pool_of(), 60)[:, :1],
        )
        for options in ({}, {"mode": 12, "difficulty": 1})
    )
    assert (usual.frame != mode.frame).any()


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
    part = make_pool("gymnasium", CLOCK, 1, seed=3, first_env=1, rules=GYMNASIUM_RULES)
    np.testing.assert_array_equal(play(part, np.zeros((9, 1), int)).frame[:, 0], frames[0][:, 1])


@pytest.mark.long
def test_processes_play_the_same(monkeypatch):
    actions = np.random.default_rng(0).integers(4, size=(40, 2))
    options = {"rules": WITHOUT_CHANCE, "game": "ALE/Breakout-v5", "options": {"mode": 12}}
    steps = [play(pool_of(vectorization_mode=mode, **options), actions) for mode in ("sync", "async")]
    assert_equal(*steps)
    monkeypatch.setattr("multiprocessing.process._current_process._config", {"daemon": True})
    error = r"env.vectorization_mode = 'async': a session that runs beside others .* use sync"
    with pytest.raises(UserError, match=error):
        pool_of(vectorization_mode="async")


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


@pytest.mark.parametrize("shape", [(84, 84), (84, 84, 1), (30, 50), (30, 50, 1), (30, 50, 3)])
@pytest.mark.parametrize("key", [None, "screen"])
def test_shapes_of_pictures(shape, key):
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
    atari = pool_of(1, "ALE/Pong-v5", rules=PROTOCOLS["v5"], screens=True)
    atari.reset()
    assert (atari.screen().shape, atari.steps_per_second) == ((210, 160, 3), 15)


def test_an_environment_that_is_made_twice_to_render_is_closed_once(monkeypatch):
    closed = []
    monkeypatch.setattr(Clock, "close", lambda self: closed.append(self.render_mode))
    pool = pool_of(1, screens=True)
    assert closed == [None]
    pool.close()
    assert closed == [None, "rgb_array"]


def test_what_renders_nothing_shows_what_the_policy_sees():
    gymnasium.register("JaxrlTest/Function-v0", lambda length: Clock(length))  # takes no render_mode
    pool = pool_of(1, "JaxrlTest/Function-v0", options={"length": 5}, screens=True)
    frame = pool.reset().frame
    assert pool.screen().shape == (84, 84, 3)
    assert (pool.screen() == frame[0, 0, 0]).all()


# --- What does not fit -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("game", "options", "expected"),
    [
        ("JaxrlTest/Vector-v0", {}, r"expected image observations .*, and it has Box\(.*\(4,\)"),
        ("JaxrlTest/Continuous-v0", {}, r"expected discrete actions, and it has Box\("),
        ("CartPole-v1", {}, "expected image observations"),
        ("ALE/Pong-v5", {"options": {"continuous": True}}, "arguments that keep the actions discrete"),
        ("ALE/Pong-v5", {"options": {"mode": 77}}, "cannot be made with env.options = {'mode': 77}"),
        (
            "ALE/Pong-v5",
            {"options": {"obs_type": "ram"}},
            "other arguments than obs_type; the policy sees grey frames",
        ),
        ("ALE/Pong-v5", {"options": {"frameskip": 2, "obs_type": "ram"}}, "other arguments than frameskip"),
        ("ALE/Pong-v5", {"options": {"obs_type": "ram", "frameskip": 2}}, "other arguments than obs_type"),
        ("ALE/Pang-v5", {}, r"no such environment is registered \(Environment `Pang` doesn't exist.*Pong"),
        ("Nowhere-v0", {}, "no such environment is registered .*--import names the module or the file"),
        (CLOCK, {"options": {"size": 3}}, r"cannot be made with env.options = {'size': 3} \(TypeError: .*'size'"),
        (
            CLOCK,
            {"options": {"render_mode": "human"}},
            "other arguments than render_mode; it is chosen for videos",
        ),
        (CLOCK, {"options": {"high": 1}}, "expected image observations"),
        (CLOCK, {"image_key": "screen"}, "env.image_key = 'screen': expected nothing; .* leave it out"),
        (
            CLOCK,
            {"options": {"key": "a"}},
            r"env.image_key = None: expected the key of an image; .* has: a \[84, 84\]",
        ),
        (CLOCK, {"options": {"key": "a"}, "image_key": "b"}, "env.image_key = 'b': expected the key of an image"),
        (CLOCK, {"options": {"key": "a", "shape": [3]}, "image_key": "a"}, "has: none"),
    ],
)
def test_refusals_are_one_line(game, options, expected):
    rules = PROTOCOLS["v5"] if game.startswith("ALE") else GYMNASIUM_RULES
    with pytest.raises(UserError, match=expected) as error:
        check_environment("gymnasium", game, rules, GymnasiumSettings(**options))
    assert "\n" not in str(error.value)


def test_an_environment_in_one_line():
    line = check_environment("gymnasium", CLOCK, GYMNASIUM_RULES, GymnasiumSettings({"shape": [30, 50]}))
    assert line == f"{CLOCK}: 3 actions, images of 50 x 30 pixels"
    assert check_environment("ale", "Pong", PROTOCOLS["v5"], GymnasiumSettings()) == ""


def test_a_check_that_fails_closes_its_environment(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    closed = []
    monkeypatch.setattr(Clock, "close", lambda self: closed.append(self))
    settings = GymnasiumSettings(options={"shape": [30, 50]})
    with pytest.raises(UserError, match="opencv"):
        check_environment("gymnasium", CLOCK, GYMNASIUM_RULES, settings)
    assert len(closed) == 1


@pytest.mark.parametrize(
    ("options", "image_key", "expected"),
    [({"high": 1}, None, "expected image observations"), ({"key": "a"}, "b", "expected the key of an image")],
)
def test_an_environment_that_is_refused_is_closed(monkeypatch, options, image_key, expected):
    closed = []
    monkeypatch.setattr(Clock, "close", lambda self: closed.append(self))
    with pytest.raises(UserError, match=expected):
        make_single(CLOCK, GYMNASIUM_RULES, GymnasiumSettings(options, image_key))
    assert len(closed) == 1


def test_a_game_of_ale_that_is_refused_is_closed(monkeypatch):
    closed = []
    monkeypatch.setattr(AtariEnv, "close", lambda self: closed.append(self))
    settings = GymnasiumSettings({"continuous": True})
    with pytest.raises(UserError, match="keep the actions discrete"):
        make_single("ALE/Pong-v5", PROTOCOLS["v5"], settings)
    assert len(closed) == 1


def test_the_error_of_closing_does_not_hide_why_an_environment_is_refused(monkeypatch):
    def fail(self):
        raise RuntimeError("closed twice")

    monkeypatch.setattr(Clock, "close", fail)
    with pytest.raises(UserError, match="expected image observations"):
        make_single(CLOCK, GYMNASIUM_RULES, GymnasiumSettings({"high": 1}))


def test_opencv_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(UserError, match=r"opencv.*pip install 'jaxrl_atari\[gymnasium\]'"):
        pool_of(1, options={"shape": [30, 50]})
    pool_of(1)  # 84x84 already


# --- Config ------------------------------------------------------------------------------------------------------


def env(game="Clock-v0", backend="gymnasium", **options):
    return Config(env=EnvConfig(game=game, backend=backend, **options))


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: env("Pong", "ale", options={"mode": 1}), "add --env.backend gymnasium"),
        (lambda: env("Pong", "envpool", image_key="x"), "add --env.backend gymnasium"),
        (lambda: env("Pong", "ale", vectorization_mode="async"), "add --env.backend gymnasium"),
        (lambda: env(noop_max=3), "env.noop_max = 3: expected nothing with Clock-v0"),
        (lambda: env(life_loss_terminal=True), "env.life_loss_terminal = True: expected nothing"),
        (lambda: env(max_frames=400), "max_episode_steps"),
        (lambda: env(protocol="v5"), "env.protocol = 'v5': expected nothing"),
        (lambda: env(num_threads=2), "env.num_threads = 2: expected 0"),
        (lambda: env(anchor_steps=2), "env.anchor_steps = 2: expected 0"),
        (lambda: env(options={"a": (1, 2)}), "values that JSON has"),
        (lambda: env(options={"a": float("nan")}), "values that JSON has"),
        (lambda: env(options={"a": [{"b": "os:system"}]}), "strings without a colon"),
        (lambda: env(options="x"), "env.options = 'x'"),
        (lambda: env("../x"), r"env.game = '../x': expected the id of a Gymnasium environment"),
        (lambda: env("ALE/Pong-v5", protocol="classic"), "env.protocol = 'classic': expected v5"),
    ],
)
def test_options_that_do_nothing_are_refused(make, expected):
    with pytest.raises(ConfigError, match=expected) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "game", "protocol", "gae_lambda"),
    [
        (env(), "Clock-v0", "gymnasium", 0.95),
        (env("pkg.envs:Clock-v0"), "Clock-v0", "gymnasium", 0.95),
        (env(clip_rewards=True, image_key="i"), "Clock-v0", "gymnasium, clip_rewards=true, image_key=i", 0.95),
        (env(options={"b": 1, "a": [True]}), "Clock-v0", 'gymnasium, options={"a": [true], "b": 1}', 0.95),
        (env("ALE/Breakout-v5"), "ALE/Breakout-v5", "v5, backend=gymnasium", 0.7),
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


@pytest.mark.skipif(importlib.util.find_spec("envpool") is None, reason="needs envpool")
def test_only_ale_records_its_games():
    assert env("Pong", "ale").resume_note == ""
    note = env("Pong", "envpool").resume_note
    assert note.startswith("new games at each resume")
    assert note.endswith("the back end envpool records no games")
    assert env().resume_note.startswith("new games at each resume")
