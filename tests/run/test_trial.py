"""Trials of several sessions in this process."""

import dataclasses
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sample_runs import read_csv
from small_training import TINY, Lines, change, contents

from jaxrl_atari import ConfigError, UserError, run_training
from jaxrl_atari.config import LogConfig
from jaxrl_atari.errors import SessionsFailed
from jaxrl_atari.evaluate.policy import load_parameters
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.runs.files import only_writer, read_json, write_json
from jaxrl_atari.trials.trial import reached_limit, with_init_digest

TWO = change(TINY, sessions=2, total_env_steps=128)


def test_a_trial_returns_its_summary_and_gives_writers_its_log_points(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    seen = Lines()
    run_dir, summary = run_training(TWO, "~/run", [seen])
    assert run_dir == Path(tmp_path / "run")
    assert summary == read_json(run_dir / "trial.json")
    assert (summary["complete"], len(summary["sessions"])) == (True, 2)
    assert [Checkpoints(run_dir / f"session_{i}").read_meta(128)["seed"] for i in (0, 1)] == [0, 1]
    points = [(row["session"], row["seed"], row["env_steps"]) for row in seen.rows]
    assert points == [(0, 0, 64), (0, 0, 128), (1, 1, 64), (1, 1, 128)]
    assert [row["env_steps"] for row in read_csv(run_dir / "session_1/metrics.csv")] == ["64", "128"]


def test_a_finished_run_keeps_what_it_was_trained_with(trained, tmp_path, capsys):
    config = change(TINY, sessions=2)
    run_dir = tmp_path / "run"
    shutil.copytree(trained("plain"), run_dir)
    before = contents(run_dir)
    run_training(config, run_dir)
    assert "session 1  finished already" in capsys.readouterr().out
    assert before.items() <= contents(run_dir).items()
    fewer = run_training(change(config, sessions=1, ppo={"gae_lambda": 0.5}), run_dir)
    assert len(fewer.summary["sessions"]) == 1
    assert read_json(run_dir / "config.json")["config"] == dataclasses.replace(config, sessions=1).to_dict()


def test_a_resume_as_another_run_is_refused_and_writes_nothing(trained):
    run_dir = trained("plain")
    before = (run_dir / "config.json").read_bytes()
    for changed, message in (
        ({"seed": 9}, "seed = 9: expected 0, with which the run began"),
        ({"env": {"game": "Qbert"}}, "env.game = 'Qbert': expected Breakout, with which"),
        ({"total_env_steps": 64}, "total_env_steps = 64: expected at least 252, the env steps of a session"),
    ):
        with pytest.raises(ConfigError) as error:
            run_training(change(TINY, sessions=2, **changed), run_dir)
        assert message in str(error.value)
    with pytest.raises(UserError, match="and no run; choose another folder"):
        run_training(TINY, run_dir / "session_0")
    assert (run_dir / "config.json").read_bytes() == before


def test_a_failed_session_does_not_stop_the_others_and_a_resume_runs_it(tmp_path, capsys):
    config = change(TWO, total_env_steps=64)
    run_dir = tmp_path / "run"
    (run_dir / "session_0").mkdir(parents=True)
    write_json(run_dir / "config.json", {"config": dataclasses.replace(config, sessions=1).to_dict()})
    message = (
        r"1 of 2 sessions failed \(session 0: .* another process is training .*--resume .* runs what is missing"
    )
    with only_writer(run_dir / "session_0"), pytest.raises(SessionsFailed, match=message) as error:
        run_training(config, run_dir)
    assert error.value.exit_status == 1
    assert "session 0  failed: " in capsys.readouterr().out
    assert not read_json(run_dir / "trial.json")["complete"]
    assert read_json(run_dir / "config.json")["config"]["sessions"] == 2
    assert run_training(config, run_dir).summary["complete"]
    with only_writer(run_dir), pytest.raises(UserError, match="another process is training there"):
        run_training(config, run_dir)


def test_a_trial_starts_from_a_trained_network(trained, tmp_path, capsys):
    """Also of a game with other actions: the arrays of another shape are new, and a line names them."""
    source = trained("plain") / "session_0"
    start = {"init_from": str(source), "init_checkpoint": "latest"}
    kept = change(TINY, total_env_steps=64, ppo={"learning_rate": 0.0}, **start)
    capsys.readouterr()
    run_training(change(kept, env={"game": "Pong"}), tmp_path / "pong")
    expected = load_parameters(source, "latest")
    found = load_parameters(tmp_path / "pong", "latest")
    new = {path for path in expected if not np.array_equal(found[path], expected[path])}
    assert new == {"policy/bias", "policy/kernel"}
    assert "random: policy/bias float32[6], policy/kernel float32[512, 6]" in capsys.readouterr().out
    recorded = read_json(tmp_path / "pong" / "config.json")["config"]
    assert recorded["init_from"] == str(source)

    np.savez(tmp_path / "mine.npz", **expected)
    from_file = dataclasses.replace(
        kept, init_from=str(tmp_path / "mine.npz"), init_digest=recorded["init_digest"]
    )
    run_training(from_file, tmp_path / "from_file")
    found = load_parameters(tmp_path / "from_file", "latest")
    assert all(np.array_equal(found[path], expected[path]) for path in expected)

    again = with_init_digest(change(from_file, init_digest=None))  # as a suite and a search keep it
    assert again == from_file
    # The parent of jobs must not start JAX, which would take the GPUs.
    code = "from jaxrl_atari.evaluate.policy import parameters_digest as f; import sys; print(f(*sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(source), "latest"]
    no_jax = os.environ | {"JAX_PLATFORMS": "none"}
    assert subprocess.check_output(command, text=True, env=no_jax).strip() == recorded["init_digest"]
    np.savez(tmp_path / "mine.npz", **expected | {"value/bias": np.ones(1, np.float32)})
    with pytest.raises(UserError, match="holds other parameters than when the run began"):
        run_training(from_file, tmp_path / "changed")


def test_a_trial_starts_from_a_network_that_learned_with_parameters_of_the_algorithm(tmp_path):
    short = change(TINY, total_env_steps=64, algorithm="rnd")
    run_training(short, tmp_path / "rnd")
    kept = change(short, algorithm="ppo", init_from=str(tmp_path / "rnd"), ppo={"learning_rate": 0.0})
    run_training(kept, tmp_path / "ppo")
    found, expected = (load_parameters(tmp_path / name, "latest") for name in ("ppo", "rnd"))
    assert all(np.array_equal(found[path], expected[path]) for path in expected)


def test_a_limit_of_the_log_options_ends_a_session(tmp_path):
    config = change(TINY, log={"stop_after_hours": 1e-9})
    summary = run_training(config, tmp_path / "run").summary
    (stopped,) = summary["stopped"].values()
    assert (summary["complete"], stopped["env_steps"]) == (True, 64)
    assert "log.stop_after_hours" in stopped["reason"]

    def is_over(episodes, return_mean):
        row = {"episodes": episodes, "return_mean": return_mean, "wall_seconds": 0.0}
        return reached_limit(LogConfig(stop_at_return=18.0), row) != ""

    assert not is_over(0, math.nan)
    assert not is_over(99, 20.0), "too few games for a mean of 100"
    assert not is_over(100, 17.9)
    assert is_over(100, 18.0)


def test_a_stop_rule_ends_sessions_as_if_their_budget_were_spent(tmp_path, capsys):
    asked = []

    def stop(row):
        asked.append((row["session"], row["env_steps"], row["return_mean"] > 400))
        return "far enough" if row["session"] == 1 else row["env_steps"] >= 128

    config = change(TINY, sessions=2)
    result = run_training(config, tmp_path / "run", stop=stop)
    assert [entry[:2] for entry in asked] == [(0, 64), (0, 128), (1, 64)]
    assert not asked[0][2], "no game has ended"
    expected = {
        "session_0": {"env_steps": 128, "reason": "stop(row) was true at this log point"},
        "session_1": {"env_steps": 64, "reason": "far enough"},
    }
    assert (result.summary["complete"], result.summary["stopped"]) == (True, expected)
    assert read_json(tmp_path / "run" / "trial.json") == result.summary
    checkpoints = Checkpoints(tmp_path / "run" / "session_0")
    assert (checkpoints.env_steps(), checkpoints.best_env_steps()) == ([128], 128), "it has a score"
    capsys.readouterr()
    assert run_training(config, tmp_path / "run").summary == result.summary
    assert capsys.readouterr().out.count("finished already") == 2
    longer = run_training(dataclasses.replace(config, total_env_steps=320), tmp_path / "run").summary
    assert (longer["complete"], longer["stopped"]) == (True, {})
    assert all(session["env_steps"] > 300 for session in longer["sessions"])
