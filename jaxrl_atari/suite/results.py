"""The results of a suite or a sweep, while it trains and at its end: they are saved, shown and drawn."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from jaxrl_atari.errors import SessionsFailed, UserError, reason
from jaxrl_atari.output import counted, say
from jaxrl_atari.report.page import try_report
from jaxrl_atari.report.suites import SuiteResults, save_results, suite_results
from jaxrl_atari.runs.layout import resume_command
from jaxrl_atari.suite.sweep import SweepPlan
from jaxrl_atari.suite.sweep_results import SweepResults, draw_sweep, save_sweep_results, sweep_results
from jaxrl_atari.trials.launch import Failure, Job


class ResultsKeeper:
    """Keeps the results of a suite or a sweep up to date while its sessions train, and notes which jobs failed.

    A sweep has a suite for each of its settings. Results are made from the metrics of the sessions. Results that
    could not be read or saved are tried again whenever a session ends, at the end, and by a resume.

    Args:
        directory: directory of the suite or sweep.
        plan: what is trained; a suite is a sweep in which nothing varies.
    """

    def __init__(self, directory: Path, plan: SweepPlan):
        self._directory = directory
        self._plan = plan
        self._labels = [setting.label for setting in plan.settings]
        self._directories = {setting.label: setting.directory(directory) for setting in plan.settings}
        self._suites: dict[str, SuiteResults] = {}  # label of a setting -> its results, as last read
        self._unsaved = set(self._labels)  # the settings whose newest results are not saved
        self._failures: list[tuple[Job, Failure]] = []
        self._resume = resume_command("suite", directory)

    @property
    def failures(self) -> list[Failure]:
        """The failures of jobs, in the order in which the jobs ended."""
        return [failure for _, failure in self._failures]

    def on_end(self, job: Job, failure: Failure | None) -> None:
        """Takes note of a job that has ended, and saves the results; see `launch.OnEnd`."""
        if failure is not None:
            job.say(f"failed: {failure.reason}")
            self._failures.append((job, failure))
        self._unsaved.add(job.setting)
        self._save_unsaved()

    def save_all(self) -> None:
        """Reads the results of all settings again, and saves them."""
        self._unsaved.update(self._labels)
        self._save_unsaved()

    def show_and_save_all(self) -> None:
        """Reads the results of all settings, prints their table, saves them, and draws them."""
        for label in self._labels:
            self._read(label)
        if self._plan.is_sweep:
            text = self._sweep_results().text
        else:
            (label,) = self._labels
            text = self._suites[label].text
        say(f"\n{text}")  # shown before anything is saved, because saving may fail
        self._save(self._labels)
        if self._plan.config.log.graphs:
            self._draw()

    def raise_failures(self) -> None:
        """Raises `SessionsFailed` if a job has failed."""
        if not self._failures:
            return
        texts = [
            f"{'  '.join(filter(None, (game, setting.label)))}: {why}"
            for setting in self._plan.settings
            for game, why in self._reasons(setting.label).items()
        ]
        count = len(self._plan.games) * len(self._plan.settings)
        trials = counted(count, "trial" if self._plan.is_sweep else "game")
        raise SessionsFailed(
            f"{len(texts)} of {trials} failed ({'; '.join(texts)}); {self._resume} runs what is missing"
        )

    def _reasons(self, label: str) -> dict[str, str]:
        """The reasons for which sessions failed under a setting: game -> reasons."""
        reasons: dict[str, list[str]] = {}
        for job, failure in self._failures:
            if job.setting == label:
                reasons.setdefault(job.game, []).append(f"session {job.session}: {failure.reason}")
        return {game: "; ".join(texts) for game, texts in reasons.items()}

    def _save_unsaved(self) -> None:
        """Reads and saves the results that are not saved, or prints why it cannot. No error stops the sessions."""
        readable = []
        for label in self._labels:
            if label not in self._unsaved:
                continue
            try:
                self._read(label)
            except (OSError, UserError) as error:
                say(f"the results cannot be read: {reason(error)}; {self._resume} tries again")
            else:
                readable.append(label)
        self._save(readable)

    def _read(self, label: str) -> None:
        """Reads the results of a setting."""
        self._suites[label] = suite_results(self._directories[label], self._reasons(label))

    def _sweep_results(self) -> SweepResults:
        """The results of the sweep, from those of its settings as last read."""
        return sweep_results(self._directory, self._plan, self._suites)

    def _save(self, labels: Sequence[str]) -> None:
        """Saves the results of some settings, and those of the sweep once every setting has been read."""
        for label in labels:
            if self._try_to_save(partial(save_results, self._suites[label])):
                self._unsaved.discard(label)
        if self._plan.is_sweep and len(self._suites) == len(self._labels):
            self._try_to_save(partial(save_sweep_results, self._sweep_results()))

    def _try_to_save(self, save: Callable[[], object]) -> bool:
        """Calls a function that saves results. Returns whether it has saved them, and prints why it has not."""
        try:
            save()
        except OSError as error:
            say(f"results are not saved: {reason(error)}; {self._resume} tries again")
            return False
        return True

    def _draw(self) -> None:
        """Writes the report of each setting, and draws the graph of a sweep, or prints why it cannot."""
        for label in self._suites:
            try_report(self._directories[label])
        if not self._plan.is_sweep:
            return
        try:
            suites = {label: results.suite for label, results in self._suites.items()}
            for path in draw_sweep(self._directory, suites):
                say(str(path))
        except OSError as error:
            say(f"the graph is not saved: {reason(error)}; {self._resume} tries again")
