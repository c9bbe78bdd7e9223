"""The results of a suite or a sweep, while it trains and at its end: they are saved, shown and drawn."""

from pathlib import Path

from jaxrl_atari.errors import UserError
from jaxrl_atari.output import say, try_to
from jaxrl_atari.report.page import try_report
from jaxrl_atari.report.suites import read_results, save_results
from jaxrl_atari.report.summary import trial_summary
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.runs.layout import TRIAL_SUMMARY_FILE, is_sweep, resume_command
from jaxrl_atari.trials.launch import Job


class SuiteResultsKeeper:
    """Saves the results of a suite or a sweep whenever a job ends, and notes which jobs failed.

    Results are made from the metrics of the sessions. Results that could not be read or saved are tried again
    whenever a job ends, at the end, and by a resume.

    Args:
        directory: directory of the suite or sweep.
    """

    def __init__(self, directory: Path):
        self.failures: dict[str, UserError] = {}  # by the names of the jobs that failed
        self._directory = directory
        self._reasons: dict[Path, str] = {}  # run directory of a game -> why sessions of it failed

    def on_end(self, job: Job, failure: UserError | None) -> None:
        """Notes a job that has finished or failed, and saves the results."""
        if failure is not None:
            job.say(f"failed: {failure}")
            self.failures[job.name] = failure
            earlier = self._reasons.get(job.folder.parent)
            reason = f"{job.folder.name.replace('_', ' ')}: {failure}"
            self._reasons[job.folder.parent] = f"{earlier}; {reason}" if earlier else reason
        self.save()

    def save(self) -> None:
        """Saves the results so far, or prints why they cannot be read or written."""
        try_to("results are not saved", self._save, resume_command("suite", self._directory))

    def _save(self) -> None:
        """Saves the trial.json of each game, the results of each setting of a sweep, and all results together."""
        results = read_results(self._directory, self._reasons)
        for _, run in results.curves():
            write_json(run.path / TRIAL_SUMMARY_FILE, trial_summary(run))
        if is_sweep(self._directory):
            for suite in results.suites.values():
                save_results(read_results(suite.path, self._reasons), suite.path)
        save_results(results, self._directory)

    def show_and_save(self, report: bool) -> None:
        """Prints the results, saves them, and writes the report, if it is wanted."""
        # Shown before anything is saved, because saving may fail.
        say(f"\n{read_results(self._directory, self._reasons).to_markdown()}")
        self.save()
        if report:
            try_report(self._directory)
