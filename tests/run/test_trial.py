"""Trials of several sessions: in this process, and in processes on simulated GPUs."""

import atexit
import dataclasses
import inspect
import io
import json
import multiprocessing.spawn
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from multiprocessing import popen_spawn_posix
from multiprocessing.pool import ThreadPool
from multiprocessing.process import BaseProcess
from types import SimpleNamespace

import pytest
import small_sessions
from simulated_gpus import simulated
from small_training import Lines, read_table
from user_commands import ROOT

from jaxrl_atari import ConfigError, UserError, run_training
from jaxrl_atari import session as session_module
from jaxrl_atari.config import Config, DevicesConfig, EnvConfig, LogConfig, PPOConfig, TrialConfig
from jaxrl_atari.config_dicts import set_fields
from jaxrl_atari.envs import THREADS_VARIABLE, process_threads
from jaxrl_atari.errors import SessionsFailed, Stopped
from jaxrl_atari.hardware.memory import FRACTION_VARIABLE
from jaxrl_atari.imports.children import IMPORTS_VARIABLE
from jaxrl_atari.imports.named import import_named
from jaxrl_atari.runs.checkpoints import Checkpoints
from jaxrl_atari.runs.files import only_writer
from jaxrl_atari.trials import processes, trial
from jaxrl_atari.trials.launch import Failure, Job, run_here
from jaxrl_atari.trials.processes import run_processes
from jaxrl_atari.trials.sessions import compile_key, train_job, unfinished_jobs
from jaxrl_atari.trials.slots import Slot, plan_slots

TINY = Config(
    name="tiny", total_env_steps=32, sessions=2, env=EnvConfig(game="CrazyClimber", num_envs=2, num_threads=1),
    ppo=PPOConfig(rollout_length=8, minibatch_size=16, epochs=1),
    log=LogConfig(every_env_steps=16, graphs=False, tensorboard=False),
)  # fmt: skip


def test_followers_get_the_absolute_path_of_the_run_directory(tmp_path, monkeypatch):
    """They may have another working directory."""
    sent = []

    def stop_here(*_):
        raise UserError("stopped by the test")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trial.distributed, "agree", sent.append)
    monkeypatch.setattr(trial, "_start_or_resume", stop_here)
    with pytest.raises(UserError, match="stopped by the test"):
        run_training(TINY, "run")
    assert sent == ["", str(tmp_path / "run")], "no problem, and the directory"


@pytest.mark.parametrize("leads", [True, False])
def test_processes_wait_for_each_other_after_a_stop(leads, tmp_path, monkeypatch):
    """The exit of process 0 would abort those that are still closing their session."""
    waited = []

    def stop_here(*_, **options):
        raise Stopped

    monkeypatch.setattr(trial.distributed, "is_leader", lambda: leads)
    monkeypatch.setattr(trial.distributed, "wait_for_all", lambda: waited.append(True))
    monkeypatch.setattr(trial, "train_job", stop_here)
    with pytest.raises(KeyboardInterrupt):
        run_training(TINY, tmp_path / "run")
    assert waited == [True]


class Seen(Lines):
    """A writer that counts how often it is closed."""

    closed = 0

    def close(self):
        self.closed += 1


SEEN = Seen()
"""What a caller of `run_training` receives."""


def read(path):
    return json.loads(path.read_text())


def description(run_dir):
    return read(run_dir / "config.json")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of two sessions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        result = run_training(TINY, "~/run", [SEEN])
        assert result.run_dir == tmp_path_factory.getbasetemp() / os.environ["HOME"] / "run"
    return result


# --- In this process ---------------------------------------------------------------------------------------------


def test_a_trial_returns_its_summary(trained):
    run_dir, summary = trained
    assert summary == read(run_dir / "trial.json")
    assert (summary["complete"], len(summary["sessions"])) == (True, 2)
    metas = [Checkpoints(run_dir / f"session_{i}").read_meta(32) for i in (0, 1)]
    assert [meta["seed"] for meta in metas] == [0, 1]
    logged = [
        row["env_steps"] for session in (0, 1) for row in read_table(run_dir / f"session_{session}/metrics.csv")
    ]
    assert [str(row["env_steps"]) for row in SEEN.rows] == logged == ["16", "32", "16", "32"]
    assert [(row["session"], row["seed"]) for row in SEEN.rows] == [(0, 0), (0, 0), (1, 1), (1, 1)]
    assert SEEN.closed == 0


def test_code_that_a_finished_run_cannot_keep_is_named(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(IMPORTS_VARIABLE, "[]")
    own = tmp_path / "own_code.py"
    own.write_text("x = 1\n")
    import_named([str(own)])
    own.unlink()
    copy = tmp_path / "run"
    shutil.copytree(trained.run_dir, copy)
    changed = dataclasses.replace(TINY, log=dataclasses.replace(TINY.log, every_env_steps=8))
    run_training(changed, copy)
    assert f"\n{own} is not kept: No such file or directory\n" in capsys.readouterr().out


def test_a_finished_run_keeps_what_it_was_trained_with(trained, capsys):
    run_dir = trained.run_dir
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert run_training(TINY, run_dir).summary == trained.summary
    assert "session 1  finished already" in capsys.readouterr().out
    assert before == {path: path.read_bytes() for path in before}
    fewer = dataclasses.replace(TINY, sessions=1, ppo=dataclasses.replace(TINY.ppo, gae_lambda=0.5))
    assert run_training(fewer, run_dir).summary["planned_sessions"] == 1
    said = capsys.readouterr().out
    assert "has finished, and keeps its own values: ppo.gae_lambda 0.5 -> None\nchanged: sessions 2 -> 1\n" in said
    assert description(run_dir)["config"] == dataclasses.replace(TINY, sessions=1).to_dict()
    assert [entry["changed"] for entry in description(run_dir)["resumed"]] == [{"sessions": [2, 1]}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 9}, "seed = 9: expected 0, with which the run began"),
        ({"env": EnvConfig(game="Qbert", num_envs=2)}, "env.game = 'Qbert': expected CrazyClimber, with which"),
        ({"total_env_steps": 16}, "total_env_steps = 16: expected at least 32, the env steps of a session"),
    ],
)
def test_a_resume_as_another_run_is_refused_and_writes_nothing(change, message, trained):
    before = (trained.run_dir / "config.json").read_bytes()
    with pytest.raises(ConfigError) as error:
        run_training(dataclasses.replace(TINY, **change), trained.run_dir)
    assert message in str(error.value)
    assert (trained.run_dir / "config.json").read_bytes() == before
    with pytest.raises(UserError, match=r"session_0: holds .*, and no run; choose another folder"):
        run_training(TINY, trained.run_dir / "session_0")


@pytest.mark.long
def test_a_failed_session_does_not_stop_the_others_and_a_resume_runs_it(tmp_path, capsys):
    config, run_dir = dataclasses.replace(TINY, sessions=3), tmp_path / "run"
    run_training(dataclasses.replace(TINY, sessions=1), run_dir)
    (run_dir / "session_1").mkdir()
    message = (
        r"1 of 3 sessions failed \(session 1: .* another process is training .*--resume .* runs what is missing"
    )
    with only_writer(run_dir / "session_1"), pytest.raises(SessionsFailed, match=message) as error:
        run_training(config, run_dir)
    assert error.value.exit_status == 1
    assert "session 1  failed: " in capsys.readouterr().out
    assert (read(run_dir / "trial.json")["complete"], description(run_dir)["config"]["sessions"]) == (False, 3)
    assert run_training(config, run_dir).summary["complete"]
    assert description(run_dir)["resumed"][0]["changed"] == {"sessions": [1, 3]}
    with only_writer(run_dir), pytest.raises(UserError, match="another process is training there"):
        run_training(config, run_dir)


def test_a_new_run_whose_sessions_are_all_refused_names_every_reason_and_is_removed(tmp_path, monkeypatch):
    reasons = iter(("no games", "no memory"))

    def refuse(*_, **__):
        raise UserError(next(reasons))

    monkeypatch.setattr(session_module, "start_environments", refuse)
    with pytest.raises(UserError, match=r"^no session could begin: no games; no memory$"):
        run_training(TINY, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_last_seeds_train_and_the_next_is_refused_before_anything_is_written(tmp_path):
    run_training(dataclasses.replace(TINY, seed=2**31 - 2), tmp_path / "run")
    assert Checkpoints(tmp_path / "run" / "session_1").read_meta(32)["seed"] == 2**31 - 1
    with pytest.raises(ConfigError, match="seed = 2147483647: expected at most 2,147,483,648 - sessions"):
        dataclasses.replace(TINY, seed=2**31 - 1)


def test_a_stop_rule_ends_sessions_as_if_their_budget_were_spent(tmp_path, capsys):
    asked = []

    def stop(row):
        asked.append((row["session"], row["env_steps"], row["return_mean"] > 400))
        return "far enough" if row["session"] == 1 else row["env_steps"] >= 32

    config = dataclasses.replace(TINY, total_env_steps=64)
    result = run_training(config, tmp_path / "run", stop=stop)
    assert [entry[:2] for entry in asked] == [(0, 16), (0, 32), (1, 16)]
    assert not asked[0][2]  # no game has ended
    expected = {
        "session_0": {"env_steps": 32, "reason": "stop(row) was true at this log point"},
        "session_1": {"env_steps": 16, "reason": "far enough"},
    }
    assert (result.summary["complete"], result.summary["stopped"]) == (True, expected)
    assert read(tmp_path / "run" / "trial.json") == result.summary
    assert "session 1 ended at 16 env steps: far enough\n" in capsys.readouterr().out
    assert Checkpoints(tmp_path / "run" / "session_0").env_steps() == [32]
    assert run_training(config, tmp_path / "run").summary == result.summary
    assert capsys.readouterr().out.count("finished already") == 2
    longer = run_training(dataclasses.replace(config, total_env_steps=96), tmp_path / "run").summary
    assert (longer["complete"], longer["stopped"]) == (True, {})
    assert [session["env_steps"] for session in longer["sessions"]] == [96, 96]


@pytest.mark.long
def test_an_early_end_holds_where_the_last_evaluation_was_interrupted(tmp_path):
    """The resume evaluates the session, and trains it no further, although its command line has no `stop`."""
    fields = {"sessions": 1, "total_env_steps": 64, "evaluation.every_env_steps": 32, "evaluation.episodes": 1}
    config = set_fields(TINY, fields | {"env.max_frames": 128})
    ended = threading.Event()

    def stop(row):
        if row["env_steps"] >= 32:
            ended.set()
        return ended.is_set()

    (job,) = unfinished_jobs(config, tmp_path)
    with pytest.raises(KeyboardInterrupt):
        train_job(job, stop=stop, stop_requested=ended.is_set)
    summary = run_training(config, tmp_path).summary
    expected = {"env_steps": 32, "reason": "stop(row) was true at this log point"}
    assert summary["stopped"] == {"session_0": expected}
    assert Checkpoints(tmp_path / "session_0").env_steps() == [32]
    assert [row["env_steps"] for row in read_table(tmp_path / "session_0" / "evaluations.csv")] == ["32"]


@pytest.mark.long
def test_a_session_whose_budget_is_spent_did_not_end_early(tmp_path):
    config = dataclasses.replace(TINY, sessions=1)
    summary = run_training(config, tmp_path / "run", stop=lambda row: row["env_steps"] >= 32).summary
    assert (summary["complete"], summary["stopped"]) == (True, {})
    assert not (tmp_path / "run" / "session_0" / "stopped.json").exists()


def test_the_only_session_uses_the_first_of_several_gpus_in_this_process(simulate, tmp_path, monkeypatch):
    """So it takes a stop rule that is no function of a module."""
    monkeypatch.delenv("CUDA_OFFSET", raising=False)
    simulate(2)
    config = dataclasses.replace(TINY, sessions=1)
    summary = run_training(config, tmp_path / "run", stop=lambda row: True).summary
    assert "session_0" in summary["stopped"]
    checkpoints = Checkpoints(tmp_path / "run" / "session_0")
    assert checkpoints.read_meta(checkpoints.env_steps()[-1])["device"].startswith("cpu:1 (devices.gpu = auto")


def test_async_environments_where_the_only_session_has_a_process_of_its_own(simulate, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_OFFSET", "1")
    simulate(2)
    options = {"game": "CartPole-v1", "backend": "gymnasium", "vectorization_mode": "async", "num_envs": 2}
    config = dataclasses.replace(TINY, sessions=1, env=EnvConfig(**options))
    with pytest.raises(ConfigError, match=r"env\.vectorization_mode = 'async': expected sync where sessions have"):
        run_training(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert not plan_slots(set_fields(config, {"trial.parallel": 1, "devices.gpu": 1}), 1).needs_processes
    assert not plan_slots(set_fields(config, {"trial.parallel": 1, "devices.gpu": False}), 1).needs_processes


@dataclasses.dataclass(frozen=True)
class OwnPPOConfig(PPOConfig):
    """With a field that no part of the package knows."""

    beta: float = 1.0


def test_a_subclass_of_a_group_of_options_is_one_line():
    with pytest.raises(
        ConfigError, match="ppo = 'OwnPPOConfig': expected PPOConfig itself, not a subclass; a run is"
    ):
        dataclasses.replace(TINY, ppo=OwnPPOConfig())


class Unknown:
    """A stream of a program that embeds Python: it has nothing but `write`."""

    def write(self, text):
        return len(text)


def open_stream(kind):
    """A standard output that takes less than the text of a run."""
    if kind == "latin-1":
        return io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    if kind == "closed pipe":
        read, write = os.pipe()
        os.close(read)
        return os.fdopen(write, "w")
    return {"none": None, "unknown": Unknown()}[kind]


@pytest.mark.parametrize("kind", ["none", "unknown", "latin-1", "closed pipe"])
def test_no_standard_output_ends_or_loses_a_run(kind, tmp_path, monkeypatch):
    stream = open_stream(kind)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        result = run_training(dataclasses.replace(TINY, sessions=1, name="λ"), tmp_path / "run")
    if kind == "closed pipe":
        stream.close()  # its descriptor leads nowhere by now
    assert result.summary["complete"]
    assert read(tmp_path / "run" / "trial.json") == result.summary


def test_a_summary_that_cannot_be_saved_is_shown_and_returned(tmp_path, capsys):
    (tmp_path / "run" / "trial.json").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text(json.dumps({"config": TINY.to_dict()}))
    result = run_training(TINY, tmp_path / "run")
    assert result.summary["complete"]
    said = capsys.readouterr().out
    assert said.index("score: return_ma at the end") < said.index("trial.json is not saved: ")


@pytest.mark.parametrize("what", ["writer", "stop"])
def test_what_cannot_be_sent_to_processes_is_refused_before_a_directory_is_made(what, tmp_path):
    config = dataclasses.replace(TINY, trial=TrialConfig(parallel=2))
    given = {"stop": {"stop": lambda row: False}, "writer": {"writers": [Holding()]}}[what]
    with pytest.raises(
        UserError, match=r"copies by pickle, and this cannot be copied: .*functions and classes of a"
    ):
        run_training(config, tmp_path / "run", **given)
    with (
        ThreadPool(1) as thread,
        pytest.raises(UserError, match="only the main thread can pass signals on to them"),
    ):
        thread.apply(run_training, (config, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_resume_is_refused_only_for_processes_that_it_would_start(tmp_path):
    """Two sessions side by side are processes; one that is left trains here, and a finished run trains nothing."""
    run_dir = tmp_path / "run"
    config = dataclasses.replace(TINY, trial=TrialConfig(parallel=2))
    run_training(dataclasses.replace(TINY, sessions=1), run_dir)
    with pytest.raises(UserError, match="processes of their own"):
        run_training(dataclasses.replace(config, sessions=3), run_dir, stop=lambda row: False)
    assert run_training(config, run_dir, stop=lambda row: False).summary["complete"]
    assert run_training(config, run_dir, stop=lambda row: False).summary["complete"]


SCRIPT = """
import dataclasses, multiprocessing, sys, small_sessions
from test_trial import TINY, TrialConfig
from jaxrl_atari import UserError, run_training

def train():
    try:
        run_training(dataclasses.replace(TINY, trial=TrialConfig(parallel=2)), sys.argv[1],
        stop=small_sessions.enough)
    except UserError as error:
        print("error:", error, flush=True)  # a pool kills its workers

if __name__ == "__main__":
    if sys.argv[2] == "pool":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.apply(train)
    else:
        train()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("stdin", "import the script again: it comes from <stdin>, where they cannot read it; save it as a file"),
        ("pool", "this is a daemonic process, such as a worker of multiprocessing.Pool, and may start none"),
        ("file", "session 1 ended at 16 env steps: enough"),
    ],
)
def test_scripts_of_every_kind_train_in_processes_or_are_refused_in_one_line(how, words, tmp_path):
    """`file` trains, and ends early by a rule that the processes get by pickle."""
    (tmp_path / "script.py").write_text(SCRIPT)
    script = "-" if how == "stdin" else str(tmp_path / "script.py")
    done = subprocess.run(
        [sys.executable, script, str(tmp_path / "run"), how], input=SCRIPT, capture_output=True, text=True,
        timeout=240,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert words in done.stdout
    assert "Traceback" not in done.stderr
    assert (tmp_path / "run").exists() == (how == "file")


class Holding(Lines):
    """A writer with a lock, which pickle cannot copy."""

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


# --- In processes ------------------------------------------------------------------------------------------------


def train(run_dir, *options, **variables):
    (run_dir.parent / "config.py").write_text(f"from jaxrl_atari.config import *\nget_config = lambda: {TINY!r}\n")
    command = [sys.executable, "-m", "jaxrl_atari.train", "--config", str(run_dir.parent / "config.py")]
    return subprocess.run(
        [*command, "--run-dir", str(run_dir), *options], env=os.environ | variables, cwd=ROOT, capture_output=True,
        text=True, timeout=240,
    )  # fmt: skip


@pytest.mark.long
def test_two_sessions_on_two_gpus(tmp_path):
    run_dir = tmp_path / "run"
    done = train(run_dir, **simulated(2), CUDA_OFFSET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^session \d  on GPU (\d) \(2 visible, CUDA_OFFSET 1\)$", done.stdout, re.M) == ["1", "0"]
    # Each process sees one GPU, the first one to it.
    for session in (0, 1):
        assert f"session {session}  device: cpu:1 (devices.gpu = auto" in done.stdout
        checkpoints = Checkpoints(run_dir / f"session_{session}")
        assert checkpoints.read_meta(checkpoints.env_steps()[-1])["config"] == description(run_dir)["config"]
    assert read(run_dir / "trial.json")["complete"]


@pytest.mark.long
def test_the_only_session_fails_alike_in_a_process_of_its_own(tmp_path):
    """Where it uses another GPU than the first: the exit status does not depend on CUDA_OFFSET."""
    (tmp_path / "run" / "session_0").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text(
        json.dumps({"config": dataclasses.replace(TINY, sessions=1).to_dict()})
    )
    with only_writer(tmp_path / "run" / "session_0"):
        done = train(tmp_path / "run", **simulated(2), CUDA_OFFSET="1")
    assert (done.returncode, done.stderr.count("error: ")) == (2, 1), done.stdout + done.stderr
    assert re.search(r"^error: .*session_0: another process is training there", done.stderr, re.M)


@pytest.mark.parametrize(
    ("fields", "parallel", "environments"),
    [
        ({"sessions": 3}, 2, [{"CUDA_VISIBLE_DEVICES": "3"}, {"CUDA_VISIBLE_DEVICES": "1"}]),
        (
            {"sessions": 6, "trial": TrialConfig(parallel=4)},
            4,
            [
                {"CUDA_VISIBLE_DEVICES": "3", FRACTION_VARIABLE: "0.45"},
                {"CUDA_VISIBLE_DEVICES": "1", FRACTION_VARIABLE: "0.45"},
            ],
        ),
        ({"sessions": 1}, 1, [{}]),  # in this process, which limits JAX to the first GPU
        ({"devices": DevicesConfig(gpu=1)}, 1, [{}]),  # in this process, which limits JAX to that GPU
        ({"devices": DevicesConfig(actor=0)}, 1, [{}]),  # the index counts both GPUs
        ({"devices": DevicesConfig(data_parallel="all")}, 1, [{}]),
        ({"devices": DevicesConfig(gpu=False)}, 1, [{}]),
        ({"devices": DevicesConfig(gpu=False), "trial": TrialConfig(parallel=2)}, 2, [{}]),
    ],
)
def test_sessions_take_the_gpus_in_turn(fields, parallel, environments, simulate, monkeypatch):
    simulate(4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    config = dataclasses.replace(TINY, **fields)
    slots, at_a_time = plan_slots(config, config.sessions, config.sessions)
    assert at_a_time == parallel
    shown = [{name: slot.variables[name] for name in slot.variables if "THREADS" not in name} for slot in slots]
    assert shown == environments


@pytest.mark.parametrize(("chosen", "threads"), [(None, 4), ("5", 5)])
def test_sessions_side_by_side_share_the_emulator_threads_unless_the_user_has_chosen(chosen, threads, monkeypatch):
    monkeypatch.setattr("jaxrl_atari.trials.slots.emulator_cores", lambda: 8)
    monkeypatch.delenv(THREADS_VARIABLE, raising=False)
    if chosen is not None:
        monkeypatch.setenv(THREADS_VARIABLE, chosen)
    config = dataclasses.replace(TINY, devices=DevicesConfig(gpu=False), trial=TrialConfig(parallel=2))
    for name, value in plan_slots(config, 2).slots[0].variables.items():
        monkeypatch.setenv(name, value)
    assert process_threads() == threads


@pytest.mark.parametrize(
    ("field", "value", "shared"),
    [
        ("ppo.learning_rate", 1e-3, True),
        ("ppo.gae_lambda", 0.5, True),
        ("seed", 7, True),
        ("ppo.epochs", 2, False),
        ("ppo.target_kl", 0.1, False),
        ("env.game", "Pong", False),
        ("network.name", "impala", False),
    ],
)
def test_sessions_share_programs_where_numbers_alone_differ(field, value, shared):
    numbers = {compile_key(config) for config in (TINY, set_fields(TINY, {field: value}))}
    assert len(numbers) == (1 if shared else 2)


def run(folder, function, sessions, slots=1, parallel=2, keys=None):
    """The failures of sessions that call a function of `small_sessions`, in the order in which they end."""
    keys = keys or [0] * sessions
    jobs = [
        Job(None, folder, number, description={}, position=number, game="Pong", compile_key=keys[number])
        for number in range(sessions)
    ]
    places = [Slot(f"on {name}", {"SLOT": name}) for name in "AB"[:slots]]
    ended = {}
    run_processes(
        jobs,
        function,
        lambda job, failure: ended.update({job.session: failure}),
        slots=places,
        parallel=parallel,
    )
    return ended


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (1, "exit status 1"),
        (-signal.SIGSEGV, "exit status -11 (killed by SIGSEGV)"),
        (-35, "exit status -35 (killed by signal 35)"),
    ],
)
def test_the_signal_that_ended_a_session_is_named(status, text):
    child = SimpleNamespace(process=SimpleNamespace(exitcode=status), failure=None)
    assert processes._Child.failure_at_end(child, stopping=False) == Failure(text)


@pytest.mark.long
def test_each_failure_is_named_and_the_others_finish(tmp_path, capfd):
    ended = run(tmp_path, small_sessions.fail, 5, parallel=3)
    assert ended == {
        0: None,
        1: Failure("seed = -1: expected another one", True),
        2: Failure("ValueError: a bug"),
        3: Failure("exit status -9 (killed; does the machine have too little memory?)"),
        4: None,
    }
    lines = capfd.readouterr().out.splitlines()
    for line in ("on A", "it begins", "it goes on"):
        assert {f"game Pong  session {number}  {line}" for number in range(5)} <= set(lines)
    assert "game Pong  session 2  ValueError: a bug" in lines


def test_this_python_has_the_private_functions_that_end_the_process_of_a_session():
    """`_SessionProcess` overrides `_bootstrap`, which runs a process, and calls `atexit._run_exitfuncs`."""
    assert "_bootstrap" in multiprocessing.spawn._main.__code__.co_names
    assert [*inspect.signature(BaseProcess._bootstrap).parameters] == ["self", "parent_sentinel"]
    assert callable(atexit._run_exitfuncs)


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="calls a function of glibc")
@pytest.mark.timeout(60)
def test_a_session_ends_although_a_library_hangs_at_exit(tmp_path, capfd):
    assert run(tmp_path, small_sessions.hang_at_exit, 1) == {0: None}
    assert (tmp_path / "handler called").exists()
    assert "the end of a line" in capfd.readouterr().out


def test_the_reason_is_told_if_a_process_cannot_import_what_its_parent_has(tmp_path, monkeypatch):
    """A file that was edited in the meantime, for example."""
    monkeypatch.setenv(IMPORTS_VARIABLE, "[]")
    own = tmp_path / "edited_idea.py"
    own.write_text("x = 1\n")
    import_named([str(own)])
    own.write_text("raise ValueError('half an edit')\n")
    (failure,) = run(tmp_path, small_sessions.begin_alone, 1).values()
    assert failure.correctable
    assert "edited_idea.py" in failure.reason
    assert "half an edit" in failure.reason
    assert not (tmp_path / "begun 0").exists()


def test_an_error_at_the_end_of_a_session_stops_no_other_and_is_raised_when_all_have_ended(tmp_path, capfd):
    """A bug in the code that saves results, for example."""
    ended = []

    def on_end(job, failure):
        ended.append(job.session)
        raise KeyError(f"score {job.session}")

    jobs = [Job(None, tmp_path, number, description={}, position=number) for number in range(2)]
    with pytest.raises(KeyError, match="score 0"):
        run_here(jobs, lambda job: None, on_end)
    with pytest.raises(KeyError, match="score 0"):
        run_processes(jobs, small_sessions.begin_alone, on_end, slots=[Slot("here", {})], parallel=1)
    assert ended == [0, 1, 0, 1]
    assert sorted(path.name for path in tmp_path.glob("begun *")) == ["begun 0", "begun 1"]
    output = capfd.readouterr()
    assert output.out.count("error after the end of a job: KeyError: 'score 0'; it stops no other job\n") == 2
    assert output.err.count("Traceback (most recent call last):\n") == 4


@pytest.mark.long
def test_ctrl_c_while_a_process_starts_is_not_lost(tmp_path, monkeypatch):
    launch = popen_spawn_posix.Popen._launch

    def launch_under_ctrl_c(popen, process):
        signal.raise_signal(signal.SIGINT)
        launch(popen, process)

    monkeypatch.setattr(popen_spawn_posix.Popen, "_launch", launch_under_ctrl_c)
    jobs = [Job(None, tmp_path, number, description={}, position=number) for number in (1, 2)]
    with pytest.raises(KeyboardInterrupt):
        run_processes(
            jobs, small_sessions.begin_alone, lambda job, failure: None, slots=[Slot("here", {})], parallel=1
        )
    assert not (tmp_path / "begun 2").exists()


@pytest.mark.long
def test_the_first_session_compiles_and_a_free_gpu_takes_the_next_one(tmp_path, capfd):
    """Session 0 trains until 2 has: 2 would be next on A, but B is free first."""
    assert list(run(tmp_path, small_sessions.take_turns, 3, slots=2).values()) == [None] * 3
    assert (tmp_path / "notes").read_text().splitlines() == [
        "A began 0", "A compiled 0", "B began 1", "B compiled 1", "B ended 1", "B began 2", "B compiled 2",
        "B ended 2", "A ended 0",
    ]  # fmt: skip
    said = capfd.readouterr().out
    assert "game Pong  session 0  compiles first; 2 sessions with the same programs will read them\n" in said


@pytest.mark.long
@pytest.mark.parametrize("variable", ["JAXRL_ATARI_NO_TUNING=1", "JAX_COMPILATION_CACHE_DIR="])
def test_without_a_cache_no_session_waits_for_the_programs_of_another(variable, tmp_path, capfd, monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv(*variable.split("="))
    assert run(tmp_path, small_sessions.begin_together, 2) == {0: None, 1: None}
    assert "compiles first" not in capfd.readouterr().out


@pytest.mark.long
def test_a_session_with_other_programs_does_not_wait(tmp_path):
    run(tmp_path, small_sessions.take_turns, 3, slots=2, parallel=3, keys=[7, 7, 8])
    notes = (tmp_path / "notes").read_text().splitlines()
    assert notes.index("A compiled 0") < min(
        notes.index(f"{slot} began 1") for slot in "AB" if f"{slot} began 1" in notes
    )
    assert notes.index("B began 2") < notes.index("A ended 0")


@pytest.mark.long
def test_no_more_sessions_share_a_gpu_than_run_at_a_time(tmp_path):
    ended = run(tmp_path, small_sessions.take_turns, 4, parallel=2)
    running = most = 0
    for line in (tmp_path / "notes").read_text().splitlines():
        running += {"began": 1, "compiled": 0, "ended": -1}[line.split()[1]]
        most = max(most, running)
    assert (most, len(ended)) == (2, 4)
