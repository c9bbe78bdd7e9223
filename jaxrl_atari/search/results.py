"""Results of a search: a table of its trials, graphs, and the best trial's config as a file for `train`."""

import csv
import io
import pprint
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna

from jaxrl_atari.config import Config
from jaxrl_atari.report.drawing import default_style, save_figure
from jaxrl_atari.report.summary import markdown_table
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.search.options import read_search, set_fields
from jaxrl_atari.search.study import open_study, ranked, reached, status

STYLE: dict[Any, Any] = {"savefig.bbox": "tight", "figure.figsize": (10, 5), "axes.formatter.min_exponent": 5}
"""Of the graphs: nothing is cut off, and a logarithmic axis has plain numbers."""


def text(value: Any) -> str:
    """A value in a table, as in the report: four significant digits of a fraction, whole numbers from 1,000 on."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if type(value) is int else "-" if value is None else str(value).replace("|", "/")


def write_results(search_dir: Path) -> str:
    """Writes trials.csv, trials.md, graphs/ and, once a trial has a score, NAME_best.py.

    Returns:
        The table as text.

    Raises:
        UserError: the directory is not a search directory, or it cannot be written to.
    """
    config, search = read_search(search_dir)
    study = open_study(search_dir, search)
    trials = ranked(study)
    rows: list[list[Any]] = [["trial", *search.space, "score", "env_steps", "status"]]
    for trial in trials:
        fields = [trial.params[name] for name in search.space]
        rows.append([trial.number, *fields, *reached(search_dir / f"trial_{trial.number}"), status(trial)])
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    write_file(search_dir / "trials.csv", file.getvalue())
    table = markdown_table([list(map(text, row)) for row in rows])
    write_file(search_dir / "trials.md", f"{table}\n")
    if trials and trials[0].value is not None:
        chosen = replace(set_fields(config, trials[0].params), name=f"{config.name}_best")
        origin = f"trial {rows[1][0]}: {dict(zip(*rows[:2], strict=True))}"
        write_file(search_dir / f"{chosen.name}.py", config_file(chosen, origin))
    if len(trials) > 1 and trials[1].value is not None:
        draw_graphs(study, search_dir / "graphs")
    return table


def config_file(config: Config, origin: str) -> str:
    """The text of a config file for a run that confirms the score of the best trial."""
    return f'''"""{origin}

    python -m jaxrl_atari.train --config SEARCH_DIR/{config.name}.py --sessions 4
"""

from jaxrl_atari.config import *


def get_config() -> Config:
    return {pprint.pformat(config, width=110)}
'''


def draw_graphs(study: optuna.Study, directory: Path) -> None:
    """Draws Optuna's graphs, as PNG and SVG: curves, fields (a panel for each), parallel, and importances."""
    with default_style(), warnings.catch_warnings():
        from matplotlib import pyplot, rcParams
        from optuna.visualization import matplotlib as graphs

        warnings.simplefilter("ignore")  # the graphs are experimental; few trials have equal importances
        drawings = {
            "curves": graphs.plot_intermediate_values,
            "fields": graphs.plot_slice,
            "parallel": graphs.plot_parallel_coordinate,
            "importances": graphs.plot_param_importances,
        }
        for name, draw in drawings.items():
            pyplot.switch_backend("agg")
            rcParams.update(STYLE)
            axes = draw(study)
            if name == "curves":
                axes.set(title="return_ma of each trial", xlabel="env steps", ylabel="return_ma")
            for panel in pyplot.gcf().axes:
                panel.tick_params(axis="x", which="both", rotation=30)
            save_figure(pyplot.gcf(), directory, name)
            pyplot.close()
