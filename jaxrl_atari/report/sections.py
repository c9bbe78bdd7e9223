"""The content of the page of a run, suite, sweep or search: its sections. The graphs that they show are drawn."""

import csv
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_atari.config import Config, flat
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.errors import UserError
from jaxrl_atari.output import counted
from jaxrl_atari.report.aggregates import missing_intervals, statistics_rows
from jaxrl_atari.report.evaluations import evaluations, written_at
from jaxrl_atari.report.graphs import plot_comparison, plot_profiles, plot_run
from jaxrl_atari.report.score_statistics import INTERVALS_NOTE
from jaxrl_atari.report.search_graphs import draw_graphs
from jaxrl_atari.report.suites import GAMES_NOTE, read_suite, suite_results
from jaxrl_atari.report.summary import Run, TrialSummary, read_run, trial_summary, verified_text
from jaxrl_atari.report.tables import cell_text, number_text
from jaxrl_atari.report.text import (
    interval_text,
    left_out_text,
    metric_rows,
    no_mean_text,
    reference_rows,
    sessions_text,
)
from jaxrl_atari.runs.description import read_config, resumes
from jaxrl_atari.runs.files import read_json, read_result
from jaxrl_atari.runs.journal import read_study
from jaxrl_atari.runs.layout import (
    CONFIG_FILE,
    EVALUATIONS_FILE,
    GRAPHS_FOLDER,
    HUB_VIDEO_FILE,
    METRICS_FILE,
    REPORT_FILE,
    RESULTS_FILE,
    SEARCH_FILE,
    SEARCH_TABLE_FILE,
    SWEEP_FILE,
    game_file,
    is_suite,
    trial_dirs,
)
from jaxrl_atari.runs.reading import latest_meta


class Section(NamedTuple):
    """A part of a page, below a heading. What is empty is not shown."""

    title: str
    score: str = ""  # in large figures
    facts: Mapping[str, Any] = {}  # name -> value, or a list of values
    rows: Sequence[Sequence[str]] = ()  # a table, with a header
    links: Mapping[str, str] = {}  # first cell of a row -> where it links to
    graphs: Sequence[Path] = ()  # SVG files
    video: Path | None = None
    notes: Sequence[str] = ()


class Page(NamedTuple):
    """The content of a page."""

    title: str
    badges: Sequence[str]
    sections: Sequence[Section]
    linked: Sequence[str] = ()  # directories within that of the page that get reports, too


# --- Runs --------------------------------------------------------------------------------------------------------


def run_page(run_dir: Path) -> Page:
    """The page of a run: score, graphs, sessions, evaluations, and the video of a game."""
    run = read_run(run_dir)
    config = run.config
    summary = trial_summary(run)
    badges = [
        f"protocol {run.protocol}",
        sessions_text(summary),
        f"{config.total_env_steps:,} env steps each",
        f"seeds {', '.join(str(each['seed']) for each in summary['sessions'])}",
        f"λ of GAE {config.resolved_gae_lambda:g}",
        f"dialect {summary['dialect']}",
    ]
    if not summary["complete"]:
        reached = np.mean([table["env_steps"][-1] for table in run.tables.values()])
        begun = f"{len(run.tables)} of {counted(config.sessions, 'session')} begun"
        badges.append(f"not complete: mean {reached:,.0f} env steps so far, {begun}")
    trial_graph, *session_graphs = _current_graphs(run)
    devices = {path.name: latest_meta(path).get("device", "") for path in run.tables}
    sections = [
        _score_section(run, summary),
        Section("Learning", graphs=[trial_graph]),
        Section("Sessions", rows=metric_rows(summary), graphs=session_graphs, notes=[no_mean_text(summary)]),
        *_evaluation_sections(run),
        *_video_sections(run),
        *_settings_sections(config, run.description, devices),
    ]
    name = "" if config.name == run.game.name else f": {config.name}"
    return Page(run.game.name + name, badges, sections)


def _score_section(run: Run, summary: TrialSummary) -> Section:
    facts = {
        "return_ma at the end": f"{summary['return_ma']}; mean over {sessions_text(summary)}",
        "sessions": left_out_text(summary),
        "over sessions": interval_text(summary["session_scores"]),
        "sample std over sessions": summary["score_std"] and number_text(summary["score_std"]),
        **dict(reference_rows(summary)),
    }
    for path, table in run.tables.items():
        facts[f"{path.name} verified"] = verified_text(path, table)
    score = "" if summary["score"] is None else number_text(summary["score"])
    notes = [summary["unfinished_games"] or "", summary["comparison_note"] or ""]
    return Section("Score", score, facts, notes=notes)


def _current_graphs(run: Run) -> list[Path]:
    """The graphs of a run, the trial first. They are drawn if one is missing, or older than what it shows."""
    graphs = [run.path / GRAPHS_FOLDER / "trial.svg"]
    shown = [run.path / CONFIG_FILE]
    for session_dir in run.tables:
        graphs.append(session_dir / GRAPHS_FOLDER / "session.svg")
        shown += [session_dir / METRICS_FILE, session_dir / EVALUATIONS_FILE]
    newest = max(file.stat().st_mtime for file in shown if file.is_file())
    if not all(graph.is_file() and graph.stat().st_mtime >= newest for graph in graphs):
        plot_run(run)
    return graphs


def _evaluation_sections(run: Run) -> list[Section]:
    """The results of `evaluate` as a table; nothing if there are none."""
    rows = [["file", "full games", "mean", "", "cut off", "returns"]]
    for each in (found for directory in (run.path, *run.tables) for found in evaluations(directory)):
        means = each.get("session_means", [])
        std = number_text(each.get("std"))
        rows.append([
            each["file"].relative_to(run.path).as_posix(),
            f"{each['episodes']}{' each' if means else ''}{', greedy' if each.get('greedy') else ''}",
            number_text(each["mean"]),
            interval_text(means) if means else f"std {std}",
            str(each.get("cut_off", "")),
            ", ".join(map(number_text, means or each.get("returns", []))),
        ])  # fmt: skip
    return [Section("Evaluations of checkpoints", rows=rows)] if len(rows) > 1 else []


def _video_sections(run: Run) -> list[Section]:
    """The newest video of a run, with a link to the page of its game; nothing if there is no video."""
    videos = [*run.path.glob("session_*/video_*.mp4"), *run.path.glob(HUB_VIDEO_FILE)]
    if not videos:
        return []
    video = max(videos, key=written_at)
    rows = [["file"], [video.relative_to(run.path).as_posix()]]
    links = {}
    game = game_file(video)
    if game.is_file():
        name = game.relative_to(run.path).as_posix()
        rows.append([f"{name}: value, probabilities, reward and return at each step"])
        links[rows[-1][0]] = _link(name)
    return [Section("A game", video=video, rows=rows, links=links)]


# --- Suites, sweeps and searches ---------------------------------------------------------------------------------


def suite_page(suite_dir: Path) -> Page:
    """The page of a suite: the table of its games, statistics over games, and graphs."""
    suite = read_suite(suite_dir)
    written = suite_dir / RESULTS_FILE
    failures = read_result(written, failures=dict)["failures"] if written.is_file() else {}
    results = suite_results(suite, failures)
    name = suite_dir.absolute().name
    graphs = []
    if results.statistics:
        graphs += plot_profiles({name: results.statistics}, suite_dir / GRAPHS_FOLDER)
    if suite.runs:
        graphs += plot_comparison([*suite.runs.items()], suite_dir / GRAPHS_FOLDER)
    protocol = suite.config.env.resolved_protocol
    badges = [
        counted(len(results.rows), "game"),
        f"protocol {protocol}",
        f"{counted(suite.config.sessions, 'session')} each",
        f"{suite.config.total_env_steps:,} env steps a session",
    ]
    notes = [GAMES_NOTE.replace("`", ""), comparison_note(protocol) or ""]
    sections = [Section("Games", rows=results.table().text_rows(), links=_links(suite.runs), notes=notes)]
    if results.statistics:
        notes = [*missing_intervals(results.statistics), INTERVALS_NOTE]
        rows = statistics_rows(results.statistics, "complete games")
        sections.append(Section("Aggregates", rows=rows, notes=notes))
    sections += _graph_sections(graphs)
    return Page(name, badges, [*sections, *_settings_sections(suite.config, suite.description)], [*suite.runs])


def sweep_page(sweep_dir: Path) -> Page:
    """The page of a sweep: the table of its settings, and the differences between them."""
    config = read_config(sweep_dir, SWEEP_FILE)
    results = read_result(sweep_dir / RESULTS_FILE, differences=list, settings=dict)
    settings = [name for name in results["settings"] if Path(name).name == name and is_suite(sweep_dir / name)]
    sections = [
        Section("Settings", rows=_read_table(sweep_dir / "results.csv"), notes=results["differences"]),
        *_graph_sections(sorted((sweep_dir / GRAPHS_FOLDER).glob("*.svg"))),
        Section("Reports", rows=[["setting"], *([name] for name in settings)], links=_links(settings)),
        *_settings_sections(config, read_json(sweep_dir / SWEEP_FILE)),
    ]
    badges = [counted(len(settings), "setting"), f"protocol {config.env.resolved_protocol}"]
    return Page(sweep_dir.absolute().name, badges, sections, settings)


def search_page(search_dir: Path) -> Page:
    """The page of a search: the table of its trials, graphs, and what was searched."""
    config = read_config(search_dir, SEARCH_FILE)
    description = read_json(search_dir / SEARCH_FILE)
    study = read_study(search_dir)
    if study is not None:
        draw_graphs(study, search_dir / GRAPHS_FOLDER)
    graphs = sorted((search_dir / GRAPHS_FOLDER).glob("*.svg"))
    rows = _read_table(search_dir / SEARCH_TABLE_FILE)
    # The names come from the directory: a table of unknown origin may name other places.
    listed = {number for number, *_ in rows[1:]}
    runs = [path.name for path in trial_dirs(search_dir) if path.name.removeprefix("trial_") in listed]
    notes = ["Best first. The best of many is an optimistic pick: confirm it with other seeds."]
    links = {name.removeprefix("trial_"): link for name, link in _links(runs).items()}
    search = dict(description["search"])
    searched = {name: _range_text(saved["attributes"]) for name, saved in search.pop("space").items()}
    searched |= {name: _text(value) for name, value in flat(search).items()}
    sections = [
        Section("Trials", rows=rows, links=links, notes=notes if rows else ["No trial has ended yet."]),
        *_graph_sections(graphs),
        Section("Search", facts=searched),
        *_settings_sections(config, description),
    ]
    badges = ["search", f"protocol {config.env.resolved_protocol}", counted(max(0, len(rows) - 1), "trial")]
    return Page(f"{config.env.game_name}: {search_dir.absolute().name}", badges, sections, runs)


def _range_text(distribution: Mapping[str, Any]) -> str:
    """The values of a searched field: `0.0001 to 0.0005, logarithmic`, or its choices.

    Args:
        distribution: attributes of a distribution of Optuna.
    """
    if "choices" in distribution:
        return " or ".join(map(str, distribution["choices"]))
    text = f"{cell_text(distribution['low'])} to {cell_text(distribution['high'])}"
    return f"{text}, logarithmic" if distribution["log"] else text


# --- Parts -------------------------------------------------------------------------------------------------------


def _links(directories: Iterable[str]) -> dict[str, str]:
    """Links to the reports of directories within that of the page."""
    return {name: _link(f"{name}/{REPORT_FILE}") for name in directories}


def _link(path: str) -> str:
    return f"./{urllib.parse.quote(path)}"


def _graph_sections(graphs: Sequence[Path]) -> list[Section]:
    shown = [graph for graph in graphs if graph.suffix == ".svg"]
    return [Section("Graphs", graphs=shown)] if shown else []


def _read_table(path: Path) -> list[list[str]]:
    """The rows of a CSV file of results, with a header and rounded numbers; empty if there is no file.

    Raises:
        UserError: the file cannot be read as a table.
    """
    if not path.is_file():
        return []
    try:
        header, *rows = csv.reader(path.read_text(encoding="utf-8").splitlines())
    except (ValueError, csv.Error) as error:
        raise UserError(f"{path}: is no table; move it away, and resume the command to make it again") from error
    return [header, *([row[0], *map(_rounded, row[1:])] for row in rows)]


def _rounded(cell: str) -> str:
    try:
        return number_text(float(cell)) if cell else "-"
    except ValueError:
        return cell


def _text(value: Any) -> str:
    return ", ".join(map(cell_text, value)) if isinstance(value, list) else cell_text(value)


def _settings_sections(
    config: Config, description: Mapping[str, Any], devices: Mapping[str, str] | None = None
) -> list[Section]:
    """The options that differ from the defaults, what each resume has changed, and the software and machine.

    Args:
        description: the content of config.json, suite.json, sweep.json or search.json.
        devices: session -> its devices.
    """
    usual = flat(Config().to_dict())
    options = flat(config.to_dict())
    rows = [["option", "value", "default"]]
    for name, value in options.items():
        if value != usual.get(name):
            rows.append([name, str(value), str(usual.get(name))])
    facts = {"protocol": config.env.resolved_protocol, "resume": config.resume_note}
    note = f"{len(rows) - 1} of {len(options)} options differ from the defaults."
    software = {name: description.get(name) for name in ("python", "versions", "git_revision", "hardware")}
    resumed = {
        f"resumed {resume.get('date')}": [
            f"{name}: {' -> '.join(map(str, values))}" for name, values in resume["changed"].items()
        ]
        for resume in resumes(description)
    }
    return [
        Section("Protocol and config", facts=facts, rows=rows, notes=[note]),
        Section(
            "Software and hardware",
            facts={name: _text(value) for name, value in flat(software).items() if value is not None}
            | resumed
            | dict(devices or {}),
        ),
    ]
