"""Sessions on the real emulator: what must not be saved, what a stop leaves out, and what a resume starts anew."""

import gc
import math
import re
import shutil
import threading

import jax
import psutil
import pytest
from sample_runs import read_csv
from small_training import TINY, Lines, change, latest_meta
from user_commands import ROOT, python

from jaxrl_atari.errors import UserError
from jaxrl_atari.evaluate.policy import load_policy
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.runs.layout import checkpoint_env_steps
from jaxrl_atari.runs.reading import is_finished
from jaxrl_atari.runs.session_log import NonFiniteError
from jaxrl_atari.session import iterations, open_session, run_session

CPU = jax.devices("cpu")[0]
LARGER = change(TINY, total_env_steps=320)


@pytest.fixture
def session_dir(tmp_path):
    return tmp_path / "session_0"


@pytest.fixture
def copied(trained, session_dir):
    """A finished session."""
    return shutil.copytree(trained("plain") / "session_0", session_dir)


def in_a_process(code, *arguments, **variables):
    """Runs code of a user's in a process of its own; returns its output."""
    ended = python("-c", code, *arguments, cwd=ROOT / "tests", **variables)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


# --- Stops and errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", ["none", "update"])
def test_what_is_not_finite_is_not_saved(overlap, copied):
    before = checkpoint_env_steps(copied)
    wild = change(
        TINY,
        total_env_steps=2560,
        overlap=overlap,
        ppo={"learning_rate": 1, "weight_decay": 10},  # each step multiplies the parameters by 1 - 10
        log={"checkpoint_every_env_steps": 10**6},
    )
    with pytest.raises(NonFiniteError, match=r"training stopped at .* goes on from the last checkpoint"):
        run_session(wild, copied)
    assert checkpoint_env_steps(copied) == before
    with pytest.raises(NonFiniteError, match=r"or ppo\.max_grad_norm$"):
        run_session(wild, copied.with_name("session_1"))


def test_parameters_that_the_last_gradient_step_has_ruined_are_not_saved(copied):
    """The metrics of its update do not show it."""
    with open_session(LARGER, copied) as run:
        state = run.learner.state
        run.learner._state = state.replace(params=jax.tree.map(lambda x: x + math.inf, state.params))
        with pytest.raises(NonFiniteError, match="parameter_norm = "):
            run.save(None)


def test_an_error_leaves_neither_threads_nor_processes(session_dir):
    class Failing(Lines):
        def write(self, row):
            if row["updates"] > 3:
                raise UserError("the disk is full")

    evaluation = {"every_env_steps": 128, "episodes": 9_999}
    config = change(TINY, overlap="update", log={"graphs": True}, evaluation=evaluation)
    write_json(session_dir.parent / "config.json", {"config": config.to_dict()})
    before = psutil.Process().children()
    with pytest.raises(UserError, match="the disk is full"):
        run_session(config, session_dir, writers=[Failing()])
    assert not {*psutil.Process().children()} - {*before}, "graphs were drawn"
    assert not [thread.name for thread in threading.enumerate() if re.match("learner|evaluator", thread.name)]


# --- Evaluations -------------------------------------------------------------------------------------------------


def test_stops_during_the_last_two_evaluations(session_dir):
    """The first one is still running when the last update ends, so that the checkpoint has nothing of the
    second one. Each is stopped once; a resume plays both."""
    config = change(TINY, evaluation={"every_env_steps": 128, "episodes": 1_000})
    with open_session(config, session_dir, stop_requested=lambda: config.is_spent(run.progress.env_steps)) as run:
        for _ in iterations(run):
            pass
        run.finish()
        assert run.is_over
    meta = latest_meta(session_dir)
    first, last = (str(meta[name]) for name in ("evaluated_env_steps", "env_steps"))
    assert first != last
    assert not is_finished(config, session_dir)
    evaluations = session_dir / "evaluations.csv"
    config = change(config, evaluation={"every_env_steps": 128, "episodes": 1})
    with pytest.raises(KeyboardInterrupt):
        run_session(config, session_dir, stop_requested=evaluations.is_file)
    assert [row["env_steps"] for row in read_csv(evaluations)] == [first]
    assert not is_finished(config, session_dir)
    run_session(config, session_dir)
    assert [row["env_steps"] for row in read_csv(evaluations)] == [first, last]
    assert is_finished(config, session_dir)


# --- Resuming ----------------------------------------------------------------------------------------------------


def test_the_arrays_of_a_checkpoint_are_freed_once_the_learner_has_copied_them(copied):
    def live_bytes():
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays())

    before = live_bytes()
    with open_session(LARGER, copied) as run:
        held = live_bytes() - before
        state = sum(array.nbytes for array in jax.tree.leaves(run.learner.state))
    assert state > 10e6
    assert held < 1.2 * state


def test_where_games_cannot_go_on_new_ones_are_started(copied, capsys):
    """With another number of environments, say."""
    at = latest_meta(copied)["env_steps"]
    logged = read_csv(copied / "metrics.csv")
    run_session(change(LARGER, env={"num_envs": 8}), copied)
    out = capsys.readouterr().out
    assert "new games are started (env.num_envs 4 -> 8)\n" in out
    assert f"resumed at {at} env steps" in out
    assert read_csv(copied / "metrics.csv")[: len(logged) - 1] == logged[:-1]
    assert load_policy(copied, "latest", device=CPU).env_steps > at


# --- Other processes ---------------------------------------------------------------------------------------------


def test_keys_do_not_depend_on_the_environment(copied):
    """JAX_DEFAULT_PRNG_IMPL names another implementation of random keys: a session trains and resumes alike."""
    code = (
        "import sys; from small_training import *; from jaxrl_atari.session import run_session;"
        "run_session(TINY, __import__('pathlib').Path(sys.argv[1]))"
    )
    in_a_process(code, other := copied.with_name("session_1"), JAX_DEFAULT_PRNG_IMPL="rbg")
    assert latest_meta(other)["checksums"] == latest_meta(copied)["checksums"]
    run_session(LARGER, other)


def test_whether_a_session_is_finished_is_known_without_starting_jax(copied):
    """The process that starts sessions takes no memory of a GPU."""
    code = (
        "import sys, pathlib, small_training as t; from jaxrl_atari.hardware.settings import has_started;"
        "from jaxrl_atari.runs.reading import is_finished;"
        "print(is_finished(t.TINY, pathlib.Path(sys.argv[1])), has_started())"
    )
    assert in_a_process(code, copied) == "True False\n"


def test_an_offline_run_of_wandb_stays_in_the_session_directory(tmp_path):
    """In a process: wandb starts a service that would outlive the test."""
    pytest.importorskip("wandb", reason="the extra wandb is not installed")
    session_dir = tmp_path / "suite_a" / "Breakout" / "session_0"
    session_dir.mkdir(parents=True)
    code = (
        "import sys, pathlib; from small_training import *; from jaxrl_atari.runs.logs import WandbWriter;"
        "writer = WandbWriter(TINY, pathlib.Path(sys.argv[1]), 'a1b2c3d4');"
        "writer.write({'env_steps': 1024, 'return_mean': 7.25, 'entropy': float('nan')});"
        "writer.evaluation({'env_steps': 1000, 'mean': 3.5, 'std': None}); writer.close()"
    )
    in_a_process(code, session_dir, WANDB_MODE="offline", HOME=str(tmp_path))
    (run_file,) = session_dir.glob("wandb/offline-run-*/run-a1b2c3d4.wandb")
    content = run_file.read_bytes().decode(errors="replace")  # records of protobuf, numbers as JSON text
    for text in ("charts/return_mean", "7.25", "evaluation/return_mean", "3.5", "Breakout", "suite_a-Breakout"):
        assert text in content
    assert not re.search("losses/entropy|charts/env_steps", content), "no NaN, and no axis"
