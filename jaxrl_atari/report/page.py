"""Reports of runs, suites and searches: one self-contained HTML page each, report.html in its directory.

The pages are made from the Jinja templates `templates/{run,suite,search}.html`. What a run contains is data: the
templates escape every value. The security policy of a page forbids network access and all scripts, except for
the script of the game page, which this package ships.
"""

import base64
import time
from collections.abc import Iterable
from pathlib import Path

from jaxrl_atari import __version__
from jaxrl_atari.errors import NoLogPoint, UserError
from jaxrl_atari.output import counted, say, try_to
from jaxrl_atari.report import text
from jaxrl_atari.report.page_content import settings_values
from jaxrl_atari.report.run_page import run_content
from jaxrl_atari.report.search_page import search_content
from jaxrl_atari.report.suite_page import suite_content
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.layout import REPORT_FILE, command_line, is_run, is_search, is_suite


def write_report(directory: Path) -> Path:
    """Writes report.html into the directory of a run, a suite or a search; returns its path.

    Graphs that are missing or outdated are drawn. The runs of a suite or a search that have a log point get
    reports, too.

    Raises:
        UserError: the directory is not of these kinds, has no log point yet, or has a damaged file.
    """
    from jinja2 import Environment, PackageLoader

    if is_suite(directory):
        kind = "suite"
        content = suite_content(directory)
    elif is_search(directory):
        kind = "search"
        content = search_content(directory)
    else:
        kind = "run"
        content = run_content(directory)
    links = _write_runs(directory, content.runs)
    environment = Environment(
        loader=PackageLoader("jaxrl_atari.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["base64"] = lambda file: base64.b64encode(file.read_bytes()).decode()
    environment.globals |= {"text": text, "counted": counted, "version": __version__}
    values = settings_values(content) | content.values | {
        "name": directory.absolute().name,
        "links": links,
        "written": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }  # fmt: skip
    path = directory / REPORT_FILE
    write_file(path, environment.get_template(f"{kind}.html").render(values))
    return path


def _write_runs(directory: Path, names: Iterable[str]) -> set[str]:
    """Writes the reports of the runs in a directory that have a log point; returns the names of these runs.

    A run with a damaged file is named in a line.
    """
    written = set()
    for name in filter(lambda name: is_run(directory / name), names):
        try:
            write_report(directory / name)
            written.add(name)
        except NoLogPoint:
            continue
        except UserError as error:
            say(f"no report: {error}")
    return written


def try_report(directory: Path) -> None:
    """Writes a report at the end of a command. Prints its path, or why it failed; see `try_to`."""
    try_to("no report", lambda: say(str(write_report(directory))), command_line("report", directory))
