"""The results of a search: trials.md and trials.csv, and NAME_best.py with the config of the best trial."""

import csv
import io
from pathlib import Path
from typing import Any, NamedTuple

from optuna.trial import FrozenTrial

from jaxrl_atari.cli.config_files import config_source
from jaxrl_atari.config import Config, set_fields
from jaxrl_atari.errors import UserError
from jaxrl_atari.report.searches import ranked
from jaxrl_atari.report.text import markdown_table, number_text
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.journal import read_study
from jaxrl_atari.runs.layout import SEARCH_TABLE_FILE, trial_dir
from jaxrl_atari.search.options import SearchConfig, read_search
from jaxrl_atari.search.study import status_text, trial_progress


class TrialRow(NamedTuple):
    """A trial in the table of a search. An unknown value is None."""

    number: int
    fields: dict[str, Any]  # dotted name of a searched field -> its value
    score: float | None
    env_steps: int
    status: str

    def cells(self) -> list[Any]:
        """The row in trials.csv, below `SearchResults.header`."""
        return [self.number, *self.fields.values(), self.score, self.env_steps, self.status]


class SearchResults(NamedTuple):
    """The results of a search."""

    header: list[str]  # of trials.csv
    rows: list[TrialRow]  # the trials that have started, the best first, by their scores in the study
    best: Config | None  # config of a run that trains the best trial again; None before one has ended with a score

    def to_csv(self) -> str:
        """The content of trials.csv."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(self.header)
        writer.writerows(row.cells() for row in self.rows)
        return file.getvalue()

    def to_markdown(self) -> str:
        """The content of trials.md: the same table, with rounded numbers."""
        return markdown_table([self.header, *([cell_text(value) for value in row.cells()] for row in self.rows)])


def cell_text(value: Any) -> str:
    """A value of a row as text: three significant digits below 1, up to six above, no decimals from 100,000 on.

    None, an unknown value, is `-`.
    """
    if value is None:
        return "-"
    if isinstance(value, float):
        if abs(value) < 1:
            return number_text(value)
        return f"{value:,.6g}" if abs(value) < 100_000 else f"{value:,.0f}"
    return f"{value:,}" if type(value) is int else str(value)


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
    write_file(search_dir / SEARCH_TABLE_FILE, results.to_csv())
    write_file(search_dir / "trials.md", f"{results.to_markdown()}\n")
    if results.best is not None:
        first = results.rows[0].cells()
        values = ", ".join(f"{name} {cell_text(value)}" for name, value in zip(results.header, first, strict=True))
        file = f"{results.best.name}.py"
        usage = f"    python -m jaxrl_atari.train --config SEARCH_DIR/{file} --sessions 4"
        write_file(search_dir / file, config_source(results.best, f"{values}\n\n{usage}\n"))
