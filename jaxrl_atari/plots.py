"""The command `plots`: draws sessions, trials, searches and comparisons as PNG and SVG.

    python -m jaxrl_atari.plots RUN_DIR... [--output DIR]
    python -m jaxrl_atari.plots SUITE_DIR... [--output DIR]
    python -m jaxrl_atari.plots SEARCH_DIR...

- Runs: each session goes to RUN_DIR/session_<i>/graphs/, each trial to RUN_DIR/graphs/, and a comparison of
  several runs to DIR. The difference of each run's score from that of the first run of the same game is printed.
- Suites: they are compared by the learning curves of each game, and by statistics over the games that are complete
  in all of them.
- Searches: the trials of each search go to SEARCH_DIR/graphs/.
- Sweeps: the curves of all settings go to SWEEP_DIR/graphs/.

Directories of several kinds may be given at once (data/*). Each kind is then drawn separately. A directory of no
kind is named on stderr and left out.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from jaxrl_atari import cli
from jaxrl_atari.cli.options import AnyDir, MoreDirs, parse
from jaxrl_atari.errors import MetricsError, NoLogPoint, UserError, require
from jaxrl_atari.output import say
from jaxrl_atari.report.comparison import compare_suites, save_comparison
from jaxrl_atari.report.graphs import XAxis, plot_column, plot_comparison, plot_run
from jaxrl_atari.report.search_graphs import draw_graphs
from jaxrl_atari.report.suites import Suite, read_suite
from jaxrl_atari.report.summary import Run, read_run, trial_summary
from jaxrl_atari.report.text import difference_text
from jaxrl_atari.runs.journal import read_study
from jaxrl_atari.runs.layout import GRAPHS_FOLDER, is_run, is_search, is_suite, is_sweep
from jaxrl_atari.suite.sweep import read_plan
from jaxrl_atari.suite.sweep_results import draw_sweep


@dataclasses.dataclass(frozen=True)
class Options:
    """Draws graphs of runs and searches, and compares runs or suites."""

    run_dir: AnyDir
    """Directory of a run, a suite, a sweep or a search, such as data/NAME_TIMESTAMP."""
    others: MoreDirs = ()
    """More directories, to compare."""
    output: Path = Path("graphs")
    """Folder for the comparison of several runs, or of suites."""
    labels: tuple[str, ...] = ()
    """Names in the comparison, one for each directory. By default, the names of the directories."""
    title: str = ""
    """Title of the comparison, or of the graph of a single run, which a later report draws without it."""
    x: XAxis = "env steps"
    """The x axis of the comparison."""
    column: str = ""
    """Draw this column of metrics.csv instead, such as entropy, into the output folder."""


def _say_paths(paths: Iterable[Path]) -> None:
    """Prints paths, one per line."""
    for path in paths:
        say(str(path))


Result = TypeVar("Result", Run, list[Path])


def _draw_search(search_dir: Path) -> list[Path]:
    """Draws the trials of a search into SEARCH_DIR/graphs/, and returns the files.

    Raises:
        NoLogPoint: no game of a trial has ended, or Optuna is not installed.
    """
    study = read_study(search_dir)
    files = draw_graphs(study, search_dir / GRAPHS_FOLDER) if study else []
    if not files:
        hint = "wait for the first finished game; drawing needs pip install 'jaxrl_atari[search]'"
        raise NoLogPoint(f"{search_dir}: holds no trial with a score; {hint}")
    return files


def _draw_setting_curves(sweep_dir: Path) -> list[Path]:
    """Draws the learning curves of all settings of a sweep into SWEEP_DIR/graphs/; returns the files.

    Raises:
        NoLogPoint: no setting has a log point.
    """
    labels = [setting.label for setting in read_plan(sweep_dir).settings]
    suites = {label: read_suite(sweep_dir / label) for label in labels if is_suite(sweep_dir / label)}
    files = draw_sweep(sweep_dir, suites)
    if not files:
        raise NoLogPoint(f"{sweep_dir}: holds no log point; wait for the first one")
    return files


def _each_usable(
    work: Callable[[Path], Result], directories: Mapping[str, Path], is_only_one: bool
) -> dict[str, Result]:
    """Reads or draws directories of one kind.

    A directory whose metrics are damaged or have no log point yet is named on stderr and left out.

    Args:
        work: reads or draws a directory.
        directories: name -> directory.
        is_only_one: whether the command has a single directory, whose error ends the command.

    Returns:
        Name -> result of `work`.

    Raises:
        UserError: a directory cannot be read for another reason.
    """
    results = {}
    for name, directory in directories.items():
        try:
            results[name] = work(directory)
        except MetricsError as error:
            if is_only_one:
                raise
            say(f"not drawn: {error}", sys.stderr)
    return results


class Directories(NamedTuple):
    """The directories of a command line by their kinds: name -> directory."""

    runs: dict[str, Path]
    suites: dict[str, Path]
    searches: dict[str, Path]
    sweeps: dict[str, Path]


def _by_kind(directories: Mapping[str, Path]) -> Directories:
    """Sorts directories by their kinds.

    A path of no kind is named on stderr and left out, because `data/*` may also match other files. But a path that
    is alone or does not exist counts as a run, because the error of reading it says what is wrong.
    """
    by_kind = Directories({}, {}, {}, {})
    for name, path in directories.items():
        if is_search(path):
            by_kind.searches[name] = path
        elif is_sweep(path):
            by_kind.sweeps[name] = path
        elif is_suite(path):
            by_kind.suites[name] = path
        elif is_run(path) or not path.exists() or len(directories) == 1:
            by_kind.runs[name] = path
        else:
            say(f"not drawn: {path}: holds no run, suite, sweep or search", sys.stderr)
    return by_kind


def _draw_suites(suites: Mapping[str, Suite], options: Options, file: str) -> None:
    """Draws the learning curves of suites.

    Args:
        file: name of the graph.
    """
    curves = [(name, run) for name, suite in suites.items() for run in suite.runs.values()]
    if curves:
        _say_paths(plot_comparison(curves, options.output, options.title, file, options.x))


def _print_comparison(suites: Mapping[str, Suite], output: Path) -> None:
    """Compares suites, prints the comparison and saves it. Raises `UserError` as `compare_suites`."""
    comparison = compare_suites(suites)
    save_comparison(comparison, output)
    say(f"\n{comparison.to_markdown()}")


def _say_differences(runs: Mapping[str, Run]) -> None:
    """Prints how the score of each run differs from that of the first run with the same game and protocol."""
    first: dict[tuple[str, str], str] = {}
    for name, run in runs.items():
        other = first.setdefault((run.game.name, run.protocol), name)
        if name != other:
            scores = {each: trial_summary(runs[each])["session_scores"] for each in (name, other)}
            text = difference_text(scores)
            if text:
                say(f"{run.game.name}: {text}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws what the directories hold, each kind separately, and prints the files."""
    options = parse(Options, arguments, "plots")
    directories = (options.run_dir, *options.others)
    names = options.labels or [directory.absolute().name for directory in directories]
    count = len(directories)
    require(len(names) == len({*names}) == count, "--labels", " ".join(names), f"{count} different names")
    by_kind = _by_kind(dict(zip(names, directories, strict=True)))

    # Runs and suites are read before anything is drawn, so that one that cannot be read is an error at once.
    runs = _each_usable(read_run, by_kind.runs, count == 1)
    suites = {name: read_suite(path) for name, path in by_kind.suites.items()}
    for suite in suites.values():
        for problem in suite.damaged.values():
            say(f"not drawn: {problem}", sys.stderr)
    drawn = _each_usable(_draw_search, by_kind.searches, count == 1)
    drawn |= _each_usable(_draw_setting_curves, by_kind.sweeps, count == 1)
    if not (runs or suites or drawn):
        raise UserError("nothing is drawn: the lines above say why")
    if options.column:
        curves = [*runs.items(), *((name, run) for name, suite in suites.items() for run in suite.runs.values())]
        _say_paths(plot_column(curves, options.column, options.output, options.title, options.x))
        return
    for files in drawn.values():
        _say_paths(files)
    for run in runs.values():
        _say_paths(plot_run(run, options.title if len(runs) == 1 else ""))
    if len(runs) > 1:
        _say_paths(plot_comparison([*runs.items()], options.output, options.title, x=options.x))
        _say_differences(runs)
    if suites:
        _draw_suites(suites, options, "comparison_of_suites" if len(runs) > 1 else "comparison")
        try:
            _print_comparison(suites, options.output)
        except UserError as error:
            if not (runs or drawn):
                raise
            say(f"not compared: {error}", sys.stderr)


if __name__ == "__main__":
    cli.run(main)
