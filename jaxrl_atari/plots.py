"""Graphs of sessions, trials and comparisons of trials, as PNG and SVG.

    python -m jaxrl_atari.plots RUN_DIR... [--output DIR]

draws each session into RUN_DIR/session_<i>/graphs/, each trial into RUN_DIR/graphs/ and, for several runs, their
comparison into DIR.

    python -m jaxrl_atari.plots SUITE_DIR... [--output DIR]

compares suites: learning curves of each game, and statistics over the games that are complete in all suites.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

import tyro

from jaxrl_atari import cli
from jaxrl_atari.cli.options import parse
from jaxrl_atari.errors import require
from jaxrl_atari.report.graphs import XAxis, plot_comparison, plot_run
from jaxrl_atari.report.suites import compare_suites, read_suite
from jaxrl_atari.report.summary import read_run
from jaxrl_atari.runs.run_dir import is_suite


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
    x: XAxis = "env steps"
    """The x axis of the comparison."""


def say_paths(paths: Iterable[Path]) -> None:
    """Prints the files that were drawn, a line each."""
    for path in paths:
        cli.say(str(path))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    options = parse(Options, arguments, "plots")
    directories = (options.run_dir, *options.others)
    output = options.output
    names = options.labels or [directory.absolute().name for directory in directories]
    count = len(directories)
    require(len(names) == len({*names}) == count, "--labels", " ".join(names), f"{count} different names")
    if is_suite(options.run_dir):
        suites = dict(zip(names, map(read_suite, directories), strict=True))
        runs = [(name, run) for name, suite in suites.items() for run in suite.runs.values()]
        if runs:
            say_paths(plot_comparison(runs, output, options.title, x=options.x))
        cli.say(f"\n{compare_suites(suites, output)}")
        return
    runs = dict(zip(names, map(read_run, directories), strict=True))
    for run in runs.values():
        say_paths(plot_run(run, options.title if len(runs) == 1 else ""))
    if len(runs) > 1:
        say_paths(plot_comparison([*runs.items()], output, options.title, x=options.x))


if __name__ == "__main__":
    cli.run(main)
