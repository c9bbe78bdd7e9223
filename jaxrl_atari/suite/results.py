"""The results of a suite or a sweep, while it trains and at its end: they are saved, shown and drawn."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from jaxrl_atari.errors import UserError
from jaxrl_atari.output import say, try_to
from jaxrl_atari.report.page import try_report
from jaxrl_atari.report.suites import SuiteResults, read_suite, save_results, suite_results
from jaxrl_atari.runs.layout import resume_command
from jaxrl_atari.suite.sweep import SweepPlan
from jaxrl_atari.suite.sweep_results import draw_sweep, save_sweep_results, sweep_results
from jaxrl_atari.trials.launch import Job


class SuiteResultsKeeper:
    """Saves the results of a suite or a sweep whenever a job ends, and notes which jobs failed.

    A sweep has a suite for each of its settings. Results are made from the metrics of the sessions. Results that
    could not be read or saved are tried again whenever a job ends, at the end, and by a resume.

    Args:
        directory: directory of the suite or sweep.
        plan: what is trained; a suite is a sweep in which nothing varies.
    """

    def __init__(self, directory: Path, plan: SweepPlan):
        self.failures: dict[str, UserError] = {}  # by the names of the jobs that failed
        self._directory = directory
        self._plan = plan
        self._reasons: dict[Path, list[str]] = {}  # run directory of a game -> why sessions of it failed
        self._resume = resume_command("suite", directory)

    def on_end(self, job: Job, failure: UserError | None) -> None:
        """Notes a job that has finished or failed, and saves the results."""
        if failure is not None:
            job.say(f"failed: {failure}")
            self.failures[job.name] = failure
            session = job.folder.name.replace("_", " ")
            self._reasons.setdefault(job.folder.parent, []).append(f"{session}: {failure}")
        self.save()

    def save(self) -> None:
        """Saves the results of all settings so far, or prints why they cannot be read or written."""
        try_to("results are not saved", lambda: self._save(self._read()), self._resume)

    def show_and_save(self) -> None:
        """Reads the results of all settings, prints their table, saves them, and draws them."""
        results = self._read()
        if self._plan.is_sweep:
            text = sweep_results(self._directory, self._plan, results).to_markdown()
        else:
            (suite,) = results.values()
            text = suite.to_markdown()
        say(f"\n{text}")  # shown before anything is saved, because saving may fail
        try_to("results are not saved", partial(self._save, results), self._resume)
        if not self._plan.config.log.graphs:
            return
        if self._plan.is_sweep:
            try_to("no graph", partial(self._draw_sweep, results), self._resume)
        try_report(self._directory)

    def _read(self) -> dict[str, SuiteResults]:
        """The results of the settings, by their labels."""
        results = {}
        for setting in self._plan.settings:
            directory = setting.directory(self._directory)
            runs = {game: (directory / game).absolute() for game in self._plan.games}
            failures = {game: "; ".join(self._reasons[run]) for game, run in runs.items() if run in self._reasons}
            results[setting.label] = suite_results(read_suite(directory), failures)
        return results

    def _save(self, results: Mapping[str, SuiteResults]) -> None:
        """Saves the results of all settings, and those of the sweep if there is one."""
        for suite in results.values():
            save_results(suite)
        if self._plan.is_sweep:
            save_sweep_results(sweep_results(self._directory, self._plan, results))

    def _draw_sweep(self, results: Mapping[str, SuiteResults]) -> None:
        """Draws the graph of the sweep, and prints the names of its files."""
        for path in draw_sweep(self._directory, {label: suite.suite for label, suite in results.items()}):
            say(str(path))
