"""The command `search`: hyperparameter search with many trials on few GPUs.

python -m jaxrl_atari.search --config configs/search_qbert.py [--search.trials 16 --search.resources.gpu 0.25]
python -m jaxrl_atari.search --resume data/qbert_search_20260101_120000 [--search.trials 32]
python -m jaxrl_atari.search --config configs/search_qbert.py --run-dir data/qbert_search
python -m jaxrl_atari.search --resume data/qbert_search_20260101_120000 --trial 3
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_atari.cli.config_files import call, run_config_file
from jaxrl_atari.cli.options import FromDirectory, parse, read_sources
from jaxrl_atari.config import Config, changed_fields
from jaxrl_atari.errors import SessionsFailed, UserError, require
from jaxrl_atari.hardware.settings import tune_process
from jaxrl_atari.output import counted, say, say_changes, try_to
from jaxrl_atari.report.page import try_report
from jaxrl_atari.report.searches import FAILURE, failure_text, status_text, trials_table
from jaxrl_atari.runs.description import describe
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.runs.layout import (
    SEARCH_FILE,
    command_line,
    has_session,
    trial_dir,
)
from jaxrl_atari.runs.run_dir import claim_run_dir
from jaxrl_atari.search.space import SearchConfig, check_search, read_search
from jaxrl_atari.search.study import open_study, save_results, start_trial, train_trial
from jaxrl_atari.trials.launch import Job, OnEnd, run_jobs
from jaxrl_atari.trials.ray_jobs import check_cluster, run_jobs_on_ray
from jaxrl_atari.trials.slots import plan_search_slots
from jaxrl_atari.trials.trial import with_init_digest

CHANGEABLE_OPTIONS = {"search.trials", "search.address", "search.resources.gpu", "search.resources.cpu"}
"""Options that may change when a search is resumed."""


@dataclasses.dataclass(frozen=True)
class Options(FromDirectory):
    """Searches hyperparameters, or resumes a search that was interrupted."""

    search: SearchConfig = dataclasses.field(default_factory=SearchConfig)
    trial: int | None = None
    """Trains this trial of the search alone: the command that a search runs for each of its trials."""

    def values(self) -> dict[str, Any]:
        """The config and the options of the search as a nested dict. Flattened, its keys name the options."""
        return self.config.to_dict() | {"search": self.search.to_dict()}


def parse_options(arguments: Sequence[str] | None) -> tuple[Options, Options | None]:
    """Parses the command line.

    Returns:
        The options; and the options of the search that is resumed, None for a new one.

    Raises:
        UserError: a value cannot be used, or cannot change when a search is resumed.
    """
    sources = read_sources(arguments)
    default = Options()
    if sources.config_file is not None:
        file = run_config_file(sources.config_file)
        default = Options(search=call(file, "get_search", SearchConfig), config=call(file, "get_config", Config))
    before = None
    resumed = sources.resumed("search")
    if resumed is not None:
        config, search = read_search(resumed)
        before = Options(config=config, search=search)
        sources.say_kept(default.values(), before.values())
        default = before
    options = parse(Options, arguments, "search", default, before.config if before else None)
    check_search(options.config, options.search)
    if before is not None:
        for name, (was, wanted) in changed_fields(before.values(), options.values()).items():
            require(name in CHANGEABLE_OPTIONS, name, wanted, f"{was!r}, its value in this search")
    return options, before


def run_search(options: Options, before: Options | None) -> None:
    """Runs a search, and shows, saves and draws its results.

    Args:
        options: the search; the config of all trials, apart from the searched fields; and the search directory,
            None for a new one.
        before: the options of the search that is resumed. None for a new search.

    Raises:
        UserError: the search cannot be run, or every trial was refused. A new directory is then removed again.
        SessionsFailed: every trial has failed, in this start or an earlier one; the results are written. If only
            some have failed, the search has its result: the values in them are bad ones.
        KeyboardInterrupt: after a stop request, once all processes have ended.
    """
    config = with_init_digest(options.config)
    search = options.search
    if search.address:  # before anything is created
        check_cluster(search.address)
    named = dataclasses.replace(config, name=f"{config.name}_search")  # names the directory
    with claim_run_dir(named, options.directory, is_new=before is None) as search_dir:
        resume = command_line("search", "--resume", search_dir)
        description = describe(config, search_dir, SEARCH_FILE)
        write_json(search_dir / SEARCH_FILE, description | {"search": search.to_dict()})
        say(f"{'search directory:' if before is None else 'resuming'} {search_dir}")
        if before is not None:
            say_changes("changed", changed_fields(before.values(), options.values()))
        study = open_study(search_dir, search)
        for _ in range(len(study.trials), search.trials):
            study.enqueue_trial({})  # its fields are sampled when it starts
        unfinished = [trial.number for trial in study.trials[: search.trials] if not trial.state.is_finished()]

        def save() -> None:
            try_to("results are not saved", lambda: save_results(search_dir, config, study), resume)

        def on_end(job: Job, failure: UserError | None) -> None:
            # ASHA may have stopped a trial before it failed.
            if failure is not None and not study.trials[job.position].state.is_finished():
                start_trial(search_dir, search, job.position).set_user_attr(FAILURE, str(failure))
            trial = study.trials[job.position]
            job.say(f"{status_text(trial)}, at {trial.last_step or 0:,} env steps")
            save()

        try:
            if unfinished:
                _train_trials(config, search, search_dir, unfinished, on_end)
        except KeyboardInterrupt:
            save()
            raise KeyboardInterrupt(f"stopped; go on with {resume}") from None
        say(f"\n{trials_table(study).to_markdown()}")  # before anything is saved, which may fail
        save()
        if config.log.graphs:
            try_report(search_dir)
        failures = [failure_text(trial) for trial in study.trials[: search.trials]]
        if all(failures):
            reasons = "; ".join(dict.fromkeys(failures))
            if not has_session(search_dir):
                raise UserError(f"no trial could begin: {reasons}")
            raise SessionsFailed(f"all of {counted(search.trials, 'trial')} failed: {reasons}")


def _train_trials(
    config: Config, search: SearchConfig, search_dir: Path, unfinished: Sequence[int], on_end: OnEnd
) -> None:
    """Trains the trials that have not ended.

    Args:
        unfinished: their numbers.

    Raises:
        KeyboardInterrupt: after a stop request, once all processes have ended.
    """
    search_dir = search_dir.absolute()
    words = ("jaxrl_atari.search", "--resume", str(search_dir), "--trial")
    jobs = []
    for number in unfinished:
        folder = trial_dir(search_dir, number)
        jobs.append(Job(folder.name, (*words, str(number)), folder, number))
    if search.address:
        run_jobs_on_ray(jobs, on_end, address=search.address, devices=config.devices, resources=search.resources)
    else:
        plan = plan_search_slots(search.resources, config.devices, len(jobs))
        run_jobs(jobs, on_end, plan, keeps_output=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Searches, or continues a search, and prints the results; with --trial, trains one trial."""
    options, before = parse_options(arguments)
    if options.trial is None:
        run_search(options, before)
        return
    if options.directory is None or before is None:
        raise UserError("--trial: expected --resume too, the directory of the search")
    tune_process()
    train_trial(options.directory, options.trial)
