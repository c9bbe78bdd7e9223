"""Reports of runs, suites, sweeps and searches: one self-contained page each, report.html in its directory.

A page is a list of sections, made by `sections.py` and rendered by the Jinja template `templates/page.html`. What
a run contains is data: the template escapes every value, and the security policy of the page forbids scripts and
network access.
"""

import base64
import time
from pathlib import Path

from jaxrl_atari import __version__
from jaxrl_atari.errors import NoLogPoint, UserError
from jaxrl_atari.output import say, try_to
from jaxrl_atari.report.sections import results_page, run_page, search_page
from jaxrl_atari.report.summary import Run, read_run
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.layout import REPORT_FILE, command_line, held_kind


def write_report(directory: Path, merged: Run | None = None) -> Path:
    """Writes report.html into the directory of a run, suite, sweep or search; returns its path.

    Graphs that are missing or older than the metrics are drawn. The runs or suites in the directory that have a
    log point get reports, too.

    Args:
        merged: the run that the report shows, whose folder is `directory`. None: what the directory holds.

    Raises:
        UserError: the directory is not of these kinds, has no log point yet, or has a damaged file.
    """
    from jinja2 import Environment, PackageLoader

    make_page = {"suite": results_page, "sweep": results_page, "search": search_page}
    make = make_page.get(held_kind(directory) or "")
    page = run_page(merged or read_run(directory)) if merged or make is None else make(directory)
    for name in page.reports:
        _try_linked_report(directory / name)
    environment = Environment(
        loader=PackageLoader("jaxrl_atari.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["base64"] = lambda file: base64.b64encode(file.read_bytes()).decode()
    reports = [name for name in page.reports if (directory / name / REPORT_FILE).is_file()]
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    path = directory / REPORT_FILE
    template = environment.get_template("page.html")
    write_file(path, template.render(page=page, reports=reports, version=__version__, written=written))
    return path


def _try_linked_report(directory: Path) -> None:
    """Writes the report of a run or suite within a page's directory, or names the file that is damaged."""
    try:
        write_report(directory)
    except NoLogPoint:
        return
    except UserError as error:
        say(f"no report: {error}")


def try_report(directory: Path) -> None:
    """Writes a report at the end of a command. Prints its path, or why it failed; see `try_to`."""
    try_to("no report", lambda: say(str(write_report(directory))), command_line("report", directory))
