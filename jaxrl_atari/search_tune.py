"""The engine of a search: Ray Tune runs the trials of `search_draws.py`, each in a process (`search_worker.py`).

`search.engine()` imports this module, with Ray's settings in the environment.
"""

import dataclasses
import json
import logging
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import tune
from ray.tune.callback import Callback

from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError
from jaxrl_atari.results import write_trial_summary
from jaxrl_atari.search_draws import Asha, Draws
from jaxrl_atari.search_space import SearchConfig
from jaxrl_atari.search_worker import (
    Record,
    memory_share,
    ranked,
    read_records,
    run_search_trial,
    short,
    trial_dir,
    write_record,
)

STATUS_SECONDS = 30.0
OBJECT_STORE_BYTES = 100 * 2**20  # nothing large passes through it


# --- What becomes of it ----------------------------------------------------------------------------------------------


class Recorder(Callback):
    """Records how each trial ends, removes models that are not kept, and tells the user."""

    def __init__(self, search_dir: Path, config: Config, search: SearchConfig):
        self._dir, self._config, self._search = search_dir, config, search
        self._told_at = time.monotonic()

    def on_trial_start(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        fields = "  ".join(f"{name} {short(value)}" for name, value in trial.config["fields"].items())
        say(f"trial {trial.config['number']}  starts: {fields}")

    def on_step_end(self, iteration: int, trials: list, **info: Any) -> None:
        if time.monotonic() - self._told_at < STATUS_SECONDS:
            return
        self._told_at = time.monotonic()
        running = [trial for trial in trials if trial.status == "RUNNING"]
        states = [
            f"trial {trial.config['number']} {result['env_steps']:,} env steps, return_ma {short(result['return_ma'])}"
            if "env_steps" in (result := trial.last_result or {})
            else f"trial {trial.config['number']} no game finished yet"
            for trial in running
        ]
        say("running: " + ("; ".join(states) or "none"))

    def on_trial_complete(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        self._end(trial.config["number"], "")

    def on_trial_error(self, iteration: int, trials: list, trial: Any, **info: Any) -> None:
        number = trial.config["number"]
        path = trial_dir(self._dir, number) / "failure.json"
        if path.exists():
            reason = json.loads(path.read_text(encoding="utf-8"))["reason"]
        else:  # the process ended before it could say why
            said = Path(trial.error_file).read_text(encoding="utf-8") if trial.error_file else ""
            lines = [line.strip() for line in said.splitlines() if line.strip()]
            killed = not lines or "actor died" in said
            reason = "its process was killed, by hand or for lack of memory" if killed else lines[-1][:300]
        self._end(number, reason)

    def _end(self, number: int, failure: str) -> None:
        record = end_record(self._dir, number, self._config, failure)
        score = "no game finished" if record.score is None else f"score {short(record.score)}"
        say(f"trial {number}  {record.status} at {record.env_steps:,} env steps, {score}: {record.reason}")
        remove_models(self._dir, self._search.keep)


def end_record(search_dir: Path, number: int, config: Config, failure: str) -> Record:
    """Writes and returns the record of a trial that has ended; `failure` says why it failed, if it did."""
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
    else:
        status, reason = "stopped", "worse than others (ASHA)"
    record = dataclasses.replace(record, status=status, reason=reason, score=score, env_steps=env_steps)
    write_record(search_dir, record)
    return record


def remove_models(search_dir: Path, keep: int) -> None:
    """Removes the checkpoints of all trials that have ended but the best `keep`."""
    records = list(read_records(search_dir).values())
    kept = {record.number for record in ranked(records)[:keep]}
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
        UserError: no cluster there.
    """
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    logging.getLogger("ray.tune").setLevel(logging.CRITICAL)  # `Recorder` tells the user
    if not search.address:  # "local": Ray would join a cluster that it finds running here
        ray.init(
            "local",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            _node_ip_address="127.0.0.1",
            **quiet,
        )
        return
    try:
        ray.init(address=search.address, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"search.address = {search.address!r}: {reason}; is there a `ray start --head`?") from error


def resources(search: SearchConfig, cluster: Mapping[str, float]) -> tuple[float, int, str]:
    """GPUs and CPU cores of each trial, and a line that says so.

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
        line = f"trials run on the CPU ({why}): {cpu} of {cores} cores each, {cores // cpu} at a time"
    else:
        slots = int(gpus / gpu)
        cpu = cpu or max(1, cores // max(slots, 1))
        line = (
            f"{gpus:g} GPUs, {gpu:g} a trial with {memory_share(gpu):.1%} of its memory; {cpu} of {cores} cores each,"
            f" {min(slots, cores // cpu)} at a time"
        )
    if gpu > gpus or cpu > cores:
        raise UserError(
            f"search.resources: a trial asks for {gpu:g} GPUs and {cpu} cores; there are {gpus:g} and {cores}"
        )
    return gpu, cpu, line


def run(config: Config, search: SearchConfig, search_dir: Path) -> bool:
    """Runs the trials that are still missing. Returns whether all have ended: not so after Ctrl-C."""
    missing = search.trials - sum(record.status != "unfinished" for record in read_records(search_dir).values())
    if missing <= 0:
        return True
    try:
        connect(search)
        gpu, cpu, line = resources(search, ray.cluster_resources())
        say(line)
        task = {"search_dir": str(search_dir), "gpu": gpu, "cpu": cpu}
        asha = search.early_stopping == "asha"
        tuner = tune.Tuner(
            tune.with_resources(run_search_trial, {"cpu": cpu, "gpu": gpu}),
            tune_config=tune.TuneConfig(
                metric="return_ma",
                mode="max",
                search_alg=Draws(search_dir, search, task),
                scheduler=Asha(search_dir, search, config.total_env_steps) if asha else None,
                num_samples=missing,
                trial_dirname_creator=lambda trial: f"trial_{trial.config['number']}",
            ),
            run_config=tune.RunConfig(
                name="ray", storage_path=str(search_dir), verbose=0, callbacks=[Recorder(search_dir, config, search)]
            ),
        )
        tuner.fit()
    finally:
        ray.shutdown()
        shutil.rmtree(search_dir / "ray", ignore_errors=True)
        remove_models(search_dir, search.keep)
    ended = [record for record in read_records(search_dir).values() if record.status != "unfinished"]
    return len(ended) >= search.trials
