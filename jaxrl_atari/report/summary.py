"""The summary of a trial: RUN_DIR/trial.json, the table that is printed at the end, and numbers as text."""

import contextlib
import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_atari.cli import counted
from jaxrl_atari.config import Config
from jaxrl_atari.envs.games import Game, comparable
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.errors import UserError
from jaxrl_atari.report.metrics import SESSION_FIGURES, aggregate_trial
from jaxrl_atari.report.statistics import CONFIDENCE, score_interval
from jaxrl_atari.runs.files import read_json, write_json
from jaxrl_atari.runs.reading import Table, read_metrics, read_sessions
from jaxrl_atari.runs.run_dir import CONFIG_FILE, read_config, session_dirs, session_number

_log = logging.getLogger(__name__)


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
    def return_ma(self) -> str:
        """The definition of the run's `return_ma`, which was another one in older versions."""
        by_env_steps = self.description.get("return_ma_env_steps")
        return "mean over the last 1M env steps" if by_env_steps else "mean of the last 100 log points"

    def is_complete(self, config: Config | None = None) -> bool:
        """Whether every session has spent its budget, or that of another config."""
        return (config or self.config).is_complete([table["env_steps"][-1] for table in self.tables.values()])


def read_run(run_dir: str | Path) -> Run:
    """Reads a run, without the sessions that `counted_sessions` leaves out.

    Raises:
        UserError: it has no readable config, or no session with metrics.
    """
    path = Path(run_dir)
    config, tables = read_config(path), read_sessions(path)
    for session_dir in tables.keys() - set(counted_sessions(path, config)):
        env_steps = tables.pop(session_dir)["env_steps"][-1]
        note = f"{session_dir} ended at {env_steps:,.0f} env steps, and the run has {config.sessions} sessions now"
        _log.warning("left out: %s", note)
    if not tables:
        raise UserError(f"{path}: none of its {config.sessions} sessions holds a log point; wait for the first one")
    return Run(path, config, tables, read_json(path / CONFIG_FILE))


def counted_sessions(run_dir: Path, config: Config) -> list[Path]:
    """The directories of a run's sessions, without unfinished ones numbered `config.sessions` or higher: given up."""

    def counts(session_dir: Path) -> bool:
        if session_number(session_dir) < config.sessions:
            return True
        with contextlib.suppress(UserError):  # no log point
            return config.is_spent(read_metrics(session_dir)["env_steps"][-1])
        return False

    return list(filter(counts, session_dirs(run_dir)))


def write_trial_summary(run_dir: str | Path) -> dict[str, Any]:
    """Writes the summary of a run to `run_dir/trial.json` and returns it. Raises `UserError` as `read_run`."""
    summary = trial_summary(read_run(run_dir))
    write_json(Path(run_dir) / "trial.json", summary)
    return summary


def trial_summary(run: Run) -> dict[str, Any]:
    """Aggregates the sessions of a run, ready for JSON.

    The content is that of `metrics.aggregate_trial` plus the config's name, protocol, seed, `planned_sessions` and
    `planned_env_steps`. `complete` tells whether every session has spent its budget, `return_ma` how the score is
    defined, and `comparison_note` why there are no scores to compare with.
    """
    config = run.config
    summary = {
        "name": config.name,
        "protocol": run.protocol,
        "comparison_note": comparison_note(run.protocol),
        "return_ma": run.return_ma,
        "seed": config.seed,
        "planned_sessions": config.sessions,
        "planned_env_steps": config.total_env_steps,
        "complete": run.is_complete(),
        **aggregate_trial(list(run.tables.values()), run.game),
    }
    for session, session_dir in zip(summary["sessions"], run.tables, strict=True):
        session["session"] = session_dir.name
    return summary


def evaluations(directory: Path) -> list[dict[str, Any]]:
    """What `evaluate` has written into the directory of a run or a session, oldest first; damaged files are left out.

    Each has `file`, `env_steps`, `checkpoint`, `episodes`, `greedy`, `mean` and, of all sessions, `session_means`.
    """
    found = []
    for path in sorted(directory.glob("evaluation*.json"), key=lambda path: path.stat().st_mtime):
        with contextlib.suppress(OSError, ValueError):
            found.append(read_json(path) | {"file": path})
    return found


def newest_evaluation(run_dir: Path, sessions: Collection[str]) -> dict[str, Any] | None:
    """The newest evaluation of the latest checkpoints of exactly these sessions, if there is one."""
    latest = [each for each in evaluations(run_dir) if each.get("checkpoint") == "latest"]
    return next((each for each in reversed(latest) if each.get("sessions") == list(sessions)), None)


# Texts.


def names_of(directories: Sequence[Path]) -> list[str]:
    """The names of directories; the directories as given if two names are equal."""
    names = [directory.absolute().name for directory in directories]
    return names if len(set(names)) == len(names) else list(map(str, directories))


def score_text(value: float | None) -> str:
    """A number as text: 14,482, 1.44 or 21; `-` where there is none."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{round(value, 2) + 0.0:.2f}".removesuffix(".00")


def fraction_text(value: float | None) -> str:
    """A normalised score as text, `-` where there is none."""
    return "-" if value is None else f"{round(value, 3) + 0.0:.3f}"


def interval_text(scores: Sequence[float]) -> str:
    """How far the mean of the sessions' scores of one game can be trusted: nothing for one session, both of two."""
    if (interval := score_interval(scores)) is not None:
        return f"{CONFIDENCE:.0%} interval {score_text(interval[0])} to {score_text(interval[1])}"
    return f"2 sessions: {score_text(scores[0])} and {score_text(scores[1])}" if len(scores) == 2 else ""


def reference_rows(summary: dict[str, Any]) -> list[list[str]]:
    """Rows of the scores to compare with, source and score, then of the score that they normalise."""
    rows = [
        [each["source"], score_text(each["score"]) + (f" ± {score_text(each['std'])}" if each["std"] else "")]
        for each in summary["references"]
    ]
    formulas = {
        "reference_normalised_score": "(score - random) / (first reference - random)",
        "human_normalised_score": "(score - random) / (human - random), both as in DQN Zoo",
    }
    return rows + [[text, f"{summary[name]:.3f}"] for name, text in formulas.items() if summary[name] is not None]


def sessions_text(summary: dict[str, Any]) -> str:
    """The sessions of a trial: `4 sessions`, or `4 sessions, 3 with a score`."""
    count, scored = len(summary["sessions"]), summary["scored_sessions"]
    return counted(count, "session") + ("" if scored in (0, count) else f", {scored} with a score")


def seeds_text(summary: dict[str, Any]) -> str:
    """The seeds of a trial's sessions, planned or counted: `seed 0`, or `seeds 0 to 3`."""
    numbers = [session_number(Path(session["session"])) for session in summary["sessions"]]
    first, last = summary["seed"], summary["seed"] + max([summary["planned_sessions"] - 1, *numbers])
    return f"seed {first}" if first == last else f"seeds {first} to {last}"


def status_text(config: Config, summary: dict[str, Any]) -> str:
    """How far a game of a suite has come: `not complete`, `complete` or `complete; 1 session without a score`.

    Args:
        config: with the budget that the suite has now.
    """
    if not config.is_complete([session["env_steps"] for session in summary["sessions"]]):
        return "not complete"
    unscored = len(summary["sessions"]) - summary["scored_sessions"]
    return "complete" + (f"; {counted(unscored, 'session')} without a score" if unscored else "")


def figure_rows(summary: dict[str, Any]) -> list[list[str]]:
    """The table of the known figures: header, then title, mean and std over several sessions, and each session's value.

    The first figure is the score.
    """
    sessions = summary["sessions"]
    overall = [summary["mean"], summary["std"]] if len(sessions) > 1 else []
    names = [session["session"].replace("_", " ") for session in sessions]
    rows = [["", *("mean", "std")[: len(overall)], *names]]
    for name, title in SESSION_FIGURES.items():
        scale = 1e6 if "efficiency" in name else 1
        if summary["mean"][name] is not None:
            values = [each[name] for each in (*overall, *sessions)]
            rows.append([title, *(score_text(None if value is None else scale * value) for value in values)])
    return rows


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats rows of cells as lines: first column left-aligned, others right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    formats = "  ".join(f"{{:{'>' if column else '<'}{width}}}" for column, width in enumerate(widths))
    return [formats.format(*row).rstrip() for row in rows]


def summary_table(summary: dict[str, Any]) -> str:
    """The table printed at the end of a trial: figures with mean and std over sessions, and scores to compare with.

    Args:
        summary: the content of trial.json, as `trial_summary` returns it.
    """
    heading = (
        f"{summary['name']}: {summary['game']}, protocol {summary['protocol']}, {sessions_text(summary)}, "
        f"{summary['planned_env_steps']:,} env steps each{'' if summary['complete'] else ' (not complete)'}"
    )
    notes = [f"score: return_ma at the end, the {summary['return_ma']}", interval_text(summary["session_scores"])]
    if summary["comparison_note"]:
        notes.append(summary["comparison_note"])
    notes = [note for note in notes if note]
    references = aligned(reference_rows(summary)) if summary["references"] else []
    return "\n".join([heading, "", *aligned(figure_rows(summary)), "", *notes, *references])
