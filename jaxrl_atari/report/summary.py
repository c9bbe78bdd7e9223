"""The summary of a trial: RUN_DIR/trial.json, the table that is printed at the end, and numbers as text."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_atari.cli import counted
from jaxrl_atari.config import Config
from jaxrl_atari.envs.games import Game, comparable
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.report.metrics import (
    SESSION_FIGURES,
    align_sessions,
    consistency,
    human_normalised,
    known_float,
    random_score,
    reference_normalised,
    session_figures,
)
from jaxrl_atari.report.statistics import CONFIDENCE, score_interval
from jaxrl_atari.runs.files import read_json, write_json
from jaxrl_atari.runs.reading import Table, read_early_end, read_sessions
from jaxrl_atari.runs.run_dir import CONFIG_FILE, read_config, session_number


class Run(NamedTuple):
    """A run directory and what it holds."""

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
        """The game, with the scores that this run's protocol is comparable with."""
        return comparable(self.config.env.game_name, self.protocol)

    @property
    def return_ma_definition(self) -> str:
        """The definition of the run's `return_ma`, which was another one in older versions."""
        by_env_steps = self.description.get("return_ma_env_steps")
        return "mean over the last 1M env steps" if by_env_steps else "mean of the last 100 log points"

    def is_complete(self, config: Config | None = None) -> bool:
        """Whether every session has spent its budget, or that of another config."""
        wanted = config or self.config
        reached = []
        for session_dir, table in self.tables.items():
            ended = read_early_end(wanted, session_dir)  # then it is as good as one that has spent its budget
            reached.append(wanted.total_env_steps if ended else table["env_steps"][-1])
        return wanted.is_complete(reached)

    @property
    def early_ends(self) -> dict[str, dict[str, Any]]:
        """Session -> `env_steps` and `reason`, of the sessions that `stop` of `run_training` has ended."""
        ends = {path.name: read_early_end(self.config, path) for path in self.tables}
        return {name: ended for name, ended in ends.items() if ended is not None}


def read_run(run_dir: Path, sessions: int | None = None) -> Run:
    """Reads a run.

    Args:
        sessions: how many count, those of its suite; None: those of its config.

    Raises:
        UserError: it has no readable config, or no session with metrics.
    """
    config = read_config(run_dir)
    return Run(run_dir, config, read_sessions(run_dir, sessions or config.sessions), read_json(run_dir / CONFIG_FILE))


def write_trial_summary(run_dir: Path) -> dict[str, Any]:
    """Writes the summary of a run to `run_dir/trial.json` and returns it. Raises `UserError` as `read_run`."""
    summary = trial_summary(read_run(run_dir))
    write_json(run_dir / "trial.json", summary)
    return summary


def trial_summary(run: Run) -> dict[str, Any]:
    """The figures of a trial, ready for JSON: an unknown value is None.

    The score is the mean of `session_scores`: the final `return_ma` of the sessions that have finished a game.
    `sessions` has the figures of each session; `mean` and `std` are their mean and population standard deviation over
    sessions, and `std` is None for a single value. `consistency` is over the log points that all sessions have reached.
    `complete` tells whether every session has spent its budget or was ended by `stop` of `run_training`; `stopped` has
    the env steps and the reason of the latter. `return_ma` tells how the score is defined, and `comparison_note` why
    there are no scores to compare with.
    """
    config = run.config
    game = run.game
    sessions: list[dict[str, Any]] = [
        {"session": path.name, "seed": config.seed + session_number(path), **session_figures(table, game)}
        for path, table in run.tables.items()
    ]
    known = {name: [each[name] for each in sessions if each[name] is not None] for name in SESSION_FIGURES}
    means = {name: float(np.mean(values)) if values else None for name, values in known.items()}
    stds = {name: float(np.std(values)) if len(values) > 1 else None for name, values in known.items()}
    score = means["final_return_ma"]
    scores = known["final_return_ma"]
    if len(known["strength"]) == len(sessions) > 1:
        _, returns = align_sessions(list(run.tables.values()), "return_mean")
        shared = returns[:, np.isfinite(returns).all(axis=0)]
        means["consistency"] = known_float(consistency(shared - random_score(game)))
    return {
        "name": config.name,
        "game": game.name,
        "protocol": run.protocol,
        "gae_lambda": config.resolved_gae_lambda,
        "comparison_note": comparison_note(run.protocol),
        "return_ma": run.return_ma_definition,
        "seed": config.seed,
        "planned_sessions": config.sessions,
        "planned_env_steps": config.total_env_steps,
        "complete": run.is_complete(),
        "stopped": run.early_ends,
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
    }


def evaluations(directory: Path) -> list[dict[str, Any]]:
    """What `evaluate` has written into the directory of a run or a session, oldest first.

    Each has `file`, `env_steps`, `checkpoint`, `episodes`, `greedy`, `mean` and, of all sessions, `session_means`.
    """
    paths = sorted(directory.glob("evaluation*.json"), key=lambda path: path.stat().st_mtime)
    return [read_json(path) | {"file": path} for path in paths]


# Texts.


def score_text(value: float | None) -> str:
    """A number as text: 14,482, 1.44 or 21; `-` where there is none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{round(value, 2) + 0.0:.2f}".removesuffix(".00")


def interval_text(scores: Sequence[float]) -> str:
    """The interval of the mean score; with two sessions, both scores; with one, nothing."""
    if (interval := score_interval(scores)) is not None:
        return f"{CONFIDENCE:.0%} interval {score_text(interval[0])} to {score_text(interval[1])}"
    return f"2 sessions: {score_text(scores[0])} and {score_text(scores[1])}" if len(scores) == 2 else ""


def reference_rows(summary: dict[str, Any]) -> list[list[str]]:
    """Rows of the scores to compare with, source and score, below the run's own; then of the score that they normalise.

    Each has its protocol, env steps and lambda, so that a difference in one of them stands beside the scores.
    """
    if not summary["references"]:
        return []
    settings = f"{summary['protocol']}, {summary['planned_env_steps']:,} env steps, λ {summary['gae_lambda']:.2f}"
    rows = [[f"this run ({settings})", score_text(summary["score"])]]
    rows += [
        [each["source"], score_text(each["score"]) + (f" ± {score_text(each['std'])}" if each["std"] else "")]
        for each in summary["references"]
    ]
    formulas = {
        "reference_normalised_score": "(score - random) / (first reference - random)",
        "human_normalised_score": "(score - random) / (human - random), both as in DQN Zoo",
    }
    return rows + [[text, score_text(summary[name])] for name, text in formulas.items() if summary[name] is not None]


def figure_rows(summary: dict[str, Any]) -> list[list[str]]:
    """The table of the known figures: header, then title, mean and std over sessions, and each session's value.

    The first figure is the score.
    """
    columns = [summary["mean"], summary["std"], *summary["sessions"]]
    rows = [["", "mean", "std", *(session["session"].replace("_", " ") for session in summary["sessions"])]]
    for name, title in SESSION_FIGURES.items():
        if summary["mean"][name] is not None:
            scale = 1e6 if "efficiency" in name else 1
            rows.append([title, *(score_text(column[name] and scale * column[name]) for column in columns)])
    return rows


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the header first, as a Markdown table that also reads well as it is; the first column is text."""
    widths = [max(3, *map(len, column)) for column in zip(*rows, strict=True)]  # Markdown needs a dash in the rule
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = []
    for name, *cells in (rows[0], rule, *rows[1:]):
        padded = [name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]
        lines.append(f"| {' | '.join(cell.replace('|', '/') for cell in padded)} |")
    return "\n".join(lines)


def summary_table(summary: dict[str, Any]) -> str:
    """The table printed at the end of a trial: figures with mean and std over sessions, and scores to compare with.

    Args:
        summary: the content of trial.json, as `trial_summary` returns it.
    """
    heading = (
        f"{summary['name']}: {summary['game']}, protocol {summary['protocol']}, "
        f"{counted(len(summary['sessions']), 'session')}, {summary['planned_env_steps']:,} env steps each"
        f"{'' if summary['complete'] else ' (not complete)'}"
    )
    score = f"score: return_ma at the end, the {summary['return_ma']}"
    ends = [
        f"{session.replace('_', ' ')} ended at {ended['env_steps']:,} env steps: {ended['reason']}"
        for session, ended in summary.get("stopped", {}).items()
    ]
    notes = [*ends, score, interval_text(summary["session_scores"]), summary["comparison_note"]]
    references = [f"{source}: {score}" for source, score in reference_rows(summary)]
    return "\n".join([heading, "", markdown_table(figure_rows(summary)), "", *filter(None, notes), *references])
