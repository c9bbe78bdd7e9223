"""Evaluation on the real emulator: which games are counted, what they score, and what the command writes and says."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ale_py.vector_env import AtariVectorEnv
from sample_runs import flip_bit, table, write_metrics

from jaxrl_atari.config import Config, EnvConfig
from jaxrl_atari.envs import env_seeds, make_pool
from jaxrl_atari.envs.ale import AlePool
from jaxrl_atari.envs.pool import EnvStep, Episode
from jaxrl_atari.envs.protocols import PROTOCOLS
from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate import play as module
from jaxrl_atari.evaluate.__main__ import _scores_to_compare, main
from jaxrl_atari.evaluate.play import EvaluationResult, run_evaluation
from jaxrl_atari.evaluate.policy import find_session, load_policy
from jaxrl_atari.evaluate.video import record_video
from jaxrl_atari.fast.frames import arrange_stacks, empty_window, gather_stacks, push_frame
from jaxrl_atari.learner import abstract_arrays
from jaxrl_atari.runs import checkpoints
from jaxrl_atari.runs.checkpoint_writer import CheckpointWriter
from jaxrl_atari.runs.description import describe
from jaxrl_atari.runs.files import write_json

CPU = jax.devices("cpu")[0]
NUM_ACTIONS = 6  # of Qbert
ONLY_ACTION = 5  # of a made-up policy: scores a little and dies


def write_session(session_dir, scores=(1.0,), env=None, logits_bias=None):
    """A session of Qbert with checkpoints at 1000, 2000, ...: small random weights and a bias on the actions."""
    config = Config(env=env or EnvConfig(game="Qbert", max_frames=1200))
    target = abstract_arrays(config, NUM_ACTIONS, CPU)
    rng = np.random.default_rng(0)
    writer = CheckpointWriter(session_dir)
    for step, score in enumerate(scores, start=1):
        state = jax.tree.map(
            lambda x: jnp.asarray(rng.normal(scale=0.02, size=x.shape), x.dtype), target["train_state"]
        )
        state.params["policy"]["bias"] = jnp.zeros(NUM_ACTIONS) if logits_bias is None else jnp.array(logits_bias)
        best = max((s for s in scores[:step] if not np.isnan(s)), default=None)
        meta = {"config": config.to_dict(), "num_actions": NUM_ACTIONS, "best_score": best}
        writer.save(1000 * step, {"train_state": state, "key": jax.random.key(0)}, meta, score)
    writer.close()
    return session_dir


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of one session."""
    path = tmp_path_factory.mktemp("qbert")
    write_session(path / "session_0", scores=(3.0, 2.0))
    return path


@pytest.fixture(scope="module")
def policy(run_dir):
    return load_policy(run_dir, device=CPU)


@pytest.fixture
def own_run(run_dir, tmp_path):
    """A copy of the run, for a test that writes into it."""
    return shutil.copytree(run_dir, tmp_path / "own_run")


@pytest.fixture(scope="module")
def one_action_policy(tmp_path_factory):
    """Always plays ONLY_ACTION."""
    bias = np.full(NUM_ACTIONS, -1e4, np.float32)
    bias[ONLY_ACTION] = 0
    env = EnvConfig(game="Qbert", protocol="classic", max_frames=2400)
    return load_policy(write_session(tmp_path_factory.mktemp("one"), env=env, logits_bias=bias), device=CPU)


def ale_games(seed, num_envs, quota, max_frames):
    """Returns and lengths of the first `quota` games of each environment, with ale-py alone: [num_envs, quota]."""
    envs = AtariVectorEnv(
        "qbert", num_envs, max_num_frames_per_episode=max_frames, repeat_action_probability=0.0, noop_max=30,
        use_fire_reset=True, reward_clipping=False, episodic_life=False,
    )  # fmt: skip
    envs.reset(seed=np.array(env_seeds(seed, num_envs)))
    games = [[] for _ in range(num_envs)]
    total, length, new = np.zeros(num_envs), np.zeros(num_envs, int), np.zeros(num_envs, bool)
    while min(map(len, games)) < quota:
        _, reward, terminated, truncated, _ = envs.step(np.full(num_envs, ONLY_ACTION))
        for i in range(num_envs):
            if new[i]:  # this step only started the game
                total[i] = length[i] = 0
            else:
                total[i], length[i] = total[i] + reward[i], length[i] + 1
                if terminated[i] or truncated[i]:
                    games[i].append((total[i], length[i]))
        new = terminated | truncated
    return [game for env in games for game in env[:quota]]


def test_an_evaluation_uses_every_core(tmp_path):
    """A session that shared the machine trained with fewer threads."""
    session = write_session(tmp_path, env=EnvConfig(game="Qbert", num_threads=1))
    assert load_policy(session, device=CPU).config.env.num_threads == 0


def test_returns_are_those_of_the_emulator(one_action_policy):
    result = run_evaluation(one_action_policy, episodes=4, num_envs=2, seed=5)
    expected = ale_games(5, num_envs=2, quota=2, max_frames=2400)
    assert sorted((game.episode_return, game.length) for game in result.games) == sorted(expected)
    returns = [game_return for game_return, _ in expected]
    assert min(returns) > 0, "no score: this test tests little"
    assert len(set(expected)) > 1, "all games alike: this test tests little"
    assert result.mean == pytest.approx(np.mean(returns))
    assert result.std == pytest.approx(np.std(returns))


def test_games_follow_the_protocol_and_back_end_of_training(tmp_path, monkeypatch):
    env = EnvConfig(game="Qbert", backend="envpool", protocol="classic", max_frames=80)
    policy = load_policy(write_session(tmp_path, env=env), device=CPU)
    asked = []

    def spy(*arguments, **options):
        asked.append((arguments, options))
        raise LookupError("this is all that was asked")

    rules = PROTOCOLS["classic"]._replace(max_frames=80)
    monkeypatch.setattr("jaxrl_atari.evaluate.play.make_pool", spy)
    monkeypatch.setattr("jaxrl_atari.evaluate.video.AlePool", spy)
    with pytest.raises(LookupError):
        run_evaluation(policy, episodes=3, num_envs=2, seed=5)
    with pytest.raises(LookupError):
        record_video(policy, tmp_path / "game.mp4", seed=5)
    assert asked == [
        (("envpool", "Qbert", 2), {"seed": 5, "num_threads": 0, "rules": rules}),
        (("Qbert", env_seeds(5, 1), 0, rules), {"colour": True}),
    ]


class ScriptedPool:
    """Environment 0 plays games of 3 steps and return 3, environment 1 games of 40 steps and return 40."""

    lengths = np.array([3, 40])

    def __init__(self):
        self.num_envs = 2
        self._age = np.zeros(2, int)

    def reset(self):
        return self._step(first=np.ones(2, bool))

    def step(self, actions):
        first = self._age == self.lengths
        self._age = np.where(first, 0, self._age + 1)
        return self._step(first)

    def _step(self, first):
        no = np.zeros(2, bool)
        ended = self._age == self.lengths
        reward = np.where(first, 0.0, 1.0).astype(np.float32)
        return EnvStep(np.zeros((2, 84, 84), np.uint8), reward, ended, no, no, first)

    def close(self):
        pass


@pytest.mark.parametrize(("episodes", "returns"), [(10, [3] * 5 + [40] * 5), (5, [3] * 3 + [40] * 2)])
def test_short_games_are_not_favoured(policy, monkeypatch, episodes, returns):
    """The first 10 games to end would be 9 or 10 short ones."""
    monkeypatch.setattr(module, "make_pool", lambda *args, **kwargs: ScriptedPool())
    result = run_evaluation(policy, episodes=episodes, num_envs=2)
    assert sorted(result.returns) == returns
    assert sorted(game.length for game in result.games) == returns


def test_same_seed_same_games(policy):
    first, second, other = (run_evaluation(policy, episodes=3, num_envs=3, seed=seed) for seed in (1, 1, 2))
    assert first == second
    assert first != other
    assert all(game.length <= 300 for game in first.games)


def test_cut_off_games_are_marked(tmp_path):
    policy = load_policy(write_session(tmp_path, env=EnvConfig(game="Qbert", max_frames=80)), device=CPU)
    result = run_evaluation(policy, episodes=2)
    assert [game.truncated for game in result.games] == [True, True]
    assert all(game.length <= 20 for game in result.games)


def test_stacks_are_those_of_training():
    """Against `gather_stacks` on a rollout that spans the start of a new game."""
    pool = make_pool("ale", "Qbert", 2, seed=0, num_threads=1, rules=PROTOCOLS["v5"]._replace(max_frames=80))
    steps = [pool.reset(), *(pool.step(np.array([2, 3])) for _ in range(40))]
    pool.close()
    assert sum(step.first.sum() for step in steps[1:]) >= 2
    frames = np.stack([steps[0].frame] * 3 + [step.frame for step in steps])[..., None]
    age = np.zeros((len(steps), 2), np.int32)
    for t in range(1, len(steps)):
        age[t] = np.where(steps[t].first, 0, np.minimum(age[t - 1] + 1, 3))
    window, ages = empty_window(2)
    for t, step in enumerate(steps):
        window, ages, stacks = push_frame(window, ages, step.frame, step.first)
        assert stacks.dtype == np.uint8
        np.testing.assert_array_equal(stacks, gather_stacks(frames, age, 2 * t + np.arange(2)))


def test_a_policy_acts_by_its_logits(policy):
    frames = np.random.default_rng(0).integers(0, 256, (3, 84, 84, 4), np.uint8)
    logits, _ = policy.network.apply(policy.params, arrange_stacks(policy.network.layout, frames))
    probabilities = np.asarray(jax.nn.softmax(logits))
    assert probabilities.max() < 0.9, "nearly certain: this test tests little"
    np.testing.assert_array_equal(policy.act(frames, jax.random.key(0), greedy=True), probabilities.argmax(-1))

    n = 6000
    same = np.repeat(frames[:1], 100, axis=0)
    actions = np.concatenate([policy.act(same, jax.random.key(i)) for i in range(n // 100)])
    assert actions.dtype == np.int32
    found = np.bincount(actions, minlength=NUM_ACTIONS) / n
    np.testing.assert_allclose(found, probabilities[0], atol=5 * 0.5 / np.sqrt(n))


def test_checkpoints_by_name_and_step(run_dir):
    assert load_policy(run_dir).env_steps == 1000  # the best
    assert load_policy(run_dir, "latest").env_steps == 2000
    assert load_policy(run_dir / "session_0", 2000, device=CPU).env_steps == 2000
    with pytest.raises(UserError, match="no checkpoint at env step 7; there are: 1000, 2000"):
        load_policy(run_dir, 7)


def test_best_session_is_taken_and_named(tmp_path):
    for i, scores in enumerate([(np.nan, np.nan), (9.0, 1.0), (5.0, 5.0)]):
        write_session(tmp_path / f"session_{i}", scores)
    (tmp_path / "session_3").mkdir()  # has not saved yet
    assert find_session(tmp_path) == (tmp_path / "session_1", "the best of 4 sessions, --session N picks another")
    assert load_policy(tmp_path).session_dir == tmp_path / "session_1"
    assert load_policy(tmp_path, session=2).session_dir == tmp_path / "session_2"
    with pytest.raises(UserError, match=r"--session 7: .* has no such session; there are: 0, 1, 2, 3"):
        load_policy(tmp_path, session=7)
    with pytest.raises(UserError, match="holds no checkpoints"):
        load_policy(tmp_path, session=3)


def test_to_choose_a_session_changes_no_file(tmp_path):
    """Evaluation may read a run that somebody else trains: a damaged config.json is left to the training's resume."""
    write_session(tmp_path / "session_0")
    (tmp_path / "config.json").write_text("{")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert find_session(tmp_path)[0].name == "session_0"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_damaged_latest_checkpoint_is_replaced_by_the_one_before_with_a_line(tmp_path, caplog):
    session_dir = write_session(tmp_path / "session_0", (3.0, 2.0))
    largest = max((session_dir / "checkpoints" / "2000").rglob("[0-9]*"), key=lambda path: path.stat().st_size)
    flip_bit(largest)
    assert load_policy(tmp_path, "latest", CPU).env_steps == 1000
    (record,) = caplog.records
    assert re.search(
        r"checkpoints/2000: damaged: its arrays? .*; the one at env step 1000 is used$", record.getMessage()
    )
    assert load_policy(tmp_path, "best", CPU).env_steps == 1000, "the best is sound"
    with pytest.raises(UserError, match=r"checkpoints/2000: damaged: its arrays? .*; other checkpoints: 1000$"):
        load_policy(tmp_path, 2000, CPU)


def test_a_damaged_best_checkpoint_is_an_error(tmp_path):
    session_dir = write_session(tmp_path / "session_0", (3.0, 2.0))
    largest = max((session_dir / "checkpoints" / "1000").rglob("[0-9]*"), key=lambda path: path.stat().st_size)
    flip_bit(largest)
    with pytest.raises(UserError, match=r"checkpoints/1000: damaged: its arrays? .*; other checkpoints: 2000$"):
        load_policy(tmp_path, "best", CPU)
    flip_bit(largest)
    flip_bit(session_dir / "checkpoints" / "2000" / "meta" / "metadata")  # its score is unknown: it may be the best
    with pytest.raises(UserError, match=r"checkpoints/2000: damaged: its meta .*; other checkpoints: 1000$"):
        load_policy(tmp_path, "best", CPU)


def test_a_session_with_a_damaged_meta_is_ranked_by_its_other_checkpoints(tmp_path, caplog):
    for i, scores in enumerate([(1.0, 2.0), (9.0, 1.0)]):
        write_session(tmp_path / f"session_{i}", scores)
    flip_bit(tmp_path / "session_1" / "checkpoints" / "2000" / "meta" / "metadata")
    assert find_session(tmp_path)[0] == tmp_path / "session_1"
    assert "session_1/checkpoints/2000: damaged: " in caplog.text


@pytest.mark.parametrize(("checkpoint", "deleted", "left"), [("best", 1000, 2000), ("latest", 2000, 1000)])
def test_a_checkpoint_that_the_training_deletes_meanwhile(tmp_path, monkeypatch, checkpoint, deleted, left):
    session_dir = write_session(tmp_path / "session_0", scores=(2.0, 1.0))
    read_arrays, opened = checkpoints.read_arrays, []

    def read_late(folder, target):
        opened.append(int(folder.parent.name))
        if len(opened) == 1:
            shutil.rmtree(folder.parent)
        return read_arrays(folder, target)

    monkeypatch.setattr(checkpoints, "read_arrays", read_late)
    assert load_policy(session_dir, checkpoint, device=CPU).env_steps == left
    assert opened == [deleted, left]


def read_video(path):
    """What ffmpeg says of a video, and its frames: uint8 [n, 630, 480, 3]."""
    import imageio_ffmpeg  # not on every machine that runs the other tests, such as a borrowed one with a GPU

    ffmpeg = imageio_ffmpeg.get_ffmpeg_exe()
    command = [ffmpeg, "-i", str(path), "-f", "rawvideo", "-pix_fmt", "rgb24", "-fps_mode", "passthrough", "-"]
    decoded = subprocess.run(command, capture_output=True, timeout=120, check=True)
    return decoded.stderr.decode(), np.frombuffer(decoded.stdout, np.uint8).reshape(-1, 630, 480, 3)


def test_video_shows_the_game(one_action_policy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = Path("lr:3e-4.mp4")  # to ffmpeg, a relative one looks like a protocol
    game = record_video(one_action_policy, path, seed=3)
    path = path.absolute()
    said, frames = read_video(path)
    assert re.search(r"Video: h264 .*yuv420p\b.* 480x630\b.* 15 fps", said)
    assert len(frames) == game.length + 1  # with the one before the first step
    assert [p.name for p in tmp_path.iterdir()] == ["lr:3e-4.mp4"]

    pool = AlePool("Qbert", env_seeds(3, 1), 0, PROTOCOLS["classic"]._replace(max_frames=2400), colour=True)
    pool.reset()
    for t in range(60):
        shown = frames[t, 1::3, 1::3].astype(float)
        assert np.abs(shown - pool.screen[0]).mean() < 8, f"frame {t}"  # lossy, and colours at half resolution
        pool.step(np.array([ONLY_ACTION]))
    pool.close()


def test_two_videos_of_a_checkpoint_at_once(tmp_path, monkeypatch, capsys):
    """The other command has written its video while this one was recording."""
    other = write_session(tmp_path / "session_0") / "video_1000.mp4"

    def record_video(policy, path, seed, greedy):
        assert path.parent == other.parent
        path.write_bytes(b"mine")
        other.write_bytes(b"of the other")
        return Episode(0, 1.0, 2, False)

    monkeypatch.setattr("jaxrl_atari.evaluate.__main__.record_video", record_video)
    result = EvaluationResult((Episode(0, 1.0, 2, False),))
    monkeypatch.setattr("jaxrl_atari.evaluate.__main__.run_evaluation", lambda *options: result)
    main([str(tmp_path), "--checkpoint", "latest", "--gpu", "false", "--video"])
    written = other.with_name("video_1000_2.mp4")
    assert (other.read_bytes(), written.read_bytes()) == (b"of the other", b"mine")
    assert f"written: {written}" in capsys.readouterr().out


def test_video_that_cannot_be_written(one_action_policy, tmp_path):
    for seed in (-1, 2**63):
        with pytest.raises(UserError, match=f"seed = {seed}: expected a whole number from 0 to 4294967295"):
            record_video(one_action_policy, tmp_path / "game.mp4", seed=seed)
    with pytest.raises(UserError, match=r"missing/video.mp4: the video could not be written \(.*No such file"):
        record_video(one_action_policy, tmp_path / "missing" / "video.mp4")


def test_command_prints_and_writes(own_run, capsys, monkeypatch):
    main([str(own_run), "--episodes", "2", "--checkpoint", "latest", "--greedy", "--gpu", "false", "--video"])
    out = capsys.readouterr().out
    session_dir = own_run / "session_0"
    written = json.loads((session_dir / "evaluation_2000.json").read_text())
    assert written["protocol"] == "v5, max_frames=1200"
    assert written["greedy"] is True
    assert len(written["returns"]) == len(written["lengths"]) == 2
    assert written["mean"] == pytest.approx(np.mean(written["returns"]))
    assert f"{written['mean']:,.1f}" in out
    assert "Qbert, protocol v5, max_frames=1200, 2 full games, greedy actions" in out
    assert "the only session" in out
    assert "not compared: " in out
    assert "human tester (as in DQN Zoo) 13,455.0" in _scores_to_compare(EnvConfig())
    assert len(read_video(session_dir / "video_2000.mp4")[1]) > 2

    reported = []
    monkeypatch.setattr("jaxrl_atari.evaluate.__main__.try_report", reported.append)
    (own_run / "report.html").touch()  # a report is brought up to date
    main([str(own_run), "--episodes", "1", "--checkpoint", "latest", "--gpu", "false"])  # takes nothing's place
    assert reported == [own_run]
    assert json.loads((session_dir / "evaluation_2000.json").read_text()) == written
    assert json.loads((session_dir / "evaluation_2000_2.json").read_text())["greedy"] is False


def test_results_that_cannot_be_written_are_refused_before_a_game_is_played(run_dir, monkeypatch):
    refuses = SimpleNamespace(access=lambda path, mode: False, W_OK=os.W_OK)
    monkeypatch.setattr("jaxrl_atari.evaluate.__main__.os", refuses)
    monkeypatch.setattr("jaxrl_atari.evaluate.__main__.run_evaluation", lambda *_, **__: pytest.fail("it played"))
    with pytest.raises(UserError, match="session_0: cannot be written to; the results go there, so copy the run"):
        main([str(run_dir), "--episodes", "1", "--gpu", "false"])


def test_the_default_is_named_an_optimistic_pick(own_run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "jaxrl_atari.evaluate.__main__.run_evaluation", lambda *options: EvaluationResult((Episode(0, 1.0, 2, False),))
    )
    main([str(own_run), "--episodes", "1", "--gpu", "false"])
    advice = "is an optimistic pick; to quote a score, use --sessions all --checkpoint latest"
    assert f"note: the best checkpoint {advice}" in capsys.readouterr().out
    main([str(own_run), "--episodes", "1", "--gpu", "false", "--checkpoint", "latest"])
    assert "optimistic" not in capsys.readouterr().out
    for i in range(2):
        write_session(tmp_path / f"session_{i}")
    main([str(tmp_path), "--episodes", "1", "--gpu", "false"])
    assert f"note: the best checkpoint {advice}" in capsys.readouterr().out


def test_every_session_is_played_and_the_interval_is_over_sessions(tmp_path, capsys):
    for i, scores in enumerate([(3.0, 2.0), (9.0, 1.0)]):
        write_session(tmp_path / f"session_{i}", scores, EnvConfig(game="Qbert", max_frames=600))
    options = ["--sessions", "all", "--checkpoint", "latest", "--episodes", "3", "--num-envs", "3", "--gpu", "false"]
    main([str(tmp_path), *options, "--seed", "5"])
    out = capsys.readouterr().out
    written = json.loads((tmp_path / "evaluation.json").read_text())
    single = [json.loads((tmp_path / f"session_{i}" / "evaluation_2000.json").read_text()) for i in range(2)]
    assert [found["seed"] for found in single] == [5, 6]
    assert written["matrix"] == [found["returns"] for found in single]  # sessions x games
    assert written["matrix"][0] != written["matrix"][1]
    assert written["session_means"] == [found["mean"] for found in single]
    assert written["date"].endswith(" UTC")  # the newest is quoted: in local time, an hour comes twice a year
    assert written["mean"] == pytest.approx(np.mean([found["mean"] for found in single]))
    # Of two sessions, a quarter of the resamples has only the worse one, and a quarter only the better one.
    assert written["interval"] == sorted(found["mean"] for found in single)
    assert (written["checkpoint"], written["env_steps"]) == ("latest", [2000, 2000])
    assert written["sessions"] == ["session_0", "session_1"]
    low, high = written["interval"]
    assert f"95% interval over sessions: {low:,.1f} to {high:,.1f}" in out
    assert "optimistic" not in out

    result = run_evaluation(load_policy(tmp_path, "latest", CPU, session=1), episodes=3, num_envs=3, seed=6)
    assert result.returns.tolist() == written["matrix"][1]  # what the session alone would play


def test_one_session_has_no_interval(tmp_path, monkeypatch, capsys):
    write_session(tmp_path / "session_0")
    result = EvaluationResult((Episode(0, 1.0, 2, False), Episode(0, 3.0, 2, False)))
    monkeypatch.setattr("jaxrl_atari.evaluate.__main__.run_evaluation", lambda *options: result)
    main([str(tmp_path), "--sessions", "all", "--gpu", "false"])
    written = json.loads((tmp_path / "evaluation.json").read_text())
    assert (written["mean"], written["interval"], written["session_means"]) == (2.0, None, [2.0])
    assert written["matrix"] == [[1.0, 3.0]]
    assert "95% interval over sessions: -" in capsys.readouterr().out


def test_a_session_that_was_given_up_is_not_played(tmp_path, monkeypatch, capsys):
    for session, score in enumerate((1.0, 2.0, 9.0)):
        write_metrics(tmp_path / f"session_{session}", table([score], [500]))
        write_session(tmp_path / f"session_{session}", [score])
    config = load_policy(tmp_path, "latest", CPU).config
    result = EvaluationResult((Episode(0, 1.0, 2, False),))
    monkeypatch.setattr("jaxrl_atari.evaluate.__main__.run_evaluation", lambda *options: result)
    for sessions, found in ((3, [0, 1, 2]), (2, [0, 1])):
        write_json(tmp_path / "config.json", describe(dataclasses.replace(config, sessions=sessions)))
        main([str(tmp_path), "--sessions", "all", "--gpu", "false"])
        written = max(tmp_path.glob("evaluation*.json"), key=lambda path: path.stat().st_mtime_ns)
        assert json.loads(written.read_text())["sessions"] == [f"session_{session}" for session in found]
        assert find_session(tmp_path)[0].name == f"session_{found[-1]}"
    shutil.rmtree(tmp_path / "session_1")
    with pytest.raises(UserError, match="1 of 2 sessions have begun"):
        main([str(tmp_path), "--sessions", "all", "--gpu", "false"])


def test_a_session_without_a_checkpoint_is_an_error_and_not_left_out(tmp_path):
    write_session(tmp_path / "session_0")
    (tmp_path / "session_1").mkdir()
    with pytest.raises(UserError, match="session_1: holds no checkpoints"):
        main([str(tmp_path), "--sessions", "all", "--checkpoint", "latest", "--gpu", "false"])
    assert not list(tmp_path.rglob("evaluation*"))


def test_a_session_that_has_not_begun_is_an_error_and_not_left_out(tmp_path, monkeypatch):
    write_session(tmp_path / "session_0")
    config = dataclasses.replace(load_policy(tmp_path, "latest", CPU).config, sessions=2)
    monkeypatch.setattr("jaxrl_atari.evaluate.__main__.load_policy", lambda *arguments: SimpleNamespace(config=config))
    with pytest.raises(UserError, match="1 of 2 sessions have begun; finish it first"):
        main([str(tmp_path), "--sessions", "all", "--checkpoint", "latest", "--gpu", "false"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--sessions", "all", "--session", "0"], "--session 0: --sessions all plays every session"),
        (["--episodes", "0"], "episodes = 0: expected a whole number >= 1"),
        (["--num-envs", "-1"], "num_envs = -1"),
        (["--seed", "-1"], "seed = -1"),
        (["--checkpoint", "5"], "no checkpoint at env step 5; there are: 1000, 2000"),
        (["--session", "4"], "has no such session"),
        (["--gpu", "7"], "--gpu = 7"),
    ],
)
def test_bad_options(run_dir, options, message):
    before = sorted(run_dir.rglob("*"))
    with pytest.raises(UserError, match=message):
        main([str(run_dir), *options])
    assert sorted(run_dir.rglob("*")) == before


def test_not_a_run_directory(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        load_policy(tmp_path / "missing")
    with pytest.raises(UserError, match="not a run directory"):
        load_policy(tmp_path)
    (tmp_path / "session_0").mkdir()
    with pytest.raises(UserError, match="none of its sessions has a checkpoint yet"):
        load_policy(tmp_path)
    (tmp_path / "session_0" / "checkpoints").mkdir()
    with pytest.raises(UserError, match="none of its sessions has a checkpoint yet"):
        load_policy(tmp_path)


def test_every_step_draws_with_a_key_of_its_own():
    keys, options = [], []

    def act(stacks, key, greedy):
        keys.append(tuple(jax.random.key_data(key).tolist()))
        options.append(greedy)
        return np.zeros(2, np.int32)

    stand_in = SimpleNamespace(act=act, device=CPU)
    list(module.play(stand_in, ScriptedPool(), np.array([2, 1]), seed=0, greedy=True))
    assert len(set(keys)) == len(keys) == 40
    assert all(options)
    list(module.play(stand_in, ScriptedPool(), np.array([1, 0]), seed=1, greedy=True))
    assert len(set(keys)) == len(keys) > 40  # another seed, other keys


def test_the_command_applies_its_options(run_dir, monkeypatch):
    asked = []

    def record(policy, *options):
        asked.append(options[:4])
        return EvaluationResult((Episode(0, 1.0, 2, False),))

    monkeypatch.setattr("jaxrl_atari.evaluate.__main__.run_evaluation", record)
    options = ["--episodes", "3", "--seed", "7", "--num-envs", "2", "--gpu", "false"]
    main([str(run_dir), *options, "--greedy"])
    main([str(run_dir), *options])
    assert asked == [(3, 7, True, 2), (3, 7, False, 2)]


def test_a_policy_acts_on_the_device_it_is_given(run_dir):
    there = jax.devices("cpu")[2]
    policy = load_policy(run_dir, device=there)
    assert policy.device == there
    assert all(x.devices() == {there} for x in jax.tree.leaves(policy.params))
