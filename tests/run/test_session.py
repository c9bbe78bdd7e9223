"""Sessions on the real emulator: what they log and save, how they stop and fail, what they resume from."""

import re
import shutil
import signal

import jax
import numpy as np
import pytest
from sample_runs import read_csv
from small_training import TINY, Lines, change, contents, flip_all, latest_meta, stop_before

from jaxrl_atari import PPO, register_algorithm, run_training
from jaxrl_atari.cli.signals import StopRequest
from jaxrl_atari.errors import Stopped, UserError
from jaxrl_atari.evaluate.play import run_evaluation
from jaxrl_atari.evaluate.policy import load_policy
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.runs.columns import TIME_COLUMNS
from jaxrl_atari.runs.layout import checkpoint_env_steps
from jaxrl_atari.session import iterations, open_session, run_session

EVALUATED = change(TINY, overlap="update", evaluation={"every_env_steps": 64, "episodes": 20, "num_envs": 1})


@pytest.fixture
def session_dir(tmp_path):
    return tmp_path / "session_0"


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory):
    """The directory of a finished session, with checkpoints of an overlapped update and of a running
    evaluation."""
    session_dir = tmp_path_factory.mktemp("evaluated") / "session_0"
    run_session(EVALUATED, session_dir)
    return session_dir


@pytest.fixture
def copied(evaluated, session_dir):
    return shutil.copytree(evaluated, session_dir)


def resume(session_dir, capsys, **options):
    """Resumes a session to a larger budget; returns what it says."""
    capsys.readouterr()
    run_session(change(TINY, total_env_steps=320, **options), session_dir)
    assert latest_meta(session_dir)["env_steps"] > 256
    steps = [int(row["env_steps"]) for row in read_csv(session_dir / "metrics.csv")]
    assert steps == sorted(set(steps))
    return capsys.readouterr().out


# --- Training ----------------------------------------------------------------------------------------------------


def test_log_points_and_checkpoints_come_at_their_intervals(session_dir):
    """A log point has the means of the updates since the one before, without the newest, which may still run."""
    lines, began = Lines(), []
    config = change(TINY, env={"max_frames": 800}, log={"every_env_steps": 128, "tensorboard": True})
    with open_session(config, session_dir, writers=[lines]) as run:
        losses = [read()["policy_loss"] for read in iterations(run)]
        run.finish()
    assert [(row["updates"], row["env_steps"]) for row in lines.rows] == [(2, 128), (4, 256)]
    assert [row["policy_loss"] for row in lines.rows] == pytest.approx([losses[0], np.mean(losses[1:3])])
    table = read_csv(session_dir / "metrics.csv")
    assert [row["policy_loss"] for row in table] == [f"{row['policy_loss']:.9g}" for row in lines.rows]
    assert float(table[-1]["learning_rate"]) == 0
    assert sum(float(table[-1][name]) for name in TIME_COLUMNS) == pytest.approx(100)
    assert checkpoint_env_steps(session_dir) == [128, 256]
    names = {path.name.split(".")[0] for path in session_dir.iterdir()}
    assert names > {"events", "metrics", "checkpoints", "actions"}
    short = change(TINY, total_env_steps=64)
    run_session(short, session_dir.with_name("session_1"), on_first_update=lambda: began.append(1))
    (row,) = read_csv(session_dir.with_name("session_1") / "metrics.csv")
    assert (began, row["updates"], row["sps"]) == ([1], "1", ""), "of one update, which compiles"


def test_a_session_has_the_seed_of_the_trial_plus_its_number(tmp_path):
    found = []
    for seed, number in ((5, 2), (7, 0), (5, 0)):
        config = change(TINY, seed=seed)
        folder = tmp_path / f"{seed}" / f"session_{number}"
        with open_session(config, folder, number) as run:
            keys, games = (
                jax.tree.map(jax.random.key_data, run.keys(0)),
                run.environments.groups[0][0].cut_segment()[0].anchor_seed,
            )
            found.append(jax.tree.map(np.asarray, (run.learner.state.params["dense"]["kernel"], keys, games)))
    jax.tree.map(np.testing.assert_array_equal, found[0], found[1])
    assert not any(jax.tree.leaves(jax.tree.map(np.array_equal, found[0], found[2])))


# --- Stops and errors --------------------------------------------------------------------------------------------


def test_a_signal_stops_after_the_update_with_a_last_checkpoint(session_dir):
    class Signal(Lines):
        def progress(self, env_steps, row):
            if env_steps > 140:
                signal.raise_signal(signal.SIGTERM)

    with StopRequest(saves=True) as stop, pytest.raises(Stopped):
        run_session(TINY, session_dir, writers=[Signal()], stop_requested=lambda: stop.requested)
    meta = latest_meta(session_dir)
    assert (meta["updates"], meta["score"]) == (3, None)
    assert str(meta["env_steps"]) == read_csv(session_dir / "metrics.csv")[-1]["env_steps"]


def test_a_stop_before_the_first_update_leaves_no_checkpoint(session_dir):
    """An evaluation would play an untrained network and count it in the score."""
    with pytest.raises(Stopped):
        run_session(TINY, session_dir, stop_requested=stop_before(1))
    assert not checkpoint_env_steps(session_dir)


def test_an_error_in_the_first_update_leaves_no_directory(tmp_path):
    def loss(params, apply, batch, options):
        raise ZeroDivisionError("in an idea of the user's own")

    register_algorithm("fails", PPO._replace(loss=loss))
    with pytest.raises(ZeroDivisionError):
        run_training(change(TINY, algorithm="fails"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_training_goes_on_when_an_evaluation_fails(session_dir, monkeypatch, capsys):
    class NoRoms(Lines):
        def progress(self, env_steps, row):
            monkeypatch.setenv("ALE_ROMS_DIR", str(session_dir))

    config = change(TINY, evaluation={"every_env_steps": 64, "episodes": 1})
    run_session(config, session_dir, writers=[NoRoms()])
    output = capsys.readouterr()
    assert re.search(r"evaluation at \d+ env steps failed: FileNotFoundError: .*breakout\.bin", output.out)
    assert config.is_spent(latest_meta(session_dir)["env_steps"])


def test_evaluations_play_the_parameters_of_their_moment(evaluated):
    rows = read_csv(evaluated / "evaluations.csv")
    assert len(rows) >= 2
    step = latest_meta(evaluated)["env_steps"]
    assert int(rows[-1]["env_steps"]) == step
    policy = load_policy(evaluated, step, device=jax.devices("cpu")[0])
    result = run_evaluation(policy, 20, seed=int(rows[-1]["seed"]), num_envs=1)
    assert Checkpoints(evaluated).mean_returns() == {
        int(row["env_steps"]): float(row["mean"])
        for row in rows
        if int(row["env_steps"]) in Checkpoints(evaluated).env_steps()
    }, "a checkpoint is written with each evaluation"
    games, mean, std, cut_off = (float(rows[-1][name]) for name in ("episodes", "mean", "std", "cut_off"))
    assert (games, mean, std, cut_off) == (20, pytest.approx(result.mean), pytest.approx(result.std), 20)


# --- Resuming ----------------------------------------------------------------------------------------------------


def test_a_larger_budget(copied, capsys):
    before = read_csv(copied / "metrics.csv")
    at = latest_meta(copied)["env_steps"]
    assert f"session 0  resumed at {at} env steps (update " in resume(copied, capsys)
    after = read_csv(copied / "metrics.csv")
    assert after[: len(before) - 1] == before[:-1]
    assert float(after[-1]["wall_seconds"]) > float(before[-1]["wall_seconds"])
    assert float(after[len(before)]["learning_rate"]) > 0


@pytest.mark.parametrize("item", ["acting", "games"])
def test_a_damaged_checkpoint_is_passed_over(item, copied, capsys):
    """Here the parameters with which an overlapped update acts, or the games."""
    before, last = checkpoint_env_steps(copied)[-2:]
    flip_all(copied, last, item)
    out = resume(copied, capsys, overlap="update")
    aside = copied / "checkpoints" / f"damaged_{last}"
    assert re.search(rf"session 0  {copied}/checkpoints/{last}: damaged: .*; it is now {aside}\n", out)
    assert f"resumed at {before} env steps" in out
    assert aside.is_dir()
    assert "new games" not in out


def test_a_resume_that_cannot_be_changes_nothing(copied):
    before = contents(copied)
    with pytest.raises(UserError, match="holds another network or optimiser"):
        run_session(change(TINY, network={"name": "impala"}), copied)
    assert contents(copied) == before
    for step in checkpoint_env_steps(copied):
        flip_all(copied, step, "arrays")
    before = contents(copied)
    with pytest.raises(UserError, match="no checkpoint is sound"):
        run_session(TINY, copied)
    assert contents(copied) == before


def test_without_a_checkpoint_a_session_starts_anew_and_sets_its_logs_aside(copied, capsys):
    before = [(copied / name).read_bytes() for name in ("metrics.csv", "evaluations.csv")]
    shutil.rmtree(copied / "checkpoints")
    out = resume(copied, capsys)
    for name in ("metrics_2.csv", "evaluations_2.csv", "actions_2"):
        assert name in out
        assert (copied / name).exists()
    assert [(copied / name).read_bytes() for name in ("metrics_2.csv", "evaluations_2.csv")] == before
    assert read_csv(copied / "metrics.csv")[0]["updates"] == "1"
