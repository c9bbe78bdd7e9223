"""Writing of reports: the kind of a directory, its template, and its report.html.

A run is data: the templates escape every value, and the page's own security policy allows neither scripts nor network.
"""

import time
from functools import cache
from pathlib import Path
from typing import Any

from jaxrl_atari import __version__
from jaxrl_atari.cli import say
from jaxrl_atari.errors import UserError, reason
from jaxrl_atari.report.group_pages import describe_search, describe_suite_page
from jaxrl_atari.report.run_page import describe_run
from jaxrl_atari.report.suites import suite_runs
from jaxrl_atari.runs.files import write_file
from jaxrl_atari.runs.run_dir import is_search, is_suite

REPORT_FILE = "report.html"


def write_report(directory: str | Path) -> Path:
    """Writes report.html into the directory of a run, a suite or a search; returns its path.

    The runs of a suite or a search get theirs first. A run without a log point gets none.

    Raises:
        UserError: the directory is none of the three, has no log point yet, or cannot be written to.
    """
    directory = Path(directory)
    if is_suite(directory):
        return _write(directory, "suite.html", describe_suite_page(directory, _write_runs(suite_runs(directory))))
    if is_search(directory):
        trials = [path for path in directory.glob("trial_*") if path.is_dir()]
        return _write(directory, "search.html", describe_search(directory, _write_runs(trials)))
    if (directory / "checkpoints").is_dir():
        raise UserError(f"{directory}: is a session's directory; expected the run's, {directory.absolute().parent}")
    return _write(directory, "run.html", describe_run(directory))


def _write_runs(run_dirs: list[Path]) -> set[str]:
    """Writes the reports of runs; returns the names of those that have one."""
    written = set()
    for run_dir in run_dirs:
        try:
            written.add(_write(run_dir, "run.html", describe_run(run_dir)).parent.name)
        except UserError:
            continue  # no log point yet, or damaged: the table names it without a link
    return written


def _write(directory: Path, template: str, content: dict[str, Any]) -> Path:
    path = directory / REPORT_FILE
    about = {"package_version": __version__, "written": time.strftime("%Y-%m-%d %H:%M")}
    page = _templates().get_template(template).render(content | about)
    try:
        write_file(path, page)
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}); copy the directory elsewhere first") from error
    return path


def try_report(directory: str | Path) -> None:
    """`write_report` at the end of a command, which must not fail for it. Prints the path, or why there is none."""
    try:
        say(str(write_report(directory)))
    except Exception as error:
        say(f"no report: {reason(error)}; python -m jaxrl_atari.report {directory} tries again")


@cache
def _templates() -> Any:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined  # when a run has trained: see `try_report`

    return Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
