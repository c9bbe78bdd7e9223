"""The content of the page of a run, suite, sweep or search: its sections. The graphs that they show are drawn."""

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_atari.config import Config, flat
from jaxrl_atari.output import counted
from jaxrl_atari.report.evaluations import evaluations, played_at
from jaxrl_atari.report.graphs import plot_comparison, plot_profiles, plot_run
from jaxrl_atari.report.search_graphs import draw_graphs
from jaxrl_atari.report.suites import read_results
from jaxrl_atari.report.summary import Run, TrialSummary, trial_summary
from jaxrl_atari.report.tables import Section, cell_text, number_text, table_of
from jaxrl_atari.report.text import (
    interval_text,
    metric_table,
    reference_rows,
    score_notes,
    sessions_text,
)
from jaxrl_atari.runs.description import read_config, resumes
from jaxrl_atari.runs.files import read_json
from jaxrl_atari.runs.journal import read_study
from jaxrl_atari.runs.layout import (
    CONFIG_FILE,
    EVALUATIONS_FILE,
    GRAPHS_FOLDER,
    HUB_VIDEO_FILE,
    METRICS_FILE,
    SEARCH_FILE,
    SEARCH_TABLE_FILE,
    SUITE_FILE,
    SWEEP_FILE,
    game_file,
    is_sweep,
    trial_dirs,
)
from jaxrl_atari.runs.reading import latest_meta, read_verification


class Page(NamedTuple):
    """The content of a page."""

    title: str
    badges: Sequence[str]
    sections: Sequence[Section]
    reports: Sequence[str] = ()  # directories within that of the page, which get reports, too, and are linked


# --- Runs --------------------------------------------------------------------------------------------------------


def run_page(run: Run) -> Page:
    """The page of a run: score, graphs, sessions, evaluations, and the video of a game."""
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
    devices = {run.session_name(path): latest_meta(path).get("device", "") for path in run.tables}
    sections = [
        _score_section(run, summary),
        Section("Learning", graphs=[trial_graph]),
        Section("Sessions", metric_table(summary), graphs=session_graphs),
        _evaluation_section(run),
        *_video_sections(run),
        *_settings_sections(config, run.description, devices),
    ]
    name = "" if config.name == run.game.name else f": {config.name}"
    return Page(run.game.name + name, badges, sections)


def _score_section(run: Run, summary: TrialSummary) -> Section:
    facts = dict(reference_rows(summary))
    for path, table in run.tables.items():
        verified = read_verification(path)
        if verified is not None:
            rows = f"{verified.rows} of {len(table['env_steps'])} rows, {counted(verified.games, 'game')}"
            facts[f"{run.session_name(path)} verified"] = f"{rows}, on {verified.date}, version {verified.version}"
    score = "" if summary["score"] is None else number_text(summary["score"])
    chosen_by = "evaluation" if run.config.evaluation.every_env_steps else "mean return of the last 100 games"
    notes = [*score_notes(summary), f"best checkpoint of a session: the one with the highest {chosen_by}"]
    return Section("Score", notes=notes, score=score, facts=facts)


def _current_graphs(run: Run) -> list[Path]:
    """The graphs of a run, the trial first. They are drawn if one is missing, or older than what it shows."""
    graphs = [run.path / GRAPHS_FOLDER / "trial.svg"]
    shown = []
    for session_dir in run.tables:
        shown.append(session_dir.parent / CONFIG_FILE)
        graphs.append(session_dir / GRAPHS_FOLDER / "session.svg")
        shown += [session_dir / METRICS_FILE, session_dir / EVALUATIONS_FILE]
    newest = max(file.stat().st_mtime for file in shown if file.is_file())
    if not all(graph.is_file() and graph.stat().st_mtime >= newest for graph in graphs):
        plot_run(run)
    return graphs


def _evaluation_section(run: Run) -> Section:
    """The results of `evaluate`, oldest first: those of all sessions, then those of each session."""
    rows = []
    for each in (found for directory in (run.path, *run.tables) for found in evaluations(directory)):
        means = each.get("session_means", [])
        games = f"{each['episodes']} each" if means else str(each["episodes"])
        rows.append({
            "file": os.path.relpath(each["file"], run.path),
            "full games": f"{games}, greedy" if each.get("greedy") else games,
            "mean": float(each["mean"]),
            "spread": interval_text(means) if means else f"std {number_text(each.get('std'))}",
            "cut off": each.get("cut_off"),
            "returns": ", ".join(map(number_text, means or each.get("returns", []))),
        })  # fmt: skip
    return Section("Evaluations of checkpoints", table_of(rows))


def _video_sections(run: Run) -> list[Section]:
    """The newest video of a run, with a link to the page of its game; nothing if there is no video."""
    videos = [*run.path.glob("session_*/video_*.mp4"), *run.path.glob(HUB_VIDEO_FILE)]
    if not videos:
        return []
    video = max(videos, key=played_at)
    game = game_file(video)
    link = game.relative_to(run.path).as_posix() if game.is_file() else ""
    return [Section("A game", notes=[video.relative_to(run.path).as_posix()], video=video, link=link)]


# --- Suites, sweeps and searches ---------------------------------------------------------------------------------


def results_page(directory: Path) -> Page:
    """The page of a suite or a sweep: the table of its games, statistics over games, and graphs."""
    results = read_results(directory)
    graphs = []
    if results.statistics:
        graphs += plot_profiles(results.statistics, directory / GRAPHS_FOLDER)
    if results.curves():
        graphs += plot_comparison(results.curves(), directory / GRAPHS_FOLDER)
    file = SWEEP_FILE if is_sweep(directory) else SUITE_FILE
    reports = (
        [*results.suites]
        if is_sweep(directory)
        else [game for suite in results.suites.values() for game in suite.runs]
    )
    sections = [
        *results.sections(),
        _graph_section(graphs),
        *_settings_sections(read_config(directory, file), read_json(directory / file)),
    ]
    name, _, badge = results.title.partition(": ")
    return Page(name, [badge], sections, reports)


def search_page(search_dir: Path) -> Page:
    """The page of a search: the table of its trials, graphs, and what was searched."""
    config = read_config(search_dir, SEARCH_FILE)
    description = read_json(search_dir / SEARCH_FILE)
    study = read_study(search_dir)
    if study is not None:
        draw_graphs(study, search_dir / GRAPHS_FOLDER)
    rows = _read_rows(search_dir / SEARCH_TABLE_FILE)
    notes = ["Best first. The best of many is an optimistic pick: confirm it with other seeds."]
    search = dict(description["search"])
    searched = {name: _range_text(saved["attributes"]) for name, saved in search.pop("space").items()}
    searched |= {name: _text(value) for name, value in flat(search).items()}
    sections = [
        Section("Trials", table_of(rows), notes if rows else ["No trial has ended yet."]),
        _graph_section(sorted((search_dir / GRAPHS_FOLDER).glob("*.svg"))),
        Section("Search", facts=searched),
        *_settings_sections(config, description),
    ]
    badges = ["search", f"protocol {config.env.resolved_protocol}", counted(len(rows), "trial")]
    reports = [path.name for path in trial_dirs(search_dir)]
    return Page(f"{config.env.game_name}: {search_dir.absolute().name}", badges, sections, reports)


def _range_text(distribution: Mapping[str, Any]) -> str:
    """The values of a searched field: `0.0001 to 0.0005, logarithmic`, or its choices.

    Args:
        distribution: attributes of a distribution of Optuna.
    """
    if "choices" in distribution:
        return " or ".join(map(str, distribution["choices"]))
    text = f"{cell_text(distribution['low'])} to {cell_text(distribution['high'])}"
    return f"{text}, logarithmic" if distribution["log"] else text


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a CSV file of results, with numbers where a cell holds one; none if there is no file."""
    if not path.is_file():
        return []
    rows = csv.DictReader(path.read_text(encoding="utf-8").splitlines())
    return [{name: _number(cell) for name, cell in row.items()} for row in rows]


def _number(cell: str) -> float | str | None:
    """The number in a cell, its text if it is none, or None if it is empty."""
    try:
        return float(cell) if cell else None
    except ValueError:
        return cell


# --- Parts -------------------------------------------------------------------------------------------------------


def _graph_section(graphs: Sequence[Path]) -> Section:
    return Section("Graphs", graphs=[graph for graph in graphs if graph.suffix == ".svg"])


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
    rows = [
        {"option": name, "value": str(value), "default": str(usual.get(name))}
        for name, value in options.items()
        if value != usual.get(name)
    ]
    note = f"{len(rows)} of {len(options)} options differ from the defaults."
    facts = {"protocol": config.env.resolved_protocol, "resume": config.resume_note}
    software = {name: description.get(name) for name in ("python", "versions", "git_revision", "hardware")}
    machine = {name: _text(value) for name, value in flat(software).items() if value is not None}
    for resume in resumes(description):
        changes = [f"{name}: {' -> '.join(map(str, values))}" for name, values in resume["changed"].items()]
        machine[f"resumed {resume.get('date')}"] = "; ".join(changes)
    return [
        Section("Protocol and config", table_of(rows), [note], facts=facts),
        Section("Software and hardware", facts=machine | dict(devices or {})),
    ]
