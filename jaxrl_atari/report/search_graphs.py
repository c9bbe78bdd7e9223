"""Graphs of searches, by Optuna: the trials' curves, and their scores against the searched fields."""

import math
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from jaxrl_atari.report.figures import default_style, save_figure

if TYPE_CHECKING:
    import optuna


def draw_graphs(study: "optuna.Study", directory: Path) -> list[Path]:
    """Draws the trials of a search, each graph as PNG and SVG; returns the files.

    - curves: return_ma against env steps, with a line for each trial
    - fields: score against each searched field
    - parallel: fields and score, with a line for each trial
    - importances: how important each field is for a good score (PED-ANOVA, arXiv:2304.10255)

    `importances` needs trials that differ in a field. Before a game has ended, nothing is drawn.
    """
    scored = scored_trials(study)
    if not scored.trials:
        return []
    with default_style(), warnings.catch_warnings():
        import matplotlib
        import matplotlib.pyplot as plt
        from optuna.exceptions import ExperimentalWarning
        from optuna.visualization import matplotlib as plots

        warnings.simplefilter("ignore", ExperimentalWarning)
        plt.switch_backend("agg")  # Optuna draws with pyplot
        matplotlib.rcParams["text.parse_math"] = True  # powers of ten along its axes
        draw = {
            "curves": plots.plot_intermediate_values,
            "fields": plots.plot_slice,
            "parallel": plots.plot_parallel_coordinate,
            "importances": plots.plot_param_importances,
        }
        files = []
        for name, plot in draw.items():
            try:
                figure = np.ravel(plot(scored))[0].figure  # type: ignore[operator]
            except (ValueError, RuntimeError):  # no importances, because no field differs
                continue
            files += save_figure(figure, directory, name)
            plt.close(figure)
    return files


def scored_trials(study: "optuna.Study") -> "optuna.Study":
    """A copy of the study in memory whose trials that have a score are all complete.

    Optuna's graphs leave out running and pruned trials; with ASHA, most are pruned. The score of a trial that has
    not ended is its last `return_ma`.
    """
    import optuna

    complete = optuna.create_study(direction="maximize")
    for trial in study.trials:
        points = {step: value for step, value in trial.intermediate_values.items() if math.isfinite(value)}
        score = points[max(points)] if trial.value is None and points else trial.value
        if score is not None and trial.params:
            copy = optuna.trial.create_trial(
                params=trial.params, distributions=trial.distributions, value=score, intermediate_values=points
            )
            complete.add_trial(copy)
    return complete
