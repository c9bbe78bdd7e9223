"""Report of a run, a suite or a search: one HTML file that needs no network, report.html in its directory.

    python -m jaxrl_atari.report RUN_DIR...

The report of a suite or a search links to those of its runs, which are written too.
"""

import argparse
from collections.abc import Sequence

from jaxrl_atari import cli
from jaxrl_atari.errors import UserError
from jaxrl_atari.report.pages import write_report


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m jaxrl_atari.report", description="Writes report.html.")
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="directory of a run, a suite or a search")
    options = parser.parse_args(arguments)
    failed = []
    for run_dir in options.run_dirs:
        try:
            cli.say(str(write_report(run_dir)))
        except UserError as error:  # the others have theirs written
            failed.append(str(error))
    if failed:
        raise UserError("; ".join(failed))


if __name__ == "__main__":
    cli.run(main)
