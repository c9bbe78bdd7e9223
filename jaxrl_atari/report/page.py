"""Reports of runs, suites, sweeps and searches: one self-contained page each, report.html in its directory.

A page is a list of sections, which the Jinja template `templates/page.html` renders. What a run contains is data:
the template escapes every value, and the security policy of the page forbids scripts and network access.
"""

import contextlib
import os
import time
from base64 import b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_atari import __version__
from jaxrl_atari.algorithms.dialects import dialect_text
from jaxrl_atari.config import Config, changed_fields, flat
from jaxrl_atari.errors import NoLogPoint
from jaxrl_atari.output import counted, say, try_to
from jaxrl_atari.report.graphs import plot_comparison, plot_run
from jaxrl_atari.report.searches import plot_search, read_study, trials_table
from jaxrl_atari.report.suites import read_results
from jaxrl_atari.report.summary import Run, read_run
from jaxrl_atari.report.tables import Section, cell_text, number_text, table_of
from jaxrl_atari.report.text import (
    interval_text,
    metric_table,
    reference_rows,
    score_notes,
    sessions_text,
)
from jaxrl_atari.runs.description import read_config, resumes
from jaxrl_atari.runs.files import read_json, write_file
from jaxrl_atari.runs.layout import (
    GRAPHS_FOLDER,
    HUB_VIDEO_FILE,
    REPORT_FILE,
    SEARCH_FILE,
    SUITE_FILE,
    SWEEP_FILE,
    command_line,
    game_file,
    held_kind,
)
from jaxrl_atari.runs.reading import evaluations, latest_meta, played_at, read_verification


class Page(NamedTuple):
    """The content of a page."""

    title: str
    badges: Sequence[str]
    sections: Sequence[Section]


def write_report(directory: Path, merged: Run | None = None) -> Path:
    """Writes report.html into the directory of a run, suite, sweep or search; returns its path.

    The graphs are drawn. The page links to the reports of the runs or suites in the directory.

    Args:
        merged: the run that the report shows, whose folder is `directory`. None: what the directory holds.

    Raises:
        UserError: the directory is not of these kinds, has no log point yet, or has a damaged file.
    """
    from jinja2 import Environment, PackageLoader

    make_page = {"suite": results_page, "sweep": results_page, "search": search_page}
    make = make_page.get(held_kind(directory) or "")
    page = run_page(merged or read_run(directory)) if merged or make is None else make(directory)
    environment = Environment(
        loader=PackageLoader("jaxrl_atari.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["base64"] = lambda file: b64encode(file.read_bytes()).decode()
    reports = sorted(path.parent.name for path in directory.glob(f"*/{REPORT_FILE}"))
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    path = directory / REPORT_FILE
    template = environment.get_template("page.html")
    write_file(path, template.render(page=page, reports=reports, version=__version__, written=written))
    return path


def try_report(directory: Path) -> None:
    """Writes a report at the end of a command. Prints its path, or why it failed; see `try_to`."""
    try_to("no report", lambda: say(str(write_report(directory))), command_line("report", directory))


# --- Runs --------------------------------------------------------------------------------------------------------


def run_page(run: Run) -> Page:
    """The page of a run: score, graphs, sessions, evaluations, and the video of a game."""
    config = run.config
    summary = run.summary
    badges = [
        f"protocol {run.protocol}",
        sessions_text(run),
        f"{config.total_env_steps:,} env steps each",
        f"seeds {', '.join(str(each['seed']) for each in summary['sessions'])}",
        f"λ of GAE {config.resolved_gae_lambda:g}",
        f"dialect {dialect_text(config)}",
    ]
    if not summary["complete"]:
        badges.append("not complete")
    *session_graphs, _, trial_graph = plot_run(run)
    devices = {run.session_name(path): latest_meta(path).get("device", "") for path in run.tables}
    sections = [
        _score_section(run),
        Section("Learning", graphs=[trial_graph]),
        Section("Sessions", metric_table(run), graphs=session_graphs),
        _evaluation_section(run),
        *_video_sections(run),
        *_settings_sections(config, run.description | {"device": devices}),
    ]
    name = "" if config.name == run.game.name else f": {config.name}"
    return Page(run.game.name + name, badges, sections)


def _score_section(run: Run) -> Section:
    facts = dict(reference_rows(run))
    for path, table in run.tables.items():
        verified = read_verification(path)
        if verified is not None:
            rows = f"{verified['rows']} of {len(table['env_steps'])} rows, {counted(verified['games'], 'game')}"
            date, version = verified["date"], verified["version"]
            facts[f"{run.session_name(path)} verified"] = f"{rows}, on {date}, version {version}"
    score = run.summary["score"]
    return Section("Score", notes=score_notes(run), score="" if score is None else number_text(score), facts=facts)


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
    graphs = plot_comparison(results.curves(), directory / GRAPHS_FOLDER) if results.curves() else []
    file = SWEEP_FILE if held_kind(directory) == "sweep" else SUITE_FILE
    sections = [
        *results.sections(),
        Section("Graphs", graphs=graphs),
        *_settings_sections(read_config(directory, file), read_json(directory / file)),
    ]
    name, _, badge = results.title.partition(": ")
    return Page(name, [badge], sections)


def search_page(search_dir: Path) -> Page:
    """The page of a search: the table of its trials, graphs, and what was searched."""
    config = read_config(search_dir, SEARCH_FILE)
    description = read_json(search_dir / SEARCH_FILE)
    study = read_study(search_dir)
    table = trials_table(study) if study else None
    graphs = []
    with contextlib.suppress(NoLogPoint):
        graphs = plot_search(search_dir)
    notes = ["Best first. The best of many is an optimistic pick: confirm it with other seeds."]
    search = dict(description["search"])
    space = {
        name: ", ".join(f"{attribute} {value}" for attribute, value in distribution["attributes"].items())
        for name, distribution in search.pop("space").items()
    }
    sections = [
        Section("Trials", table, notes if table else ["No trial has started yet, or Optuna is not installed."]),
        Section("Graphs", graphs=graphs),
        Section("Search", facts=space | {name: cell_text(value) for name, value in flat(search).items()}),
        *_settings_sections(config, description),
    ]
    badges = ["search", f"protocol {config.env.resolved_protocol}"]
    return Page(f"{config.env.game_name}: {search_dir.absolute().name}", badges, sections)


# --- Parts -------------------------------------------------------------------------------------------------------


def _settings_sections(config: Config, description: Mapping[str, Any]) -> list[Section]:
    """The options that differ from the defaults, what each resume has changed, and the software and machine.

    Args:
        description: the content of config.json, suite.json, sweep.json or search.json. That of a run also has
            `device`: session -> its devices.
    """
    options = config.to_dict()
    rows = [
        {"option": name, "value": str(value), "default": str(usual)}
        for name, (usual, value) in changed_fields(Config().to_dict(), options).items()
    ]
    note = f"{len(rows)} of {len(flat(options))} options differ from the defaults."
    facts = {"protocol": config.env.resolved_protocol, "resume": config.resume_note}
    software = {
        name: description.get(name) for name in ("python", "versions", "git_revision", "hardware", "device")
    }
    machine = {name: cell_text(value) for name, value in flat(software).items() if value is not None}
    for resume in resumes(description):
        changes = [f"{name}: {' -> '.join(map(str, values))}" for name, values in resume["changed"].items()]
        machine[f"resumed {resume.get('date')}"] = "; ".join(changes) or "other software or another machine"
    return [
        Section("Protocol and config", table_of(rows), [note], facts=facts),
        Section("Software and hardware", facts=machine),
    ]
