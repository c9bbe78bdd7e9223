"""The files of a run directory: reading them, and writing the trial's summary.

RUN_DIR/config.json              the config, nested, under "config"
RUN_DIR/session_<i>/metrics.csv  a row for each log point of session i
RUN_DIR/trial.json               written here: the figures of `metrics.aggregate_trial`
"""

import csv
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_atari.config_files import read_config
from jaxrl_atari.errors import UserError
from jaxrl_atari.games import GAMES
from jaxrl_atari.run_dir.files import write_json
from jaxrl_atari.run_dir.metrics import SESSION_FIGURES, Table, aggregate_trial

_log = logging.getLogger(__name__)

REQUIRED_COLUMNS = (
    *(
        "env_steps",
        "updates",
        "optimizer_steps",
        "wall_seconds",
        "sps",
        "episodes",
        "return_mean",
        "return_ma",
    ),
    *(
        "episode_length",
        "learning_rate",
        "policy_loss",
        "value_loss",
        "entropy",
        "approx_kl",
        "clip_fraction",
    ),
    *("explained_variance", "gradient_norm"),
)
"""The columns of every metrics.csv; what `monitor.py` measures may follow."""


def read_metrics(session_dir: str | Path) -> Table:
    """Reads `session_dir/metrics.csv`, also while it is being written: column name -> float64 `[N]`, N >= 1.

    Empty cells are NaN. A last line that was cut short is dropped with a note in the log. Where a resumed
    session has logged an env step again, its later row replaces the rows from there on.

    Raises:
      UserError: no such file, no rows yet, a column is missing, or a line in the middle cannot be read.
    """
    path = Path(session_dir) / "metrics.csv"
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); expected a session's metrics") from error
    lines = text.splitlines(keepends=True)
    # Even a last line with all its cells may have lost digits of the last one: only a line feed ends a row.
    cut_short = bool(lines) and not lines[-1].endswith("\n")
    rows = list(csv.reader(lines[:-1] if cut_short else lines))
    if cut_short and len(lines) > 1:
        _log.warning("%s: line %d is cut short and was left out", path, len(lines))
    if len(rows) < 2:
        raise UserError(f"{path}: holds no log point yet; wait for the first one, or remove the session")
    header = rows[0]
    if missing := [name for name in REQUIRED_COLUMNS if name not in header]:
        raise UserError(f"{path}: has no column {', '.join(missing)}; expected a metrics.csv of jaxrl_atari")
    values = np.empty((len(rows) - 1, len(header)))
    for index, row in enumerate(rows[1:]):
        try:
            values[index] = [float(cell) if cell else np.nan for cell in row]
        except ValueError as error:
            raise UserError(
                f"{path}: line {index + 2} is not {len(header)} numbers; mend or remove that line"
            ) from error
    env_steps = values[:, header.index("env_steps")]
    next_lowest = np.minimum.accumulate(np.append(env_steps[1:], np.inf)[::-1])[::-1]
    kept = values[env_steps < next_lowest]
    return {name: kept[:, index].copy() for index, name in enumerate(header)}


def session_dirs(run_dir: str | Path) -> list[Path]:
    """The directories `session_<i>` of a run, by i."""
    numbered = {
        int(match[1]): path
        for path in Path(run_dir).glob("session_*")
        if path.is_dir() and (match := re.fullmatch(r"session_(\d+)", path.name))
    }
    return [numbered[index] for index in sorted(numbered)]


def read_sessions(run_dir: str | Path) -> dict[Path, Table]:
    """Session directory -> its metrics, of all sessions that have any; the others are noted in the log.

    Raises:
      UserError: none has.
    """
    tables, problems = {}, []
    for session_dir in session_dirs(run_dir):
        try:
            tables[session_dir] = read_metrics(session_dir)
        except UserError as error:
            problems.append(str(error))
    if not tables:
        raise UserError(problems[0] if problems else f"{run_dir}: holds no session_0; expected a run directory")
    for problem in problems:
        _log.warning("left out: %s", problem)
    return tables


def write_trial_summary(run_dir: str | Path) -> dict[str, Any]:
    """Aggregates the sessions of a run into `run_dir/trial.json`, and returns what it wrote.

    To the figures of `metrics.aggregate_trial` it adds the config's name, protocol, seed, `planned_sessions`
    and `planned_env_steps`, and `complete`: whether every session has reached its budget.

    Raises:
      UserError: the run has no readable config or no session with metrics.
    """
    config, tables = read_config(run_dir), read_sessions(run_dir)
    figures = aggregate_trial(list(tables.values()), GAMES[config.env.game_name])
    finished = [config.is_spent(int(table["env_steps"][-1])) for table in tables.values()]
    summary = {
        "name": config.name,
        "protocol": config.env.resolved_protocol,
        "seed": config.seed,
        "planned_sessions": config.sessions,
        "planned_env_steps": config.total_env_steps,
        "complete": len(finished) >= config.sessions and all(finished),
        **figures,
    }
    for figures_of_one, session_dir in zip(summary["sessions"], tables, strict=True):
        figures_of_one["session"] = session_dir.name
    write_json(Path(run_dir) / "trial.json", summary)
    return summary


def score_text(score: float) -> str:
    """A score for people: 14,482 or 1.44."""
    return f"{score:,.0f}" if abs(score) >= 1000 else f"{score:.2f}".removesuffix(".00")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    if value and abs(value) < 0.01:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 10_000 or float(value).is_integer() else f"{value:,.2f}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as aligned lines: the first column to the left, the others to the right."""
    first, *others = ([len(cell) for cell in column] for column in zip(*rows, strict=True))
    formats = [f"{{:<{max(first)}}}", *(f"{{:>{max(widths)}}}" for widths in others)]
    return ["  ".join(formats).format(*row).rstrip() for row in rows]


def summary_table(summary: dict[str, Any]) -> str:
    """What a trial prints at its end: each figure's mean and std over sessions, and our score beside the reference.

    Args:
      summary: as `write_trial_summary` returns it.
    """
    sessions = summary["sessions"]
    heading = (
        f"{summary['name']}: {summary['game']}, protocol {summary['protocol']}, {len(sessions)} "
        f"session{'s' if len(sessions) > 1 else ''}, {summary['planned_env_steps']:,} env steps each"
    )
    if not summary["complete"]:
        heading += " (not complete)"
    figures = [["figure", "mean", "std", *(figures["session"] for figures in sessions)]]
    for name, title in SESSION_FIGURES.items():
        if summary["mean"][name] is not None:
            spread = [summary["mean"][name], summary["std"][name], *(figures[name] for figures in sessions)]
            figures.append([title, *map(_number, spread)])
    figures.append(["consistency", _number(summary["consistency"]), *[""] * (1 + len(sessions))])
    scores = [["score", _number(summary["score"])]]
    sources = [f"± {_number(summary['score_std'])} over sessions; return_ma at the end"]
    for name, what in {
        "reference_score": "SLM Lab's PPO, protocol v5, 10,000,000 env steps",
        "random_score": "uniformly random play, protocol v5",
        "human_score": "human tester, as in DQN Zoo",
        "reference_normalised_score": "(score - random) / (reference - random)",
        "human_normalised_score": "(score - random) / (human - random), both as in DQN Zoo",
    }.items():
        scores.append([name.replace("_", " "), _number(summary[name])])
        sources.append(what)
    compared = [f"{line}  {source}" for line, source in zip(_columns(scores), sources, strict=True)]
    return "\n".join([heading, "", *_columns(figures), "", *compared])
