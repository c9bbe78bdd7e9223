"""Ray Tune runs the trials of a search, each in a process of its own (`worker.py`).

Import this module through `load_tune` of the command, which puts Ray's settings into the environment first.
"""

import contextlib
import dataclasses
import logging
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.progress_reporter import TrialProgressCallback

from jaxrl_atari.cli import counted, say
from jaxrl_atari.config import Config, GpuOption
from jaxrl_atari.errors import UserError, require
from jaxrl_atari.report.search_records import Record, ranked, read_records, trial_dir, value_text, write_record
from jaxrl_atari.report.summary import score_text, write_trial_summary
from jaxrl_atari.runs.files import refusal
from jaxrl_atari.search.algorithm import ResumableAsha, TrialSampler
from jaxrl_atari.search.files import StopFile
from jaxrl_atari.search.space import SearchConfig
from jaxrl_atari.search.worker import memory_share, run_search_trial, usable_gpus

STATUS_SECONDS = 30.0
STOP_SECONDS = 60.0  # time for trials to write a last checkpoint
OBJECT_STORE_BYTES = 100 * 2**20  # nothing large passes through it


# --- The end of a trial ----------------------------------------------------------------------------------------------


class Recorder(TrialProgressCallback):
    """Records how each trial ends, removes checkpoints that are not kept, and replaces Ray's display of progress."""

    def __init__(self, search_dir: Path, search: SearchConfig):
        super().__init__()
        self._dir, self._search = search_dir, search
        self._stop = StopFile(search_dir)
        self._shown_at = time.monotonic()
        self._stopping_at: float | None = None

    def setup(self, *arguments: Any, **info: Any) -> None:
        """Makes SIGUSR1 a stop request again: Tune has just set a handler of its own, which drops the trials."""
        signal.signal(signal.SIGUSR1, signal.getsignal(signal.SIGTERM))

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        """Shows nothing."""

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        fields = "  ".join(f"{name} {value_text(value)}" for name, value in trial.config["fields"].items())
        say(f"trial {trial.config['number']}  starts: {fields}")

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        running = [trial for trial in trials if trial.status == "RUNNING"]
        now = time.monotonic()
        if not self._stop.requested():
            if now - self._shown_at >= STATUS_SECONDS:
                self._shown_at = now
                say("running: " + ("; ".join(map(_progress, running)) or "none"))
        elif self._stopping_at is None:
            self._stopping_at = now
            say(f"stopping: {counted(len(running), 'trial')} to write a last checkpoint (Ctrl-C again: stop at once)")
        elif now - self._stopping_at > STOP_SECONDS:
            say(f"killing what has not ended within {STOP_SECONDS:.0f} s: {counted(len(running), 'trial')}")
            raise KeyboardInterrupt

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._end(trial.config["number"])

    def on_trial_recover(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        number = trial.config["number"]
        reason = read_records(self._dir)[number].reason or failure_reason(trial.error_file)
        say(f"trial {number}  is tried again: {reason}")

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        # A killed process is no failure in an interruption: whoever sent the signal may have sent it to all processes.
        self._end(trial.config["number"], "" if self._stop.requested() else failure_reason(trial.error_file))

    def _end(self, number: int, failure: str = "") -> None:
        tries = self._search.retries + 1
        record = end_record(self._dir, number, failure, self._stop.requested(), tries)
        score = "no game finished" if record.score is None else f"score {score_text(record.score)}"
        status = "interrupted" if record.status == "unfinished" else record.status
        say(f"trial {number}  {status} at {record.env_steps:,} env steps, {score}: {record.reason}")
        remove_checkpoints(self._dir, self._search)


def _progress(trial: Any) -> str:
    """Progress of a running trial, by its last result."""
    result = trial.last_result or {}
    if "env_steps" not in result:
        return f"trial {trial.config['number']} no game finished yet"
    score = score_text(result["return_ma"])
    return f"trial {trial.config['number']} {result['env_steps']:,} env steps, return_ma {score}"


def failure_reason(error_file: str | None) -> str:
    """Why a process failed that did not record the reason itself, in one line, from the file with Ray's message."""
    error = Path(error_file).read_text(encoding="utf-8") if error_file else ""
    if "running low on memory" in error:  # Ray's memory monitor
        used = re.search(r"\S+ used / \S+ limit", error)
        return "Ray killed its process because the machine was low on memory" + (f" ({used[0]})" if used else "")
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    if not lines or "actor died" in error:
        return "its process was killed, by hand or for lack of memory"
    return lines[-1][:300]


def end_record(search_dir: Path, number: int, failure: str, interrupted: bool, tries: int) -> Record:
    """Writes and returns the record of a trial that has ended.

    Args:
        failure: why the trial failed; empty if it did not, or recorded the reason itself.
        interrupted: the search is being interrupted; a trial with budget left is unfinished.
        tries: how often a failed trial was started, in this start of the search.
    """
    record = read_records(search_dir)[number]
    try:
        summary = write_trial_summary(trial_dir(search_dir, number))
        score, env_steps, spent = summary["score"], round(summary["mean"]["env_steps"]), summary["complete"]
    except UserError:  # no log point
        score, env_steps, spent = None, 0, False
    if record.status == "failed":
        status, reason = "failed", record.reason
    elif failure:
        status, reason = "failed", failure
    elif spent:
        status, reason = "finished", "budget spent"
    elif interrupted:
        status, reason = "unfinished", "continues when the search is resumed"
    else:
        status, reason = "stopped", "worse than others (ASHA)"
    tries = tries if status == "failed" else 1
    record = dataclasses.replace(record, status=status, reason=reason, score=score, env_steps=env_steps, tries=tries)
    write_record(search_dir, record)
    return record


def remove_checkpoints(search_dir: Path, search: SearchConfig) -> None:
    """Removes the checkpoints of the finished and stopped trials, except the best `search.keep`.

    A failed trial keeps its own: its error may be one that the user can correct.
    """
    records = list(read_records(search_dir).values())
    unscored = [record for record in records if record.status == "finished" and record.score is None]
    kept = {record.number for record in [*ranked(records), *unscored][: search.keep]}
    for record in records:
        if record.status in ("finished", "stopped") and record.number not in kept:
            for checkpoints in trial_dir(search_dir, record.number).glob("session_*/checkpoints"):
                if not refusal(checkpoints):  # what cannot be read now may be sound
                    shutil.rmtree(checkpoints, ignore_errors=True)


# --- Running ---------------------------------------------------------------------------------------------------------


def connect(config: Config, search: SearchConfig) -> None:
    """Starts Ray on this machine, or joins the cluster at `search.address`.

    Raises:
        UserError: Ray does not start, no cluster is there, or it requires a token.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # `Recorder` reports errors
    if not search.address:
        # Ray's processes inherit the ignored SIGHUP: they outlive the terminal until trials are saved.
        handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
        local = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES, "_node_ip_address": "127.0.0.1"}
        local["num_gpus"] = len(usable_gpus(config).gpus)  # Ray would count GPUs that JAX cannot use
        try:
            with own_process_groups():
                ray.init("local", **local, **quiet)  # without "local", Ray would join a cluster on this machine
        except Exception as error:  # Ray has no narrower class for a start that takes too long
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"Ray did not start: {reason}; is the machine busy? --resume starts it again") from error
        finally:
            signal.signal(signal.SIGHUP, handler)
        return
    try:
        if search.address != "auto":
            host, _, port = search.address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()  # Ray would wait minutes for a dead address
        ray.init(address=search.address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        reason, advice = " ".join(str(error).split())[:200], "is there a `ray start --head`?"
        if "InvalidAuthToken" in str(error.__cause__):
            reason, advice = "the cluster requires its token", "copy ~/.ray/auth_token from the head node"
        raise UserError(f"search.address = {search.address!r}: {reason}; {advice}") from error


@contextlib.contextmanager
def own_process_groups() -> Iterator[None]:
    """Starts processes in groups of their own: a signal to this one's group, as from `timeout`, does not reach them."""
    start = subprocess.Popen.__init__

    def start_apart(self: Any, *args: Any, **options: Any) -> None:
        start(self, *args, **{"process_group": 0, **options})

    subprocess.Popen.__init__ = start_apart
    try:
        yield
    finally:
        subprocess.Popen.__init__ = start


def resources(
    search: SearchConfig, machines: Sequence[Mapping[str, float]], option: GpuOption, problem: str
) -> tuple[float, int, int, str]:
    """GPUs and CPU cores of each trial, the number of trials at a time, and a line that describes all three.

    Args:
        machines: numbers of "GPU" and "CPU" of each machine in the Ray cluster.
        option: devices.gpu.
        problem: why there is no GPU, if there is none.

    Raises:
        UserError: a trial needs more than any machine has.
    """
    owned = [(0.0 if option is False else each.get("GPU", 0.0), int(each.get("CPU", 0))) for each in machines]
    gpus, cores = sum(gpus for gpus, _ in owned), sum(cores for _, cores in owned)
    require(option is not True or gpus > 0, "devices.gpu", True, "a Ray cluster with GPUs", "use auto or false")
    gpu = search.resources.gpu if gpus else 0.0

    def slots(gpus: float, cores: int) -> int:
        """Trials for which a machine has GPUs. A trial with a fraction of a GPU cannot have parts of two."""
        return cores if not gpu else int(gpus) * int(1 / gpu) if gpu < 1 else int(gpus / gpu)

    shares = [cores // slots(gpus, cores) for gpus, cores in owned if slots(gpus, cores)]
    cpu = search.resources.cpu or max(1, min(shares, default=1))
    at_once = sum(min(slots(gpus, cores), cores // cpu) for gpus, cores in owned)
    if at_once == 0:
        where = f" on {len(owned)} machines, none of which has enough of both" if len(owned) > 1 else ""
        raise UserError(
            f"search.resources: a trial needs {counted(gpu, 'GPU')} and {counted(cpu, 'core')}; found: "
            f"{counted(gpus, 'GPU')} and {counted(cores, 'core')}{where}; "
            "lower them"
        )
    if gpu:
        where = f"{gpus:g} GPUs, {gpu:g} for each trial with {memory_share(gpu):.1%} of its memory"
    else:
        why = "search.resources.gpu = 0" if gpus else "devices.gpu = false" if option is False else problem
        where = f"trials run on the CPU: {why}"
    return gpu, cpu, at_once, f"{where}; {cpu} of {cores} cores each, {at_once} at a time"


def fit(config: Config, search: SearchConfig, search_dir: Path, trials: int) -> None:
    """Runs `trials` trials in the Ray cluster."""
    problem = "the cluster has no GPU" if search.address else usable_gpus(config).problem
    machines = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    gpu, cpu, at_once, line = resources(search, machines, config.devices.gpu, problem)
    say(line)
    task = {"search_dir": str(search_dir), "gpu": gpu, "cpu": cpu}
    asha = search.early_stopping == "asha"
    tune.Tuner(
        tune.with_resources(run_search_trial, {"cpu": cpu, "gpu": gpu}),
        tune_config=tune.TuneConfig(
            search_alg=TrialSampler(search_dir, search, task),
            scheduler=ResumableAsha(search_dir, search, config.total_env_steps) if asha else None,
            num_samples=trials,
            max_concurrent_trials=at_once,  # a trial is sampled only when it can start
            trial_dirname_creator=lambda trial: f"trial_{trial.config['number']}",
        ),
        run_config=tune.RunConfig(
            name="ray",
            storage_path=str(search_dir),
            verbose=0,
            callbacks=[Recorder(search_dir, search)],
            failure_config=tune.FailureConfig(max_failures=search.retries),
        ),
    ).fit()


def run(config: Config, search: SearchConfig, search_dir: Path) -> bool:
    """Runs the missing trials. Returns True if all have ended, False after an interruption."""

    def missing() -> int:
        return search.trials - sum(not r.is_open(search.retries) for r in read_records(search_dir).values())

    if missing() <= 0:
        return True
    stop = StopFile(search_dir)
    stop.clear()  # left by a search that crashed
    terminate = signal.getsignal(signal.SIGTERM)
    try:
        try:
            connect(config, search)
        finally:
            signal.signal(signal.SIGTERM, terminate)  # Ray has set a handler of its own, which exits with status 15
        with stop:
            fit(config, search, search_dir, missing())
    except (KeyboardInterrupt, SystemExit):
        # A second Ctrl-C, a trial that needed too long for its last checkpoint, or SIGTERM while Ray starts.
        pass
    finally:
        ray.shutdown()
        stop.clear()
        shutil.rmtree(search_dir / "ray", ignore_errors=True)
        remove_checkpoints(search_dir, search)
    return missing() <= 0
