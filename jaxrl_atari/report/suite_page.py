"""The page of a suite: the table of its games, statistics over games, and graphs."""

from collections.abc import Mapping
from pathlib import Path

from jaxrl_atari.report.aggregates import SuiteStatistics, missing_intervals, statistics_rows
from jaxrl_atari.report.figures import is_drawn
from jaxrl_atari.report.graphs import digest_of_profiles, digest_of_runs, plot_comparison, plot_profiles
from jaxrl_atari.report.page_content import PageContent
from jaxrl_atari.report.score_statistics import INTERVALS_NOTE
from jaxrl_atari.report.suites import GAMES_NOTE, Suite, read_suite, suite_results, text_rows
from jaxrl_atari.runs.files import read_result
from jaxrl_atari.runs.layout import GRAPHS_FOLDER, RESULTS_FILE


def suite_content(suite_dir: Path) -> PageContent:
    """The content of the page of a suite. Outdated graphs are drawn."""
    suite = read_suite(suite_dir)
    written = suite_dir / RESULTS_FILE
    failures = read_result(written, failures=dict)["failures"] if written.is_file() else {}
    results = suite_results(suite, failures)
    values = {
        "games": text_rows(results.rows),
        "explanation": GAMES_NOTE.replace("`", ""),
        "aggregates": statistics_rows(results.statistics, "complete games"),
        "intervals": [*missing_intervals(results.statistics), INTERVALS_NOTE],
        "graphs": _update_graphs(suite, results.statistics),
    }
    return PageContent(suite.config, suite.description, values, [*suite.runs])


def _update_graphs(suite: Suite, statistics: Mapping[str, SuiteStatistics]) -> list[Path]:
    """Draws the graphs of a suite that are outdated, and returns the files that the page shows.

    Args:
        statistics: normalisation -> statistics of the suite.
    """
    directory = suite.path / GRAPHS_FOLDER
    graphs = []
    if statistics:
        profiles = {suite.path.absolute().name: statistics}
        graphs.append(directory / "suites.svg")
        if not is_drawn(graphs[-1], digest_of_profiles(profiles)):
            plot_profiles(profiles, directory)
    if suite.runs:
        runs = [*suite.runs.items()]
        graphs.append(directory / "comparison.svg")
        if not is_drawn(graphs[-1], digest_of_runs(runs)):
            plot_comparison(runs, directory)
    return graphs
