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
from collections.abc import Mapping, Sequence
from pathlib import Path

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
from jaxrl_atari.runs.layout import GRAPHS_FOLDER, held_kind, is_suite
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
    """Title of the comparison, or of the graph of a single run."""
    x: XAxis = "env steps"
    """The x axis of the comparison."""
    column: str = ""
    """Draw this column of metrics.csv instead, such as entropy, into the output folder."""


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


def _compare(suites: Mapping[str, Suite], output: Path, only_suites: bool) -> None:
    """Compares suites, prints the comparison and saves it.

    Args:
        only_suites: whether the command draws nothing else. If not, an error of the comparison is only said.

    Raises:
        UserError: the suites cannot be compared, and the command draws nothing else.
    """
    if not suites:
        return
    try:
        comparison = compare_suites(suites)
    except UserError as error:
        if only_suites:
            raise
        say(f"not compared: {error}", sys.stderr)
        return
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
    runs: dict[str, Run] = {}
    suites: dict[str, Suite] = {}
    files: list[Path] = []
    for name, path in zip(names, directories, strict=True):
        kind = held_kind(path)
        try:
            if kind == "search":
                files += _draw_search(path)
            elif kind == "sweep":
                files += _draw_setting_curves(path)
            elif kind == "suite":
                suites[name] = read_suite(path)
            elif kind == "run" or count == 1 or not path.exists():  # the error of reading it says what is wrong
                runs[name] = read_run(path)
            else:  # `data/*` may match other files
                say(f"not drawn: {path}: holds no run, suite, sweep or search", sys.stderr)
        except MetricsError as error:
            if count == 1:
                raise
            say(f"not drawn: {error}", sys.stderr)
    if not (runs or suites or files):
        raise UserError("nothing is drawn: the lines above say why")
    only_suites = not (runs or files)
    curves_of_suites = [(name, run) for name, suite in suites.items() for run in suite.runs.values()]
    output, title, x = options.output, options.title, options.x
    if options.column:
        files += plot_column([*runs.items(), *curves_of_suites], options.column, output, title, x)
    else:
        for run in runs.values():
            files += plot_run(run, title if len(runs) == 1 else "")
        if len(runs) > 1:
            files += plot_comparison([*runs.items()], output, title, x=x)
        if curves_of_suites:
            file = "comparison_of_suites" if len(runs) > 1 else "comparison"
            files += plot_comparison(curves_of_suites, output, title, file, x)
    for file in files:
        say(str(file))
    for problem in (problem for suite in suites.values() for problem in suite.damaged.values()):
        say(f"not drawn: {problem}", sys.stderr)
    if not options.column:
        _say_differences(runs)
        _compare(suites, output, only_suites)


if __name__ == "__main__":
    cli.run(main)
