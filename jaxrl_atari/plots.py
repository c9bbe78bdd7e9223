"""The command `plots`: draws sessions, trials, searches and comparisons as PNG and SVG.

    python -m jaxrl_atari.plots RUN_DIR... [--output DIR]
    python -m jaxrl_atari.plots RUN_DIR... --merge DIR
    python -m jaxrl_atari.plots SUITE_DIR... [--output DIR]
    python -m jaxrl_atari.plots SEARCH_DIR...

Directories of several kinds may be given at once (data/*). Each kind is then drawn separately. A directory of no
kind is named on stderr and left out.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_atari import cli
from jaxrl_atari.cli.options import MoreDirs, RunDir, parse
from jaxrl_atari.errors import MetricsError, UserError, require
from jaxrl_atari.output import say
from jaxrl_atari.report.graphs import XAxis, plot_comparison, plot_run
from jaxrl_atari.report.searches import plot_search
from jaxrl_atari.report.suites import Results, Suite, read_results, read_suite, save_results
from jaxrl_atari.report.summary import Run, merge_runs, read_run
from jaxrl_atari.report.text import differences, summary_table
from jaxrl_atari.runs.layout import GRAPHS_FOLDER, held_kind


@dataclasses.dataclass(frozen=True)
class Options:
    """Draws graphs of runs and searches, and compares runs or suites."""

    run_dir: RunDir
    """Directory of a run, a suite, a sweep or a search, such as data/NAME_TIMESTAMP."""
    others: MoreDirs = ()
    """More directories, to compare."""
    output: Path = Path("graphs")
    """Folder for the comparison of several runs, or of suites."""
    labels: tuple[str, ...] = ()
    """Names in the comparison, one for each directory. By default, the names of the directories."""
    title: str = ""
    """Title of the comparison, or of the graph of a single run."""
    x: XAxis = "env steps"
    """The x axis of the comparison."""
    merge: Path | None = None
    """Take the runs, of one config with different seeds, as one trial, and draw it into this folder."""
    column: str = ""
    """Draw this column of metrics.csv instead, such as entropy, into the output folder."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws what the directories hold, each kind separately, and prints the files."""
    options = parse(Options, arguments, "plots")
    directories = (options.run_dir, *options.others)
    if options.merge is not None:
        merged = merge_runs([read_run(directory) for directory in directories], options.merge)
        say(summary_table(merged))
        if options.column:
            named = [(options.merge.name, merged)]
            files = plot_comparison(
                named, options.output, options.title, options.column, options.x, options.column
            )
        else:
            files = plot_run(merged, options.title)
    else:
        files = _plot_each_kind(options, directories)
    for file in files:
        say(str(file))


def _plot_each_kind(options: Options, directories: Sequence[Path]) -> list[Path]:
    """Draws what the directories hold, and returns the files.

    Raises:
        UserError: a label is missing; nothing can be drawn; or the only directory cannot be read.
    """
    names = options.labels or [directory.absolute().name for directory in directories]
    count = len(directories)
    require(len(names) == len({*names}) == count, "--labels", " ".join(names), f"{count} different names")
    runs: list[tuple[str, Run]] = []
    suites: dict[str, Suite] = {}
    files: list[Path] = []
    for name, path in zip(names, directories, strict=True):
        kind = held_kind(path)
        try:
            if kind == "search":
                files += plot_search(path)
            elif kind == "sweep" and options.column:
                prefix = f"{name} " if count > 1 else ""
                runs += [(f"{prefix}{setting}", run) for setting, run in read_results(path).curves()]
            elif kind == "sweep":
                files += plot_comparison(read_results(path).curves(), path / GRAPHS_FOLDER, x=options.x)
            elif kind == "suite":
                suites[name] = read_suite(path)
            elif kind == "run" or count == 1 or not path.exists():  # the error of reading it says what is wrong
                runs.append((name, read_run(path)))
            else:  # `data/*` may match other files
                say(f"not drawn: {path}: holds no run, suite, sweep or search", sys.stderr)
        except MetricsError as error:
            if count == 1:
                raise
            say(f"not drawn: {error}", sys.stderr)
    if not (runs or suites or files):
        raise UserError("nothing is drawn: the lines above say why")
    comparison = Results(" and ".join(suites), suites)
    curves = comparison.curves()
    output, title, x = options.output, options.title, options.x
    if options.column:
        return files + plot_comparison([*runs, *curves], output, title, options.column, x, options.column)
    for _, run in runs:
        files += plot_run(run, title if len(runs) == 1 else "")
    if len(runs) > 1:
        files += plot_comparison(runs, output, title, x=x)
        for line in differences(runs):
            say(line)
    if curves:
        file = "comparison_of_suites" if len(runs) > 1 else "comparison"
        files += plot_comparison(curves, output, title, file, x)
    if suites:
        output.mkdir(parents=True, exist_ok=True)
        save_results(comparison, output, "comparison")
        say(comparison.sections()[-1].to_markdown())
    return files


if __name__ == "__main__":
    cli.run(main)
