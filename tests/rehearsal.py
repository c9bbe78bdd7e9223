"""Rehearsals of faults: a small training through the real command, in the environment of a user."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil
from user_commands import ROOT, still_running

from jaxrl_atari.runs.layout import checkpoint_env_steps, latest_env_steps

INTERRUPTED = 130

CONFIG = """
from jaxrl_atari.config import Config, EnvConfig, EvaluationConfig, LogConfig, PPOConfig

def get_config():
    return Config(
        name="fault", total_env_steps=1_000, env=EnvConfig(game="CrazyClimber", num_envs=2, num_threads=1),
        ppo=PPOConfig(rollout_length=8, minibatch_size=16, epochs=1),
        log=LogConfig(every_env_steps=16, checkpoint_every_env_steps=64, graphs=False),
    )
"""
ENDLESS = ("--total-env-steps", 1_000_000)


class Train:
    """`train --config CONFIG --run-dir DIR`, started as often as a test likes."""

    def __init__(self, folder, environment):
        self.run_dir, self.environment = folder / "run", environment
        self.config = folder / "fault.py"
        self.config.write_text(CONFIG)
        self.started = []

    def start(self, *options, variables=(), limit="", **how):
        """`limit`: arguments of the shell's `ulimit`."""
        command = ["sh", "-c", f'ulimit {limit} && exec "$0" "$@"'] if limit else []
        command += [
            sys.executable,
            "-m",
            "jaxrl_atari.train",
            "--config",
            self.config,
            "--run-dir",
            self.run_dir,
        ]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        process = subprocess.Popen(
            [*map(str, (*command, *options))], cwd=ROOT, env=self.environment | dict(variables), text=True,
            start_new_session=True, **pipes | how,
        )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, *options, **how):
        """Starts it and waits for its end; returns the status and the output."""
        process = self.start(*options, **how)
        output, _ = process.communicate(timeout=600)
        return process.returncode, output

    def steps(self):
        """Env steps of the complete checkpoints."""
        return checkpoint_env_steps(self.run_dir / "session_0")

    def last(self):
        """Env steps of the latest checkpoint; 0 if there is none."""
        return latest_env_steps(self.run_dir / "session_0")

    def logged(self):
        """Env steps of the whole rows of metrics.csv; a kill may cut the last one short."""
        header, *rows = (self.run_dir / "session_0" / "metrics.csv").read_text().splitlines()
        return [int(row.split(",")[0]) for row in rows if row.count(",") == header.count(",")]

    def wait_for(self, process, after=0):
        """Waits for a checkpoint beyond `after` env steps."""
        end = time.monotonic() + 300
        while self.last() <= after:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end
            time.sleep(0.05)

    def continues(self, *options):
        """The same command line loses nothing and finishes; once more, it does nothing."""
        before = self.last()
        total = max(1_000, before + 100)
        options = [*options, "--total-env-steps", total]
        status, output = self.run(*options)
        assert status == 0, output
        assert "damaged" not in output
        assert not before or f"resumed at {before:,} env steps" in output, output
        assert self.last() > total - 20
        assert self.logged() == sorted(set(self.logged()))
        assert json.loads((self.run_dir / "trial.json").read_text())["complete"]
        status, output = self.run(*options)
        assert (status, "finished already" in output) == (0, True), output


def rehearsal(tmp_path, environment):
    """`Train` in a folder of its own; after the test, no process of it is left. A fixture."""
    train = Train(tmp_path, environment)
    yield train
    for process in train.started:
        with process:  # closes its pipes and waits
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    sessions = {process.pid for process in train.started}
    assert not still_running(processes_of(sessions), seconds=60)


def processes_of(sessions):
    """The processes of the sessions (as `setsid` makes them) that the commands led."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) in sessions:
                found.append(process)
    return found
