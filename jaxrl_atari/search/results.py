"""The results of a search: trials.md and trials.csv, and NAME_best.py with the config of the best trial."""

import csv
import io
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_atari.config import Config
from jaxrl_atari.config_dicts import config_source, set_fields
from jaxrl_atari.errors import DamagedMetrics
from jaxrl_atari.report.searches import ranked
from jaxrl_atari.report.text import markdown_table, number_text
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.journal import read_study
from jaxrl_atari.runs.layout import SEARCH_TABLE_FILE, trial_dir
from jaxrl_atari.search.options import read_search
from jaxrl_atari.search.study import status_text, trial_progress


class SearchResults(NamedTuple):
    """The results of a search."""

    rows: list[list[Any]]  # rows of trials.csv: the header, then a row for each trial, the best first
    text: str  # the same table in Markdown, with rounded numbers
    best: Config | None  # config of a run that trains the best trial again; None before one has ended with a score


def cell_text(value: Any) -> str:
    """A value as text: numbers below 1 with three significant digits, other numbers with up to six."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return number_text(value) if abs(value) < 1 else f"{value:,.6g}"
    return f"{value:,}" if type(value) is int else str(value)


def search_results(search_dir: Path) -> SearchResults:
    """Reads the results of a search; writes nothing.

    Raises:
        UserError: the directory is not that of a search, or its journal is damaged.
    """
    config, search = read_search(search_dir)
    study = read_study(search_dir)
    trials = [] if study is None else ranked(study.trials)
    rows: list[list[Any]] = [["trial", *search.space, "score", "env_steps", "status"]]
    for trial in trials:
        fields = [trial.params.get(name) for name in search.space]
        status = status_text(trial)
        try:
            score, env_steps = trial_progress(trial_dir(search_dir, trial.number))
        except DamagedMetrics as error:  # the study has the score of a trial that has ended
            score = trial.value
            env_steps = trial.last_step or 0
            status += f"; {error}"
        rows.append([trial.number, *fields, score, env_steps, status])
    table = markdown_table([[cell_text(value) for value in row] for row in rows])
    best = None
    if trials and trials[0].value is not None:
        new_seed = config.seed + config.sessions  # no trial has used it
        best = set_fields(config, trials[0].params | {"name": f"{config.name}_best", "seed": new_seed})
    return SearchResults(rows, table, best)


def save_search_results(search_dir: Path, results: SearchResults) -> None:
    """Writes trials.csv, trials.md and, once there is a best trial, NAME_best.py."""
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(results.rows)
    write_file(search_dir / SEARCH_TABLE_FILE, table.getvalue())
    write_file(search_dir / "trials.md", f"{results.text}\n")
    if results.best is not None:
        header, first, *_ = results.rows
        values = ", ".join(f"{name} {cell_text(value)}" for name, value in zip(header, first, strict=True))
        file = f"{results.best.name}.py"
        usage = f"    python -m jaxrl_atari.train --config SEARCH_DIR/{file} --sessions 4"
        write_file(search_dir / file, config_source(results.best, f"{values}\n\n{usage}\n"))
