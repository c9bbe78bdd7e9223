"""Search algorithm and scheduler for Ray Tune: Optuna's samplers, and ASHA.

Both take their state from the files of the search, which a crash cannot lose: the records, and what each trial logged.
Ray's own checkpoint of an experiment lacks the scores that ASHA has compared and the trials of the last seconds.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from optuna.samplers import RandomSampler, TPESampler
from ray.tune.schedulers import ASHAScheduler
from ray.tune.search import Searcher

from jaxrl_atari.errors import UserError
from jaxrl_atari.report.search_records import Record, read_records, trial_dir, write_record
from jaxrl_atari.runs.reading import read_metrics
from jaxrl_atari.runs.run_dir import session_dir
from jaxrl_atari.search import SearchConfig
from jaxrl_atari.search.files import StopFile
from jaxrl_atari.search.space import Fields, grid_point
from jaxrl_atari.search.study import optuna_distributions, past_study


def sample(search: SearchConfig, number: int, records: Iterable[Record] = ()) -> Fields:
    """Samples the fields of trial `number`; those of a grid are given by the number.

    Args:
        records: earlier trials, from whose scores Optuna's TPE learns; `random` ignores them.
    """
    seed = int(np.random.SeedSequence([search.seed, number]).generate_state(1)[0])
    sampler = RandomSampler(seed) if search.method == "random" else TPESampler(seed=seed)
    study = past_study(search, records, sampler)
    study.enqueue_trial(grid_point(search.space, number))
    return study.ask(optuna_distributions(search)).params


class TrialSampler(Searcher):
    """Unfinished trials with the fields they have, then new trials, until the search is interrupted.

    A new trial has its record on disk before it starts.
    """

    def __init__(self, search_dir: Path, search: SearchConfig, task: dict[str, Any]):
        super().__init__(metric="return_ma", mode="max")
        self._dir, self._search, self._task, self._stop = search_dir, search, task, StopFile(search_dir)
        self._unfinished = [r for r in read_records(search_dir).values() if r.is_open(search.retries)]

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        if self._stop.requested():
            return Searcher.FINISHED
        if self._unfinished:
            record = self._unfinished.pop(0)
        else:
            records = read_records(self._dir)
            number = max(records, default=-1) + 1
            record = Record(number, sample(self._search, number, records.values()))
            write_record(self._dir, record)
        return {**self._task, "number": record.number, "fields": record.fields}

    def on_trial_complete(self, trial_id: str, result: dict | None = None, error: bool = False) -> None:
        """Does nothing: the records hold the scores."""

    def save(self, checkpoint_path: str) -> None:
        """Does nothing: the records hold all state."""


class ResumableAsha(ASHAScheduler):
    """Ray's ASHA (Li et al. 2018, arXiv:1810.05934) that continues with the comparisons made before a resume."""

    def __init__(self, search_dir: Path, search: SearchConfig, budget: int):
        super().__init__(
            time_attr="env_steps",
            metric="return_ma",
            mode="max",
            max_t=budget,
            grace_period=search.grace_env_steps,
            reduction_factor=search.reduction,
            stop_last_trials=False,  # a trial ends itself at its budget, with a last checkpoint
        )
        self._dir = search_dir
        for record in read_records(search_dir).values():
            if not record.is_open(search.retries):
                past: Any = SimpleNamespace(trial_id=f"trial_{record.number}", config={"number": record.number})
                super().on_trial_add(None, past)  # pyright: ignore[reportArgumentType]
                self._replay(past, None)

    def on_trial_add(self, tune_controller: Any, trial: Any) -> None:
        super().on_trial_add(tune_controller, trial)
        self._replay(trial, -1)  # an interrupted trial may have ended before its last log point was compared

    def _replay(self, trial: Any, end: int | None) -> None:
        """Repeats the comparisons at a trial's log points up to `end`. What was decided then stands."""
        try:
            metrics = read_metrics(session_dir(trial_dir(self._dir, trial.config["number"]), 0))
        except UserError:  # no log point yet
            return
        for env_steps, score in zip(metrics["env_steps"][:end], metrics["return_ma"][:end], strict=True):
            if math.isfinite(score):
                result = {"env_steps": int(env_steps), "return_ma": float(score)}
                self.on_trial_result(None, trial, result)  # pyright: ignore[reportArgumentType]
