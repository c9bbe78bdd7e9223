"""Numbers, scores and the summary of a trial as text, for terminals, Markdown and the templates of reports.

A `summary` summarises a trial (`summary.TrialSummary`).
"""

from collections.abc import Sequence

import numpy as np

from jaxrl_atari.output import counted
from jaxrl_atari.report.metrics import SESSION_METRICS, TABLE_SCALES
from jaxrl_atari.report.score_statistics import CONFIDENCE, score_interval
from jaxrl_atari.report.summary import TrialSummary

LONG_BUDGET = 10_000_000
"""Below this budget in env steps, tables show the final `return_mean` beside the score."""


def score_text(value: float | None) -> str:
    """A score as text, such as 14,482, 1.44 or 21; `-` for None."""
    if value is None:
        return "-"
    rounded = round(value, 2) + 0.0  # the sum turns -0.0 into 0.0
    if abs(rounded) >= 1000:
        return f"{value:,.0f}"
    return f"{rounded:.2f}".removesuffix(".00")


def number_text(value: float) -> str:
    """A number of any size as text: 0.000343, 0.95, 2,048, 1e-08.

    The text has three significant digits, and all digits before the point.
    """
    if value == 0 or abs(value) >= 999.5:  # from there on, three digits would round to 1000
        return f"{value:,.0f}"
    if abs(value) < 1e-6:
        return f"{value:.3g}"
    return np.format_float_positional(value, precision=3, fractional=False, trim="-")


def lambda_text(value: float) -> str:
    """The lambda of GAE as text, exactly, with two decimals or more: 0.70, 0.95, 0.999."""
    return np.format_float_positional(value, min_digits=2)


def interval_text(scores: Sequence[float]) -> str:
    """The interval of the mean score as text; with two sessions, both scores; empty if there is no interval."""
    interval = score_interval(scores)
    if interval is not None:
        return f"{CONFIDENCE:.0%} interval {score_text(interval[0])} to {score_text(interval[1])}"
    return f"2 sessions: {score_text(scores[0])} and {score_text(scores[1])}" if len(scores) == 2 else ""


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
    return f"{summary['protocol']}, {steps}, λ {lambda_text(summary['gae_lambda'])}, dialect {summary['dialect']}"


def reference_rows(summary: TrialSummary) -> list[list[str]]:
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
    normalised = {
        "(score - random) / (first reference - random)": summary["reference_normalised_score"],
        "(score - random) / (human - random), both as in DQN Zoo": summary["human_normalised_score"],
    }
    return rows + [[formula, score_text(value)] for formula, value in normalised.items() if value is not None]


def metric_rows(summary: TrialSummary) -> list[list[str]]:
    """The table of the known metrics, the score first, and below a budget of 10M env steps the final return_mean.

    The header is followed by rows with a title, mean and std over the sessions, and the value of each session.
    """
    columns = [summary["mean"], summary["std"], *summary["sessions"]]
    rows = [["", "mean", "std", *(session["session"].replace("_", " ") for session in summary["sessions"])]]
    for name, title in SESSION_METRICS.items():
        if name == "final_return_mean" and summary["planned_env_steps"] >= LONG_BUDGET:
            continue
        if summary["mean"][name] is not None:
            scale = TABLE_SCALES.get(name, 1)
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


def summary_table(summary: TrialSummary) -> str:
    """The text printed at the end of a trial: the table of metrics, notes, and reference scores."""
    budget = f"{summary['planned_env_steps']:,} env steps each"
    settings = f"protocol {summary['protocol']}, {sessions_text(summary)}, {budget}"
    heading = f"{summary['name']}: {summary['game']}, {settings}"
    if not summary["complete"]:
        heading += " (not complete)"
    ends = [
        f"{session.replace('_', ' ')} ended at {ended['env_steps']:,} env steps: {ended['reason']}"
        for session, ended in summary["stopped"].items()
    ]
    notes = [
        *ends,
        summary["unfinished_games"],
        f"score: return_ma at the end, the {summary['return_ma']}",
        left_out_text(summary),
        interval_text(summary["session_scores"]),
        summary["comparison_note"],
    ]
    references = [f"{source}: {score}" for source, score in reference_rows(summary)]
    return "\n".join([heading, "", markdown_table(metric_rows(summary)), "", *filter(None, notes), *references])
