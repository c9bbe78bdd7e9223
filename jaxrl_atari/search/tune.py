"""The engine of a search: Ray Tune runs the trials of `search_draws.py`, each in a process (`search_worker.py`).

`search.engine()` imports this module, with Ray's settings in the environment.
"""

import contextlib
import dataclasses
import json
import logging
import re
import shutil
import signal
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.progress_reporter import TrialProgressCallback

from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError
from jaxrl_atari.run_dir.results import write_trial_summary
from jaxrl_atari.search.draws import Asha, Draws
from jaxrl_atari.search.space import SearchConfig
from jaxrl_atari.search.worker import (
    Record,
    StopFile,
    memory_share,
    ranked,
    read_records,
    run_search_trial,
    short,
    trial_dir,
    write_record,
)

STATUS_SECONDS = 30.0
STOP_SECONDS = 60.0  # for trials to write a last checkpoint
OBJECT_STORE_BYTES = 100 * 2**20  # nothing large passes through it


# --- What becomes of it ----------------------------------------------------------------------------------------------


class Recorder(TrialProgressCallback):
    """Records how each trial ends, removes models that are not kept, and tells the user, in place of Ray's callback."""

    def __init__(self, search_dir: Path, config: Config, search: SearchConfig):
        super().__init__()
        self._dir, self._config, self._search = search_dir, config, search
        self._stop = StopFile(search_dir)
        self._told_at = time.monotonic()
        self._stopping_at: float | None = None

    def on_trial_result(self, iteration: int, trials: list, trial: Any, result: dict, **info: Any) -> None:
        """Nothing."""

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        fields = "  ".join(f"{name} {short(value)}" for name, value in trial.config["fields"].items())
        say(f"trial {trial.config['number']}  starts: {fields}")

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        running = [trial for trial in trials if trial.status == "RUNNING"]
        if self._stop.wanted():
            self._wait_for_last_checkpoints(len(running))
        elif time.monotonic() - self._told_at >= STATUS_SECONDS:
            self._told_at = time.monotonic()
            say("running: " + ("; ".join(map(_state, running)) or "none"))

    def _wait_for_last_checkpoints(self, running: int) -> None:
        if self._stopping_at is None:
            self._stopping_at = time.monotonic()
            say(f"stopping: {running} trials write a last checkpoint (once more: stop at once)")
        elif time.monotonic() - self._stopping_at > STOP_SECONDS:
            say(f"{running} trials have not ended within {STOP_SECONDS:.0f} s: they are killed")
            raise KeyboardInterrupt

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._end(trial.config["number"], "")

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        number = trial.config["number"]
        path = trial_dir(self._dir, number) / "failure.json"
        if path.exists():
            reason = json.loads(path.read_text(encoding="utf-8"))["reason"]
        elif self._stop.wanted():  # whoever interrupted the search may have told its processes too
            reason = ""
        else:  # the process ended before it could say why
            reason = why_ended(Path(trial.error_file).read_text(encoding="utf-8") if trial.error_file else "")
        self._end(number, reason)

    def _end(self, number: int, failure: str) -> None:
        record = end_record(self._dir, number, self._config, failure, interrupted=self._stop.wanted())
        score = "no game finished" if record.score is None else f"score {short(record.score)}"
        status = "interrupted" if record.status == "unfinished" else record.status
        say(f"trial {number}  {status} at {record.env_steps:,} env steps, {score}: {record.reason}")
        remove_models(self._dir, self._search.keep)


def _state(trial: Any) -> str:
    """How a running trial stands, as Ray Tune knows it."""
    result = trial.last_result or {}
    if "env_steps" not in result:
        return f"trial {trial.config['number']} no game finished yet"
    score = short(result["return_ma"])
    return f"trial {trial.config['number']} {result['env_steps']:,} env steps, return_ma {score}"


def why_ended(said: str) -> str:
    """Why a process ended that could not say so itself, in one line; `said` is what Ray has written about it."""
    if "running low on memory" in said:  # Ray's watch over the machine's memory
        used = re.search(r"\S+ used / \S+ limit", said)
        return "Ray killed its process, for the machine had too little memory left" + (f" ({used[0]})" if used else "")
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if not lines or "actor died" in said:
        return "its process was killed, by hand or for lack of memory"
    return lines[-1][:300]


def end_record(search_dir: Path, number: int, config: Config, failure: str, interrupted: bool = False) -> Record:
    """Writes and returns the record of a trial that has ended.

    Args:
        failure: why it failed; empty if it did not.
        interrupted: the search is; a trial that has budget left will go on.
    """
    record = read_records(search_dir)[number]
    try:
        summary = write_trial_summary(trial_dir(search_dir, number))
        score, env_steps = summary["score"], round(summary["mean"]["env_steps"])
    except UserError:  # no log point
        score, env_steps = None, 0
    if failure:
        status, reason = "failed", failure
    elif config.is_spent(env_steps):
        status, reason = "finished", "budget spent"
    elif interrupted:
        status, reason = "unfinished", "goes on when the search is resumed"
    else:
        status, reason = "stopped", "worse than others (ASHA)"
    record = dataclasses.replace(record, status=status, reason=reason, score=score, env_steps=env_steps)
    write_record(search_dir, record)
    return record


def remove_models(search_dir: Path, keep: int) -> None:
    """Removes the checkpoints of all trials that have ended but the best `keep`."""
    records = list(read_records(search_dir).values())
    unscored = [record for record in records if record.status == "finished" and record.score is None]
    kept = {record.number for record in [*ranked(records), *unscored][:keep]}
    for record in records:
        if record.status != "unfinished" and record.number not in kept:
            for checkpoints in trial_dir(search_dir, record.number).glob("session_*/checkpoints"):
                shutil.rmtree(checkpoints, ignore_errors=True)


def say(line: str) -> None:
    """Prints a line at once."""
    print(line, flush=True)


# --- Running ---------------------------------------------------------------------------------------------------------


def connect(search: SearchConfig) -> None:
    """Starts Ray on this machine, or joins the cluster at `search.address`.

    Raises:
        UserError: no cluster there, or it wants a token.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # `Recorder` tells the user
    if not search.address:  # "local": Ray would join a cluster that it finds running here
        with ignored(signal.SIGHUP):  # Ray's processes inherit it: they outlive the terminal until trials are saved
            ray.init(
                "local",
                include_dashboard=False,
                object_store_memory=OBJECT_STORE_BYTES,
                _node_ip_address="127.0.0.1",
                **quiet,
            )
        return
    try:
        if search.address != "auto":
            host, _, port = search.address.rpartition(":")
            socket.create_connection((host, int(port)), timeout=10).close()  # Ray would wait minutes for nobody
        ray.init(address=search.address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        if "InvalidAuthToken" in str(error.__cause__):
            reason, advice = "the cluster wants its token", "copy ~/.ray/auth_token from the machine of its head"
        else:
            reason, advice = " ".join(str(error).split())[:200], "is there a `ray start --head`?"
        raise UserError(f"search.address = {search.address!r}: {reason}; {advice}") from error


@contextlib.contextmanager
def ignored(number: signal.Signals) -> Iterator[None]:
    """Ignores a signal meanwhile."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


def resources(search: SearchConfig, cluster: Mapping[str, float]) -> tuple[float, int, int, str]:
    """GPUs and CPU cores of each trial, how many run at a time, and a line that says so.

    Args:
        cluster: what there is of "GPU" and "CPU".

    Raises:
        UserError: a trial asks for more than there is.
    """
    gpus, cores = cluster.get("GPU", 0.0), int(cluster.get("CPU", 1))
    gpu, cpu = search.resources.gpu, search.resources.cpu
    if gpu == 0 or gpus == 0:
        gpu, why = 0.0, "search.resources.gpu = 0" if gpu == 0 else "there is no GPU"
        cpu = cpu or 1
        at_once = cores // cpu
        line = f"trials run on the CPU ({why}): {cpu} of {cores} cores each, {at_once} at a time"
    else:
        slots = int(gpus / gpu)
        cpu = cpu or max(1, cores // max(slots, 1))
        at_once = min(slots, cores // cpu)
        line = (
            f"{gpus:g} GPUs, {gpu:g} a trial with {memory_share(gpu):.1%} of its memory; {cpu} of {cores} cores each,"
            f" {at_once} at a time"
        )
    if at_once == 0:
        raise UserError(
            f"search.resources: a trial asks for {gpu:g} GPUs and {cpu} cores; there are {gpus:g} and {cores}"
        )
    return gpu, cpu, at_once, line


def make_tuner(config: Config, search: SearchConfig, search_dir: Path, missing: int) -> tune.Tuner:
    """What runs the `missing` trials, once Ray is there.

    Raises:
        UserError: a trial asks for more than there is.
    """
    gpu, cpu, at_once, line = resources(search, ray.cluster_resources())
    say(line)
    task = {"search_dir": str(search_dir), "gpu": gpu, "cpu": cpu}
    asha = search.early_stopping == "asha"
    return tune.Tuner(
        tune.with_resources(run_search_trial, {"cpu": cpu, "gpu": gpu}),
        tune_config=tune.TuneConfig(
            metric="return_ma",
            mode="max",
            search_alg=Draws(search_dir, search, task),
            scheduler=Asha(search_dir, search, config.total_env_steps) if asha else None,
            num_samples=missing,
            max_concurrent_trials=at_once,  # none is drawn before there is room for it
            trial_dirname_creator=lambda trial: f"trial_{trial.config['number']}",
        ),
        run_config=tune.RunConfig(
            name="ray", storage_path=str(search_dir), verbose=0, callbacks=[Recorder(search_dir, config, search)]
        ),
    )


def run(config: Config, search: SearchConfig, search_dir: Path) -> bool:
    """Runs the trials that are still missing. Returns whether all have ended: not so after Ctrl-C."""
    missing = search.trials - sum(record.status != "unfinished" for record in read_records(search_dir).values())
    if missing <= 0:
        return True
    stop = StopFile(search_dir)
    stop.clear()  # of a search that crashed
    try:
        connect(search)
        with stop:  # only now, for Ray has set its own handlers of signals
            make_tuner(config, search, search_dir, missing).fit()
    except KeyboardInterrupt:  # a second Ctrl-C, or a trial took too long over its last checkpoint
        pass
    finally:
        ray.shutdown()
        stop.clear()
        shutil.rmtree(search_dir / "ray", ignore_errors=True)
        remove_models(search_dir, search.keep)
    ended = [record for record in read_records(search_dir).values() if record.status != "unfinished"]
    return len(ended) >= search.trials
