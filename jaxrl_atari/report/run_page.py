"""Content of a run's report: a dict of texts, numbers and charts for the template run.html."""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_atari.config import Config, flat
from jaxrl_atari.envs.games import GAMES
from jaxrl_atari.envs.protocols import PROTOCOLS, Rules
from jaxrl_atari.plots import SESSION_PANELS, SMOOTHING
from jaxrl_atari.report.chart import Chart, Series, draw, scale
from jaxrl_atari.report.summary import (
    Run,
    evaluated_at,
    figure_rows,
    newest_evaluation,
    read_run,
    score_text,
    seeds_text,
    sessions_text,
    trial_summary,
)
from jaxrl_atari.runs.columns import COLUMNS, TIME_COLUMNS
from jaxrl_atari.runs.description import latest_text
from jaxrl_atari.runs.files import read_json
from jaxrl_atari.runs.reading import Table, moving_average
from jaxrl_atari.runs.run_dir import CONFIG_FILE

REFERENCES = {
    "reference_score": "SLM Lab's PPO, 10M env steps",
    "tutorial_score": "SLM Lab's tutorial, 10M env steps",
    "human_score": "human tester",
    "random_score": "random play",
}
"""Scores to compare with -> their names on the page."""

TIMES = {
    "emulators_percent": "waiting for the emulators",
    "policy_percent": "policy and the rest of acting",
    "learning_percent": "update, log points, checkpoints",
}
MAX_VIDEO_BYTES = 32 << 20
"""A larger video is named and not embedded."""


def describe_run(run_dir: Path) -> dict[str, Any]:
    """The content of a run's page.

    Raises:
        UserError: not a run directory, or no session has a log point.
    """
    run = read_run(run_dir)
    config, tables, summary = run.config, run.tables, trial_summary(run)
    sessions = {path.name.replace("_", " "): table for path, table in tables.items()}
    return {
        "title": "" if config.name == summary["game"] else config.name,
        "summary": summary,
        "config": config,
        "sessions": sessions_text(summary),
        "seeds": seeds_text(summary),
        "score": score_text(summary["score"]),
        "score_std": score_text(summary["score_std"]),
        "interval": interval_text(summary["score_interval"]),
        "progress": _progress(summary),
        "marks": _marks(summary),
        "evaluation": _evaluation(run),
        "returns": returns_chart(summary, sessions),
        "panels": _panels(sessions),
        "legend": list(sessions),
        "smoothing": SMOOTHING,
        "figures": _figures(summary),
        "time": _time(tables.values()),
        "options": options(config),
        "lambda_note": _lambda_note(config),
        "rules": _rules(config),
        "software": software(_description(run_dir / CONFIG_FILE)),
        "devices": {path.name.replace("_", " "): device for path in tables if (device := latest_text(path, "device"))},
        "video": _video(list(tables)),
    }


def interval_text(interval: Sequence[float] | None) -> str:
    """`12,400 to 12,600`, or a dash where there is no interval."""
    return "-" if interval is None else f"{score_text(interval[0])} to {score_text(interval[1])}"


def _lambda_note(config: Config) -> str:
    """Whether the lambda in force is a tuned one: those are of the games that have a reference score."""
    if config.ppo.gae_lambda is not None:
        return ""
    tuned = GAMES[config.env.game_name].reference_score is not None
    return " (tuned for this game)" if tuned else " (the default: none is tuned for this game)"


def _progress(summary: Mapping[str, Any]) -> str:
    """How far a run has come that is not complete; empty for a complete one."""
    if summary["complete"]:
        return ""
    steps, found = summary["mean"]["env_steps"] or 0, len(summary["sessions"])
    begun = f"{found} of {summary['planned_sessions']} sessions {'has' if found == 1 else 'have'} begun"
    return f"mean {steps:,.0f} of {summary['planned_env_steps']:,} env steps; {begun}"


def _marks(summary: Mapping[str, Any]) -> list[Any]:
    """The score beside those to compare with, on one scale; empty where there is nothing to compare."""
    known = [(title, summary[name]) for name, title in REFERENCES.items() if summary[name] is not None]
    if summary["score"] is None or not known:
        return []
    scores = [("this run", summary["score"]), *sorted(known, key=lambda pair: -pair[1])]
    return scale([(name, value, score_text(value)) for name, value in scores], summary["score_interval"])


def _evaluation(run: Run) -> dict[str, Any] | None:
    """The newest evaluation of the latest checkpoints of all sessions, as text."""
    found = newest_evaluation(run.path, [path.name for path in run.tables])
    if found is None:
        return None
    matrix = zip(found["sessions"], found["session_means"], found["matrix"], strict=True)
    return {
        "mean": score_text(found["mean"]),
        "interval": interval_text(found["interval"]),
        "env_steps": evaluated_at(found),
        "episodes": found["episodes"],
        "greedy": found["greedy"],
        "rows": [
            (name.replace("_", " "), score_text(mean), ", ".join(map(score_text, returns)))
            for name, mean, returns in matrix
        ],
    }


def returns_chart(summary: Mapping[str, Any], sessions: Mapping[str, Table]) -> Chart | None:
    """Returns of all sessions against env steps: faint `return_mean`, strong `return_ma`."""
    series = [
        Series(table["env_steps"], table[column], number, look)
        for column, look in (("return_mean", "faint"), ("return_ma", "strong"))
        for number, table in enumerate(sessions.values())
    ]
    rules = [(summary[name], title) for name, title in REFERENCES.items() if summary[name] is not None]
    rules = [(height, f"{title}: {score_text(height)}") for height, title in rules if "tutorial" not in title]
    return draw("raw return of a full game", series, rules=rules)


def _panels(sessions: Mapping[str, Table]) -> list[Chart]:
    """Small charts of the learning metrics that have values: moving averages, as in a session's graph."""
    charts = []
    for column, title in SESSION_PANELS.items():
        window = 1 if column == "learning_rate" else SMOOTHING
        series = [
            Series(table["env_steps"], moving_average(table[column], window), number)
            for number, table in enumerate(sessions.values())
            if column in table
        ]
        unit = COLUMNS[column].unit
        chart = draw(f"{title}, {unit}" if unit else title, series)
        charts += [chart] if chart is not None else []
    return charts


def _figures(summary: dict[str, Any]) -> list[list[str]]:
    """The table of figures: its header, and a row for each figure that is known."""
    header = ["", "mean", "std", *(session["session"].replace("_", " ") for session in summary["sessions"])]
    rows = figure_rows(summary)
    return [header, *(rows[:-1] if summary["consistency"] is None else rows)]


def _time(tables: Any) -> list[tuple[str, float]]:
    """Where the time went, in percent, over all sessions: log points weighted by their time. Empty if unknown."""
    weights, shares = [], []
    for table in tables:
        if all(name in table for name in TIME_COLUMNS):
            seconds = np.diff(table["wall_seconds"], prepend=0.0)
            values = np.stack([table[name] for name in TIME_COLUMNS])
            known = np.isfinite(values).all(axis=0) & (seconds > 0)
            weights.append(seconds[known])
            shares.append(values[:, known])
    weight = np.concatenate(weights) if weights else np.empty(0)
    if not weight.sum():
        return []
    means = (np.concatenate(shares, axis=1) * weight).sum(axis=1) / weight.sum()
    return [(TIMES[name], float(np.clip(mean, 0, 100))) for name, mean in zip(TIME_COLUMNS, means, strict=True)]


def options(config: Config) -> list[tuple[str, str, str, bool]]:
    """Every option: name, value, default, and whether they differ."""
    values, defaults = flat(config.to_dict()), flat(Config().to_dict())
    return [(name, str(value), str(defaults[name]), value != defaults[name]) for name, value in values.items()]


def _rules(config: Config) -> list[tuple[str, str, str, bool]]:
    """The rules of the protocol: name, value, the named protocol's value, and whether they differ."""
    name = config.env.resolved_protocol.partition(",")[0]
    return [
        (rule, str(value).lower(), str(named).lower(), value != named)
        for rule, value, named in zip(Rules._fields, config.env.rules, PROTOCOLS[name], strict=True)
    ]


def _description(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def part(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A group of values of a description; empty where it is missing or something else."""
    found = values.get(name)
    return found if isinstance(found, dict) else {}


def software(description: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Versions and machine of a run, suite or search, from its description: name and value."""

    versions, hardware = part(description, "versions"), part(description, "hardware")
    rows = [("Python", description.get("python")), *versions.items(), ("git", description.get("git_revision"))]
    if hardware:
        gpus, memory = hardware.get("gpus"), hardware.get("memory_gib")
        rows += [
            ("CPU", f"{hardware.get('cpu')}, {hardware.get('cores')} cores"),
            ("memory", f"{memory:.0f} GiB" if isinstance(memory, float) else memory),
            ("GPUs", (", ".join(map(str, gpus)) or "none") if isinstance(gpus, list) else None),
            ("NVIDIA driver", hardware.get("driver")),
        ]
    resumed = description.get("resumed")
    if isinstance(resumed, list):
        rows += [("resumed", _resume_text(each)) for each in resumed if isinstance(each, dict)]
    return [(str(name), str(value)) for name, value in rows if value is not None]


def _resume_text(entry: Mapping[str, Any]) -> str:
    """The date of a resume and the fields that it changed."""
    changed = entry.get("changed")
    fields = changed.items() if isinstance(changed, dict) else ()
    pairs = [(name, values) for name, values in fields if isinstance(values, list) and len(values) == 2]
    return "; ".join([str(entry.get("date")), *(f"{name} {old} → {new}" for name, (old, new) in pairs)])


def _video(session_dirs: Sequence[Path]) -> dict[str, Any] | None:
    """The newest video of the sessions as a data URI; without one if it is too large."""
    found = [path for session_dir in session_dirs for path in session_dir.glob("video_*.mp4")]
    found += session_dirs[0].parent.glob("replay.mp4")  # of a run from the Hub
    sizes = {path: path.stat() for path in found if path.is_file()}
    if not sizes:
        return None
    path = max(sizes, key=lambda path: sizes[path].st_mtime)
    data = None
    if sizes[path].st_size <= MAX_VIDEO_BYTES:
        data = "data:video/mp4;base64," + base64.b64encode(path.read_bytes()).decode()
    return {"name": path.relative_to(session_dirs[0].parent).as_posix(), "data": data}
