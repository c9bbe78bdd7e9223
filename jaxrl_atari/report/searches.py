"""Searches as they are read: the table of trials and the search space as text, and the trials of the study.

`runs/journal.py` reads the study, which is Optuna's. Optuna is imported only for the trials.
"""

import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_atari.config import flat
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.report.text import number_text, score_text
from jaxrl_atari.runs.layout import SEARCH_TABLE_FILE

if TYPE_CHECKING:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

REMAKE_ADVICE = "move it away: `python -m jaxrl_atari.search --resume SEARCH_DIR` makes it again"


class ScoredTrial(NamedTuple):
    """A trial that has a score."""

    number: int
    fields: dict[str, Any]  # dotted name of a searched field -> value
    distributions: dict[str, "BaseDistribution"]  # dotted name of a searched field -> distribution of its values
    score: float  # its last return_ma
    env_steps: list[int]  # env steps of the log points that have a return_ma
    returns: list[float]  # return_ma at these log points
    kind: str  # best, finished, stopped by ASHA, or unfinished


# --- Tables ------------------------------------------------------------------------------------------------------


def trial_rows(search_dir: Path) -> list[list[str]]:
    """The table of trials.csv with rounded numbers: a header, then a row for each trial, the best first.

    The table is empty before the search has written its first results.

    Raises:
        UserError: trials.csv is damaged.
    """
    path = search_dir / SEARCH_TABLE_FILE
    if not path.is_file():
        return []
    try:
        table = [*csv.reader(path.read_text(encoding="utf-8").splitlines())]
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}: cannot be used ({reason(error)}); {REMAKE_ADVICE}") from error
    if not table or not {"trial", "score", "status"} <= {*table[0]}:
        raise UserError(f"{path}: cannot be used (its first line is no header of trials); {REMAKE_ADVICE}")
    header = table[0]
    rows = [dict(zip(header, row, strict=False)) for row in table[1:]]
    shown_as_score = {"score", "env_steps"}

    def cell_text(name: str, cell: str) -> str:
        try:
            value = float(cell)
        except ValueError:
            return cell
        if name == "trial" or not math.isfinite(value):
            return cell
        return score_text(value) if name in shown_as_score else number_text(value)

    return [header, *([cell_text(name, row.get(name, "")) for name in header] for row in rows)]


def search_facts(search: Any) -> dict[str, Any]:
    """The search space and the options of a search as text: name -> value.

    The value of a searched field is its range, such as `0.0001 to 0.0005, logarithmic`, or its choices.

    Args:
        search: the entry `search` of a search.json, which may be of unknown origin.
    """
    if not isinstance(search, Mapping):
        return {}
    space = search.get("space")
    fields = space.items() if isinstance(space, Mapping) else ()
    options = flat({name: value for name, value in search.items() if name != "space"})
    return {name: distribution_text(saved) for name, saved in fields} | {
        name: _value_text(value) for name, value in options.items()
    }


def distribution_text(saved: Any) -> str:
    """A distribution of Optuna as text; see `search_facts`. An unknown form is shown as it is.

    Args:
        saved: the JSON value of the distribution.
    """
    attributes = saved.get("attributes", saved) if isinstance(saved, Mapping) else None
    if not isinstance(attributes, Mapping):
        return str(saved)
    if "choices" in attributes:
        choices = attributes["choices"]
        return " or ".join(map(str, choices)) if isinstance(choices, list) else str(choices)
    if not {"low", "high"} <= set(attributes):
        return str(saved)
    text = f"{_value_text(attributes['low'])} to {_value_text(attributes['high'])}"
    step = attributes.get("step")
    if step is not None and (step != 1 or isinstance(step, float)):  # whole numbers have steps of 1 by default
        text += f" in steps of {_value_text(step)}"
    return f"{text}, logarithmic" if attributes.get("log") else text


def _value_text(value: Any) -> str:
    """A JSON value as text; numbers have the form of `number_text`."""
    return number_text(value) if type(value) in (int, float) else str(value)


# --- Trials ------------------------------------------------------------------------------------------------------


def ranked(trials: Iterable["FrozenTrial"]) -> "list[FrozenTrial]":
    """The trials that have started, best first: finished ones, then those that ASHA stopped, then all others.

    A trial that ASHA stopped comes after finished ones, because it was worse than others at the same env steps.
    """
    from optuna.trial import TrialState

    def key(trial: "FrozenTrial") -> tuple[bool, bool, float]:
        score = trial.value
        return score is None, trial.state == TrialState.PRUNED, 0.0 if score is None else -score

    return sorted((trial for trial in trials if trial.params), key=key)


def read_trials(study: "optuna.Study") -> list[ScoredTrial]:
    """The trials that have a score, in the order of their numbers. A running trial has its score so far.

    The best trial is the first one of `ranked`, if that has ended with a score.
    """
    from optuna.trial import TrialState

    saved = study.trials
    best = next((trial.number for trial in ranked(saved) if trial.value is not None), None)
    kinds = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "stopped by ASHA"}
    scored_trials = []
    for trial in saved:
        points = sorted((step, value) for step, value in trial.intermediate_values.items() if math.isfinite(value))
        score = trial.value
        if score is None and points:
            score = points[-1][1]
        if score is not None and trial.params:
            scored = ScoredTrial(
                number=trial.number,
                fields=dict(trial.params),
                distributions=dict(trial.distributions),
                score=float(score),
                env_steps=[step for step, _ in points],
                returns=[value for _, value in points],
                kind="best" if trial.number == best else kinds.get(trial.state, "unfinished"),
            )
            scored_trials.append(scored)
    return scored_trials
