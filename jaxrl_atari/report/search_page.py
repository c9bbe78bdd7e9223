"""The page of a search: the table of its trials, graphs, and what was searched."""

from pathlib import Path

from jaxrl_atari.report.page_content import PageContent
from jaxrl_atari.report.search_graphs import update_graphs
from jaxrl_atari.report.searches import search_facts, trial_rows
from jaxrl_atari.runs.description import read_config
from jaxrl_atari.runs.files import read_json
from jaxrl_atari.runs.journal import read_study
from jaxrl_atari.runs.layout import GRAPHS_FOLDER, SEARCH_FILE, trial_dirs


def search_content(search_dir: Path) -> PageContent:
    """The content of the page of a search. Outdated graphs are drawn."""
    config = read_config(search_dir, SEARCH_FILE)
    description = read_json(search_dir / SEARCH_FILE)
    trials = trial_rows(search_dir)
    graphs = search_dir / GRAPHS_FOLDER
    study = read_study(search_dir)
    if study is not None:
        update_graphs(study, graphs)
    values = {
        "trials": trials,
        "graphs": sorted(graphs.glob("*.svg")),
        "search": search_facts(description.get("search")),
    }
    # The names come from the directory: a table of unknown origin may name other places.
    listed = {f"trial_{number}" for number, *_ in trials[1:]}
    runs = [path.name for path in trial_dirs(search_dir) if path.name in listed]
    return PageContent(config, description, values, runs)
