"""Summaries of trials: RUN_DIR/trial.json, the table printed at the end, and numbers as text."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_atari.config import Config
from jaxrl_atari.dialects import dialect_text
from jaxrl_atari.envs.games import Game, comparable
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.errors import UserError
from jaxrl_atari.output import counted
from jaxrl_atari.report.metrics import (
    SESSION_FIGURES,
    align_sessions,
    consistency,
    cut_table,
    human_normalised,
    known_float,
    random_score,
    reference_normalised,
    sample_std,
    session_figures,
)
from jaxrl_atari.report.statistics import CONFIDENCE, score_interval
from jaxrl_atari.runs.files import read_json, read_result, write_json
from jaxrl_atari.runs.layout import CONFIG_FILE, TRIAL_FILE, session_number
from jaxrl_atari.runs.reading import Table, read_early_end, read_sessions
from jaxrl_atari.runs.run_dir import read_config


class Run(NamedTuple):
    """The content of a run directory."""

    path: Path
    config: Config
    tables: dict[Path, Table]  # session directory -> its metrics
    description: dict[str, Any]  # the content of config.json

    @property
    def protocol(self) -> str:
        """The protocol, as it is shown beside a score."""
        return self.config.env.resolved_protocol

    @property
    def game(self) -> Game:
        """The game, with the reference scores of the run's protocol."""
        return comparable(self.config.env.game_name, self.protocol)

    @property
    def return_ma_definition(self) -> str:
        """The definition of the run's `return_ma`, which has changed since older versions."""
        by_env_steps = self.description.get("return_ma_env_steps")
        return "mean over the last 1M env steps" if by_env_steps else "mean of the last 100 log points"

    def is_complete(self, config: Config | None = None) -> bool:
        """Whether every session has spent its budget or was ended by `stop` of `run_training`.

        Args:
            config: the config whose budget counts; None: that of the run.
        """
        wanted = config or self.config
        reached = []
        for session_dir, table in self.tables.items():
            ended = read_early_end(wanted, session_dir)
            reached.append(wanted.total_env_steps if ended else table["env_steps"][-1])
        return wanted.is_complete(reached)

    @property
    def early_ends(self) -> dict[str, dict[str, Any]]:
        """The sessions that `stop` of `run_training` has ended: name -> `env_steps` and `reason`."""
        ends = {path.name: read_early_end(self.config, path) for path in self.tables}
        return {name: ended for name, ended in ends.items() if ended is not None}


def read_run(run_dir: Path, sessions: int | None = None) -> Run:
    """Reads a run.

    Args:
        sessions: number of sessions that count, as in its suite; None: as in its config.

    Raises:
        UserError: the directory has no readable config, or no session with metrics.
    """
    config = read_config(run_dir)
    tables = read_sessions(run_dir, sessions or config.sessions)
    return Run(run_dir, config, tables, read_json(run_dir / CONFIG_FILE))


def write_trial_summary(run_dir: Path) -> dict[str, Any]:
    """Writes the summary of a run to RUN_DIR/trial.json and returns it. Raises `UserError` as `read_run`."""
    summary = trial_summary(read_run(run_dir))
    write_json(run_dir / TRIAL_FILE, summary)
    return summary


class Members(NamedTuple):
    """The sessions of a trial that count. Its score, curve and table use these sessions only."""

    tables: dict[Path, Table]  # session directory -> its log points that count
    left_out: dict[Path, str]  # session directory -> why the session does not count
    env_steps: float | None  # where the log points of all members are cut; None once a session has finished


def members(run: Run) -> Members:
    """Chooses the sessions of a trial that count, so that all of them are compared at the same env steps.

    - Once a session has finished, the finished sessions count: those that have spent their budget, and those ended
      by `stop` of `run_training`. The curve of a stopped session keeps its last value.
    - Before that, sessions that have come at least half as far as the furthest one count. Their log points are
      cut at the env steps that all of them have reached.

    A session without a finished game has no score and is left out, unless no session has one.
    """
    scored = {path: table for path, table in run.tables.items() if np.isfinite(table["return_ma"]).any()}
    left_out = {path: "no finished game" for path in run.tables if scored and path not in scored}
    candidates = scored or run.tables
    reached = {path: table["env_steps"][-1] for path, table in candidates.items()}
    stopped = run.early_ends
    finished = [path for path in candidates if run.config.is_spent(reached[path]) or path.name in stopped]
    counted_in = finished or [path for path in candidates if 2 * reached[path] >= max(reached.values())]
    for path in candidates:
        if path not in counted_in:
            left_out[path] = f"unfinished, at {reached[path]:,.0f} of {run.config.total_env_steps:,} env steps"
    if finished:
        return Members({path: run.tables[path] for path in finished}, left_out, None)
    common = min(reached[path] for path in counted_in)
    tables = {path: cut_table(run.tables[path], common) for path in counted_in}
    for path in scored.keys() & tables.keys():
        if not np.isfinite(tables[path]["return_ma"]).any():
            left_out[path] = f"no finished game up to {common:,.0f} env steps"
            del tables[path]
    return Members(tables, left_out, float(common))


def trial_summary(run: Run) -> dict[str, Any]:
    """The figures of a trial over its `members`, ready for JSON. An unknown value is None.

    - `score`: mean of `session_scores`, the final `return_ma` of the members that have finished a game.
      `return_ma`: its definition.
    - `sessions`: the figures of each member. `left_out`: the other sessions, and why they do not count.
    - `mean`, `std`: mean and sample standard deviation of each figure over the members. `std` is None for a single
      value. `consistency` is over the log points at which every member has a finished game.
    - `common_env_steps`: where the log points of unfinished members are cut; None if they have finished.
    - `complete`: whether every session has finished. `stopped`: env steps and reason of the sessions that `stop`
      of `run_training` has ended.
    - `comparison_note`: why there are no reference scores.
    """
    config = run.config
    game = run.game
    trial = members(run)
    sessions: list[dict[str, Any]] = [
        {"session": path.name, "seed": config.seed + session_number(path), **session_figures(table, game)}
        for path, table in trial.tables.items()
    ]
    known = {name: [each[name] for each in sessions if each[name] is not None] for name in SESSION_FIGURES}
    means = {name: float(np.mean(values)) if values else None for name, values in known.items()}
    stds = {name: float(sample_std(values)) if len(values) > 1 else None for name, values in known.items()}
    score = means["final_return_ma"]
    scores = known["final_return_ma"]
    if len(known["strength"]) == len(sessions) > 1:
        _, returns = align_sessions(list(trial.tables.values()), "return_mean")
        shared = returns[:, np.isfinite(returns).all(axis=0)]
        means["consistency"] = known_float(consistency(shared - random_score(game)))
    return {
        "name": config.name,
        "game": game.name,
        "protocol": run.protocol,
        "gae_lambda": config.resolved_gae_lambda,
        "dialect": dialect_text(config),
        "comparison_note": comparison_note(run.protocol),
        "return_ma": run.return_ma_definition,
        "seed": config.seed,
        "planned_sessions": config.sessions,
        "planned_env_steps": config.total_env_steps,
        "complete": run.is_complete(),
        "stopped": run.early_ends,
        "common_env_steps": trial.env_steps,
        "score": score,
        "session_scores": scores,
        "score_std": stds["final_return_ma"],
        "score_interval": score_interval(scores),
        "references": [reference._asdict() for reference in game.comparisons],
        "reference_normalised_score": reference_normalised(score, game),
        "human_normalised_score": human_normalised(score, game),
        "mean": means,
        "std": stds,
        "sessions": sessions,
        "left_out": [{"session": path.name, "reason": why} for path, why in trial.left_out.items()],
    }


def evaluations(directory: Path) -> list[dict[str, Any]]:
    """The results that `evaluate` has written into the directory of a run or a session, oldest first.

    Each has `file`, `env_steps`, `checkpoint`, `episodes`, `greedy` and `mean`; a result of all sessions also has
    `session_means`.

    Raises:
        UserError: as `read_result`, or the returns of a result are no numbers.
    """
    found = []
    for path in directory.glob("evaluation*.json"):
        result = read_result(path, mean=float, episodes=int)
        for name in ("session_means", "returns", "truncated"):
            values = result.get(name, [])
            if not isinstance(values, list) or not all(isinstance(value, int | float) for value in values):
                raise UserError(f"{path}: {name} is not a list of numbers; restore it from a copy")
        found.append(result | {"file": path})
    return sorted(found, key=lambda each: (written_at(each["file"]), each["file"].name))


def written_at(file: Path) -> float:
    """The time at which a result or a video was made, in seconds since 1970 (UTC).

    It is the `date` in the JSON file of a result, which copies keep. A video's date is in `video_STEP.json` or, if
    there is no such file, in the `evaluation_STEP.json` of its evaluation. Without a date, it is the file's time.
    """
    described = [file.with_suffix(".json"), file.with_name(f"{file.stem.replace('video', 'evaluation')}.json")]
    for path in filter(Path.is_file, described):
        try:
            date = str(read_json(path)["date"]).removesuffix(" UTC")
            return datetime.strptime(date, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC).timestamp()
        except (ValueError, LookupError):  # a file of an earlier version, or of another program
            continue
    return file.stat().st_mtime


# Texts.


def score_text(value: float | None) -> str:
    """A score as text, such as 14,482, 1.44 or 21; `-` for None."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{round(value, 2) + 0.0:.2f}".removesuffix(".00")


def number_text(value: float) -> str:
    """A number of any size as text, with three significant digits: 0.000343, 0.95, 2,048, 1e-08."""
    if value == 0 or abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) < 1e-6:
        return f"{value:.3g}"
    return np.format_float_positional(value, precision=3, fractional=False, trim="-")


def interval_text(scores: Sequence[float]) -> str:
    """The interval of the mean score as text; with two sessions, both scores; with one session, nothing."""
    interval = score_interval(scores)
    if interval is not None:
        return f"{CONFIDENCE:.0%} interval {score_text(interval[0])} to {score_text(interval[1])}"
    return f"2 sessions: {score_text(scores[0])} and {score_text(scores[1])}" if len(scores) == 2 else ""


def left_out_text(summary: Mapping[str, Any]) -> str:
    """The sessions left out and why, and where unfinished ones are compared; empty if all have finished."""
    parts = []
    if summary["left_out"]:
        named = [f"{each['session'].replace('_', ' ')} ({each['reason']})" for each in summary["left_out"]]
        parts.append(f"left out: {', '.join(named)}")
    steps = summary["common_env_steps"]
    members = len(summary["sessions"])
    if steps is not None and members > 1:
        parts.append(f"compared at {steps:,.0f} env steps, which the {members} have reached")
    return "; ".join(parts)


def sessions_text(summary: Mapping[str, Any]) -> str:
    """The number of sessions that count, as text: `4 sessions`, or `3 of 4 sessions` if one is left out."""
    members = len(summary["sessions"])
    every = members + len(summary["left_out"])
    return counted(members, "session") if members == every else f"{members} of {counted(every, 'session')}"


def own_settings(summary: Mapping[str, Any]) -> str:
    """The settings of a run that are shown beside reference scores: those in which its learning rule may differ.

    An example is `v5, 10,000,000 env steps, λ 0.95, dialect sb3`.
    """
    steps = f"{summary['planned_env_steps']:,} env steps"
    return f"{summary['protocol']}, {steps}, λ {summary['gae_lambda']:.2f}, dialect {summary['dialect']}"


def reference_rows(summary: dict[str, Any]) -> list[list[str]]:
    """Rows (source, score): the run's own score, the reference scores, and the run's normalised scores.

    A source names its protocol, env steps and lambda, so that readers see the differences. Empty without
    references.
    """
    if not summary["references"]:
        return []
    rows = [[f"this run ({own_settings(summary)})", score_text(summary["score"])]]
    for each in summary["references"]:
        text = score_text(each["score"])
        if each["std"]:
            text += f" ± {score_text(each['std'])}"
        rows.append([each["source"], text])
    formulas = {
        "reference_normalised_score": "(score - random) / (first reference - random)",
        "human_normalised_score": "(score - random) / (human - random), both as in DQN Zoo",
    }
    return rows + [
        [text, score_text(summary[name])] for name, text in formulas.items() if summary[name] is not None
    ]


def figure_rows(summary: dict[str, Any]) -> list[list[str]]:
    """The table of the known figures, the score first.

    The header is followed by rows with a title, mean and std over the sessions, and the value of each session.
    """
    columns = [summary["mean"], summary["std"], *summary["sessions"]]
    rows = [["", "mean", "std", *(session["session"].replace("_", " ") for session in summary["sessions"])]]
    for name, title in SESSION_FIGURES.items():
        if summary["mean"][name] is not None:
            scale = 1e6 if "efficiency" in name else 1
            rows.append([title, *(score_text(column[name] and scale * column[name]) for column in columns)])
    return rows


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns are aligned in plain text too: the first to the left, others to the right.

    Args:
        rows: rows of cells; the first row is the header.
    """
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for name, *cells in (rows[0], rule, *rows[1:]):
        padded = [name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in padded)} |")
    return "\n".join(lines)


def summary_table(summary: dict[str, Any]) -> str:
    """The text printed at the end of a trial: the table of figures, notes, and reference scores.

    Args:
        summary: the content of trial.json, as `trial_summary` returns it.
    """
    budget = f"{summary['planned_env_steps']:,} env steps each"
    settings = f"protocol {summary['protocol']}, {sessions_text(summary)}, {budget}"
    heading = f"{summary['name']}: {summary['game']}, {settings}"
    if not summary["complete"]:
        heading += " (not complete)"
    ends = [
        f"{session.replace('_', ' ')} ended at {ended['env_steps']:,} env steps: {ended['reason']}"
        for session, ended in summary.get("stopped", {}).items()
    ]
    notes = [
        *ends,
        f"score: return_ma at the end, the {summary['return_ma']}",
        left_out_text(summary),
        interval_text(summary["session_scores"]),
        summary["comparison_note"],
    ]
    references = [f"{source}: {score}" for source, score in reference_rows(summary)]
    return "\n".join([heading, "", markdown_table(figure_rows(summary)), "", *filter(None, notes), *references])
