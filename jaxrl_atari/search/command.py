"""The command `search`: hyperparameter search with many trials on few GPUs.

python -m jaxrl_atari.search --config configs/search_qbert.py [--search.trials 16 --search.resources.gpu 0.25]
python -m jaxrl_atari.search --resume data/qbert_search_20260101_120000 [--search.trials 32]
python -m jaxrl_atari.search --config configs/search_qbert.py --run-dir data/qbert_search
python -m jaxrl_atari.search --resume data/qbert_search_20260101_120000 --trial 3
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from optuna import Study

from jaxrl_atari.cli.config_files import run_config_file
from jaxrl_atari.cli.options import FromDirectory, parse, read_sources
from jaxrl_atari.config import Config, Limits, changed_fields
from jaxrl_atari.envs import check_environment
from jaxrl_atari.errors import SessionsFailed, UserError, reason, require
from jaxrl_atari.output import counted, say, say_changes, try_to
from jaxrl_atari.process_tuning import tune_process
from jaxrl_atari.report.page import try_report
from jaxrl_atari.report.search_graphs import draw_graphs
from jaxrl_atari.report.tables import number_text
from jaxrl_atari.runs.description import describe
from jaxrl_atari.runs.files import write_json
from jaxrl_atari.runs.layout import (
    GRAPHS_FOLDER,
    SEARCH_FILE,
    has_session,
    is_search,
    resume_command,
    trial_dir,
    trial_number,
)
from jaxrl_atari.runs.run_dir import claim_run_dir
from jaxrl_atari.search.check import check_search
from jaxrl_atari.search.options import SearchConfig, read_search
from jaxrl_atari.search.results import save_search_results, search_results
from jaxrl_atari.search.study import (
    failure_text,
    open_study,
    record_failure,
    status_text,
    trial_progress,
    unfinished_trials,
)
from jaxrl_atari.search.trial import train_trial
from jaxrl_atari.trials.launch import Job, run_jobs
from jaxrl_atari.trials.ray_jobs import check_cluster, run_jobs_on_ray
from jaxrl_atari.trials.resources import slots_here

CHANGEABLE_OPTIONS = {"search.trials", "search.address", "search.resources.gpu", "search.resources.cpu"}
"""Options that may change when a search is resumed."""


@dataclasses.dataclass(frozen=True)
class Options(FromDirectory):
    """Searches hyperparameters, or resumes a search that was interrupted."""

    search: SearchConfig = dataclasses.field(default_factory=SearchConfig)
    trial: Annotated[int | None, Limits(0, 1_000_000)] = None
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
        default = Options(search=file.call("get_search", SearchConfig), config=file.call("get_config", Config))
    before = None
    resumed = sources.resumed(is_search)
    if resumed is not None:
        config, search = read_search(resumed)
        before = Options(config=config, search=search)
        sources.say_kept(default.values(), before.values())
        default = before
    options = parse(Options, arguments, "search", default, before.config if before else None)
    parallel = options.config.trial.parallel
    require(
        parallel == 0 or (before is not None and parallel == before.config.trial.parallel),
        "trial.parallel",
        parallel,
        expected="0 in a search",
        hint="--search.resources.gpu and --search.resources.cpu set how many trials a machine trains at a time",
    )
    check_search(options.config, options.search)
    if before is not None:
        for name, (was, wanted) in changed_fields(before.values(), options.values()).items():
            require(name in CHANGEABLE_OPTIONS, name, wanted, f"{was!r}, its value in this search")
    return options, before


def run_search(options: Options, before: Options | None) -> Path:
    """Runs a search and returns the search directory.

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
    config = options.config
    search = options.search
    # Before anything is created.
    if search.address:
        check_cluster(search.address)
    else:
        slots_here(search.resources, config, search.trials)
    check_environment(config.env)
    is_new = before is None
    named = dataclasses.replace(config, name=f"{config.name}_search")  # names the directory
    with claim_run_dir(named, options.directory, is_new) as search_dir:
        unfinished = _start_or_resume(search_dir, options, before)
        study = open_study(search_dir, search)
        if unfinished:
            _train_trials(config, search, search_dir, study, unfinished)
        failures = [failure_text(trial) for trial in study.get_trials(deepcopy=False)[: search.trials]]
        if is_new and all(failures) and not has_session(search_dir):
            raise UserError(f"no trial could begin: {'; '.join(dict.fromkeys(failures))}")
        results = search_results(search_dir)
        say(f"\n{results.table().to_markdown()}")  # shown before anything is saved, because saving may fail
        resume = resume_command("search", search_dir)
        try_to("results are not saved", partial(save_search_results, search_dir, results), resume)
    if config.log.graphs:
        try_to("no graphs", partial(draw_graphs, study, search_dir / GRAPHS_FOLDER), resume)
        try_report(search_dir)
    if all(failures):
        raise SessionsFailed(f"all of {counted(search.trials, 'trial')} failed; the last one: {failures[-1]}")
    return search_dir


def _start_or_resume(search_dir: Path, options: Options, before: Options | None) -> list[int]:
    """Writes search.json if that is due, prints what a resume changes, and returns the trials that are left.

    Args:
        before: the options of the search that is resumed; None for a new one.

    Returns:
        The numbers of the trials that have not ended.
    """
    unfinished = unfinished_trials(search_dir, options.search)
    values_before = None if before is None else before.values()
    if unfinished or options.values() != values_before:
        description = describe(options.config, search_dir, SEARCH_FILE)
        write_json(search_dir / SEARCH_FILE, description | {"search": options.search.to_dict()})
    say(f"{'search directory:' if before is None else 'resuming'} {search_dir}")
    if values_before is not None:
        say_changes("changed", changed_fields(values_before, options.values()))
    return unfinished


def _train_trials(
    config: Config, search: SearchConfig, search_dir: Path, study: Study, unfinished: Sequence[int]
) -> None:
    """Trains the trials that have not ended, new ones among them. Whenever one ends, the results are written.

    Args:
        study: gets the trials that it lacks.
        unfinished: the numbers of the trials that have not ended.

    Raises:
        KeyboardInterrupt: after a stop request, once all processes have ended.
    """
    for _ in range(len(study.get_trials(deepcopy=False)), search.trials):
        study.enqueue_trial({})  # its fields are sampled when it starts
    resume = resume_command("search", search_dir)

    def save_results() -> None:
        try_to(
            "results are not saved", lambda: save_search_results(search_dir, search_results(search_dir)), resume
        )

    def on_end(job: Job, failure: UserError | None) -> None:
        number = trial_number(job.folder)
        ended = study.get_trials(deepcopy=False)[number].state.is_finished()  # perhaps ASHA has stopped it
        if failure is not None and not ended:
            record_failure(search_dir, search, number, str(failure))
        after_end = f"; its process then failed: {failure}" if failure is not None and ended else ""
        trial = study.get_trials(deepcopy=False)[number]
        say(f"{_progress(job.folder)}: {status_text(trial)}{after_end}")
        save_results()

    words = ("jaxrl_atari.search", "--resume", str(search_dir.absolute()), "--trial")
    folders = [trial_dir(search_dir.absolute(), number) for number in unfinished]
    jobs = [
        Job(folder.name, (*words, str(number)), folder, number)
        for number, folder in zip(unfinished, folders, strict=True)
    ]
    try:
        if search.address:
            run_jobs_on_ray(
                jobs, on_end, address=search.address, devices=config.devices, resources=search.resources
            )
        else:
            slots, parallel = slots_here(search.resources, config, len(jobs))
            run_jobs(jobs, on_end, slots=slots, parallel=parallel)
    except KeyboardInterrupt:
        save_results()
        raise KeyboardInterrupt(f"stopped; go on with {resume}") from None


def _progress(run_dir: Path) -> str:
    """How far a trial has come: its name, env steps and score, or why its log points cannot be read."""
    try:
        score, env_steps = trial_progress(run_dir)
    except (OSError, UserError) as error:
        return f"{run_dir.name}: {reason(error)}"
    return f"{run_dir.name} at {env_steps:,} env steps, return_ma {number_text(score)}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Searches, or continues a search, and prints the results; with --trial, trains one trial."""
    options, before = parse_options(arguments)
    if options.trial is None:
        run_search(options, before)
        return
    if options.directory is None or before is None:
        raise UserError("--trial: expected --resume too, the directory of the search")
    require(options.trial < options.search.trials, "--trial", options.trial, f"0 to {options.search.trials - 1}")
    tune_process()
    train_trial(trial_dir(options.directory, options.trial))
