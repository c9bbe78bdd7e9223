"""The summary of a trial: RUN_DIR/trial.json, and the table that is printed at the end."""

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
from jaxrl_atari.report.metrics import SESSION_FIGURES, Table, aggregate_trial
from jaxrl_atari.runs.files import read_json, write_json
from jaxrl_atari.runs.reading import read_metrics, read_sessions
from jaxrl_atari.runs.run_dir import read_config, session_dirs, session_number

_log = logging.getLogger(__name__)


class Run(NamedTuple):
    """A run directory and what it holds."""

    path: Path
    config: Config
    tables: dict[Path, Table]  # session directory -> its metrics

    @property
    def game(self) -> Game:
        """The game, with the scores that this run's protocol is comparable with."""
        return comparable(self.config.env.game_name, self.config.env.resolved_protocol)


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
    return Run(path, config, tables)


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
    `planned_env_steps`. `complete` tells whether every session has spent its budget, and `comparison_note` why the
    scores to compare with are None, if the protocol differs from theirs.
    """
    config, tables, protocol = run.config, list(run.tables.values()), run.config.env.resolved_protocol
    summary = {
        "name": config.name,
        "protocol": protocol,
        "comparison_note": comparison_note(protocol),
        "seed": config.seed,
        "planned_sessions": config.sessions,
        "planned_env_steps": config.total_env_steps,
        "complete": config.is_complete([table["env_steps"][-1] for table in tables]),
        **aggregate_trial(tables, run.game),
    }
    for session, session_dir in zip(summary["sessions"], run.tables, strict=True):
        session["session"] = session_dir.name
    return summary


def newest_evaluation(run_dir: Path, sessions: Collection[str]) -> dict[str, Any] | None:
    """The newest evaluation of the latest checkpoints of exactly these sessions, if there is a sound one."""
    found = []
    for path in sorted(run_dir.glob("evaluation*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            values = read_json(path)
            if values["checkpoint"] == "latest" and _is_evaluation(values) and set(values["sessions"]) == set(sessions):
                found.append(values)
    return max(found, key=lambda values: str(values.get("date", "")), default=None)  # a copied file has another time


def _is_evaluation(found: dict[str, Any]) -> bool:
    """Whether an evaluation has the values that are quoted."""

    def numbers(values: Any) -> bool:
        return isinstance(values, list) and all(isinstance(v, int | float) and abs(v) <= 1e30 for v in values)

    names, matrix = found["sessions"], found["matrix"]
    return (
        isinstance(names, list)
        and all(isinstance(name, str) for name in names)
        and numbers([found["mean"], found["episodes"], *found["session_means"], *found["env_steps"]])
        and (found["interval"] is None or (numbers(found["interval"]) and len(found["interval"]) == 2))
        and isinstance(matrix, list)
        and all(map(numbers, matrix))
        and 0 < len(names) == len(matrix) == len(found["session_means"]) == len(found["env_steps"])
        and isinstance(found["greedy"], bool)
    )


def evaluated_at(evaluation: dict[str, Any]) -> str:
    """The env steps of the checkpoints of an evaluation of all sessions: they may not be the latest now."""
    low, high = min(evaluation["env_steps"]), max(evaluation["env_steps"])
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def sessions_text(summary: dict[str, Any]) -> str:
    """The sessions of a trial: `4 sessions`, or `4 sessions, of which 3 have a score`."""
    count, scored = len(summary["sessions"]), summary["scored_sessions"]
    text = counted(count, "session")
    return text if scored in (0, count) else f"{text}, of which {scored} {'has' if scored == 1 else 'have'} a score"


def seeds_text(summary: dict[str, Any]) -> str:
    """The seeds of a trial's sessions, planned or counted: `seed 0`, or `seeds 0 to 3`."""
    numbers = [session_number(Path(session["session"])) for session in summary["sessions"]]
    first, last = summary["seed"], summary["seed"] + max([summary["planned_sessions"] - 1, *numbers])
    return f"seed {first}" if first == last else f"seeds {first} to {last}"


def status_text(config: Config, summary: dict[str, Any]) -> str:
    """How far a game of a suite has come: `not complete`, `complete` or `complete; 1 session has no score`.

    Args:
        config: with the budget that the suite has now.
    """
    if not config.is_complete([session["env_steps"] for session in summary["sessions"]]):
        return "not complete"
    unscored = len(summary["sessions"]) - summary["scored_sessions"]
    return f"complete; {unscored} session{' has' if unscored == 1 else 's have'} no score" if unscored else "complete"


def score_text(score: float | None) -> str:
    """A score as text: 14,482 or 1.44; `-` where there is none."""
    if score is None:
        return "-"
    return f"{score:,.0f}" if abs(score) >= 1000 else f"{score:.2f}".removesuffix(".00")


def number_text(value: float | None) -> str:
    """A figure as text, `-` where it is unknown."""
    if value is None:
        return "-"
    if value and abs(value) < 0.01:
        return f"{value:.2e}"
    return f"{value:,.0f}" if abs(value) >= 10_000 or float(value).is_integer() else f"{value:,.2f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Formats rows of cells as lines: first column left-aligned, others right-aligned."""
    first, *others = ([len(cell) for cell in column] for column in zip(*rows, strict=True))
    formats = [f"{{:<{max(first)}}}", *(f"{{:>{max(widths)}}}" for widths in others)]
    return ["  ".join(formats).format(*row).rstrip() for row in rows]


def figure_rows(summary: dict[str, Any]) -> list[list[str]]:
    """The table of figures: title, mean, std and value of each session; known figures, then the consistency."""
    rows = []
    for name, title in SESSION_FIGURES.items():
        if summary["mean"][name] is not None:
            values = [summary["mean"][name], summary["std"][name], *(session[name] for session in summary["sessions"])]
            rows.append([title, *map(number_text, values)])
    return [*rows, ["consistency", number_text(summary["consistency"]), *[""] * (1 + len(summary["sessions"]))]]


def summary_table(summary: dict[str, Any]) -> str:
    """The table printed at the end of a trial: mean and std of each figure over sessions, and reference scores.

    Args:
        summary: the content of trial.json, as `write_trial_summary` returns it.
    """
    sessions = summary["sessions"]
    heading = (
        f"{summary['name']}: {summary['game']}, protocol {summary['protocol']}, {sessions_text(summary)}, "
        f"{summary['planned_env_steps']:,} env steps each"
    )
    if not summary["complete"]:
        heading += " (not complete)"
    figures = [["figure", "mean", "std", *(session["session"] for session in sessions)], *figure_rows(summary)]
    scores = [["score", number_text(summary["score"])]]
    spread = "" if summary["score_std"] is None else f"± {number_text(summary['score_std'])} over sessions; "
    sources = [f"{spread}return_ma at the end"]
    low, high = summary["score_interval"] or (None, None)
    scores.append(["95% interval", "-" if low is None else f"{number_text(low)} to {number_text(high)}"])
    sources.append("of the score, by bootstrap over sessions")
    for name, source in {
        "reference_score": "SLM Lab's PPO, protocol v5, 10,000,000 env steps",
        "tutorial_score": "the same in SLM Lab's tutorial",
        "random_score": "uniformly random play, protocol v5",
        "human_score": "human tester, as in DQN Zoo",
        "reference_normalised_score": "(score - random) / (reference - random)",
        "human_normalised_score": "(score - random) / (human - random), both as in DQN Zoo",
    }.items():
        scores.append([name.replace("_", " "), number_text(summary[name])])
        sources.append(source)
    compared = [f"{line}  {source}" for line, source in zip(_aligned(scores), sources, strict=True)]
    note = [summary["comparison_note"]] if summary["comparison_note"] else []
    return "\n".join([heading, "", *_aligned(figures), "", *compared, *note])
