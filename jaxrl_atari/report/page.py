"""Reports of runs, suites and searches: one self-contained HTML page each, report.html in its directory.

The pages are made from the Jinja templates `templates/{run,suite,search}.html`. What a run contains is data: the
templates escape every value. The security policy of a page forbids network access and all scripts, except for
the script of the game page, which this package ships.
"""

import base64
import hashlib
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_atari import __version__
from jaxrl_atari.config import Config
from jaxrl_atari.config_dicts import flat
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.errors import DamagedMetrics, NoLogPoint
from jaxrl_atari.output import counted, say, try_to_draw
from jaxrl_atari.report import text
from jaxrl_atari.report.aggregates import missing_intervals, statistics_rows
from jaxrl_atari.report.evaluations import GAME_TEMPLATE, evaluations, written_at
from jaxrl_atari.report.graphs import (
    digest_of,
    digest_of_run,
    digest_of_runs,
    is_drawn,
    plot_comparison,
    plot_profiles,
    plot_run,
)
from jaxrl_atari.report.score_statistics import INTERVALS
from jaxrl_atari.report.search_graphs import update_graphs
from jaxrl_atari.report.searches import search_facts, trial_rows
from jaxrl_atari.report.suites import EXPLANATION, Suite, read_suite, result_values, text_rows
from jaxrl_atari.report.summary import Run, read_run, trial_summary, verified_text
from jaxrl_atari.runs.description import read_config
from jaxrl_atari.runs.files import read_json, read_result, write_file
from jaxrl_atari.runs.journal import read_study
from jaxrl_atari.runs.layout import (
    GRAPHS_FOLDER,
    HUB_VIDEO_FILE,
    REPORT_FILE,
    RESULTS_FILE,
    SEARCH_FILE,
    command_line,
    game_file,
    is_run,
    is_search,
    is_suite,
    trial_dirs,
)
from jaxrl_atari.runs.reading import latest_meta


class GamePage(NamedTuple):
    """A page that `evaluate --video` has written, to be shown within the report."""

    content: str
    script_digest: str  # of its script, for the security policy of the report: `sha256-...`


def write_report(directory: Path) -> Path:
    """Writes report.html into the directory of a run, a suite or a search; returns its path.

    The runs of a suite or a search that have a log point get reports first. Graphs that are missing or outdated
    are drawn.

    Raises:
        UserError: the directory is not of these kinds, has no log point yet, or has a damaged file.
    """
    from jinja2 import Environment, PackageLoader

    if is_suite(directory):
        kind = "suite"
        values = _suite_values(directory)
    elif is_search(directory):
        kind = "search"
        values = _search_values(directory)
    else:
        kind = "run"
        values = _run_values(directory)
    environment = Environment(
        loader=PackageLoader("jaxrl_atari.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["base64"] = lambda file: base64.b64encode(file.read_bytes()).decode()
    environment.globals |= {"text": text, "counted": counted, "version": __version__}
    page = environment.get_template(f"{kind}.html")
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    path = directory / REPORT_FILE
    write_file(path, page.render(values | {"name": directory.absolute().name, "written": written}))
    return path


def try_report(directory: Path) -> None:
    """Writes a report at the end of a command. Prints its path, or why it failed; see `try_to_draw`."""
    try_to_draw("no report", lambda: say(str(write_report(directory))), command_line("report", directory))


def _settings(config: Config, description: Mapping[str, Any]) -> dict[str, Any]:
    """The values of settings.html: the config, and the software and hardware in a description (config.json)."""
    usual = flat(Config().to_dict())
    software = {name: description.get(name) for name in ("python", "versions", "git_revision", "hardware")}
    return {
        "config": config,
        "comparison_note": comparison_note(config.env.resolved_protocol),
        "options": [(name, value, usual.get(name)) for name, value in flat(config.to_dict()).items()],
        "software": flat(software),
        "changes": _changes(description.get("resumed")),
    }


def _changes(resumed: Any) -> list[tuple[str, str]]:
    """The options that each resume changed, from `resumed` in config.json. Malformed entries are skipped."""
    rows = []
    for start in resumed if isinstance(resumed, list) else []:
        changed = start.get("changed") if isinstance(start, dict) else None
        for name, values in changed.items() if isinstance(changed, dict) else ():
            if isinstance(values, list):
                rows.append((f"resumed {start.get('date')}", f"{name}: {' -> '.join(map(str, values))}"))
    return rows


def _update_run_graphs(run: Run) -> list[Path]:
    """Draws the graphs of a run if they are outdated, and returns the files that the report shows."""
    graphs = [
        run.path / GRAPHS_FOLDER / "trial.svg",
        *(path / GRAPHS_FOLDER / "session.svg" for path in run.tables),
    ]
    source = digest_of_run(run)
    if not all(is_drawn(graph, source) for graph in graphs):
        plot_run(run)
    return graphs


def _run_values(run_dir: Path) -> dict[str, Any]:
    """The values of run.html. Outdated graphs are drawn."""
    run = read_run(run_dir)
    graphs = _update_run_graphs(run)
    videos = [*run_dir.glob("session_*/video_*.mp4"), *run_dir.glob(HUB_VIDEO_FILE)]
    video = max(videos, key=written_at, default=None)
    return _settings(run.config, run.description) | {
        "run": run,
        "summary": trial_summary(run),
        "mean_env_steps": float(np.mean([table["env_steps"][-1] for table in run.tables.values()])),
        "graphs": graphs,
        "evaluations": [
            evaluation for directory in (run_dir, *run.tables) for evaluation in evaluations(directory)
        ],
        "verified": {path.name: verified_text(path, table) for path, table in run.tables.items()},
        "video": video,
        "game_page": video and _read_game_page(video),
        "game_file": video and game_file(video),
        "devices": {session_dir.name: latest_meta(session_dir).get("device", "") for session_dir in run.tables},
    }


def _read_game_page(video: Path) -> GamePage | None:
    """The page of the game in a video; None if there is none, or if it has the script of another version.

    The report only links to pages of other versions. It allows the shipped script alone, by its digest, so that a
    run of unknown origin cannot bring a script of its own.
    """
    path = game_file(video)
    if not path.is_file():
        return None
    content = path.read_text(encoding="utf-8", errors="replace")
    script = GAME_TEMPLATE.read_text(encoding="utf-8").rpartition("<script>")[2].partition("</script>")[0]
    if f"<script>{script}</script>" not in content:
        return None
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return GamePage(content, f"sha256-{digest}")


def _update_suite_graphs(suite: Suite, aggregates: Mapping[str, Any]) -> list[Path]:
    """Draws the graphs of a suite that are outdated, and returns the files that the report shows.

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


def _suite_values(suite_dir: Path) -> dict[str, Any]:
    """The values of suite.html. Outdated graphs are drawn, and the reports of the runs are written."""
    suite = read_suite(suite_dir)
    written = suite_dir / RESULTS_FILE
    table = result_values(suite, read_result(written, failures=dict)["failures"] if written.is_file() else {})
    links = _write_runs(suite_dir, suite.runs)
    graphs = _update_suite_graphs(suite, table["aggregates"])
    return _settings(suite.config, suite.description) | {
        "games": text_rows(table["games"]),
        "explanation": EXPLANATION.replace("`", ""),
        "links": links,
        "aggregates": statistics_rows(table["aggregates"], "complete games"),
        "intervals": [*missing_intervals(table["aggregates"]), INTERVALS],
        "graphs": graphs,
    }


def _search_values(search_dir: Path) -> dict[str, Any]:
    """The values of search.html. Outdated graphs are drawn, and the reports of the trials are written."""
    config = read_config(search_dir, SEARCH_FILE)
    description = read_json(search_dir / SEARCH_FILE)
    trials = trial_rows(search_dir)
    directory = search_dir / GRAPHS_FOLDER
    study = read_study(search_dir)
    if study is not None:
        update_graphs(study, directory)
    # The names come from the directory: a table of unknown origin may name other places.
    listed = {f"trial_{number}" for number, *_ in trials[1:]}
    links = _write_runs(search_dir, [path.name for path in trial_dirs(search_dir) if path.name in listed])
    return _settings(config, description) | {
        "trials": trials,
        "links": links,
        "graphs": sorted(directory.glob("*.svg")),
        "search": search_facts(description.get("search")),
    }


def _write_runs(directory: Path, names: Iterable[str]) -> set[str]:
    """Writes the reports of the runs in a directory that have a log point; returns the names of these runs.

    A run whose metrics are damaged is named in a line.
    """
    written = set()
    for name in filter(lambda name: is_run(directory / name), names):
        try:
            write_report(directory / name)
            written.add(name)
        except NoLogPoint:
            continue
        except DamagedMetrics as error:
            say(f"no report: {error}")
    return written
