"""Graphs of sessions, trials and comparisons of trials, as PNG and SVG.

    python -m jaxrl_atari.plots RUN_DIR... [--output DIR]

draws each session into RUN_DIR/session_<i>/graphs/, each trial into RUN_DIR/graphs/ and, for several runs, their
comparison into DIR. Several runs of one game are also compared by their probability of improvement.

    python -m jaxrl_atari.plots SUITE_DIR... [--output DIR]

compares suites: learning curves of each game, and statistics over the games that are complete in all suites.
"""

import dataclasses
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import tyro

from jaxrl_atari import cli
from jaxrl_atari.errors import UserError
from jaxrl_atari.report.graphs import XAxis, plot_comparison, plot_session, plot_trial
from jaxrl_atari.report.statistics import ONE_IMPROVEMENT, coverage_note, probability_of_improvement
from jaxrl_atari.report.suites import compare_suites, estimate_text, scores_at, suite_runs
from jaxrl_atari.report.summary import Run, names_of, read_run
from jaxrl_atari.runs.run_dir import is_suite

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Options:
    """Draws graphs of runs, and compares runs or suites."""

    run_dir: tyro.conf.Positional[Path]
    """Directory of a run or of a suite."""
    others: tyro.conf.Positional[tuple[Path, ...]] = ()
    """More of them, to compare."""
    output: Path = Path("graphs")
    """For the comparison of several runs, or of suites."""
    labels: tuple[str, ...] = ()
    """Names in the comparison, one for each directory; by default those of the directories."""
    title: str = ""
    """Title of the comparison, or of the graph of a single run."""
    x: XAxis = "env_steps"
    """What the curves are drawn against."""


def _improvements(runs: Sequence[Run]) -> list[str]:
    """The probability that the first run of each game and protocol beats each further one, as lines of text.

    Only complete runs with several sessions count: one session against another shows nothing about their settings.
    """
    lines: list[str] = []
    first: dict[tuple[str, str], Run] = {}
    for run in runs:
        if len(run.tables) < 2 or not run.is_complete() or not scores_at({"": run}):
            _log.warning("%s: no probability of improvement: it needs several complete sessions with a score", run.path)
            continue
        earlier = first.setdefault((run.game.name, run.protocol), run)
        if earlier is not run:
            chance = probability_of_improvement(scores_at({"": earlier}), scores_at({"": run}))
            sessions = len(earlier.tables), len(run.tables)
            by_chance = f"without a difference it is 1.000 in 1 of {math.comb(sum(sessions), sessions[0])} comparisons"
            lines += [
                f"{run.game.name}: probability of improvement of {earlier.path} over {run.path}: "
                f"{estimate_text(*chance)}; {by_chance}. {coverage_note(min(sessions), ONE_IMPROVEMENT)}".rstrip(),
            ]
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    options = tyro.cli(Options, args=arguments, prog="python -m jaxrl_atari.plots")
    directories, labels, output = (options.run_dir, *options.others), options.labels, options.output
    if labels and len(labels) != len(directories):
        raise UserError(f"--labels {' '.join(labels)}: expected {len(directories)} names, one for each directory")
    suites = list(filter(is_suite, directories))
    if suites and len(suites) < len(directories):
        raise UserError(
            f"{' '.join(map(str, directories))}: runs and suites; compare runs with runs, suites with suites"
        )
    if suites:
        runs = [run for suite in suites for run in suite_runs(suite)]
        if runs:
            print(*plot_comparison(runs, output, title=options.title, x=options.x), sep="\n")
        try:
            print("\n" + compare_suites(suites, output, labels))
        except UserError as error:
            if len(suites) > 1 or not runs:
                raise
            print(f"\nno statistics: {error}")  # the curves of one suite are drawn
        return
    drawn = {}
    for directory, name in zip(directories, labels or names_of(directories), strict=True):
        try:
            run = read_run(directory)
            drawn[name] = run
            for session_dir in run.tables:
                print(*plot_session(run, session_dir, options.x), sep="\n")
            print(*plot_trial(run, options.x, options.title if len(directories) == 1 else ""), sep="\n")
        except UserError as error:
            if len(directories) == 1:
                raise
            _log.warning("left out: %s", error)
    if len(drawn) > 1:
        runs = list(drawn.values())
        print(*plot_comparison(runs, output, list(drawn), options.title, options.x), sep="\n")
        print(*_improvements(runs), sep="\n")
    if len(drawn) < len(directories):
        raise UserError(f"drew {len(drawn)} of {len(directories)} runs; the warnings above say why")


if __name__ == "__main__":
    cli.run(main)
