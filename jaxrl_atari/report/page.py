"""Reports of runs, suites and searches: one HTML page each, report.html in its directory, with everything in it.

A run is data: the template escapes every value, and the page's own security policy allows neither scripts nor network.
"""

import base64
import contextlib
import csv
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxrl_atari import __version__
from jaxrl_atari.cli import counted, say
from jaxrl_atari.config import Config, flat
from jaxrl_atari.envs.protocols import PROTOCOLS, Rules, comparison_note
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.report.graphs import draw_suites, plot_comparison, plot_session, plot_trial
from jaxrl_atari.report.suites import (
    aggregate_rows,
    describe_suite,
    intervals_text,
    read_group,
    read_suite,
    suite_runs,
)
from jaxrl_atari.report.summary import (
    Run,
    evaluations,
    figure_rows,
    fraction_text,
    interval_text,
    read_run,
    reference_rows,
    score_text,
    seeds_text,
    sessions_text,
    status_text,
    trial_summary,
)
from jaxrl_atari.runs.files import read_json, write_file
from jaxrl_atari.runs.run_dir import SEARCH_FILE, SUITE_FILE, is_search, is_suite, latest_text

REPORT_FILE = "report.html"
MAX_VIDEO_BYTES = 32 << 20
"""A larger video is named and not embedded."""

Rows = Sequence[Sequence[Any]]


@dataclass(frozen=True)
class Section:
    """A part of a page."""

    title: str
    score: str = ""
    facts: Rows = ()  # names and values; without a value, a name is not shown
    table: Rows = ()  # the header first
    links: Mapping[str, str] = field(default_factory=dict)  # first cell of a row -> folder of a report beside the page
    settings: Mapping[str, Rows] = field(default_factory=dict)  # title -> names, values and usual values; folded
    graphs: Sequence[Path] = ()
    folded: Sequence[Path] = ()  # more graphs
    video: Path | None = None
    notes: Sequence[str | None] = ()


@dataclass(frozen=True)
class Page:
    """A report."""

    title: str
    badges: Sequence[str]
    sections: Sequence[Section]


def write_report(directory: str | Path) -> Path:
    """Writes report.html into the directory of a run, a suite or a search; returns its path.

    The runs of a suite or a search get theirs first; one without a log point gets none. Graphs of runs and suites that
    are missing or older than the metrics are drawn.

    Raises:
        UserError: the directory is none of the three, or has no log point yet.
    """
    from jinja2 import Environment, FileSystemLoader

    directory = Path(directory)
    if (directory / "checkpoints").is_dir():
        raise UserError(f"{directory}: is a session's directory; expected the run's, {directory.absolute().parent}")
    describe = _suite_page if is_suite(directory) else _search_page if is_search(directory) else _run_page
    page, path = describe(directory), directory / REPORT_FILE
    templates = FileSystemLoader(Path(__file__).parent / "templates")
    environment = Environment(loader=templates, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["base64"] = lambda file: base64.b64encode(file.read_bytes()).decode()
    template = environment.get_template("page.html")
    write_file(path, template.render(page=page, version=__version__, written=time.strftime("%Y-%m-%d %H:%M")))
    return path


def try_report(directory: str | Path) -> None:
    """`write_report` at the end of a command, which must not fail for it. Prints the path, or why there is none."""
    try:
        say(str(write_report(directory)))
    except Exception as error:
        say(f"no report: {reason(error)}; python -m jaxrl_atari.report {directory} tries again")


def _is_drawn(graph: Path, session_dirs: Iterable[Path]) -> bool:
    """Whether a graph is there and as new as the metrics of the sessions."""
    newest = max((session_dir / "metrics.csv").stat().st_mtime for session_dir in session_dirs)
    return graph.is_file() and graph.stat().st_mtime >= newest


def _config_sections(config: Config, description: Mapping[str, Any]) -> list[Section]:
    """Options and rules, and what a description says of software and hardware."""
    protocol, usual = config.env.resolved_protocol, flat(Config().to_dict())
    rules = zip(Rules._fields, config.env.rules, PROTOCOLS[protocol.partition(",")[0]], strict=True)
    options = [(name, value, usual[name]) for name, value in flat(config.to_dict()).items()]
    changed = [row for row in options if row[1] != row[2]]
    known = {name: description.get(name) for name in ("python", "versions", "git_revision", "hardware", "resumed")}
    if isinstance(known["resumed"], list):
        known["resumed"] = dict(enumerate(known["resumed"], 1))
    return [
        Section(
            "Protocol and config",
            facts=[("protocol", protocol)],
            table=[("option", "value", "default"), *changed],
            settings={"all options": options, "rules of the protocol": list(rules)},
            notes=[f"{len(changed)} of {len(options)} options differ from the defaults."],
        ),
        Section("Software and hardware", facts=list(flat(known).items())),
    ]


# Runs.


def _run_page(run_dir: Path) -> Page:
    run = read_run(run_dir)
    summary, trial = trial_summary(run), run_dir / "graphs" / "trial.svg"
    scores = summary["session_scores"]
    drawn = [session_dir / "graphs" / "session.svg" for session_dir in run.tables]
    if not _is_drawn(trial, run.tables):
        plot_trial(run)
    for graph, session_dir in zip(drawn, run.tables, strict=True):
        if not _is_drawn(graph, [session_dir]):
            plot_session(run, session_dir)
    facts = [
        ("return_ma at the end", f"{summary['return_ma']}; mean over sessions"),
        ("over sessions", interval_text(scores)),
        ("std over sessions", score_text(summary["score_std"])),
        ("each session", ", ".join(map(score_text, scores)) if len(scores) > 2 else ""),
        *reference_rows(summary),
    ]
    badges = [
        f"protocol {run.protocol}",
        sessions_text(summary),
        f"{run.config.total_env_steps:,} env steps each",
        seeds_text(summary),
        f"λ of GAE {run.config.resolved_gae_lambda:g}",
    ]
    if not summary["complete"]:
        begun = f"{len(run.tables)} of {counted(run.config.sessions, 'session')} begun"
        badges.append(f"not complete: mean {summary['mean']['env_steps']:,.0f} env steps, {begun}")
    note = "No game has ended yet." if summary["score"] is None else summary["comparison_note"]
    videos = [*run_dir.glob("session_*/video_*.mp4"), *run_dir.glob("replay.mp4")]
    video = max(videos, key=lambda path: path.stat().st_mtime, default=None)
    is_small = video is not None and video.stat().st_size <= MAX_VIDEO_BYTES
    shown = video and f"{video.relative_to(run_dir)}{'' if is_small else ' is too large to be part of this page'}"
    sections = [
        Section("Score", score=score_text(summary["score"]), facts=facts, notes=[note]),
        Section("Learning", graphs=[trial], folded=drawn),
        Section("Sessions", table=[row for row in figure_rows(summary) if row[0] != "score"]),
        Section("Evaluations of checkpoints", table=_evaluation_rows(run)),
        Section("Video", video=video if is_small else None, notes=[shown]),
        *_config_sections(run.config, run.description),
        Section("Devices", facts=[(path.name, latest_text(path, "device")) for path in run.tables]),
    ]
    name = "" if run.config.name == run.game.name else f": {run.config.name}"
    return Page(f"{run.game.name}{name}", badges, sections)


def _evaluation_rows(run: Run) -> Rows:
    """What `evaluate` has found: a row for each evaluation of a session or of all sessions, if there is any."""
    rows = []
    for directory in (run.path, *run.tables):
        for found in evaluations(directory):
            with contextlib.suppress(KeyError, TypeError, ValueError):  # damaged
                means = found.get("session_means")
                rows.append([
                    found["file"].relative_to(run.path).as_posix(),
                    f"{found['episodes']:,}{' each' if means else ''}{', greedy' if found['greedy'] else ''}",
                    score_text(found["mean"]),
                    interval_text(means) if means else f"std {score_text(found['std'])}",
                    str(found.get("cut_off", sum(found.get("truncated", ())))),
                    ", ".join(map(score_text, means or found["returns"])),
                ])  # fmt: skip
    return [["file", "full games", "mean", "", "cut off", "returns"], *rows] if rows else []


# Suites and searches.


def _suite_page(suite_dir: Path) -> Page:
    config, description = read_group(suite_dir / SUITE_FILE)
    runs = {run.path.name: run for run in suite_runs(suite_dir)}
    links = {game: _write_run(suite_dir / game) for game in runs}
    described, protocol = describe_suite(read_suite(suite_dir)), config.env.resolved_protocol
    statuses, graphs = {}, suite_dir / "graphs"
    drawn = [graphs / "suites.svg", graphs / "comparison.svg"]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # a suite writes it when a game ends
        statuses = {row["game"]: str(row["status"]) for row in read_json(suite_dir / "results.json")["games"]}
    rows = [["game", "score", "", "reference", "ratio", "human-normalised", "env steps", "hours", "status"]]
    for game in description["games"]:
        status, cells = statuses.get(game, "waiting"), 7 * ["-"]
        if game in runs:
            summary = trial_summary(runs[game])
            now = status_text(config, summary)
            status = status if now == "not complete" and status.startswith("failed") else now
            cells = [
                score_text(summary["score"]),
                interval_text(summary["session_scores"]),
                score_text(next((each.score for each in runs[game].game.references), None)),
                fraction_text(summary["reference_normalised_score"]),
                fraction_text(summary["human_normalised_score"]),
                f"{summary['mean']['env_steps']:,.0f}",
                score_text(summary["mean"]["wall_hours"]),
            ]
        rows.append([game, *cells, status])
    if runs and not _is_drawn(drawn[1], [session_dir for run in runs.values() for session_dir in run.tables]):
        plot_comparison(list(runs.values()), graphs)
        draw_suites({suite_dir.absolute().name: described}, graphs)
    sources = {each.source for run in runs.values() for each in run.game.references[:1]}
    notes = [
        "score: return_ma at the end, mean over sessions. ratio: (score - random) / (reference - random). "
        f"reference: {', '.join(sorted(sources)) or 'none'}.",
        comparison_note(protocol),
    ]
    badges = [
        counted(len(rows) - 1, "game"),
        f"protocol {protocol}",
        f"{counted(config.sessions, 'session')} each",
        f"{config.total_env_steps:,} env steps a session",
    ]
    sections = [
        Section("Games", table=rows, links=links, notes=notes),
        Section("Aggregates", table=aggregate_rows(described, "complete games"), notes=[intervals_text(described)]),
        Section("Graphs", graphs=list(filter(Path.is_file, drawn))),
        *_config_sections(config, description),
    ]
    return Page(suite_dir.absolute().name, badges, sections)


def _write_run(run_dir: Path) -> str:
    """Writes the report of a run beside the page; returns its folder, or nothing if there is no log point yet."""
    with contextlib.suppress(UserError):
        return write_report(run_dir).parent.name
    return ""


def _search_page(search_dir: Path) -> Page:
    config, description = read_group(search_dir / SEARCH_FILE)
    rows, table = [], search_dir / "trials.csv"
    if table.is_file():
        header, *trials = csv.reader(table.read_text(encoding="utf-8").splitlines())
        rows = [header, *([number, *map(_cell, header[1:], cells)] for number, *cells in trials)]
    badges = ["search", f"protocol {config.env.resolved_protocol}", counted(max(len(rows) - 1, 0), "trial")]
    note = "Best first. The best of many is an optimistic pick: confirm it with other seeds."
    links = {number: _write_run(search_dir / f"trial_{number}") for number, *_ in rows[1:] if number.isdigit()}
    sections = [
        Section("Trials", table=rows, links=links, notes=[note]),
        Section("Graphs", graphs=sorted(search_dir.glob("graphs/*.svg"))),
        Section("Search", facts=list(flat({"search": description.get("search")}).items())),
        *_config_sections(config, description),
    ]
    return Page(f"{config.env.game_name}: {search_dir.absolute().name}", badges, sections)


def _cell(column: str, text: str) -> str:
    """A cell of trials.csv: env steps and large numbers are whole, fractions have four significant digits."""
    try:
        number = float(text)
    except ValueError:
        return text
    return f"{number:,.0f}" if column == "env_steps" or number.is_integer() or abs(number) >= 1000 else f"{number:.4g}"
