"""Evaluation on the real emulator: which games are counted, what they score, and what the command writes and
says."""

import dataclasses
import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv
from gymnasium.error import ResetNeeded
from gymnasium.utils.env_checker import check_env
from played_games import area_resize, needs_envpool
from sample_runs import read_csv
from small_training import flip_all

from jaxrl_atari import load_policy, make_env, record_video, run_evaluation
from jaxrl_atari.config import Config, EnvConfig
from jaxrl_atari.envs import env_seeds, make_pool
from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate.__main__ import main
from jaxrl_atari.runs.layout import checkpoint_env_steps

NUM_ACTIONS = 4  # of Breakout
QUICK = ["--gpu", "false", "--num-envs", "2", "--episodes"]


@pytest.fixture
def own_run(trained, tmp_path):
    """A copy of the run, for a test that writes into it."""
    return shutil.copytree(trained("plain"), tmp_path / "own_run")


@pytest.fixture(scope="module")
def policy(trained):
    return load_policy(trained("plain"), device=jax.devices("cpu")[0])


def always(policy, action, **env):
    """The policy, but it always takes one action, in other games of Breakout."""
    head = {"kernel": jnp.zeros((512, NUM_ACTIONS)), "bias": 1e4 * jax.nn.one_hot(action, NUM_ACTIONS)}
    config = dataclasses.replace(policy.config, env=EnvConfig(game="Breakout", **env))
    return dataclasses.replace(policy, config=config, params={**policy.params, "policy": head})


# --- Games -------------------------------------------------------------------------------------------------------


def ale_games(seed, num_envs, quota, max_frames, action):
    """Return, length and cut-off of the first `quota` games of each environment, with ale-py alone."""
    envs = AtariVectorEnv(
        "breakout", num_envs, max_num_frames_per_episode=max_frames, repeat_action_probability=0.0, noop_max=30,
        use_fire_reset=True, reward_clipping=False, episodic_life=False,
    )  # fmt: skip
    envs.reset(seed=np.array(env_seeds(seed, num_envs)))
    games = [[] for _ in range(num_envs)]
    total, length, new = np.zeros(num_envs), np.zeros(num_envs, int), np.zeros(num_envs, bool)
    while min(map(len, games)) < quota:
        _, reward, terminated, truncated, _ = envs.step(np.full(num_envs, action))
        total = np.where(new, 0, total + reward)  # a new game's step only starts it
        length = np.where(new, 0, length + 1)
        new = terminated | truncated
        for i in np.flatnonzero(new):
            games[i].append((total[i], length[i], truncated[i]))
    return [game for env in games for game in env[:quota]]


@pytest.mark.parametrize(("action", "ends"), [(1, "lives"), (3, "cut off")])
def test_returns_are_those_of_the_emulator(policy, action, ends):
    """FIRE loses game after game, at different times; LEFT scores in each, and then waits to be cut off."""
    chosen = always(policy, action, protocol="classic", max_frames=800)
    result = run_evaluation(chosen, episodes=4, num_envs=2, seed=5)
    expected = ale_games(5, num_envs=2, quota=2, max_frames=800, action=action)
    assert sorted((game.episode_return, game.length, game.truncated) for game in result.games) == sorted(expected)
    returns = [game_return for game_return, _, _ in expected]
    assert (result.mean, result.std) == pytest.approx((np.mean(returns), np.std(returns, ddof=1)))
    if ends == "lives":
        assert len({length for _, length, _ in expected}) > 1, "all games alike: this test tests little"
        assert result.num_truncated == 0
    else:
        assert min(returns) > 0, "no score: this test tests little"
        assert result.num_truncated == 4


def test_each_environment_plays_a_fixed_number_of_games_which_the_seed_chooses(trained, policy):
    """The first 3 games to end would be short ones, which are mostly the bad ones."""

    def games(policy, seed):
        config = dataclasses.replace(policy.config, env=EnvConfig(game="Breakout", max_frames=400))
        policy = dataclasses.replace(policy, config=config)
        return run_evaluation(policy, episodes=3, num_envs=2, seed=seed).games

    first = games(policy, seed=1)
    assert Counter(game.env for game in first) == {0: 2, 1: 1}
    assert games(policy, seed=2) != first
    with jax.default_prng_impl("rbg"):  # the user's kind of keys changes nothing
        again = load_policy(trained("plain"), device=jax.devices("cpu")[0])
        assert games(again, seed=1) == first


# --- Policies ----------------------------------------------------------------------------------------------------


def test_a_policy_acts_by_its_logits(policy):
    head = policy.params["policy"] | {"bias": jnp.array([1.0, 0.0, -1.0, -2.0])}
    policy = dataclasses.replace(policy, params={**policy.params, "policy": head})
    frames = np.random.default_rng(0).integers(0, 256, (2, 84, 84, 4), np.uint8)
    outputs = policy.decide(frames, np.zeros(2, bool), (), greedy=True).outputs
    logits = np.asarray(outputs.logits, np.float64)
    expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    probabilities, values = policy.distribution(frames)
    np.testing.assert_allclose(probabilities, expected, rtol=1e-5)
    np.testing.assert_array_equal(values, outputs.value)
    np.testing.assert_array_equal(policy.act(frames, greedy=True), probabilities.argmax(-1))
    actions = np.stack([policy.act(frames, jax.random.key(i)) for i in range(300)])
    for chosen, expected in zip(actions.T, probabilities, strict=True):
        found = np.bincount(chosen, minlength=NUM_ACTIONS) / len(chosen)
        np.testing.assert_allclose(found, expected, atol=5 * 0.5 / np.sqrt(len(chosen)))


def test_frames_and_keys_that_a_policy_cannot_use(policy):
    with pytest.raises(ValueError, match=re.escape("expected uint8 [n, 84, 84, 4], got uint8 [1, 4, 84, 84]")):
        policy.act(np.zeros((1, 4, 84, 84), np.uint8), jax.random.key(0))
    with pytest.raises(ValueError, match="got float32"):
        policy.act(np.zeros((1, 84, 84, 4), np.float32), jax.random.key(0))


def test_a_policy_keeps_to_its_device_and_leaves_the_callers_alone(trained):
    there = jax.devices("cpu")[2]
    policy = load_policy(trained("plain"), device=there)
    assert all(x.devices() == {there} for x in jax.tree.leaves(policy.params))
    decision = policy.decide(np.zeros((2, 84, 84, 4), np.uint8), np.zeros(2, bool), (), greedy=True)
    assert decision.outputs.logits.devices() == {there}
    assert jnp.zeros(()).devices() == {jax.devices("cpu")[0]}


def test_checkpoints_and_sessions_by_name_and_score(trained):
    run_dir = trained("plain")
    scores = {}
    for session in (0, 1):
        session_dir = run_dir / f"session_{session}"
        scores |= {
            (session, int(row["env_steps"])): float(row["return_mean"])
            for row in read_csv(session_dir / "metrics.csv")
            if int(row["env_steps"]) in checkpoint_env_steps(session_dir)
        }
    session, step = max(scores, key=lambda key: (scores[key], -key[0], key[1]))
    best = load_policy(run_dir)
    assert (best.session_dir, best.env_steps) == (run_dir / f"session_{session}", step)
    assert best.config.env.num_threads == 0, "an evaluation uses every core"
    other = load_policy(str(run_dir), "latest", session=1 - session)
    steps = checkpoint_env_steps(other.session_dir)
    assert (other.session_dir, other.env_steps) == (run_dir / f"session_{1 - session}", steps[-1])
    assert load_policy(other.session_dir, steps[0]).env_steps == steps[0]
    with pytest.raises(UserError, match=f"checkpoints/7: .*{', '.join(map(str, steps))}"):
        load_policy(other.session_dir, 7)
    with pytest.raises(UserError, match="session_7: holds no checkpoint"):
        load_policy(run_dir, session=7)


def test_a_damaged_checkpoint_is_never_played(own_run, caplog):
    session_dir = own_run / "session_0"
    *_, before, latest = steps = checkpoint_env_steps(session_dir)
    flip_all(session_dir, latest, "arrays")
    assert load_policy(session_dir, "latest").env_steps == before
    assert f"checkpoints/{latest}: damaged" in caplog.text
    with pytest.raises(UserError, match=f"checkpoints/{latest}: damaged: "):
        load_policy(session_dir, latest)
    for step in steps[:-1]:
        flip_all(session_dir, step, "arrays")
    with pytest.raises(UserError, match="damaged: "):
        load_policy(session_dir, "best")


@needs_envpool
def test_another_back_end_than_that_of_training(own_run):
    main([str(own_run), *QUICK, "2", "--session", "0", "--backend", "envpool"])
    (path,) = own_run.rglob("evaluation_*.json")
    assert json.loads(path.read_text())["backend"] == "envpool"


# --- A Gymnasium environment -------------------------------------------------------------------------------------


def test_the_loop_of_the_page_scores_what_an_evaluation_does(own_run):
    page = (Path(__file__).parents[2] / "docs" / "api" / "python.md").read_text(encoding="utf-8")
    (code,) = (code for code in re.findall(r"```python\n(.*?)```", page, re.S) if "make_env" in code)
    code = re.sub(r'"data/\w+"', repr(str(own_run)), code)
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


def test_gymnasiums_checker_passes():
    env = make_env(Config(env=EnvConfig(game="Breakout")))
    check_env(env.unwrapped)
    env.reset(seed=1)
    assert env.render() is None
    env.close()
    env.close()


# Where another test has drawn, matplotlib refuses the windows in which `play` can show plots.
@pytest.mark.filterwarnings("ignore:.*matplotlib is not installed")
def test_a_person_can_play(monkeypatch):
    pytest.importorskip("pygame")
    from gymnasium.utils.play import PlayableGame

    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    env = make_env(Config(env=EnvConfig(game="Breakout")), render_mode="rgb_array")
    env.reset(seed=1)
    game = PlayableGame(env)
    assert game.relevant_keys == {ord(key) for key in " ad"}
    assert game.video_size == (160, 210)
    assert env.unwrapped.get_keys_to_action()[(ord("a"),)] == 3  # LEFT


def test_ends_and_seeds_of_the_environment():
    env = make_env(Config(env=EnvConfig(game="Breakout", max_frames=80)))
    assert env.reset(seed=9)[1] == {"lives": 5}
    for t in range(20):
        _, _, terminated, truncated, _ = env.step(t % 4)
        assert (terminated, truncated) == (False, t == 19)
    env.reset()
    env.step(2)
    others = [env.reset()[0].tobytes() for _ in range(3)]  # in the middle of a game: others, at random
    assert len({*others, env.reset(seed=9)[0].tobytes()}) > 1


# --- Videos ------------------------------------------------------------------------------------------------------


def test_video_shows_the_game(policy, tmp_path, monkeypatch):
    import imageio_ffmpeg  # not on every machine that runs the other tests, such as a borrowed one with a GPU

    monkeypatch.chdir(tmp_path)
    moves_left = always(policy, 3, protocol="classic", max_frames=240)
    games = record_video(moves_left, "lr:3e-4.mp4", games=2, seed=3, page="game.html")  # to ffmpeg, a protocol
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-i", f"{tmp_path}/lr:3e-4.mp4", "-f", "rawvideo"]
    decoded = subprocess.run(
        [*command, "-pix_fmt", "rgb24", "-fps_mode", "passthrough", "-"], capture_output=True, check=True
    )
    assert re.search(r"Video: h264 .*yuv420p\b.* 480x630\b.* 15 fps", decoded.stderr.decode())
    frames = np.frombuffer(decoded.stdout, np.uint8).reshape(-1, 630, 480, 3)
    lengths = [game.length for game in games]
    assert len(frames) == sum(lengths) + 2  # with the first frame of each game
    assert [game.step for game in games] == [lengths[0] - 1, sum(lengths)]
    page = (tmp_path / "game.html").read_text()
    data = json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])
    ends = [lengths[0], lengths[0] + 1 + lengths[1]]
    assert [data["return"][end] for end in ends] == [game.episode_return for game in games]
    assert data["return"][lengths[0] + 1] == 0
    assert len(data["reward"]) == len(data["return"]) == len(frames) == len(data["action"]) + 1
    assert {*data["action"]} == {3}
    pool = make_pool(moves_left.config.env, 1, seed=3)
    step = pool.reset()
    for t in range(60):
        grey = frames[t, 1::3, 1::3] @ np.array([0.299, 0.587, 0.114])
        assert np.abs(area_resize(grey) - step.frame[0]).mean() < 3, f"frame {t}"  # lossy
        step = pool.step(np.array([3]))


def test_videos_that_cannot_be_written_leave_no_file(policy, tmp_path):
    with pytest.raises(UserError, match="seed = -1: expected a whole number"):
        record_video(policy, tmp_path / "game.mp4", seed=-1)
    with pytest.raises(UserError, match=r"missing/video.mp4: the video could not be written \(.*No such file"):
        record_video(policy, tmp_path / "missing" / "video.mp4")
    assert list(tmp_path.iterdir()) == []


# --- The command -------------------------------------------------------------------------------------------------


def test_a_session(own_run):
    session_dir = own_run / "session_1"
    step = checkpoint_env_steps(session_dir)[-1]
    (own_run / "report.html").touch()  # it is brought up to date
    command = [str(own_run), *QUICK, "3", "--session", "1", "--checkpoint", "latest", "--seed", "4"]
    main([*command, "--greedy", "--video"])
    written = json.loads((session_dir / f"evaluation_{step}.json").read_text())
    assert written["protocol"] == "v5, max_frames=128"
    assert (written["greedy"], written["seed"], written["cut_off"]) == (True, 4, 3)
    assert (written["lengths"], written["truncated"]) == ([32] * 3, [True] * 3)
    expected = run_evaluation(load_policy(session_dir, "latest"), 3, seed=4, greedy=True, num_envs=2)
    assert written["returns"] == expected.returns.tolist()
    assert {f"video_{step}.mp4", f"game_{step}.html"} <= {path.name for path in session_dir.iterdir()}
    assert f"evaluation_{step}.json" in (own_run / "report.html").read_text()

    main(command)  # takes nothing's place
    assert json.loads((session_dir / f"evaluation_{step}.json").read_text()) == written
    assert json.loads((session_dir / f"evaluation_{step}_2.json").read_text())["greedy"] is False


def test_every_session_is_played(own_run):
    main([str(own_run), *QUICK, "3", "--session", "all", "--checkpoint", "latest", "--seed", "5"])
    written = json.loads((own_run / "evaluation.json").read_text())
    single = [json.loads(path.read_text()) for path in sorted(own_run.glob("session_*/evaluation_*.json"))]
    assert [found["seed"] for found in single] == [5, 6]
    assert written["returns"] == [found["returns"] for found in single]  # sessions x games
    assert written["session_means"] == [found["mean"] for found in single]
    assert written["mean"] == pytest.approx(np.mean(written["session_means"]))
    assert written["interval"] is None  # it needs three sessions
    assert (written["checkpoint"], written["cut_off"]) == ("latest", sum(found["cut_off"] for found in single))
    assert written["env_steps"] == [checkpoint_env_steps(own_run / name)[-1] for name in written["sessions"]]
    assert written["sessions"] == ["session_0", "session_1"]


def test_a_session_is_not_left_out(own_run):
    shutil.rmtree(own_run / "session_1" / "checkpoints")
    with pytest.raises(UserError, match="session_1: holds no checkpoint"):
        main([str(own_run), *QUICK, "1", "--session", "all", "--checkpoint", "latest"])
    assert not list(own_run.rglob("evaluation*"))
