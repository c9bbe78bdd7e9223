"""The results of a search: trials.md and trials.csv, and NAME_best.py with the config of the best trial."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from optuna.trial import FrozenTrial, TrialState

from jaxrl_atari.cli.config_files import config_source
from jaxrl_atari.config import Config, set_fields
from jaxrl_atari.errors import UserError
from jaxrl_atari.report.tables import Table, cell_text
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.journal import read_study
from jaxrl_atari.runs.layout import SEARCH_TABLE_FILE, trial_dir
from jaxrl_atari.search.options import SearchConfig, read_search
from jaxrl_atari.search.study import status_text, trial_progress


def ranked(trials: Iterable[FrozenTrial]) -> list[FrozenTrial]:
    """The trials that have started, best first: finished ones, then those that ASHA stopped, then all others.

    A trial that ASHA stopped comes after finished ones, because it was worse than others at the same env steps.
    """

    def key(trial: FrozenTrial) -> tuple[bool, bool, float]:
        score = trial.value
        return score is None, trial.state == TrialState.PRUNED, 0.0 if score is None else -score

    return sorted((trial for trial in trials if trial.params), key=key)


class TrialRow(NamedTuple):
    """A trial in the table of a search. An unknown value is None."""

    number: int
    fields: dict[str, Any]  # dotted name of a searched field -> its value
    score: float | None
    env_steps: int
    status: str

    def values(self) -> dict[str, Any]:
        """The row of trials.csv."""
        return {
            "trial": self.number,
            **self.fields,
            "score": self.score,
            "env_steps": self.env_steps,
            "status": self.status,
        }


class SearchResults(NamedTuple):
    """The results of a search."""

    header: list[str]  # of trials.csv
    rows: list[TrialRow]  # the trials that have started, the best first, by their scores in the study
    best: Config | None  # config of a run that trains the best trial again; None before one has ended with a score

    def table(self) -> Table:
        """The table of trials."""
        return Table({name: name for name in self.header}, [row.values() for row in self.rows])


def search_results(search_dir: Path) -> SearchResults:
    """Reads the results of a search; writes nothing.

    Raises:
        UserError: the directory holds no search, or its journal is damaged.
    """
    config, search = read_search(search_dir)
    study = read_study(search_dir)
    trials = [] if study is None else study.get_trials(deepcopy=False)
    best_first = ranked(trials)
    rows = [_trial_row(search_dir, search, trial) for trial in best_first]
    best = None
    if best_first and best_first[0].value is not None:
        new_seed = config.seed + config.sessions  # no trial has used it
        best = set_fields(config, best_first[0].params | {"name": f"{config.name}_best", "seed": new_seed})
    return SearchResults(["trial", *search.space, "score", "env_steps", "status"], rows, best)


def _trial_row(search_dir: Path, search: SearchConfig, trial: FrozenTrial) -> TrialRow:
    """The row of a trial, from the study and from the log points of the trial."""
    status = status_text(trial)
    try:
        score, env_steps = trial_progress(trial_dir(search_dir, trial.number))
    except UserError as error:  # the study has the score of a trial that has ended
        score = trial.value
        env_steps = trial.last_step or 0
        status += f"; {error}"
    fields = {name: _field_value(trial, name) for name in search.space}
    return TrialRow(trial.number, fields, score, env_steps, status)


def _field_value(trial: FrozenTrial, name: str) -> Any:
    """The value of a searched field in a row.

    None stands for an unknown value, as in a trial that was killed before it sampled the field. A choice None is
    therefore the text `None`.
    """
    if name not in trial.params:
        return None
    value = trial.params[name]
    return "None" if value is None else value


def save_search_results(search_dir: Path, results: SearchResults) -> None:
    """Writes trials.csv, trials.md and, once there is a best trial, NAME_best.py."""
    results.table().write_csv(search_dir / SEARCH_TABLE_FILE)
    write_file(search_dir / "trials.md", f"{results.table().to_markdown()}\n")
    if results.best is not None:
        values = ", ".join(f"{name} {cell_text(value)}" for name, value in results.rows[0].values().items())
        file = f"{results.best.name}.py"
        usage = f"    python -m jaxrl_atari.train --config SEARCH_DIR/{file} --sessions 4"
        write_file(search_dir / file, config_source(results.best, f"{values}\n\n{usage}\n"))
