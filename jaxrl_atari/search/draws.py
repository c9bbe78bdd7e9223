"""What a search tries and what it stops: draws of fields by Optuna or chance, and ASHA.

A search is resumed from its trials' files alone: each `record.json` says what was drawn and how it ended, and each
`metrics.csv` what ASHA has seen. Ray's own record of an experiment is not used: it would lose what ASHA has seen, and
the trials of the seconds before a crash.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
from ray.tune.schedulers import AsyncHyperBandScheduler
from ray.tune.search import Searcher

from jaxrl_atari.errors import UserError
from jaxrl_atari.run_dir.results import read_metrics
from jaxrl_atari.search.space import (
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
from jaxrl_atari.search.worker import Record, StopFile, read_records, trial_dir, write_record
from jaxrl_atari.trial.trial import session_dir


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
                return kinds.IntDistribution(int(low), int(high))
            case Choice(values) | Grid(values):
                return kinds.CategoricalDistribution(values)
        raise TypeError(f"{distribution!r} is no distribution")

    return {name: convert(distribution) for name, distribution in space.items()}


class Draws(Searcher):
    """Draws the trials' fields: first those of unfinished trials, as they are, then new ones until there are enough
    or the search is interrupted.

    What is drawn is on disk before the trial starts.
    """

    def __init__(self, search_dir: Path, search: SearchConfig, task: dict[str, Any]):
        super().__init__(metric="return_ma", mode="max")
        self._dir, self._search, self._task, self._stop = search_dir, search, task, StopFile(search_dir)
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
            self._study = study = optuna.create_study(direction="maximize", sampler=sampler)
            for record in records.values():
                if record.status != "unfinished":
                    study.add_trial(self._past(record))

    def _past(self, record: Record) -> optuna.trial.FrozenTrial:
        scored = record.status != "failed" and record.score is not None
        return optuna.trial.create_trial(
            state=optuna.trial.TrialState.COMPLETE if scored else optuna.trial.TrialState.FAIL,
            value=record.score if scored else None,
            params=record.fields,
            distributions=self._distributions,
        )

    def suggest(self, trial_id: str) -> dict[str, Any] | str:
        if self._stop.wanted():
            return Searcher.FINISHED
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
            past: Any = SimpleNamespace(trial_id=f"trial_{record.number}")
            super().on_trial_add(tune_controller, past)
            self._replay(tune_controller, past, record.number, None)
        # Of a trial that was interrupted the last log point may not have been compared yet.
        self._replay(tune_controller, trial, trial.config["number"], -1)

    def _replay(self, tune_controller: Any, trial: Any, number: int, end: int | None) -> None:
        """Shows the log points up to `end` again. What was decided then stands."""
        path = session_dir(trial_dir(self._dir, number), 0)
        if not (path / "metrics.csv").exists():
            return
        try:
            metrics = read_metrics(path)
        except UserError:  # it had no log point yet
            return
        for env_steps, score in zip(metrics["env_steps"][:end], metrics["return_ma"][:end], strict=True):
            if math.isfinite(score):
                result = {"env_steps": int(env_steps), "return_ma": float(score)}
                self.on_trial_result(tune_controller, trial, result)
