"""Rehearsals of faults: a small training through the real command, in the environment of a user."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
from user_commands import ROOT

from jaxrl_atari.runs.meta import is_sound

INTERRUPTED = 130

# The game is that of configs/quickstart.py, so that test_commands.py runs the same programs.
CONFIG = """
import os, time
from jaxrl_atari.config import Config, EnvConfig, EvaluationConfig, LogConfig, PPOConfig

def get_config():
    return Config(
        name="fault", total_env_steps=1_000, env=EnvConfig(game="CrazyClimber", num_envs=2, num_threads=1),
        ppo=PPOConfig(rollout_length=8, minibatch_size=16, epochs=1),
        log=LogConfig(every_env_steps=16, checkpoint_every_env_steps=64, graphs=False),
    )

if os.environ.get("FAULT") == "nan":
    from jaxrl_atari import session
    rate = session.learning_rate
    session.learning_rate = lambda config, steps: float("nan") if steps > 300 else rate(config, steps)
if os.environ.get("FAULT") == "disk":
    import resource
    from jaxrl_atari import session
    rate, limits = session.learning_rate, resource.getrlimit(resource.RLIMIT_FSIZE)
    def no_large_files(config, steps):
        if steps > 300:
            resource.setrlimit(resource.RLIMIT_FSIZE, (256 << 10, limits[1]))
        return rate(config, steps)
    session.learning_rate = no_large_files
if os.environ.get("FAULT") == "emulator":
    from jaxrl_atari.envs import ale
    receive, steps = ale.AlePool._recv, []
    def recv(pool):
        steps.append(None)
        if len(steps) > 150:
            raise RuntimeError("the emulator is broken")
        return receive(pool)
    ale.AlePool._recv = recv
if os.environ.get("FAULT") == "clock":
    now, now_ns, day = time.time, time.time_ns, 86_400
    time.time, time.time_ns = lambda: now() - day, lambda: now_ns() - day * 10**9
"""


class Train:
    """`train --config CONFIG --run-dir DIR`, started as often as a test likes."""

    def __init__(self, folder, environment):
        self.run_dir, self.environment = folder / "run", environment
        self.config = folder / "fault.py"
        self.config.write_text(CONFIG)
        self.started = []

    def start(
        self,
        *options,
        stdout=subprocess.PIPE,
        run_dir=None,
        module="train",
        stderr=subprocess.STDOUT,
        preexec_fn=None,
        **environment,
    ):
        options = ["--config", self.config, "--run-dir", run_dir or self.run_dir, *options]
        process = subprocess.Popen(
            [sys.executable, "-m", f"jaxrl_atari.{module}", *map(str, options)], cwd=ROOT, stdin=subprocess.DEVNULL,
            env=self.environment | environment, stdout=stdout, stderr=stderr, text=True,
            start_new_session=True, preexec_fn=preexec_fn,
        )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, *options, **how):
        """Starts it and waits for its end; returns the status and the output."""
        process = self.start(*options, **how)
        output, _ = process.communicate(timeout=600)
        return process.returncode, output

    def steps(self, session=0):
        """Env steps of the complete checkpoints."""
        folder = self.run_dir / f"session_{session}" / "checkpoints"
        return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())

    def last(self, session=0):
        """Env steps of the latest checkpoint; 0 if there is none."""
        return max(self.steps(session), default=0)

    def wait_for(self, process, session=0, after=0):
        """Waits for a checkpoint beyond `after` env steps."""
        end = time.monotonic() + 300
        while self.last(session) <= after:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end
            time.sleep(0.05)

    def continues(self, *options, **how):
        """The same command line loses nothing and finishes; once more, it does nothing."""
        before = self.last()
        self.check_soundness()
        total = max(1_000, before + 100)
        options = ["--total-env-steps", total, *options]
        status, output = self.run(*options, **how)
        assert status == 0, output
        if before:
            assert f"resumed at {before:,} env steps" in output or "finished already" in output, output
        assert self.last() > total - 20
        assert json.loads((self.run_dir / "trial.json").read_text())["complete"]
        status, output = self.run(*options, **how)
        assert (status, "finished already" in output) == (0, True), output

    def check_soundness(self):
        """Every checkpoint equals its checksums, and the table of log points has whole rows in ascending order."""
        for path in self.run_dir.glob("session_*"):
            for step_dir in (path / "checkpoints").glob("*"):
                assert is_sound(step_dir) or not step_dir.name.isdecimal(), step_dir
            if (path / "metrics.csv").is_file():
                header, *rows = [line.split(",") for line in (path / "metrics.csv").read_text().splitlines()]
                rows = [row for row in rows if len(row) == len(header)]  # a kill may cut the last one short
                steps = [int(row[0]) for row in rows]
                assert steps == sorted(set(steps))


def processes_of(run_dir):
    """Running processes whose command line names the run directory."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if str(run_dir) in " ".join(process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def rehearsal(tmp_path, environment):
    """`Train` in a folder of its own; after the test, no process of it is left. A fixture."""
    train = Train(tmp_path, environment)
    yield train
    for process in train.started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    _, left = psutil.wait_procs(processes_of(train.run_dir), timeout=30)  # graphs may still be drawn
    for process in left:
        process.kill()
    assert not left
