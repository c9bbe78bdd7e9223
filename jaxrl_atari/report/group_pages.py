"""Content of the reports of suites and searches: tables that link to the reports of their runs.

Both kinds of directory are read as files: the code that writes them is a layer above.
"""

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from jaxrl_atari.cli import flat
from jaxrl_atari.cli.errors import UserError
from jaxrl_atari.config import Config
from jaxrl_atari.envs.games import GAMES
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.report.chart import Series, draw
from jaxrl_atari.report.run_page import interval_text, options, software
from jaxrl_atari.run_dir.config_file import SEARCH_FILE, SUITE_FILE, config_from_dict
from jaxrl_atari.run_dir.files import read_json
from jaxrl_atari.run_dir.metrics import align_sessions
from jaxrl_atari.run_dir.reading import read_sessions
from jaxrl_atari.run_dir.suite_statistics import aggregate_rows, describe_suite, read_suite, suite_runs
from jaxrl_atari.run_dir.summary import number_text, read_run, score_text, status_text, trial_summary


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
        "title": config.name if config.name != "suite" else suite_dir.absolute().name,
        "config": config,
        "protocol": protocol,
        "note": note,
        "games": [_game_row(suite_dir, config, name, written, statuses.get(name, "waiting")) for name in names],
        "aggregates": aggregate_rows(described, "over the complete games") if described else [],
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
    if not status.startswith("failed"):
        row["status"] = status_text(config, summary)
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
    """The content of a search's page, its trials in the order of trials.csv: best first.

    Args:
        written: names of the trials' directories whose reports are written.

    Raises:
        UserError: search.json or trials.csv cannot be used.
    """
    values, config = _read_group(search_dir / SEARCH_FILE)
    header, rows = _read_trials(search_dir / "trials.csv")
    fields = header[1 : header.index("score")]
    trials = [
        {
            "number": row["trial"],
            "link": link(f"trial_{row['trial']}", written),
            "fields": [_short(row[name]) for name in fields],
            "score": score_text(_number(row["score"])),
            "env_steps": number_text(_number(row["env_steps"])),
            "status": row["status"],
            "reason": row["reason"],
        }
        for row in rows
    ]
    search = values.get("search")
    return {
        "title": search_dir.absolute().name,
        "config": config,
        "protocol": config.env.resolved_protocol,
        "fields": fields,
        "trials": trials,
        "best": trials[0] if rows and _is_ranked(rows[0]) else None,
        "curves": _trial_curves(search_dir, rows),
        "scatters": _scatters(fields, rows),
        "search": [(name, str(value)) for name, value in flat(search if isinstance(search, dict) else {}).items()],
        "options": options(config),
    }


def _read_trials(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            header, *lines = list(csv.reader(file))
        expected = ["score", "env_steps", "status", "reason"]
        if header[:1] != ["trial"] or header[-4:] != expected or any(len(line) != len(header) for line in lines):
            raise ValueError("other columns than those of a search")
    except (OSError, ValueError, csv.Error) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: cannot be used ({reason}); python -m jaxrl_atari.search.results writes it") from error
    return header, [dict(zip(header, line, strict=True)) for line in lines]


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) <= 1e30 else None


def _short(text: str) -> str:
    value = _number(text)
    return text if value is None else f"{value:.4g}"


def _is_ranked(row: dict[str, str]) -> bool:
    """Whether a trial has a rank: those that have come first in trials.csv, others follow in the order of numbers."""
    return _number(row["score"]) is not None and row["status"] in ("finished", "stopped")


def _trial_curves(search_dir: Path, rows: list[dict[str, str]]) -> Any:
    """`return_ma` of every trial, the mean over its sessions; the best one is strong."""
    series = []
    for rank, row in enumerate(rows):
        try:
            tables = list(read_sessions(search_dir / f"trial_{int(row['trial'])}").values())
        except (UserError, ValueError):
            continue
        env_steps, returns = align_sessions(tables, "return_ma")
        known = np.isfinite(returns).any(axis=0)
        if known.any():
            mean = np.nanmean(returns[:, known], axis=0)
            best = rank == 0 and _is_ranked(row)
            series.append(Series(env_steps[known], mean, 0 if best else 1, "strong" if best else "faint"))
    best_text = "; the best one is thick" if any(one.look == "strong" for one in series) else ""
    return draw(f"return_ma of all trials{best_text}", series)


def _scatters(fields: list[str], rows: list[dict[str, str]]) -> list[Any]:
    """The score against each field that has numbers. Fields whose values span a decade are drawn on a log scale."""
    charts = []
    for name in fields:
        points = [(_number(row[name]), _number(row["score"])) for row in rows if row["status"] != "failed"]
        known = [(x, y) for x, y in points if x is not None and y is not None]
        if len(known) < 2:
            continue
        values = [x for x, _ in known]
        log = min(values) > 0 and max(values) / min(values) >= 10
        x = [math.log10(value) if log else value for value in values]
        drawn = Series(x, [y for _, y in known], look="dots")
        charts.append(draw(f"score against {name}", [drawn], f"log10 of {name}" if log else name, x_from=None))
    return charts
