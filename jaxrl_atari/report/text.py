"""Scores and the summary of a trial (`summary.TrialSummary`) as text, for terminals, Markdown and pages."""

from collections.abc import Sequence

import numpy as np

from jaxrl_atari.output import counted
from jaxrl_atari.report.metrics import RATIOS_OF_STRENGTH, SESSION_METRICS
from jaxrl_atari.report.score_statistics import CONFIDENCE, difference, score_interval
from jaxrl_atari.report.summary import Run, TrialSummary, trial_summary
from jaxrl_atari.report.tables import Table, number_text


def interval_text(scores: Sequence[float]) -> str:
    """The interval of the mean score as text; with two sessions, both scores; empty if there is no interval."""
    interval = score_interval(scores)
    if interval is not None:
        return f"{CONFIDENCE:.0%} interval {number_text(interval[0])} to {number_text(interval[1])}"
    return f"2 sessions: {number_text(scores[0])} and {number_text(scores[1])}" if len(scores) == 2 else ""


def left_out_text(summary: TrialSummary) -> str:
    """The sessions left out and why, and where unfinished ones are compared; empty if there is nothing to say."""
    parts = []
    if summary["left_out"]:
        named = [f"{each['session'].replace('_', ' ')} ({each['reason']})" for each in summary["left_out"]]
        parts.append(f"left out: {', '.join(named)}")
    steps = summary["common_env_steps"]
    members = len(summary["sessions"])
    if steps is not None and members > 1:
        parts.append(f"compared at {steps:,.0f} env steps, which these {members} sessions have reached")
    return "; ".join(parts)


def sessions_text(summary: TrialSummary) -> str:
    """The number of sessions that count, as text: `4 sessions`, or `3 of 4 sessions` if one is left out."""
    members = len(summary["sessions"])
    total = members + len(summary["left_out"])
    return counted(members, "session") if members == total else f"{members} of {counted(total, 'session')}"


def own_settings(summary: TrialSummary) -> str:
    """The settings of a run as they are shown beside reference scores, which may have been made with others.

    An example is `v5, 10,000,000 env steps, λ 0.95, dialect sb3`.
    """
    steps = f"{summary['planned_env_steps']:,} env steps"
    return f"{summary['protocol']}, {steps}, λ {summary['gae_lambda']:g}, dialect {summary['dialect']}"


def reference_rows(summary: TrialSummary) -> list[list[str]]:
    """Rows (source, score): the run's own score, the reference scores, and the run's normalised scores.

    A source names its protocol, env steps and lambda, so that readers see the differences. Empty without
    references.
    """
    if not summary["references"]:
        return []
    rows = [[f"this run ({own_settings(summary)})", number_text(summary["score"])]]
    for each in summary["references"]:
        text = number_text(each["score"])
        if each["std"]:
            text += f" ± {number_text(each['std'])}"
        rows.append([each["source"], text])
    normalised = {
        "(score - random) / (first reference - random)": summary["reference_normalised_score"],
        "(score - random) / (human - random), both as in DQN Zoo": summary["human_normalised_score"],
    }
    return rows + [[formula, number_text(value)] for formula, value in normalised.items() if value is not None]


def metric_table(summary: TrialSummary) -> Table:
    """The known metrics, the score first: title, mean and std over the sessions, and the value of each session."""
    columns = {"mean": summary["mean"], "std": summary["std"]}
    columns |= {session["session"].replace("_", " "): session for session in summary["sessions"]}
    rows = []
    for name, title in SESSION_METRICS.items():
        values = {column: metrics[name] for column, metrics in columns.items()}
        if any(value is not None for value in values.values()):
            rows.append({"metric": title, **values})
    return Table({"metric": "", **{column: column for column in columns}}, rows)


def no_mean_text(summary: TrialSummary) -> str:
    """The metrics without a mean, because they have no meaning in a session; empty if there are none."""
    titles = [
        SESSION_METRICS[name]
        for name in RATIOS_OF_STRENGTH
        if summary["mean"][name] is None and any(each[name] is not None for each in summary["sessions"])
    ]
    return f"no mean of {', '.join(titles)}: a session is no better than random play" if titles else ""


def differences(runs: Sequence[tuple[str, Run]]) -> list[str]:
    """The difference of each run's score from that of the first run of the same game and protocol, in sentences.

    Args:
        runs: name, and run.
    """
    first: dict[tuple[str, str], tuple[str, list[float]]] = {}
    sentences = []
    for name, run in runs:
        scores = trial_summary(run)["session_scores"]
        other, others = first.setdefault((run.game.name, run.protocol), (name, scores))
        if name != other and scores and others:
            sentences.append(f"{run.game.name}: {name} - {other}: {_difference_text(scores, others)}")
    return sentences


def _difference_text(scores: Sequence[float], others: Sequence[float]) -> str:
    """The difference of the scores of two trials, and whether it may be chance."""
    counts = f"{len(scores)} and {counted(len(others), 'session')}"
    if len(scores) == len(others):
        counts = f"{counted(len(scores), 'session')} each"
    found = difference(scores, others)
    if found is None:
        return f"{number_text(float(np.mean(scores) - np.mean(others)))}; {counts} cannot tell it from chance"
    text = number_text(found.value)
    if found.interval is not None:
        text += f", {CONFIDENCE:.0%} interval {' to '.join(map(number_text, found.interval))}"
    text += f", p {number_text(found.p)} (Welch's t test); "
    if found.is_significant:
        return f"{text}distinguishable with {counts}"
    needed = "more than 1,000" if found.sessions_needed is None else f"about {found.sessions_needed:,}"
    return f"{text}not distinguishable with {counts}; {needed} each would find a difference of this size"


def score_notes(summary: TrialSummary) -> list[str]:
    """What there is to say of the score of a trial: what it is, which sessions it leaves out, and its interval."""
    ends = [
        f"{session.replace('_', ' ')} ended at {ended['env_steps']:,} env steps: {ended['reason']}"
        for session, ended in summary["stopped"].items()
    ]
    notes = [
        *ends,
        summary["unfinished_games"],
        f"score: return_ma at the end, the {summary['return_ma']}",
        left_out_text(summary),
        no_mean_text(summary),
        interval_text(summary["session_scores"]),
        summary["comparison_note"],
    ]
    return [note for note in notes if note]


def summary_table(summary: TrialSummary) -> str:
    """The text printed at the end of a trial: the table of metrics, notes, and reference scores."""
    budget = f"{summary['planned_env_steps']:,} env steps each"
    settings = f"protocol {summary['protocol']}, {sessions_text(summary)}, {budget}"
    heading = f"{summary['name']}: {summary['game']}, {settings}"
    if not summary["complete"]:
        heading += " (not complete)"
    references = [f"{source}: {score}" for source, score in reference_rows(summary)]
    table = metric_table(summary).to_markdown()
    return "\n".join([heading, "", table, "", *score_notes(summary), *references])
