"""Content of the reports of suites and searches: tables that link to the reports of their runs.

Both kinds of directory are read as files: the code that writes them is a layer above.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jaxrl_atari.config import Config, config_from_dict, flat
from jaxrl_atari.envs.games import GAMES
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.errors import UserError
from jaxrl_atari.report.chart import Series, draw
from jaxrl_atari.report.metrics import mean_curve
from jaxrl_atari.report.run_page import interval_text, options, part, software
from jaxrl_atari.report.search_records import Record, best_first, ranked, read_records, trial_dir, value_text
from jaxrl_atari.report.suites import INTERVALS, aggregate_rows, describe_suite, read_suite, suite_runs
from jaxrl_atari.report.summary import number_text, read_run, score_text, status_text, trial_summary
from jaxrl_atari.runs.files import read_json
from jaxrl_atari.runs.reading import read_sessions
from jaxrl_atari.runs.run_dir import SEARCH_FILE, SUITE_FILE


def link(name: str, written: set[str]) -> str | None:
    """The address of a run's report beside this one; None if it has none."""
    return f"./{quote(name, safe='')}/report.html" if name in written else None


def _read_group(path: Path) -> tuple[dict[str, Any], Config]:
    try:
        values = read_json(path)
        return values, config_from_dict(values["config"])
    except (OSError, ValueError, KeyError, TypeError, UserError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: damaged ({type(error).__name__}: {reason}); restore it from a copy") from error


# Suites


def describe_suite_page(suite_dir: Path, written: set[str]) -> dict[str, Any]:
    """The content of a suite's page.

    Args:
        written: names of the games whose reports are written.

    Raises:
        UserError: suite.json cannot be used.
    """
    values, config = _read_group(suite_dir / SUITE_FILE)
    statuses = _statuses(suite_dir)
    planned = values.get("games")
    names = [name for name in planned if isinstance(name, str) and name in GAMES] if isinstance(planned, list) else []
    names = list(dict.fromkeys([*names, *(run.name for run in suite_runs(suite_dir))]))
    protocol = config.env.resolved_protocol
    note = comparison_note(protocol)
    described = {} if note else describe_suite(read_suite(suite_dir))
    return {
        "title": suite_dir.absolute().name,
        "config": config,
        "protocol": protocol,
        "note": note,
        "games": [_game_row(suite_dir, config, name, written, statuses.get(name, "waiting")) for name in names],
        "aggregates": aggregate_rows(described, "over the complete games") if described else [],
        "intervals": INTERVALS.replace("`", ""),  # it is Markdown
        "charts": _suite_charts(described),
        "options": options(config),
        "software": software(values),
    }


def _statuses(suite_dir: Path) -> dict[str, str]:
    """Game -> its status in results.json, which a suite writes each time that a game ends."""
    try:
        rows = read_json(suite_dir / "results.json")["games"]
        return {str(row["game"]): str(row["status"]) for row in rows}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _game_row(suite_dir: Path, config: Config, name: str, written: set[str], status: str) -> dict[str, Any]:
    row = {"name": name, "link": link(name, written), "status": status, "curve": None, "summary": None}
    try:
        run = read_run(suite_dir / name)
    except UserError:  # waiting, or no log point yet
        return row
    summary, tables = trial_summary(run), run.tables.values()
    curves = [Series(table["env_steps"], table["return_ma"], i) for i, table in enumerate(tables)]
    now = status_text(config, summary)
    if now != "not complete" or not status.startswith("failed"):  # a failed game may have been resumed since
        row["status"] = now
    return row | {
        "summary": summary,
        "curve": draw(name, curves),
        "score": score_text(summary["score"]),
        "interval": interval_text(summary["score_interval"]),
        "sessions": ", ".join(score_text(session["final_return_ma"]) for session in summary["sessions"]),
        "reference": score_text(summary["reference_score"]),
        "ratio": _fraction(summary["reference_normalised_score"]),
        "human": _fraction(summary["human_normalised_score"]),
        "hours": number_text(summary["mean"]["wall_hours"]),
        "env_steps": number_text(summary["mean"]["env_steps"]),
    }


def _fraction(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _suite_charts(described: Mapping[str, Any]) -> list[Any]:
    """IQM against env steps and hours, and the performance profile, of the first normalisation that there is."""
    if not described:
        return []
    kind, found = next(iter(described.items()))
    panels = {
        "iqm_by_env_steps": (f"interquartile mean, {kind}", "env steps"),
        "iqm_by_hours": (f"interquartile mean, {kind}", "hours of a session"),
        "profile": ("performance profile: share of sessions above a score", f"{kind} score"),
    }
    charts = []
    for name, (title, x_label) in panels.items():
        curve = found[name]
        series = Series(curve["x"], curve["value"], low=curve["low"], high=curve["high"])
        chart = draw(title, [series], x_label)
        charts += [chart] if chart is not None else []
    return charts


# Searches


def describe_search(search_dir: Path, written: set[str]) -> dict[str, Any]:
    """The content of a search's page, its trials best first.

    Args:
        written: names of the trials' directories whose reports are written.

    Raises:
        UserError: search.json or a trial's record cannot be used.
    """
    values, config = _read_group(search_dir / SEARCH_FILE)
    search = part(values, "search")
    fields = list(part(search, "space"))
    records = best_first(list(read_records(search_dir).values()))
    trials = [
        {
            "number": record.number,
            "link": link(trial_dir(search_dir, record.number).name, written),
            "fields": [value_text(record.fields.get(name, "-")) for name in fields],
            "score": score_text(record.score),
            "env_steps": number_text(record.env_steps),
            "status": record.status,
            "reason": record.reason,
        }
        for record in records
    ]
    return {
        "title": search_dir.absolute().name,
        "config": config,
        "protocol": config.env.resolved_protocol,
        "fields": fields,
        "trials": trials,
        "best": trials[0] if ranked(records) else None,
        "curves": _trial_curves(search_dir, records),
        "scatters": _scatters(fields, records),
        "search": [(name, str(value)) for name, value in flat(search).items()],
        "options": options(config),
    }


def _trial_curves(search_dir: Path, records: Sequence[Record]) -> Any:
    """`return_ma` of every trial, the mean over its sessions; the best one is strong."""
    series, best = [], ranked(records)[:1]
    for record in records:
        try:
            tables = list(read_sessions(trial_dir(search_dir, record.number)).values())
        except UserError:
            continue
        env_steps, mean = mean_curve(tables, "return_ma")
        if env_steps.size:
            series.append(Series(env_steps, mean, *((0, "strong") if record in best else (1, "faint"))))
    best_text = "; the best one is thick" if any(one.look == "strong" for one in series) else ""
    return draw(f"return_ma of all trials{best_text}", series)


def _scatters(fields: Sequence[str], records: Sequence[Record]) -> list[Any]:
    """The score against each field that has numbers. Fields whose values span a decade are drawn on a log scale."""
    scored = [(r.fields, r.score) for r in records if r.status != "failed" and r.score is not None]
    charts = []
    for name in fields:
        points: list[tuple[Any, float]] = [(values.get(name), score) for values, score in scored]
        known = [(x, y) for x, y in points if type(x) in (int, float) and abs(x) <= 1e30]
        if len(known) < 2:
            continue
        values = [x for x, _ in known]
        log = min(values) > 0 and max(values) / min(values) >= 10
        x = [math.log10(value) if log else value for value in values]
        drawn = Series(x, [y for _, y in known], look="dots")
        charts.append(draw(f"score against {name}", [drawn], f"log10 of {name}" if log else name, x_from=None))
    return charts
