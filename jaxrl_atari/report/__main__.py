"""The command `report`: writes one HTML file that needs no network, report.html, for a run, suite or search.

    python -m jaxrl_atari.report RUN_DIR...
    python -m jaxrl_atari.report RUN_DIR... --merge DIR

The report of a suite or a search links to the reports of its runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxrl_atari import cli
from jaxrl_atari.cli.options import MoreDirs, RunDir, parse
from jaxrl_atari.output import say
from jaxrl_atari.report.page import write_report
from jaxrl_atari.report.summary import merge_runs, read_run


@dataclass(frozen=True)
class Options:
    """Writes report.html, one file with everything in it, into directories of runs, suites or searches."""

    run_dir: RunDir
    """Directory of a run, a suite or a search, such as data/NAME_TIMESTAMP."""
    others: MoreDirs = ()
    """More such directories."""
    merge: Path | None = None
    """Take the runs, of one config with different seeds, as one trial, and write its report into this folder."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes a report into each directory, and prints its path."""
    options = parse(Options, arguments, "report")
    directories = (options.run_dir, *options.others)
    if options.merge is not None:
        merged = merge_runs([read_run(directory) for directory in directories], options.merge)
        say(str(write_report(options.merge, merged)))
        return
    for directory in directories:
        say(str(write_report(directory)))


if __name__ == "__main__":
    cli.run(main)
