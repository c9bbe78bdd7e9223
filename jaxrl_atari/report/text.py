"""Scores and the summary of a trial as text, for terminals, Markdown and pages."""

from collections.abc import Sequence

import numpy as np

from jaxrl_atari.algorithms.dialects import dialect_text
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.output import counted
from jaxrl_atari.report.metrics import RATIOS_OF_STRENGTH, SESSION_METRICS
from jaxrl_atari.report.score_statistics import CONFIDENCE, difference, score_interval
from jaxrl_atari.report.summary import Run
from jaxrl_atari.report.tables import Table, number_text, table_of


def interval_text(scores: Sequence[float]) -> str:
    """The interval of the mean score as text; with two sessions, both scores; empty if there is no interval."""
    interval = score_interval(scores)
    if interval is not None:
        return f"{CONFIDENCE:.0%} interval {number_text(interval[0])} to {number_text(interval[1])}"
    return f"2 sessions: {number_text(scores[0])} and {number_text(scores[1])}" if len(scores) == 2 else ""


def left_out_text(run: Run) -> str:
    """The sessions left out and why, and where unfinished ones are compared; empty if there is nothing to say."""
    parts = []
    members, left_out, common_env_steps = run.members
    if left_out:
        named = [f"{run.session_name(path).replace('_', ' ')} ({why})" for path, why in left_out.items()]
        parts.append(f"left out: {', '.join(named)}")
    if common_env_steps is not None and len(members) > 1:
        parts.append(
            f"compared at {common_env_steps:,.0f} env steps, which these {len(members)} sessions have reached"
        )
    return "; ".join(parts)


def sessions_text(run: Run) -> str:
    """The number of sessions that count, as text: `4 sessions`, or `3 of 4 sessions` if one is left out."""
    members = len(run.members.tables)
    total = members + len(run.members.left_out)
    return counted(members, "session") if members == total else f"{members} of {counted(total, 'session')}"


def reference_rows(run: Run) -> list[list[str]]:
    """Rows (source, score): the run's own score, the reference scores, and the run's normalised scores.

    A source names its protocol, env steps and lambda, so that readers see the differences. Empty without
    references.
    """
    game = run.game
    references = [*game.references, *filter(None, (game.human, game.random))]
    if not references:
        return []
    config = run.config
    settings = f"{run.protocol}, {config.total_env_steps:,} env steps, λ {config.resolved_gae_lambda:g}"
    own = f"this run ({settings}, dialect {dialect_text(config)})"
    rows = [[own, number_text(run.summary["score"])]]
    for each in references:
        spread = f" ± {number_text(each.std)}" if each.std else ""
        rows.append([each.source, f"{number_text(each.score)}{spread}"])
    normalised = {
        "(score - random) / (first reference - random)": run.summary["reference_normalised_score"],
        "(score - random) / (human - random), both as in DQN Zoo": run.summary["human_normalised_score"],
    }
    return rows + [[formula, number_text(value)] for formula, value in normalised.items() if value is not None]


def metric_table(run: Run) -> Table:
    """The known metrics, the score first: title, mean and std over the sessions, and the value of each session."""
    summary = run.summary
    columns = {"mean": summary["mean"], "std": summary["std"]}
    columns |= {session["session"].replace("_", " "): session for session in summary["sessions"]}
    rows = []
    for name, title in SESSION_METRICS.items():
        values = {column: metrics[name] for column, metrics in columns.items()}
        if any(value is not None for value in values.values()):
            rows.append({"metric": title, **values})
    return table_of(rows)


def no_mean_text(run: Run) -> str:
    """The metrics without a mean, because they have no meaning in a session; empty if there are none."""
    summary = run.summary
    titles = [
        SESSION_METRICS[name]
        for name in RATIOS_OF_STRENGTH
        if summary["mean"][name] is None and any(each[name] is not None for each in summary["sessions"])
    ]
    return f"no mean of {', '.join(titles)}: a session is no better than random play" if titles else ""


def differences(runs: Sequence[tuple[str, Run]]) -> list[str]:
    """The difference of each run's score from that of the first run of the same game and protocol, in sentences.

    A run without a finished session is not compared: its score is that of fewer env steps.

    Args:
        runs: name, and run.
    """
    first: dict[tuple[str, str], tuple[str, list[float]]] = {}
    sentences = []
    for name, run in runs:
        if run.members.common_env_steps is not None:
            continue
        scores = run.summary["session_scores"]
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
    if found.p < 1 - CONFIDENCE:
        return f"{text}distinguishable with {counts}"
    needed = "more than 1,000" if found.sessions_needed is None else f"about {found.sessions_needed:,}"
    return f"{text}not distinguishable with {counts}; {needed} each would find a difference of this size"


def score_notes(run: Run) -> list[str]:
    """What there is to say of the score of a trial: what it is, which sessions it leaves out, and its interval."""
    ends = [
        f"{session.replace('_', ' ')} ended at {ended['env_steps']:,} env steps: {ended['reason']}"
        for session, ended in run.summary["stopped"].items()
    ]
    notes = [
        *ends,
        run.summary["unfinished_games"],
        f"score: return_ma at the end, the {run.return_ma_definition}",
        left_out_text(run),
        no_mean_text(run),
        interval_text(run.summary["session_scores"]),
        comparison_note(run.protocol),
    ]
    return [note for note in notes if note]


def summary_table(run: Run) -> str:
    """The text printed at the end of a trial: the table of metrics, notes, and reference scores."""
    budget = f"{run.config.total_env_steps:,} env steps each"
    heading = f"{run.config.name}: {run.game.name}, protocol {run.protocol}, {sessions_text(run)}, {budget}"
    if not run.summary["complete"]:
        heading += " (not complete)"
    references = [f"{source}: {score}" for source, score in reference_rows(run)]
    return "\n".join([heading, "", metric_table(run).to_markdown(), "", *score_notes(run), *references])
