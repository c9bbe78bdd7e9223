"""Sessions as processes: on two simulated GPUs, as commands of their own, killed in a resume, from a script."""

import os
import re
import shutil

import psutil
from simulated_gpus import simulated
from small_training import TINY, change, contents, latest_meta
from user_commands import ROOT, python, start, still_running

from jaxrl_atari.runs.files import only_writer, read_json

TWO = change(TINY, sessions=2, total_env_steps=128)


def train(run_dir, config, *options, **variables):
    """A process of the command."""
    file = run_dir.parent / "config.py"
    file.write_text(f"from jaxrl_atari.config import *\nget_config = lambda: {config!r}\n")
    return start(["-m", "jaxrl_atari.train", "--config", file, "--run-dir", run_dir, *options], **variables)


def checksums(run_dir):
    """Those of the last checkpoint of both sessions."""
    return [latest_meta(run_dir / f"session_{session}")["checksums"] for session in (0, 1)]


def test_two_sessions_on_two_gpus(trained, tmp_path):
    """Each in a process that sees one GPU; their parameters are those of sessions that train alone."""
    config = change(TINY, sessions=2, devices={"gpu": "auto"})
    run_dir = tmp_path / "run"
    process = train(run_dir, config, **simulated(2), CUDA_OFFSET="1")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert re.findall(r"^session \d  on GPU (\d) \(2 visible, CUDA_OFFSET 1\)$", output, re.M) == ["1", "0"]
    described = read_json(run_dir / "config.json")
    for session in (0, 1):
        assert f"session {session}  device: cpu:1 (devices.gpu = auto" in output
        assert latest_meta(run_dir / f"session_{session}")["config"] == described["config"]
    assert checksums(run_dir) == checksums(trained("plain"))
    assert read_json(run_dir / "trial.json")["complete"]


def test_each_session_can_be_a_command_of_its_own(trained, tmp_path):
    """As in the array of a cluster: the first makes the run directory, and the last one writes the summary."""
    config = change(TINY, sessions=2)
    run_dir = tmp_path / "run"
    processes = [train(run_dir, config, "--session", session) for session in (1, 0)]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert checksums(run_dir) == checksums(trained("plain"))
    assert read_json(run_dir / "trial.json")["complete"]
    assert "resumed" not in read_json(run_dir / "config.json")
    before = contents(run_dir / "session_1")
    again = train(run_dir, config, "--session", 1)
    assert (again.communicate(timeout=240), again.returncode)[1] == 0
    assert contents(run_dir / "session_1") == before, "a finished session is left as it is"


def test_a_resume_changes_config_json_with_its_first_update(trained, tmp_path):
    """Not if its sessions are refused, and not if it is killed before."""
    run_dir = tmp_path / "run"
    shutil.copytree(trained("plain"), run_dir)
    before = (run_dir / "config.json").read_bytes()
    options = ["--total-env-steps", 512, "--trial.parallel", 2]
    with only_writer(run_dir / "session_0"), only_writer(run_dir / "session_1"):
        process = train(run_dir, TINY, *options)
        output, _ = process.communicate(timeout=240)
    assert process.returncode == 1, output
    assert output.count("another process is training there") >= 2
    assert (run_dir / "config.json").read_bytes() == before
    process = train(run_dir, TINY, *options)
    while not (run_dir / ".resume.json").exists():
        assert process.poll() is None, process.communicate()
    jobs = psutil.Process(process.pid).children()
    process.kill()
    process.communicate()
    assert not still_running(jobs, seconds=60)
    assert (run_dir / "config.json").read_bytes() == before
    process = train(run_dir, TINY, *options)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    described = read_json(run_dir / "config.json")
    assert described["config"]["total_env_steps"] == 512
    (entry,) = described["resumed"]
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
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    done = python(tmp_path / "script.py", tmp_path / "run", PYTHONPATH=paths)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "error: writers and stop need sessions that train in this process" in done.stdout
    assert read_json(tmp_path / "run/trial.json")["complete"]
    assert (tmp_path / "run/code/script.py").read_text() == SCRIPT
