"""Evaluation on the real emulator: which games are counted, what they score, and what the command writes and
says."""

import csv
import dataclasses
import json
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import CancelledError
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from PIL import Image
from sample_runs import flip_bit
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from user_commands import user_environment

from jaxrl_atari import load_policy, make_env, record_video, run_evaluation, run_training
from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, LogConfig, PPOConfig
from jaxrl_atari.envs import EnvPool, env_seeds, make_pool
from jaxrl_atari.envs.ale_pool import AlePool
from jaxrl_atari.envs.protocols import PROTOCOLS
from jaxrl_atari.errors import ConfigError, UserError
from jaxrl_atari.evaluate import play, video
from jaxrl_atari.evaluate.__main__ import main
from jaxrl_atari.frames import arrange_stacks, gather_stacks
from jaxrl_atari.network_interface import Observation
from jaxrl_atari.runs.layout import meta_file

NUM_ACTIONS = 6  # of Qbert
QUICK = ["--gpu", "false", "--num-envs", "2", "--episodes"]


def train(run_dir):
    """A run of Qbert: two sessions with a log point and a checkpoint every 256 env steps, 60 env steps a game.

    It has `anchor_steps`, which only the back end ale takes.
    """
    config = Config(
        sessions=2,
        total_env_steps=1024,
        env=EnvConfig(game="Qbert", num_envs=4, num_threads=1, max_frames=240, anchor_steps=100),
        ppo=PPOConfig(rollout_length=64, minibatch_size=64, epochs=1),
        devices=DevicesConfig(gpu=False),
        log=LogConfig(every_env_steps=256, checkpoint_every_env_steps=256, graphs=False),
    )
    return run_training(config, run_dir).run_dir


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return train(tmp_path_factory.mktemp("trained") / "qbert")


@pytest.fixture
def own_run(run_dir, tmp_path):
    """A copy of the run, for a test that writes into it."""
    return shutil.copytree(run_dir, tmp_path / "own_run")


@pytest.fixture(scope="module")
def policy(run_dir):
    return load_policy(run_dir, device=jax.devices("cpu")[0])


def always(policy, action, **env):
    """The policy, but it always takes one action, in other games."""
    head = {"kernel": jnp.zeros((512, NUM_ACTIONS)), "bias": 1e4 * jax.nn.one_hot(action, NUM_ACTIONS)}
    config = dataclasses.replace(policy.config, env=EnvConfig(**env))
    return dataclasses.replace(policy, config=config, params={**policy.params, "policy": head})


def steps_of(session_dir):
    return sorted(int(path.name) for path in (session_dir / "checkpoints").iterdir())


def damage(session_dir, step):
    """Flips a bit of the largest array; a second time, flips it back."""
    arrays = (session_dir / "checkpoints" / str(step) / "arrays").rglob("[0-9]*")
    flip_bit(max(arrays, key=lambda path: path.stat().st_size))


# --- Games -------------------------------------------------------------------------------------------------------


def ale_games(seed, num_envs, quota, max_frames, action):
    """Returns and lengths of the first `quota` games of each environment, with ale-py alone."""
    envs = AtariVectorEnv(
        "qbert", num_envs, max_num_frames_per_episode=max_frames, repeat_action_probability=0.0, noop_max=30,
        use_fire_reset=True, reward_clipping=False, episodic_life=False,
    )  # fmt: skip
    envs.reset(seed=np.array(env_seeds(seed, num_envs)))
    games = [[] for _ in range(num_envs)]
    total, length, new = np.zeros(num_envs), np.zeros(num_envs, int), np.zeros(num_envs, bool)
    while min(map(len, games)) < quota:
        _, reward, terminated, truncated, _ = envs.step(np.full(num_envs, action))
        total, length = (
            np.where(new, 0, total + reward),
            np.where(new, 0, length + 1),
        )  # a new game's step only starts it
        new = terminated | truncated
        for i in np.flatnonzero(new):
            games[i].append((total[i], length[i]))
    return [game for env in games for game in env[:quota]]


def test_returns_are_those_of_the_emulator(policy):
    result = run_evaluation(
        always(policy, 5, game="Qbert", protocol="classic", max_frames=2400), episodes=4, num_envs=2, seed=5
    )
    expected = ale_games(5, num_envs=2, quota=2, max_frames=2400, action=5)
    assert sorted((game.episode_return, game.length) for game in result.games) == sorted(expected)
    first = [next(game for game in result.games if game.env == env) for env in (0, 1)]
    assert [game.step for game in first] == [game.length - 1 for game in first]  # steps count from 0
    returns = [game_return for game_return, _ in expected]
    assert min(returns) > 0, "no score: this test tests little"
    assert len(set(expected)) > 1, "all games alike: this test tests little"
    assert (result.mean, result.std) == pytest.approx((np.mean(returns), np.std(returns, ddof=1)))


def test_each_environment_plays_a_fixed_number_of_games(policy):
    """The first 5 games to end would be short ones, which are mostly the bad ones."""
    assert Counter(game.env for game in run_evaluation(policy, episodes=5, num_envs=2).games) == {0: 3, 1: 2}


@pytest.mark.long
def test_same_seed_same_games_whatever_the_default_kind_of_keys(policy):
    first, other = (run_evaluation(policy, episodes=3, num_envs=3, seed=seed).games for seed in (1, 2))
    with jax.default_prng_impl("rbg"):
        assert run_evaluation(policy, episodes=3, num_envs=3, seed=1).games == first
    assert first != other


def test_a_checkpoint_is_loaded_whatever_the_default_kind_of_keys(run_dir):
    with jax.default_prng_impl("rbg"):
        load_policy(run_dir)


def test_a_game_that_waits_for_fire(policy, monkeypatch, caplog):
    monkeypatch.setattr(play, "SECONDS_BETWEEN_LINES", 0)
    lines = []
    waiting = always(policy, 0, game="Breakout", max_frames=800)
    result = run_evaluation(waiting, episodes=2, num_envs=2, greedy=True, say=lines.append)
    assert (result.num_truncated, result.mean) == (2, 0)
    assert "2 games in progress, longest 150 of 200 env steps" in lines
    assert lines[-1].endswith("200  cut off at env.max_frames")
    assert caplog.messages[0].startswith("greedy play can stand still: Breakout may wait for FIRE")


def test_stacks_are_those_of_training():
    """Against `gather_stacks` on a rollout that spans the start of a new game."""
    pool = make_pool("ale", "Qbert", 2, seed=0, num_threads=1, rules=PROTOCOLS["v5"]._replace(max_frames=80))
    steps = [pool.reset(), *(pool.step(np.array([2, 3])) for _ in range(40))]
    assert sum(step.first.sum() for step in steps[1:]) >= 2
    frames = np.stack([steps[0].frame] * 3 + [step.frame for step in steps])[..., None]
    ages = np.zeros((len(steps), 2), np.int32)
    for t in range(1, len(steps)):
        ages[t] = np.where(steps[t].first, 0, np.minimum(ages[t - 1] + 1, 3))
    window, age = play.empty_window(2)
    for t, step in enumerate(steps):
        window, age, stacks = play.push_frame(window, age, step.frame, step.first)
        np.testing.assert_array_equal(stacks, gather_stacks(frames, ages, 2 * t + np.arange(2)))


def test_pushed_frames_make_naive_stacks():
    """Over the starts of new games: a young game's stack is filled with its first frame."""
    rng = np.random.default_rng(6)
    window, age = play.empty_window(2)
    expected = [[], []]
    for number in range(12):
        frame = rng.integers(0, 256, (2, 84, 84), dtype=np.uint8)
        first = np.array([number in (0, 5, 7), number in (0, 9)])
        window, age, stacks = play.push_frame(window, age, frame, first)
        for i, seen in enumerate(expected):
            seen[:] = [frame[i]] * 4 if first[i] else [*seen[1:], frame[i]]
            np.testing.assert_array_equal(stacks[i], np.stack(seen, axis=-1))


# --- Policies ----------------------------------------------------------------------------------------------------


def test_a_policy_acts_by_its_logits(policy):
    frames = np.random.default_rng(0).integers(0, 256, (3, 84, 84, 4), np.uint8)
    stacks = arrange_stacks(policy.network.layout, frames)
    logits = policy.network.apply(policy.params, Observation(stacks)).logits
    probabilities = np.asarray(jax.nn.softmax(logits))
    assert probabilities.max() < 0.9, "nearly certain: this test tests little"
    np.testing.assert_array_equal(policy.act(frames, jax.random.key(0), greedy=True), probabilities.argmax(-1))
    np.testing.assert_array_equal(policy.act(frames, greedy=True), probabilities.argmax(-1))
    one = policy.act(frames[1], greedy=True)
    assert (one.shape, one.dtype, one) == ((), np.int32, probabilities[1].argmax())
    assert policy.act(frames[1], jax.random.key(5)) == policy.act(frames[1:2], jax.random.key(5))[0]
    with pytest.raises(ValueError, match=r"key: expected a JAX key, such as jax.random.key\(0\), or greedy=True"):
        policy.act(frames)
    same = np.repeat(frames[:1], 100, axis=0)
    actions = np.concatenate([policy.act(same, jax.random.key(i)) for i in range(60)])
    assert actions.dtype == np.int32
    found = np.bincount(actions, minlength=NUM_ACTIONS) / len(actions)
    np.testing.assert_allclose(found, probabilities[0], atol=5 * 0.5 / np.sqrt(len(actions)))


def test_a_policy_pickles(policy):
    content = pickle.dumps(policy)
    again = pickle.loads(content)
    assert (again.config, again.session_dir, again.env_steps) == (
        policy.config,
        policy.session_dir,
        policy.env_steps,
    )
    frames = np.random.default_rng(0).integers(0, 256, (3, 84, 84, 4), np.uint8)
    np.testing.assert_array_equal(again.act(frames, greedy=True), policy.act(frames, greedy=True))
    key = jax.random.key(3)
    np.testing.assert_array_equal(again.act(frames, key), policy.act(frames, key))
    arrays = [(jax.tree.map(np.asarray, each.params)) for each in (again, policy)]
    assert all(map(np.array_equal, *map(jax.tree.leaves, arrays)))


@pytest.mark.parametrize("shape", [(1, 84, 84, 1), (1, 84, 84, 6), (1, 4, 84, 84), (84, 84), (1, 1, 84, 84, 4)])
def test_other_frames_are_refused(policy, shape):
    with pytest.raises(ValueError, match=re.escape(f"expected uint8 [n, 84, 84, 4], got uint8 {list(shape)}")):
        policy.act(np.zeros(shape, np.uint8), jax.random.key(0))
    with pytest.raises(ValueError, match="got float32"):
        policy.act(np.zeros((1, 84, 84, 4), np.float32), jax.random.key(0))


def test_a_policy_keeps_to_its_device_and_leaves_the_callers_alone(run_dir):
    there = jax.devices("cpu")[2]
    policy = load_policy(run_dir, device=there)
    assert all(x.devices() == {there} for x in jax.tree.leaves(policy.params))
    rules = policy.config.env.rules
    steps = play.play(policy, make_pool("ale", "Qbert", 1, seed=0, rules=rules), seed=0, greedy=False)
    for _ in range(3):
        next(steps)
        assert jnp.zeros(()).devices() == {jax.devices("cpu")[0]}


def test_checkpoints_and_sessions_by_name_and_score(run_dir, own_run, monkeypatch):
    scores = {}
    for session in (0, 1):
        with (run_dir / f"session_{session}" / "metrics.csv").open() as file:
            scores |= {(session, int(row["env_steps"])): float(row["return_mean"]) for row in csv.DictReader(file)}
    session, step = max(scores, key=lambda key: (scores[key], key[1]))
    best = load_policy(run_dir)
    assert (best.session_dir, best.env_steps) == (run_dir / f"session_{session}", step)
    assert best.config.env.num_threads == 0, "an evaluation uses every core"
    other = load_policy(str(run_dir), "latest", session=1 - session)
    steps = steps_of(other.session_dir)
    assert (other.session_dir, other.env_steps) == (run_dir / f"session_{1 - session}", steps[-1])
    assert load_policy(other.session_dir, steps[0]).env_steps == steps[0]
    with pytest.raises(
        UserError, match=f"checkpoints/7: no such checkpoint; there are: {', '.join(map(str, steps))}"
    ):
        load_policy(other.session_dir, 7)
    with pytest.raises(UserError, match="session_7: holds no checkpoint"):
        load_policy(run_dir, session=7)
    monkeypatch.setenv("HOME", str(own_run.parent))
    assert load_policy("~/own_run").env_steps == step


def cut_meta(session_dir, step):
    path = meta_file(session_dir, step)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [damage, cut_meta])
def test_a_damaged_checkpoint_is_never_played(own_run, caplog, damage):
    session_dir = own_run / "session_0"
    *_, before, latest = steps = steps_of(session_dir)
    damage(session_dir, latest)
    assert load_policy(session_dir, "latest").env_steps == before
    (message,) = caplog.messages
    assert re.search(f"checkpoints/{latest}: damaged: .*; the checkpoint at env step {before} is used$", message)
    assert load_policy(own_run, "latest").env_steps in (before, steps_of(own_run / "session_1")[-1])
    with pytest.raises(UserError, match=f"checkpoints/{latest}: damaged: "):
        load_policy(session_dir, latest)
    for step in steps[:-1]:
        damage(session_dir, step)
    with pytest.raises(UserError, match="damaged: "):
        load_policy(session_dir, "best")


def test_not_a_run_directory(tmp_path, own_run):
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(UserError, match="not a run directory"):
            load_policy(path)
    for session_dir in own_run.glob("session_*"):
        shutil.rmtree(session_dir / "checkpoints")
    with pytest.raises(UserError, match="holds no checkpoint"):
        load_policy(own_run)


# --- A Gymnasium environment -------------------------------------------------------------------------------------


def snippet(page, word):
    """The Python code of a page that uses a word."""
    text = (Path(__file__).parents[2] / "docs" / page).read_text(encoding="utf-8")
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", text, re.S) if word in code)
    return code


def test_the_loop_of_the_page_scores_what_an_evaluation_does(own_run):
    code = snippet("environments.md", "make_env").replace('"data/quickstart_20261122_054147"', repr(str(own_run)))
    scope = {}
    exec(code, scope)
    policy, env = scope["policy"], scope["env"]
    scores = [scope["score"]]
    observation, _ = env.reset()  # the next game
    score, over = 0.0, False
    while not over:
        observation, reward, terminated, truncated, _ = env.step(policy.act(observation, greedy=True))
        score, over = score + reward, terminated or truncated
    scores.append(score)
    expected = run_evaluation(policy, episodes=2, seed=0, greedy=True, num_envs=1)
    assert scores == expected.returns.tolist()
    with pytest.raises(ResetNeeded, match="the game is over"):
        env.step(0)
    env.close()
    observation, _ = env.reset()
    assert env.observation_space.contains(observation)


def test_sampled_actions_score_what_an_evaluation_does(policy):
    """With the keys of `play.play`: observations are those of an evaluation, step by step."""
    played = play.play(
        policy, make_pool("ale", "Qbert", 1, seed=4, rules=policy.config.env.rules), seed=4, greedy=False
    )
    env = make_env(policy.config)
    observation, _ = env.reset(seed=4)
    next(played)
    for _ in range(30):
        step, decision = next(played)
        observation, reward, *_ = env.step(decision.actions[0])
        np.testing.assert_array_equal(observation[..., 3], step.frame[0])
        assert reward == step.reward[0]


@pytest.mark.parametrize(
    "options",
    [
        {"game": "Breakout"},
        pytest.param({"game": "Breakout", "protocol": "machado"}, marks=pytest.mark.long),
        pytest.param(
            {"game": "ALE/Breakout-v5", "backend": "gymnasium", "options": {"mode": 12}}, marks=pytest.mark.long
        ),
    ],
)
@pytest.mark.parametrize("render_mode", [None, pytest.param("rgb_array", marks=pytest.mark.long)])
@pytest.mark.filterwarnings("ignore:.*Not able to test alternative render modes:UserWarning")
def test_gymnasiums_checker_passes(options, render_mode):
    env = make_env(Config(env=EnvConfig(**options)), render_mode)
    check_env(env)
    env.reset(seed=1)
    assert (env.render() is None) == (render_mode is None)
    if render_mode:
        assert (env.render().shape, env.metadata["render_fps"]) == ((210, 160, 3), 15)
    env.close()
    env.close()


def test_a_seed_out_of_range_leaves_the_environment_usable():
    env = make_env(Config(env=EnvConfig(game="Breakout")))
    env.reset(seed=1)
    with pytest.raises(UserError, match="seed = 1099511627776: expected a whole number from 0 to 4294967295"):
        env.reset(seed=2**40)
    random_numbers = env.np_random.bit_generator.state
    for seed in (-1, 2**32):
        with pytest.raises(ConfigError, match=f"seed = {seed}: expected a whole number"):
            env.reset(seed=seed)
    assert env.np_random.bit_generator.state == random_numbers
    env.step(0)
    env.reset(seed=2)
    env.close()
    env.close()


def test_stacks_and_seeds_of_the_environment():
    """Stacks hold the last four frames of the pool; the first frame of a game fills them."""
    config = Config(env=EnvConfig(game="Breakout", max_frames=80))
    env = make_env(config)
    assert env.action_space.n == 4
    pool = make_pool("ale", "Breakout", 1, seed=9, rules=config.env.rules)
    frames = [pool.reset().frame[0]] * 4
    observation, info = env.reset(seed=9)
    assert info == {"lives": 5}
    for t in range(20):
        np.testing.assert_array_equal(observation, np.stack(frames[-4:], axis=-1))
        frames.append(pool.step(np.array([t % 4])).frame[0])
        observation, _, terminated, truncated, _ = env.step(t % 4)
        assert (terminated, truncated) == (False, t == 19)
    first = pool.step(np.array([0])).frame[0]  # the auto-reset step
    np.testing.assert_array_equal(env.reset()[0], np.stack([first] * 4, axis=-1))
    env.step(2)
    others = [env.reset()[0].tobytes() for _ in range(3)]  # in the middle of a game: others, at random
    assert len({*others, env.reset(seed=9)[0].tobytes()}) > 1


# --- Videos ------------------------------------------------------------------------------------------------------


def read_video(path):
    """What ffmpeg says of a video, and its frames: uint8 [n, 630, 480, 3]."""
    import imageio_ffmpeg  # not on every machine that runs the other tests, such as a borrowed one with a GPU

    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24"]
    decoded = subprocess.run(
        [*command, "-fps_mode", "passthrough", "-"], capture_output=True, timeout=120, check=True
    )
    return decoded.stderr.decode(), np.frombuffer(decoded.stdout, np.uint8).reshape(-1, 630, 480, 3)


@pytest.mark.long
def test_video_shows_the_game(policy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    game = record_video(
        always(policy, 5, game="Qbert", protocol="classic", max_frames=2400), "lr:3e-4.mp4", seed=3
    )  # to ffmpeg, this looks like a protocol
    said, frames = read_video(tmp_path / "lr:3e-4.mp4")
    assert re.search(r"Video: h264 .*yuv420p\b.* 480x630\b.* 15 fps", said)
    assert len(frames) == game.length + 1  # with the one before the first step
    assert game.step == game.length - 1
    pool = AlePool("Qbert", env_seeds(3, 1), 0, PROTOCOLS["classic"]._replace(max_frames=2400), colour=True)
    step = pool.reset()
    for t in range(60):
        shown = frames[t, 1::3, 1::3].astype(float)
        assert np.abs(shown - step.frame[0]).mean() < 8, f"frame {t}"  # lossy, and colours at half resolution
        step = pool.step(np.array([5]))


def test_video_that_cannot_be_written(policy, tmp_path):
    with pytest.raises(UserError, match="seed = -1: expected a whole number from 0 to 4294967295"):
        record_video(policy, tmp_path / "game.mp4", seed=-1)
    with pytest.raises(UserError, match=r"missing/video.mp4: the video could not be written \(.*No such file"):
        record_video(policy, tmp_path / "missing" / "video.mp4")


def test_an_interrupted_recording_leaves_no_video(policy, tmp_path, monkeypatch):
    lines = []

    def say(line):
        lines.append(line)
        if len(lines) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(video, "SECONDS_BETWEEN_LINES", 0)
    with pytest.raises(KeyboardInterrupt):
        record_video(policy, tmp_path / "video.mp4", say=say)
    assert re.fullmatch(r"recording: 2 env steps, return [\d.]+", lines[2])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_pools_are_closed(policy, tmp_path, monkeypatch):
    """Some have processes, which would stay until the garbage collector came."""
    opened, closed = [], []
    make, close = play.make_evaluation_pool, EnvPool.close

    def make_and_note(*args, **named):
        opened.append(make(*args, **named))
        return opened[-1]

    monkeypatch.setattr(play, "make_evaluation_pool", make_and_note)
    monkeypatch.setattr(video, "make_evaluation_pool", make_and_note)
    monkeypatch.setattr(EnvPool, "close", lambda pool: (closed.append(pool), close(pool)))

    quick = always(policy, 1, game="Breakout", max_frames=40)
    run_evaluation(quick, 2, num_envs=2)
    record_video(quick, tmp_path / "video.mp4")
    with pytest.raises(CancelledError):
        run_evaluation(quick, 2, num_envs=2, cancelled=lambda: True)
    assert len(opened) == 3
    assert {*map(id, opened)} <= {*map(id, closed)}


# --- The command -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_session(own_run, capsys):
    command, step = [str(own_run), *QUICK, "3", "--session", "1"], steps_of(own_run / "session_1")[-1]
    main([*command, "--checkpoint", "latest", "--greedy", "--video", "--seed", "4"])
    out, session_dir = capsys.readouterr().out, own_run / "session_1"
    written = json.loads((session_dir / f"evaluation_{step}.json").read_text())
    assert written["protocol"] == "v5, max_frames=240"
    assert (written["greedy"], written["seed"], written["cut_off"]) == (True, 4, 3)
    assert (written["lengths"], written["truncated"]) == ([60] * 3, [True] * 3)
    expected = run_evaluation(load_policy(session_dir, "latest"), 3, seed=4, greedy=True, num_envs=2)
    assert written["returns"] == expected.returns.tolist()
    assert f"mean {expected.mean:>12,.1f}" in out
    assert "3 of 3 games cut off at env.max_frames" in out
    assert "optimistic" not in out
    assert len(read_video(session_dir / f"video_{step}.mp4")[1]) == 61
    (image,) = EventAccumulator(str(session_dir / "video")).Reload().Images("game")
    animation = Image.open(BytesIO(image.encoded_image_string))
    assert (image.step, animation.size, animation.n_frames) == (step, (160, 210), 61)
    assert not (own_run / "report.html").exists()

    (own_run / "report.html").touch()  # it is brought up to date
    main([*command, "--checkpoint", str(step)])  # takes nothing's place
    assert (own_run / "report.html").stat().st_size > 0
    assert json.loads((session_dir / f"evaluation_{step}.json").read_text()) == written
    assert json.loads((session_dir / f"evaluation_{step}_2.json").read_text())["greedy"] is False


def test_scores_reach_the_report_if_the_video_cannot_be_shown_in_tensorboard(own_run, capsys, monkeypatch):
    def fail(*arguments):
        raise subprocess.CalledProcessError(1, "ffmpeg")

    monkeypatch.setattr("jaxrl_atari.evaluate.__main__.add_to_tensorboard", fail)
    (own_run / "report.html").touch()
    with pytest.raises(UserError, match=r"not saved: the video in TensorBoard \(Called"):
        main([str(own_run), *QUICK, "1", "--session", "1", "--video"])
    assert re.search(r"^written: .*/video_\d+\.mp4 ", capsys.readouterr().out, re.MULTILINE)
    (path,) = own_run.rglob("evaluation_*.json")
    assert path.name in (own_run / "report.html").read_text()


def test_the_default_is_named_an_optimistic_pick(own_run, capsys):
    main([str(own_run), *QUICK, "1", "--backend", "ale"])
    out = capsys.readouterr().out
    (path,) = own_run.rglob("evaluation_*.json")
    assert json.loads(path.read_text())["std"] is None  # a single game has no sample standard deviation
    assert re.search("^   std            -$", out, re.MULTILINE)
    assert (
        "the best checkpoint is an optimistic pick; to quote a score, use --session all --checkpoint latest" in out
    )
    assert "note: played on ale; if the run was trained on another emulator, scores may differ" in out


@pytest.mark.skipif(find_spec("envpool") is None, reason="envpool is not installed")
def test_another_back_end_than_that_of_training(own_run):
    main([str(own_run), *QUICK, "1", "--session", "0", "--backend", "envpool"])
    (path,) = own_run.rglob("evaluation_*.json")
    assert json.loads(path.read_text())["backend"] == "envpool"


def test_a_policy_of_another_back_end_needs_no_option_that_this_one_refuses(run_dir):
    assert load_policy(run_dir).config.env.anchor_steps == 100
    assert load_policy(run_dir, backend="envpool").config.env.anchor_steps == 0


def test_the_best_checkpoints_of_all_sessions_are_named_an_optimistic_pick(own_run, capsys):
    main([str(own_run), *QUICK, "1", "--session", "all"])
    out = capsys.readouterr().out
    assert "2 sessions: " in out
    assert (
        "the best checkpoint is an optimistic pick; to quote a score, use --session all --checkpoint latest" in out
    )


def test_every_session_is_played(own_run, capsys):
    main([str(own_run), *QUICK, "3", "--session", "all", "--checkpoint", "latest", "--seed", "5"])
    out = capsys.readouterr().out
    written = json.loads((own_run / "evaluation.json").read_text())
    single = [json.loads(path.read_text()) for path in sorted(own_run.glob("session_*/evaluation_*.json"))]
    assert [found["seed"] for found in single] == [5, 6]
    assert written["returns"] == [found["returns"] for found in single]  # sessions x games
    assert written["returns"][0] != written["returns"][1]
    assert written["session_means"] == [found["mean"] for found in single]
    assert written["date"].endswith(" UTC")  # the newest is quoted: in local time, an hour comes twice a year
    assert written["mean"] == pytest.approx(np.mean(written["session_means"]))
    assert written["interval"] is None  # it needs three sessions
    assert (written["checkpoint"], written["cut_off"]) == ("latest", sum(found["cut_off"] for found in single))
    assert written["env_steps"] == [steps_of(own_run / name)[-1] for name in written["sessions"]]
    assert written["sessions"] == ["session_0", "session_1"]
    assert "2 sessions: " in out
    assert "optimistic" not in out


def test_the_best_session_is_named_an_optimistic_pick(own_run, capsys):
    main([str(own_run), *QUICK, "1", "--checkpoint", "latest"])
    assert "note: the best session is an optimistic pick; to quote" in capsys.readouterr().out
    for chosen in ([own_run, "--session", "0"], [own_run / "session_0"]):
        main([*map(str, chosen), *QUICK, "1", "--checkpoint", "latest"])
        assert "optimistic" not in capsys.readouterr().out


def test_a_video_that_fails_without_a_word_has_a_reason(policy, tmp_path, monkeypatch):
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/bin/false")
    with pytest.raises(UserError, match=r"the video could not be written \(ffmpeg ended with 1\)"):
        record_video(policy, tmp_path / "game.mp4")


def test_what_cannot_be_saved_was_shown(own_run, capsys, monkeypatch):
    """A full disk, from the first game on: both sessions are played and shown, and the error names the files."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_a_full_disk(*arguments, **named):
        resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
        return run_evaluation(*arguments, **named)

    monkeypatch.setattr("jaxrl_atari.evaluate.__main__.run_evaluation", on_a_full_disk)
    command = [str(own_run), *QUICK, "2", "--session", "all", "--checkpoint", "latest"]
    try:
        with pytest.raises(UserError, match=r"not saved: .*session_0/evaluation_") as error:
            main(command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(error.value).count("File too large") == 3
    out = capsys.readouterr().out
    assert len(re.findall(r"^ +mean +[\d.]+", out, re.M)) == 3
    assert not list(own_run.rglob("evaluation*"))


@pytest.mark.parametrize("locked", ["session_1", "."])
def test_a_folder_that_cannot_be_written_to_is_named_before_anything_is_played(
    own_run, capsys, monkeypatch, locked
):
    folder = own_run / locked
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder)
    command = [str(own_run), *QUICK, "1", "--session", "all", "--checkpoint", "latest"]
    with pytest.raises(UserError, match=f"^--video: {folder} cannot be written to; leave it out"):
        main([*command, "--video"])
    assert not list(own_run.rglob("evaluation*"))
    main(command)
    assert (
        f"note: {folder} cannot be written to: the results there are shown, not saved" in capsys.readouterr().out
    )


IN_A_CALLBACK = """
import gc, signal
from jaxrl_atari import cli
from jaxrl_atari.evaluate import __main__ as evaluate

def in_a_callback(phase, info):  # Python swallows what it raises
    gc.callbacks.remove(in_a_callback)
    signal.raise_signal(signal.SIGTERM)

def when_the_games_begin(*arguments, **named):
    gc.callbacks.append(in_a_callback)
    gc.collect()
    return play(*arguments, **named)

play = evaluate.run_evaluation
evaluate.run_evaluation = when_the_games_begin
cli.run(evaluate.main)
"""


@pytest.mark.long
def test_a_signal_during_a_callback_ends_the_games(own_run):
    command = [sys.executable, "-c", IN_A_CALLBACK, own_run, *QUICK, "1000000"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100, env=user_environment())
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (130, "interrupted")
    assert not list(own_run.rglob("evaluation*"))


def test_a_session_is_not_left_out(own_run):
    command = [str(own_run), *QUICK, "1", "--session", "all", "--checkpoint", "latest"]
    shutil.rmtree(own_run / "session_1" / "checkpoints")
    with pytest.raises(UserError, match="session_1: holds no checkpoint"):
        main(command)
    shutil.rmtree(own_run / "session_1")
    with pytest.raises(UserError, match="session_1: holds no checkpoint"):
        main(command)
    assert not list(own_run.rglob("evaluation*"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--session", "worst"], "session.*worst"),
        (["--episodes", "0"], "episodes = 0: expected a whole number from 1"),
        (["--num-envs", "-1"], "num-envs = -1"),
        (["--seed", "-1"], "seed = -1"),
        (["--gpu", "7"], "--gpu = 7"),
        (["--gpu", "cuda"], "gpu = 'cuda': expected true or false"),
    ],
)
def test_bad_options(run_dir, options, message):
    before = sorted(run_dir.rglob("*"))
    with pytest.raises(UserError, match=message):
        main([str(run_dir), *options])
    assert sorted(run_dir.rglob("*")) == before
