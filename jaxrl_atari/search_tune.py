"""The engine of a search: Ray Tune runs the trials, Optuna or chance draws their fields, ASHA stops the worse ones.

A search is resumed from its trials' files alone: each `record.json` says what was drawn and how it ended, and each
`metrics.csv` what ASHA has seen. Ray's own record of an experiment is not used: it would lose what ASHA has seen, and
the trials of the seconds before a crash.
"""

import dataclasses
import json
import logging
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jaxrl_atari.config import Config
from jaxrl_atari.errors import UserError
from jaxrl_atari.results import read_metrics, write_trial_summary
from jaxrl_atari.search_space import (
    Choice,
    Fields,
    Grid,
    Integer,
    LogUniform,
    SearchConfig,
    Space,
    Uniform,
    draw,
    grid_point,
)
from jaxrl_atari.search_worker import (
    Record,
    memory_share,
    ranked,
    read_records,
    run_search_trial,
    session_dir,
    short,
    trial_dir,
    write_record,
)

# Before Ray is imported.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # its tables; `Recorder` tells the user
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")  # our own files hold all that theirs would
os.environ.setdefault("TUNE_PRINT_ALL_TRIAL_ERRORS", "0")  # a trial's output.txt has them
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # a trial without a GPU keeps off it by itself

try:
    import optuna
    import ray
    from ray import tune
    from ray.tune.callback import Callback
    from ray.tune.schedulers import AsyncHyperBandScheduler
    from ray.tune.search import Searcher
except ImportError as error:
    raise UserError(f"search mode needs {error.name}: pip install 'jaxrl_atari[search]'") from error

STATUS_SECONDS = 30.0
OBJECT_STORE_BYTES = 100 * 2**20  # nothing large passes through it


# --- What is tried ---------------------------------------------------------------------------------------------------


def optuna_distributions(space: Space) -> dict[str, optuna.distributions.BaseDistribution]:
    """The space in Optuna's terms."""
    kinds = optuna.distributions

    def convert(distribution: Any) -> optuna.distributions.BaseDistribution:
        match distribution:
            case Uniform(low, high):
                return kinds.FloatDistribution(low, high)
            case LogUniform(low, high):
                return kinds.FloatDistribution(low, high, log=True)
            case Integer(low, high):
                return kinds.IntDistribution(low, high)
            case Choice(values) | Grid(values):
                return kinds.CategoricalDistribution(values)
        raise TypeError(f"{distribution!r} is no distribution")

    return {name: convert(distribution) for name, distribution in space.items()}


class Draws(Searcher):
    """Draws the trials' fields: first those of unfinished trials, as they are, then new ones until there are enough.

    What is drawn is on disk before the trial starts.
    """

    def __init__(self, search_dir: Path, search: SearchConfig, task: dict[str, Any]):
        super().__init__(metric="return_ma", mode="max")
        self._dir, self._search, self._task = search_dir, search, task
        records = read_records(search_dir)
        self._begun = [record for record in records.values() if record.status == "unfinished"]
        self._next = max(records, default=-1) + 1
        self._study: optuna.Study | None = None
        self._asked: dict[str, optuna.trial.Trial] = {}  # by Ray's id
        if search.method == "optuna":
            optuna.logging.set_verbosity(optuna.logging.WARNING)
            self._distributions = optuna_distributions(search.space)
            # Another seed after a resume, lest the same numbers be drawn again.
            sampler = optuna.samplers.TPESampler(seed=search.seed + self._next)
            self._study = optuna.create_study(direction="maximize", sampler=sampler)
            for record in records.values():
                if record.status != "unfinished":
                    self._study.add_trial(self._past(record))

    def _past(self, record: Record) -> optuna.trial.FrozenTrial:
        scored = record.status != "failed" and record.score is not None
        return optuna.trial.create_trial(
            state=optuna.trial.TrialState.COMPLETE if scored else optuna.trial.TrialState.FAIL,
            value=record.score if scored else None,
            params=record.fields,
            distributions=self._distributions,
        )

    def suggest(self, trial_id: str) -> dict[str, Any] | None:
        if self._begun:
            record = self._begun.pop(0)
            fields = self._ask(trial_id, record.fields)
        else:
            fields = self._draw(trial_id)
            record = Record(self._next, fields)
            self._next += 1
            write_record(self._dir, record)
        return {**self._task, "number": record.number, "fields": fields}

    def _draw(self, trial_id: str) -> Fields:
        if self._study is None:
            return draw(self._search.space, self._search.seed, self._next)
        return self._ask(trial_id, grid_point(self._search.space, self._next))

    def _ask(self, trial_id: str, fixed: Fields) -> Fields:
        """Optuna's fields with some of them given."""
        if self._study is None:
            return fixed
        if fixed:
            self._study.enqueue_trial(fixed)
        self._asked[trial_id] = self._study.ask(self._distributions)
        return {name: self._asked[trial_id].params[name] for name in self._distributions}

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        asked = self._asked.pop(trial_id, None)
        if self._study is not None and asked is not None:
            score = None if error or not result else result.get("return_ma")
            state = optuna.trial.TrialState.FAIL if score is None else optuna.trial.TrialState.COMPLETE
            self._study.tell(asked, score, state=state)

    def save(self, checkpoint_path: str) -> None:
        """Nothing: the records hold it all."""

    def restore(self, checkpoint_path: str) -> None:
        """Never called."""


class Asha(AsyncHyperBandScheduler):
    """Ray's ASHA (Li et al. 2018, arXiv:1810.05934), which after a resume knows what it had seen before."""

    def __init__(self, search_dir: Path, search: SearchConfig, budget: int):
        super().__init__(
            time_attr="env_steps",
            max_t=budget,
            grace_period=search.grace_env_steps,
            reduction_factor=search.reduction,
            stop_last_trials=False,  # they end by themselves, with a last checkpoint
        )
        self._dir = search_dir
        self._ended = [record for record in read_records(search_dir).values() if record.status != "unfinished"]

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_add(tune_controller, trial)
        ended, self._ended = self._ended, []
        for record in ended:
            past = SimpleNamespace(trial_id=f"trial_{record.number}")
            super().on_trial_add(tune_controller, past)
            self._replay(tune_controller, past, record.number)
        self._replay(tune_controller, trial, trial.config["number"])

    def _replay(self, tune_controller: Any, trial: Any, number: int) -> None:
        path = session_dir(trial_dir(self._dir, number), 0)
        if not (path / "metrics.csv").exists():
            return
        try:
            metrics = read_metrics(path)
        except UserError:  # it had no log point yet
            return
        for env_steps, score in zip(metrics["env_steps"], metrics["return_ma"], strict=True):
            if score == score:  # no NaN
                result = {"env_steps": int(env_steps), "return_ma": float(score)}
                self.on_trial_result(tune_controller, trial, result)


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
    if not search.address:  # on the loopback interface: Ray lets anybody who can reach it run code
        ray.init(include_dashboard=False, object_store_memory=OBJECT_STORE_BYTES, _node_ip_address="127.0.0.1", **quiet)
        return
    try:
        ray.init(address=search.address, **quiet)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"search.address = {search.address!r}: {reason}; is there a `ray start --head`?") from error


def resources(search: SearchConfig, cluster: dict[str, float]) -> tuple[float, int, str]:
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
