"""The results of a suite or a sweep, while it trains and at its end: they are saved, shown and drawn."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from jaxrl_atari.errors import UserError
from jaxrl_atari.output import say, try_to
from jaxrl_atari.report.page import try_report
from jaxrl_atari.report.suites import Suite, SuiteResults, read_suite, save_results, suite_results
from jaxrl_atari.runs.layout import resume_command, session_number
from jaxrl_atari.suite.sweep import Setting, SweepPlan
from jaxrl_atari.suite.sweep_results import SweepResults, draw_sweep, save_sweep_results, sweep_results
from jaxrl_atari.trials.launch import Job


class _SettingResults:
    """The results of one setting: the results of its suite.

    Args:
        parent: directory of the suite or sweep.
    """

    def __init__(self, setting: Setting, parent: Path):
        self.directory = setting.directory(parent)
        self.newest: SuiteResults | None = None  # as last read
        self.is_saved = False  # whether `newest` is up to date and saved
        self._saved: Suite | None = None  # the suite as last saved
        self._failures: dict[str, list[str]] = {}  # game -> why sessions of it failed

    def note_end(self, job: Job, failure: UserError | None) -> None:
        """Notes the end of a job of this setting, which changes the results."""
        self.is_saved = False
        if failure is not None:
            game = job.folder.parent.name
            self._failures.setdefault(game, []).append(f"session {session_number(job.folder)}: {failure}")

    def read(self, anew: bool = False) -> None:
        """Reads the results. Games that were complete when they were saved are read again only with `anew`."""
        if anew:
            self._saved = None
        failures = {game: "; ".join(reasons) for game, reasons in self._failures.items()}
        self.newest = suite_results(read_suite(self.directory, self._saved), failures)

    def save(self) -> None:
        """Saves the results as last read."""
        assert self.newest is not None
        save_results(self.newest, self._saved)
        self._saved = self.newest.suite
        self.is_saved = True


class SuiteResultsKeeper:
    """Keeps the results of a suite or a sweep up to date while its sessions train, and notes which jobs failed.

    A sweep has a suite for each of its settings. Results are made from the metrics of the sessions. Results that
    could not be read or saved are tried again whenever a session ends, at the end, and by a resume.

    Args:
        directory: directory of the suite or sweep.
        plan: what is trained; a suite is a sweep in which nothing varies.
    """

    def __init__(self, directory: Path, plan: SweepPlan):
        self.failures: dict[str, UserError] = {}  # by the names of the jobs that failed
        self._directory = directory
        self._plan = plan
        self._by_label = {setting.label: _SettingResults(setting, directory) for setting in plan.settings}
        self._by_directory = {results.directory.absolute(): results for results in self._by_label.values()}
        self._resume = resume_command("suite", directory)

    def on_end(self, job: Job, failure: UserError | None) -> None:
        """Notes a job that has finished or failed, and saves the results that this changes."""
        if failure is not None:
            job.say(f"failed: {failure}")
            self.failures[job.name] = failure
        self._by_directory[job.folder.parents[1]].note_end(job, failure)
        self._save_unsaved()

    def save_all(self) -> None:
        """Reads and saves the results of all settings, in which running sessions have come further."""
        for results in self._by_label.values():
            results.is_saved = False
        self._save_unsaved()

    def show_and_save_all(self) -> None:
        """Reads the results of all settings anew, prints their table, saves them, and draws them."""
        for results in self._by_label.values():
            results.read(anew=True)
        if self._plan.is_sweep:
            text = self._sweep_results().to_markdown()
        else:
            (suite,) = self._newest().values()
            text = suite.to_markdown()
        say(f"\n{text}")  # shown before anything is saved, because saving may fail
        self._save([*self._by_label.values()])
        if self._plan.config.log.graphs:
            self._draw()

    def _save_unsaved(self) -> None:
        """Reads and saves the results that are not saved, or prints why their files cannot be read or written."""
        readable = []
        for results in self._by_label.values():
            if not results.is_saved and try_to("the results cannot be read", results.read, self._resume):
                readable.append(results)
        self._save(readable)

    def _save(self, readable: Sequence[_SettingResults]) -> None:
        """Saves the results of some settings, and of the sweep once every setting has been read."""
        for results in readable:
            try_to("results are not saved", results.save, self._resume)
        if self._plan.is_sweep and len(self._newest()) == len(self._by_label):
            save = partial(save_sweep_results, self._sweep_results())
            try_to("results are not saved", save, self._resume)

    def _newest(self) -> dict[str, SuiteResults]:
        """The results of the settings that have been read, by their labels."""
        return {label: results.newest for label, results in self._by_label.items() if results.newest is not None}

    def _sweep_results(self) -> SweepResults:
        """The results of the sweep, from the results of its settings as last read."""
        return sweep_results(self._directory, self._plan, self._newest())

    def _draw(self) -> None:
        """Writes the report of each setting, and draws the graph of a sweep, or prints why it cannot."""
        for results in self._by_label.values():
            try_report(results.directory)
        if self._plan.is_sweep:
            try_to("no graph", self._draw_sweep, self._resume)

    def _draw_sweep(self) -> None:
        """Draws the graph of the sweep, and prints the names of its files."""
        suites = {label: results.suite for label, results in self._newest().items()}
        for path in draw_sweep(self._directory, suites):
            say(str(path))
