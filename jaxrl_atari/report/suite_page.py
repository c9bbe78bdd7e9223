"""The page of a suite: the table of its games, statistics over games, and graphs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_atari.report.aggregates import missing_intervals, statistics_rows
from jaxrl_atari.report.graphs import digest_of, digest_of_runs, is_drawn, plot_comparison, plot_profiles
from jaxrl_atari.report.page_content import PageContent
from jaxrl_atari.report.score_statistics import INTERVALS
from jaxrl_atari.report.suites import EXPLANATION, Suite, read_suite, result_values, text_rows
from jaxrl_atari.runs.files import read_result
from jaxrl_atari.runs.layout import GRAPHS_FOLDER, RESULTS_FILE


def suite_content(suite_dir: Path) -> PageContent:
    """The content of the page of a suite. Outdated graphs are drawn."""
    suite = read_suite(suite_dir)
    written = suite_dir / RESULTS_FILE
    table = result_values(suite, read_result(written, failures=dict)["failures"] if written.is_file() else {})
    values = {
        "games": text_rows(table["games"]),
        "explanation": EXPLANATION.replace("`", ""),
        "aggregates": statistics_rows(table["aggregates"], "complete games"),
        "intervals": [*missing_intervals(table["aggregates"]), INTERVALS],
        "graphs": _update_graphs(suite, table["aggregates"]),
    }
    return PageContent(suite.config, suite.description, values, [*suite.runs])


def _update_graphs(suite: Suite, aggregates: Mapping[str, Any]) -> list[Path]:
    """Draws the graphs of a suite that are outdated, and returns the files that the page shows.

    Args:
        aggregates: the `aggregates` of `result_values`.
    """
    directory = suite.path / GRAPHS_FOLDER
    graphs = []
    if aggregates:
        profiles = {suite.path.absolute().name: aggregates}
        graphs.append(directory / "suites.svg")
        if not is_drawn(graphs[-1], digest_of(profiles)):
            plot_profiles(profiles, directory)
    if suite.runs:
        runs = [*suite.runs.items()]
        graphs.append(directory / "comparison.svg")
        if not is_drawn(graphs[-1], digest_of_runs(runs)):
            plot_comparison(runs, directory)
    return graphs
