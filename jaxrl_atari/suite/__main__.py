"""The command `suite`: a trial for each of many games, and one table of all scores; with --vary, a sweep.

python -m jaxrl_atari.suite [--games Pong Breakout ...] [--sessions 4 --total-env-steps 1000000 ...]
python -m jaxrl_atari.suite --vary ppo.learning_rate=1e-4,2.5e-4,1e-3 [--vary FIELD=VALUE,... --games Pong ...]
python -m jaxrl_atari.suite --resume data/suite_20260101_120000
python -m jaxrl_atari.suite --run-dir data/suite [--games Pong Breakout ...]
"""

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jaxrl_atari import cli
from jaxrl_atari.algorithm import check_config
from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.cli.options import FromDirectory, parse, read_sources
from jaxrl_atari.config import changed_fields
from jaxrl_atari.errors import UserError, require
from jaxrl_atari.output import counted, say, say_changes, try_to
from jaxrl_atari.report.page import try_report
from jaxrl_atari.report.suites import read_results, save_results
from jaxrl_atari.runs.files import only_writer, write_json
from jaxrl_atari.runs.layout import (
    REPORT_FILE,
    TRIAL_SUMMARY_FILE,
    command_line,
    has_session,
    held_kind,
)
from jaxrl_atari.runs.run_dir import claim_run_dir
from jaxrl_atari.suite.sweep import SweepPlan, game_configs, parse_vary, plan_sweep, read_plan, write_plan
from jaxrl_atari.trials.launch import Job, OnEnd, raise_failures, run_jobs
from jaxrl_atari.trials.ray_jobs import check_cluster, run_jobs_on_ray
from jaxrl_atari.trials.slots import ResourcesConfig, plan_slots
from jaxrl_atari.trials.trial import config_to_resume, described_for_jobs, session_jobs, with_init_digest


@dataclasses.dataclass(frozen=True)
class Options(FromDirectory):
    """Trains many games: a trial for each, and one table of all scores.

    ppo.gae_lambda is the value tuned for each game unless it is given.
    """

    games: list[str] | None = None
    """Games to train, separated by spaces or commas. None: all that have a reference score under the protocol."""
    vary: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="FIELD=VALUE,...")] = ()
    """Trains the games once for each of several values of a field: `ppo.learning_rate=1e-4,1e-3`. With several
    --vary, once for each combination of values."""
    address: str = ""
    """Ray cluster that trains the sessions: its address, or `auto`. Empty: this machine, without Ray."""
    resources: ResourcesConfig = dataclasses.field(default_factory=ResourcesConfig)
    """With `address`: resources of each session. Without it, --trial.parallel N trains N sessions at a time."""


def parse_options(arguments: Sequence[str] | None) -> tuple[Options, SweepPlan, SweepPlan | None]:
    """Parses the command line.

    Returns:
        The options; the plan; and the plan of the suite or sweep that is resumed, None for a new one.

    Raises:
        UserError: a value that cannot be used.
    """
    sources = read_sources(arguments)
    default = Options(config=dataclasses.replace(load_config(sources.config_file), name="suite"))
    before = None
    resumed = sources.resumed("suite", "sweep")
    if resumed is not None:
        before = read_plan(resumed)
        sources.say_kept(default.config.to_dict(), before.config.to_dict())
        default = Options(config=before.config, games=before.games)
    options = parse(Options, arguments, "suite", default, before.config if before else None)
    config = options.config
    given = changed_fields(default.config.to_dict(), config.to_dict())
    hint = "choose with --games Pong Breakout"
    require("env.game" not in given, "env.game", config.env.game, "no --env.game in a suite", hint)
    require(not config.devices.distributed, "devices.distributed", True, "false in a suite")
    games = None if options.games is None else [name for word in options.games for name in word.split(",") if name]
    vary = parse_vary(options.vary)
    games = list(game_configs(config, games))
    if before is not None:  # the games and values that are named are added to those of the directory
        games = list(dict.fromkeys([*before.games, *games]))
        fields = ", ".join(before.vary) or "no field"
        require(vary.keys() <= before.vary.keys(), "--vary", ", ".join(vary), f"{fields}, as in this directory")
        vary = {name: [*values, *vary.get(name, [])] for name, values in before.vary.items()}
    for name in vary:
        require(name not in given, name, "", f"no such option, because --vary has {name}")
    return options, plan_sweep(config, games, vary), before


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains the sessions that a suite or a sweep lacks, and shows, saves and draws its results."""
    options, plan, before = parse_options(arguments)
    # Before the directory is made.
    for config in plan.settings.values():
        check_config(config)
    if options.address:
        check_cluster(options.address)
    plan = plan_sweep(with_init_digest(plan.config), plan.games, plan.vary)
    with claim_run_dir(plan.config, options.directory, is_new=before is None) as directory:
        settings = f", {counted(len(plan.settings), 'setting')}" if plan.vary else ""
        say(f"suite: {directory}, {counted(len(plan.games), 'game')}{settings}")
        jobs = unfinished_jobs(directory, plan)
        write_plan(directory, plan)
        if before is not None:
            say_changes("changed", changed_fields(before.config.to_dict(), plan.config.to_dict()))
        resume = command_line("suite", "--resume", directory)
        failures: dict[Path, UserError] = {}

        def save() -> None:
            try_to("results are not saved", lambda: save_all_results(directory, failures), resume)

        def on_end(job: Job, failure: UserError | None) -> None:
            if failure is not None:
                job.say(f"failed: {failure}")
                failures[job.folder] = failure
            save()

        try:
            if jobs:
                _train(jobs, plan, directory, options, on_end)
        except KeyboardInterrupt:
            save()
            raise KeyboardInterrupt(f"stopped; go on with {resume}") from None
        if has_session(directory):
            say(f"\n{read_results(directory, failures).to_markdown()}")  # before anything is saved, which may fail
            save()
            if plan.config.log.graphs:
                _report(directory, plan, jobs)
    failed = {job.name: failures[job.folder] for job in jobs if job.folder in failures}
    raise_failures(failed, plan.total_sessions, directory, resume)


def unfinished_jobs(directory: Path, plan: SweepPlan) -> list[Job]:
    """Makes a job of each session that has not trained to its end. Names the trials that have no such session.

    Raises:
        UserError: a game's directory holds a run of another game, protocol or seed, or a damaged config.json.
    """
    jobs: list[Job] = []
    for number, (label, run_dir, config) in enumerate(plan.trials(directory)):
        config_to_resume(config, run_dir)  # refuses another run
        left = session_jobs(config, run_dir, label, number * config.sessions)
        if not left:
            say(f"{label}finished already")
        jobs += left
    return jobs


def _train(jobs: Sequence[Job], plan: SweepPlan, directory: Path, options: Options, on_end: OnEnd) -> None:
    """Writes the config.json of the runs that have jobs, and trains the jobs on this machine or on a Ray cluster.

    Raises:
        ConfigError: the machine does not have the devices, or too little memory for sessions that share a GPU.
        UserError: the cluster cannot be used.
        KeyboardInterrupt: a stop was requested, and every session that was training has ended.
    """
    due = {job.folder.parent for job in jobs}
    with contextlib.ExitStack() as exits:
        for _, run_dir, config in plan.trials(directory):
            if run_dir.absolute() in due:
                run_dir.mkdir(parents=True, exist_ok=True)
                exits.enter_context(only_writer(run_dir))  # a `train --resume` of this game would disturb the jobs
                exits.enter_context(described_for_jobs(config, run_dir))
        if options.address:
            devices, resources = plan.config.devices, options.resources
            run_jobs_on_ray(jobs, on_end, address=options.address, devices=devices, resources=resources)
        else:
            run_jobs(jobs, on_end, plan_slots(plan.config, plan.total_sessions, len(jobs)))


def _report(directory: Path, plan: SweepPlan, jobs: Sequence[Job]) -> None:
    """Writes the reports of the runs that have trained or have none yet, of the settings, and of all together."""
    trained = {job.folder.parent for job in jobs}
    for _, run_dir, _ in plan.trials(directory):
        if run_dir.absolute() in trained or not (run_dir / REPORT_FILE).is_file():
            try_report(run_dir)
    if plan.vary:
        for setting in plan.settings:
            try_report(directory / setting)
    try_report(directory)


def save_all_results(directory: Path, failures: Mapping[Path, UserError]) -> None:
    """Saves the trial.json of each game, the results of each setting of a sweep, and all results together.

    Args:
        failures: directory of a session that failed -> its error.
    """
    results = read_results(directory, failures)
    for _, run in results.curves():
        write_json(run.path / TRIAL_SUMMARY_FILE, run.summary)
    if held_kind(directory) == "sweep":
        for suite in results.suites.values():
            save_results(read_results(suite.path, failures), suite.path)
    save_results(results, directory)


if __name__ == "__main__":
    cli.run(main)
