"""Trials of several sessions: real processes on simulated GPUs, signals, failures, resuming."""

import dataclasses
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from sample_runs import table, write_checkpoint, write_metrics
from user_commands import ROOT

from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, LogConfig, PPOConfig, TrialConfig
from jaxrl_atari.errors import SessionsFailed, UserError
from jaxrl_atari.hardware.gpus import SIMULATED
from jaxrl_atari.hardware.memory_share import FRACTION
from jaxrl_atari.report.summary import write_trial_summary
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.runs.config_file import read_config
from jaxrl_atari.runs.description import describe, make_run_dir, write_description
from jaxrl_atari.runs.files import only_writer, write_json
from jaxrl_atari.suite import session_worker as worker
from jaxrl_atari.suite import trial
from jaxrl_atari.suite.processes import Failure, Task, run_processes
from jaxrl_atari.suite.trial import run_training, run_trial


def test_two_sessions_on_two_gpus(tmp_path):
    options = "--sessions 2 --total-env-steps 32 --env.num-envs 2 --env.num-threads 1 --ppo.rollout-length 8"
    options += " --ppo.minibatch-size 16 --ppo.epochs 1 --log.no-graphs --log.no-tensorboard"
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "jaxrl_atari.train", "--config", "configs/qbert.py", "--run-dir", str(run_dir)]
    environment = os.environ | {SIMULATED: "2", "CUDA_OFFSET": "1"}
    done = subprocess.run(
        [*command, *options.split()], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^session \d+  on GPU (\d) ", done.stdout, re.MULTILINE) == ["1", "0"]  # CUDA_OFFSET is 1
    # Each process sees one GPU, the first one to it.
    device = "device: cpu:1 (devices.gpu = auto, and there is a GPU, simulated by a CPU device)"
    assert done.stdout.count(device) == 2
    sessions = [run_dir / "session_0", run_dir / "session_1"]
    assert all(Checkpoints(path).steps() for path in sessions)
    assert [json.loads((path / "config.json").read_text())["seed"] for path in sessions] == [0, 1]


# --- Without training ------------------------------------------------------------------------------------------------


@pytest.fixture
def scripts(tmp_path):
    """Sessions that are small scripts: session -> its code."""

    def tasks(codes, gpus=None):
        for i, code in enumerate(codes):
            (tmp_path / f"task_{i}.py").write_text(code)
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        return [Task(i, (f"task_{i}",), environment, (gpus or {}).get(i, ())) for i in range(len(codes))]

    return tasks


def test_a_failing_session_is_reported_and_the_others_finish(scripts, capfd):
    codes = [
        "print('fine')",
        "import sys; print('error: no such game', file=sys.stderr); print('bye'); sys.exit(2)",
        "raise ValueError('a bug')",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "print('session 4  fine too')",
    ]
    assert run_processes(scripts(codes), parallel=2) == {
        1: ("no such game", 2),
        2: ("ValueError: a bug", 1),
        3: ("its process was ended by SIGKILL; does the machine have too little memory?", -9),
    }
    lines = capfd.readouterr().out.splitlines()
    for line in ("session 0  fine", "session 1  failed: no such game", "session 4  fine too"):
        assert line in lines


@pytest.mark.parametrize("refused", ["process", "thread"])
def test_a_process_that_cannot_be_started_does_not_end_those_that_run(scripts, tmp_path, monkeypatch, refused):
    first, second = scripts([f"import time; time.sleep(0.5); open({str(tmp_path / 'end')!r}, 'w')", ""])
    start, start_thread = subprocess.Popen, threading.Thread.start

    def no_second_process(command, **options):
        if command[-1] == "task_1":
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return start(command, **options)

    def no_second_thread(thread):
        if thread.name == "session 1":
            raise RuntimeError("can't start new thread")
        start_thread(thread)

    if refused == "process":
        monkeypatch.setattr(subprocess, "Popen", no_second_process)
    else:
        monkeypatch.setattr(threading.Thread, "start", no_second_thread)
    ((name, failure),) = run_processes([first, second], parallel=2).items()
    assert name == 1
    assert failure.reason.startswith("its process could not be started (")
    assert (tmp_path / "end").exists()


def test_a_gpu_holds_no_more_than_its_share_of_processes(scripts, tmp_path):
    log = tmp_path / "log"
    code = f"""
import os, time
def note(text):
    fd = os.open({str(log)!r}, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, text)
note(b"+"); time.sleep(0.2); note(b"-")
"""
    assert run_processes(scripts([code] * 3, gpus={i: (0,) for i in range(3)}), parallel=3) == {}
    assert log.read_text() == "+-+-+-"


def test_processes_share_a_gpu_up_to_the_limit(scripts, tmp_path):
    """Each task waits until another one has begun, and gives a third one time to begin."""
    code = f"""
import os, time
from pathlib import Path
folder = Path({str(tmp_path)!r})
(folder / f"began_{{os.getpid()}}").touch()
while len(list(folder.glob("began_*"))) < 2:
    time.sleep(0.01)
time.sleep(0.5)
count = len(list(folder.glob("began_*"))) - len(list(folder.glob("ended_*")))
(folder / f"count_{{count}}_{{os.getpid()}}").touch()
(folder / f"ended_{{os.getpid()}}").touch()
"""
    assert run_processes(scripts([code] * 4, gpus={i: (0,) for i in range(4)}), parallel=4, per_gpu=2) == {}
    counts = [int(path.name.split("_")[1]) for path in tmp_path.glob("count_*")]
    assert len(counts) == 4
    assert max(counts) == 2


def test_after_a_stop_request_no_waiting_task_starts(scripts, tmp_path):
    codes = [
        "import os, signal, time\nassert os.getpgid(0) == os.getpid()  # a Ctrl-C in the terminal does not reach it\n"
        "os.kill(os.getppid(), signal.SIGINT)\ntime.sleep(60)",
        f"open({str(tmp_path / 'second')!r}, 'w')",
    ]
    with pytest.raises(KeyboardInterrupt):
        run_processes(scripts(codes), parallel=1)
    assert not (tmp_path / "second").exists()


def test_a_second_signal_kills(scripts):
    deaf = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    code = f"import signal, time\n{deaf}\nprint('deaf', flush=True)\ntime.sleep(60)"
    parent = (
        "import sys, os; from jaxrl_atari.suite.processes import *;"
        "run_processes([Task(0, ('task_0',), dict(os.environ), ())] * 2, parallel=2)"
    )
    (task,) = scripts([code])
    process = subprocess.Popen(
        [sys.executable, "-c", parent], env=task.environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    deaf_children = 0
    while deaf_children < 2:
        deaf_children += "deaf" in process.stdout.readline()
        assert process.poll() is None
    children = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGINT)
    while "stopping: 2 sessions" not in process.stdout.readline():
        assert process.poll() is None
    time.sleep(0.5)  # the signal is sent after the line
    assert all(child.status() != psutil.STATUS_ZOMBIE for child in children)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert not psutil.wait_procs(children, timeout=5)[1]


def make_config(folder, **fields):
    return Config(
        output_dir=str(folder),
        total_env_steps=32,
        env=EnvConfig(num_envs=2),
        ppo=PPOConfig(rollout_length=8, minibatch_size=16),
        log=LogConfig(tensorboard=False),
        **fields,
    )


def run_new_trial(config):
    run_trial(config, make_run_dir(config))


@pytest.fixture
def started(monkeypatch):
    """What `run_trial` starts, in place of starting it: calls of `run_processes` and sessions run here."""
    calls = []
    for name in (SIMULATED, "CUDA_VISIBLE_DEVICES", "CUDA_OFFSET", FRACTION):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(trial, "run_processes", lambda *arguments: calls.append(arguments) or {})
    monkeypatch.setattr(trial, "run_session", lambda config, folder, session, **how: calls.append(session))
    return calls


def test_a_missing_package_is_refused_before_a_run_directory_is_made(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install 'jaxrl_atari\[wandb\]'"):
        make_run_dir(Config(output_dir=str(tmp_path / "data"), log=LogConfig(wandb=True)))
    assert not list(tmp_path.iterdir())


def test_on_one_device_sessions_run_in_this_process_one_after_the_other(tmp_path, started, monkeypatch):
    run_new_trial(make_config(tmp_path, sessions=2))
    assert started == [0, 1]
    monkeypatch.setenv(SIMULATED, "1")
    run_new_trial(make_config(tmp_path, sessions=2))
    assert started == [0, 1, 0, 1]


def environments(tasks):
    return [(task.environment["CUDA_VISIBLE_DEVICES"], task.environment.get(FRACTION)) for task in tasks]


def test_each_process_sees_its_gpus_and_its_share(tmp_path, started, monkeypatch):
    monkeypatch.setenv(SIMULATED, "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    run_new_trial(make_config(tmp_path, sessions=3))
    tasks, parallel, per_gpu = started.pop()
    assert environments(tasks) == [("3", None), ("1", None), ("3", None)]
    assert (parallel, per_gpu) == (2, 1)

    run_new_trial(make_config(tmp_path, sessions=6, trial=TrialConfig(parallel=4)))
    tasks, parallel, per_gpu = started.pop()
    assert environments(tasks)[:2] == [("3", "0.45"), ("1", "0.45")]
    assert (parallel, per_gpu) == (4, 2)

    # An index: that GPU for all, which is the first one to its process.
    run_new_trial(make_config(tmp_path, sessions=2, devices=DevicesConfig(gpu=1)))
    tasks, parallel, per_gpu = started.pop()
    assert environments(tasks) == [("1", None)] * 2
    assert [json.loads(task.first_line)["config"]["devices"]["gpu"] for task in tasks] == [0, 0]
    assert (parallel, per_gpu) == (1, 1)

    # One session among several GPUs takes one of them.
    run_new_trial(make_config(tmp_path, sessions=1))
    assert environments(started.pop()[0]) == [("3", None)]


def test_several_processes_on_a_cpu(tmp_path, started):
    run_new_trial(make_config(tmp_path, sessions=3, trial=TrialConfig(parallel=2)))
    tasks, parallel, _ = started.pop()
    assert (len(tasks), parallel) == (3, 2)
    assert [task.gpus for task in tasks] == [()] * 3
    descriptions = [json.loads(task.first_line)["descriptions"].values() for task in tasks]
    assert [[description["seed"] for description in pair] for pair in descriptions] == [[0, 0], [0, 1], [0, 2]]


def test_a_signal_is_a_stop_request_to_the_session_in_this_process(tmp_path, started, monkeypatch):
    def run_session(config, folder, session, stop_requested, **how):
        assert not stop_requested()
        signal.raise_signal(signal.SIGTERM)
        started.append((session, stop_requested()))
        raise KeyboardInterrupt

    monkeypatch.setattr(trial, "run_session", run_session)
    with pytest.raises(KeyboardInterrupt):
        run_new_trial(make_config(tmp_path, sessions=2))
    assert started == [(0, True)]


def test_a_worker_writes_the_descriptions_once_training_has_begun(tmp_path, monkeypatch):
    """The process of a session, without its process: it reads them from standard input."""
    config = make_config(tmp_path, sessions=3, devices=DevicesConfig(gpu=False))
    descriptions = [describe(config), describe(make_config(tmp_path, sessions=3, seed=2))]
    folders = [tmp_path, tmp_path / "session_2"]
    written = [folder / "config.json" for folder in folders]
    by_folder = dict(zip(map(str, folders), descriptions, strict=True))
    task = {"config": config.to_dict(), "resume": True, "descriptions": by_folder}

    def run_session(given, folder, session, *, resume, stop_requested, on_first_update):
        assert (given, folder, session, resume) == (config, tmp_path / "session_2", 2, True)
        assert not stop_requested()
        assert not any(path.exists() for path in written)
        assert not stop_requested.__self__.training
        on_first_update()
        assert stop_requested.__self__.training  # from now on a stop waits for the last checkpoint
        assert [json.loads(path.read_text()) for path in written] == descriptions

    monkeypatch.setattr("jaxrl_atari.session.run_session", run_session)
    watched = []
    monkeypatch.setattr(worker, "end_with_parent", lambda: watched.append("the parent"))
    monkeypatch.setattr(sys, "argv", ["worker", str(tmp_path), "2"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(task) + "\n"))
    worker.main()
    assert all(path.exists() for path in written)
    assert watched == ["the parent"]


def test_threads_of_a_session_that_shares_the_cores_with_other_games(tmp_path, monkeypatch):
    seen = []

    def run_session(config, folder, session, *, on_first_update, **how):
        seen.append(config.env.num_threads)
        on_first_update()

    monkeypatch.setattr(trial, "run_session", run_session)
    config = make_config(tmp_path, sessions=1)
    run_dir = make_run_dir(config)
    run_trial(config, run_dir, num_threads=3)
    assert seen == [3]
    for folder in (run_dir, run_dir / "session_0"):
        assert json.loads((folder / "config.json").read_text())["config"]["env"]["num_threads"] == 0


def test_a_resume_with_fewer_sessions_is_recorded_where_nothing_remains_to_be_trained(tmp_path, started, caplog):
    config = make_config(tmp_path, sessions=3)
    run_dir = make_run_dir(config)
    run_trial(config, run_dir)
    for session, (score, env_steps) in enumerate([(1.0, 32), (1.0, 32), (9.0, 16)]):  # the last one is given up
        write_checkpoint(run_dir / f"session_{session}", env_steps)
        metrics = run_dir / f"session_{session}" / "metrics.csv"
        write_metrics(tmp_path / f"table_{session}", table([score], [env_steps]))
        (tmp_path / f"table_{session}" / "metrics.csv").rename(metrics)
    started.clear()
    write_trial_summary(run_dir)  # after the sessions, so that nothing seems to have changed since
    run_training(dataclasses.replace(config, sessions=2), run_dir)
    assert not started
    assert read_config(run_dir).sessions == 2
    summary = json.loads((run_dir / "trial.json").read_text())
    assert (summary["planned_sessions"], summary["complete"], summary["score"]) == (2, True, 1.0)
    assert [session["session"] for session in summary["sessions"]] == ["session_0", "session_1"]
    assert "session_2 ended at 16 env steps, and the run has 2 sessions now" in caplog.text
    for session in (0, 1):
        (run_dir / f"session_{session}" / "metrics.csv").unlink()
    with pytest.raises(UserError, match="none of its 2 sessions holds a log point"):
        write_trial_summary(run_dir)


def test_an_interrupted_summary_is_made_again(tmp_path, started, monkeypatch):
    """trial.json is written last: it says that the graphs and the report are there."""
    config = make_config(tmp_path)
    run_dir = make_run_dir(config)
    run_trial(config, run_dir)
    write_checkpoint(run_dir / "session_0", 32)
    write_metrics(run_dir / "session_0", table([1.0], [32]))

    def stopped(run_dir):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trial, "try_report", stopped)
        with pytest.raises(KeyboardInterrupt):
            run_training(config, run_dir)
    assert not (run_dir / "trial.json").exists()
    write_json(run_dir / "trial.json", {"complete": False, "planned_env_steps": 32})  # of an earlier interruption
    run_training(config, run_dir)
    assert json.loads((run_dir / "trial.json").read_text())["complete"]
    assert (run_dir / "trial.json").is_file()
    assert (run_dir / "report.html").is_file()


def test_an_interrupted_run_has_a_summary_of_how_far_it_came(tmp_path, started, monkeypatch):
    """Also one that had been complete, with a smaller budget."""
    run_dir = make_run_dir(make_config(tmp_path))

    def run_session(config, folder, session, *, on_first_update, **how):
        on_first_update()
        if config.total_env_steps > 32:
            raise KeyboardInterrupt
        write_metrics(folder, table([1.0], [32]))
        write_checkpoint(folder, 32)

    monkeypatch.setattr(trial, "run_session", run_session)
    run_training(make_config(tmp_path), run_dir)
    assert json.loads((run_dir / "trial.json").read_text())["complete"]
    longer = dataclasses.replace(make_config(tmp_path), total_env_steps=64)
    with pytest.raises(KeyboardInterrupt):
        run_training(longer, run_dir)
    summary = json.loads((run_dir / "trial.json").read_text())
    assert (summary["complete"], summary["planned_env_steps"], summary["score"]) == (False, 64, 1.0)


def test_an_error_of_one_of_several_processes_ends_the_trial(tmp_path, monkeypatch):
    """The others are still in that session: the next one would add their gradients to its own."""
    called = []

    def run_session(config, folder, session, **how):
        called.append(session)
        raise OSError("the disk is full")

    monkeypatch.setattr(trial, "run_session", run_session)
    with pytest.raises(OSError, match="the disk is full"):
        run_new_trial(make_config(tmp_path, sessions=2, devices=DevicesConfig(distributed=True)))
    assert called == [0]


def test_a_failing_session_in_this_process(tmp_path, started, monkeypatch):
    def run_session(config, folder, session, **how):
        if session == 1:
            raise UserError("no such game")
        write_checkpoint(Path(folder), 32)
        started.append(session)

    monkeypatch.setattr(trial, "run_session", run_session)
    summary = r"1 of 3 sessions failed \(session 1: no such game\); --resume "
    with pytest.raises(SessionsFailed, match=summary) as failed:
        run_new_trial(make_config(tmp_path, sessions=3))
    assert failed.value.exit_status == 1
    assert started == [0, 2]

    # Going on runs what is missing.
    monkeypatch.setattr(
        trial, "run_session", lambda config, folder, session, resume, **how: started.append((session, resume))
    )
    (run_dir,) = tmp_path.iterdir()
    run_trial(make_config(tmp_path, sessions=3), run_dir, resume=True)
    assert started == [0, 2, (1, True)]
    # The only session of a trial passes its own error on.
    monkeypatch.setattr(trial, "run_session", lambda *a, **k: (_ for _ in ()).throw(UserError("no such game")))
    with pytest.raises(UserError, match=r"^no such game$"):
        run_new_trial(make_config(tmp_path, sessions=1))


@pytest.mark.parametrize(("status", "kind"), [(2, UserError), (1, SessionsFailed), (-9, SessionsFailed)])
def test_the_only_session_fails_alike_in_a_process_of_its_own(status, kind, tmp_path, started, monkeypatch):
    """Where it uses one of several GPUs: the exit status does not depend on the number of GPUs."""
    monkeypatch.setenv(SIMULATED, "2")
    monkeypatch.setattr(trial, "run_processes", lambda *_: {0: Failure("no such game", status)})
    with pytest.raises(UserError, match="no such game") as failed:
        run_new_trial(make_config(tmp_path, sessions=1))
    assert type(failed.value) is kind


def test_a_budget_below_what_a_session_has_reached_is_refused(tmp_path, started):
    """Its score would be published as that of the smaller budget."""
    config = dataclasses.replace(make_config(tmp_path, sessions=2), total_env_steps=96)
    run_dir = make_run_dir(config)
    write_description(run_dir, describe(config))
    write_checkpoint(run_dir / "session_1", 96)
    smaller = dataclasses.replace(config, total_env_steps=64)
    with pytest.raises(UserError, match=r"total_env_steps = 64: expected at least 96, the env steps of .*session_1"):
        run_training(smaller, run_dir)
    assert read_config(run_dir).total_env_steps == 96
    assert started == []


def test_a_finished_run_keeps_the_options_that_it_trained_with(tmp_path, started, capsys):
    config = make_config(tmp_path, sessions=2)
    run_dir = make_run_dir(config)
    write_description(run_dir, describe(config))
    for session in range(2):
        write_checkpoint(run_dir / f"session_{session}", 32)
        write_metrics(run_dir / f"session_{session}", table([1.0], [32]))
    changed = dataclasses.replace(config, sessions=1, ppo=dataclasses.replace(config.ppo, gae_lambda=0.5))
    run_training(changed, run_dir)
    assert "changed: sessions 2 -> 1\n" in capsys.readouterr().out
    described = json.loads((run_dir / "config.json").read_text())
    assert (described["config"]["sessions"], described["config"]["ppo"]["gae_lambda"]) == (1, None)
    assert described["resumed"][0]["changed"] == {"sessions": [2, 1]}
    assert started == []


def test_a_follower_trains_the_sessions_that_its_leader_trains(tmp_path, monkeypatch):
    """The same sessions in the same way, or the processes would wait for each other."""
    config, calls = make_config(tmp_path, sessions=2), []
    monkeypatch.setattr(
        trial, "run_session", lambda config, folder, session, *, resume, **how: calls.append((folder.name, resume))
    )
    write_checkpoint(tmp_path / "session_0", 32)
    trial.follow_trial(config, tmp_path, resume=True)
    trial.follow_trial(config, tmp_path)
    assert calls == [("session_1", True), ("session_0", False), ("session_1", False)]


def test_two_processes_cannot_train_in_one_run_directory(tmp_path, started):
    config = make_config(tmp_path)
    run_dir = make_run_dir(config)
    with only_writer(run_dir), pytest.raises(UserError, match="another process is training"):
        run_trial(config, run_dir)
    assert started == []
