"""Trials of several sessions in this process, and on two simulated GPUs."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from simulated_gpus import simulated
from small_training import TINY, Lines, change, latest_meta, read_table
from user_commands import ROOT, still_running

from jaxrl_atari import ConfigError, UserError, run_training
from jaxrl_atari.errors import SessionsFailed
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.runs.files import only_writer

TWO = change(TINY, sessions=2, total_env_steps=128)


def read(path):
    return json.loads(path.read_text())


def description(run_dir):
    return read(run_dir / "config.json")


def test_a_trial_returns_its_summary_and_gives_writers_its_log_points(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    seen = Lines()
    run_dir, summary = run_training(TWO, "~/run", [seen])
    assert run_dir == Path(tmp_path / "run")
    assert summary == read(run_dir / "trial.json")
    assert (summary["complete"], len(summary["sessions"])) == (True, 2)
    assert [Checkpoints(run_dir / f"session_{i}").read_meta(128)["seed"] for i in (0, 1)] == [0, 1]
    points = [(row["session"], row["seed"], row["env_steps"]) for row in seen.rows]
    assert points == [(0, 0, 64), (0, 0, 128), (1, 1, 64), (1, 1, 128)]
    assert [row["env_steps"] for row in read_table(run_dir / "session_1/metrics.csv")] == ["64", "128"]


def test_a_finished_run_keeps_what_it_was_trained_with(trained, tmp_path, capsys):
    config = change(TINY, sessions=2)
    run_dir = tmp_path / "run"
    shutil.copytree(trained("plain"), run_dir)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    run_training(config, run_dir)
    assert "session 1  finished already" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in before}
    assert (
        run_training(change(config, sessions=1, ppo={"gae_lambda": 0.5}), run_dir).summary["planned_sessions"] == 1
    )
    assert description(run_dir)["config"] == dataclasses.replace(config, sessions=1).to_dict()


def test_a_resume_as_another_run_is_refused_and_writes_nothing(trained):
    run_dir = trained("plain")
    before = (run_dir / "config.json").read_bytes()
    for changed, message in (
        ({"seed": 9}, "seed = 9: expected 0, with which the run began"),
        ({"env": {"game": "Qbert"}}, "env.game = 'Qbert': expected Breakout, with which"),
        ({"env": {"protocol": "classic"}}, "env.protocol = "),
        ({"total_env_steps": 64}, "total_env_steps = 64: expected at least 252, the env steps of a session"),
    ):
        with pytest.raises(ConfigError) as error:
            run_training(change(TINY, sessions=2, **changed), run_dir)
        assert message in str(error.value)
    with pytest.raises(UserError, match="and no run; choose another folder"):
        run_training(TINY, run_dir / "session_0")
    assert (run_dir / "config.json").read_bytes() == before


def test_a_failed_session_does_not_stop_the_others_and_a_resume_runs_it(tmp_path, capsys):
    config = change(TWO, sessions=2, total_env_steps=64)
    run_dir = tmp_path / "run"
    (run_dir / "session_0").mkdir(parents=True)
    (run_dir / "config.json").write_text(json.dumps({"config": dataclasses.replace(config, sessions=1).to_dict()}))
    message = (
        r"1 of 2 sessions failed \(session 0: .* another process is training .*--resume .* runs what is missing"
    )
    with only_writer(run_dir / "session_0"), pytest.raises(SessionsFailed, match=message) as error:
        run_training(config, run_dir)
    assert error.value.exit_status == 1
    assert "session 0  failed: " in capsys.readouterr().out
    assert (read(run_dir / "trial.json")["complete"], description(run_dir)["config"]["sessions"]) == (False, 2)
    assert run_training(config, run_dir).summary["complete"]
    with only_writer(run_dir), pytest.raises(UserError, match="another process is training there"):
        run_training(config, run_dir)


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
    assert read(tmp_path / "run" / "trial.json") == result.summary
    assert Checkpoints(tmp_path / "run" / "session_0").env_steps() == [128]
    capsys.readouterr()
    assert run_training(config, tmp_path / "run").summary == result.summary
    assert capsys.readouterr().out.count("finished already") == 2
    longer = run_training(dataclasses.replace(config, total_env_steps=320), tmp_path / "run").summary
    assert (longer["complete"], longer["stopped"]) == (True, {})
    assert all(session["env_steps"] > 300 for session in longer["sessions"])


def start(run_dir, config, *options, **variables):
    """A process of the command."""
    file = run_dir.parent / "config.py"
    file.write_text(f"from jaxrl_atari.config import *\nget_config = lambda: {config!r}\n")
    return subprocess.Popen(
        [sys.executable, "-m", "jaxrl_atari.train", "--config", file, "--run-dir", run_dir, *map(str, options)],
        env=os.environ | variables, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def checksums(run_dir):
    """Those of the last checkpoint of both sessions."""
    return [latest_meta(run_dir / f"session_{session}")["checksums"] for session in (0, 1)]


def test_two_sessions_on_two_gpus(trained, tmp_path):
    """Each in a process that sees one GPU; their parameters are those of sessions that train alone."""
    config = change(TINY, sessions=2, devices={"gpu": "auto"})
    run_dir = tmp_path / "run"
    process = start(run_dir, config, **simulated(2), CUDA_OFFSET="1")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert re.findall(r"^session \d  on GPU (\d) \(2 visible, CUDA_OFFSET 1\)$", output, re.M) == ["1", "0"]
    for session in (0, 1):
        assert f"session {session}  device: cpu:1 (devices.gpu = auto" in output
        assert latest_meta(run_dir / f"session_{session}")["config"] == description(run_dir)["config"]
    assert checksums(run_dir) == checksums(trained("plain"))
    assert read(run_dir / "trial.json")["complete"]


def test_each_session_can_be_a_command_of_its_own(trained, tmp_path):
    """As in the array of a cluster: the first makes the run directory, and the last one writes the summary."""
    config = change(TINY, sessions=2)
    run_dir = tmp_path / "run"
    processes = [start(run_dir, config, "--session", session) for session in (1, 0)]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert checksums(run_dir) == checksums(trained("plain"))
    assert read(run_dir / "trial.json")["complete"]
    assert "resumed" not in description(run_dir)


def test_a_resume_changes_config_json_with_its_first_update(trained, tmp_path):
    """Not if its sessions are refused, and not if it is killed before."""
    run_dir = tmp_path / "run"
    shutil.copytree(trained("plain"), run_dir)
    before = (run_dir / "config.json").read_bytes()
    options = ["--total-env-steps", 512, "--trial.parallel", 2]
    with only_writer(run_dir / "session_0"), only_writer(run_dir / "session_1"):
        process = start(run_dir, TINY, *options)
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert output.count("another process is training there") >= 2
    assert (run_dir / "config.json").read_bytes() == before
    process = start(run_dir, TINY, *options)
    while not (run_dir / ".resume.json").exists():
        assert process.poll() is None, process.communicate()
    jobs = psutil.Process(process.pid).children()
    process.kill()
    process.communicate()
    assert not still_running(jobs, seconds=60)
    assert (run_dir / "config.json").read_bytes() == before
    process = start(run_dir, TINY, *options)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert description(run_dir)["config"]["total_env_steps"] == 512
    (entry,) = description(run_dir)["resumed"]
    assert entry["changed"] == {"total_env_steps": [256, 512], "trial.parallel": [0, 2]}
    assert not (run_dir / ".resume.json").exists()


SCRIPT = """
import sys
from jaxrl_atari import UserError, register_network, run_training
from jaxrl_atari.networks import NatureActorCritic
from small_training import TINY, change

register_network("mine", NatureActorCritic)

if __name__ == "__main__":
    config = change(TINY, sessions=2, network={"name": "mine"}, trial={"parallel": 2})
    try:
        run_training(config, sys.argv[1], stop=lambda row: True)
    except UserError as error:
        print("error:", error)
    run_training(config, sys.argv[1])
"""


def test_a_script_trains_in_processes_with_what_it_registers(tmp_path):
    """Writers and a rule to stop stay in its own process, and are refused before a directory is made."""
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", tmp_path / "run"], capture_output=True, text=True, timeout=240,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error: writers and stop need sessions that train in this process" in done.stdout
    assert read(tmp_path / "run/trial.json")["complete"]
    assert (tmp_path / "run/code/script.py").read_text() == SCRIPT
