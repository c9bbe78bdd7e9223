"""The command `suite`: a trial for each of many games, and one table of all scores; with --vary, a sweep.

python -m jaxrl_atari.suite [--games Pong Breakout ...] [--sessions 4 --total-env-steps 1000000 ...]
python -m jaxrl_atari.suite --vary ppo.learning_rate=1e-4,2.5e-4,1e-3 [--vary FIELD=VALUE,... --games Pong ...]
python -m jaxrl_atari.suite --resume data/suite_20260101_120000
python -m jaxrl_atari.suite --run-dir data/suite [--games Pong Breakout ...]
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from jaxrl_atari import cli
from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.cli.options import FromDirectory, parse, read_sources
from jaxrl_atari.config import changed_fields
from jaxrl_atari.errors import require
from jaxrl_atari.output import counted, say, say_changes
from jaxrl_atari.runs.layout import has_session, is_suite, is_sweep, resume_command
from jaxrl_atari.runs.run_dir import claim_run_dir
from jaxrl_atari.suite.results import SuiteResultsKeeper
from jaxrl_atari.suite.sweep import SweepPlan, game_configs, parse_vary, plan_sweep, read_plan, write_plan
from jaxrl_atari.trials.launch import Job, raise_failures
from jaxrl_atari.trials.slots import ResourcesConfig


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
    """With `address`: resources of each session."""


def _holds_suite(directory: Path) -> bool:
    """Whether a directory holds a suite or a sweep."""
    return is_suite(directory) or is_sweep(directory)


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
    resumed = sources.resumed(_holds_suite)
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
    require(
        options.address or options.resources == ResourcesConfig(),
        "--resources",
        dataclasses.asdict(options.resources),
        expected="no resources without --address",
        hint="on this machine, --trial.parallel N trains N sessions at a time",
    )
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
    # Imported here, so that --help need not import Flax and orbax.
    from jaxrl_atari.suite.jobs import check_trainable, train_jobs, unfinished_jobs
    from jaxrl_atari.trials.sessions import with_init_digest

    check_trainable(plan, options.address)
    plan = plan_sweep(with_init_digest(plan.config), plan.games, plan.vary)
    with claim_run_dir(plan.config, options.directory, is_new=before is None) as directory:
        jobs = unfinished_jobs(directory, plan)
        if plan != before or jobs:
            write_plan(directory, plan)
        _say_plan(directory, plan, before, jobs)
        results = SuiteResultsKeeper(directory)
        resume = resume_command("suite", directory)
        try:
            if jobs:
                train_jobs(jobs, plan, directory, options.address, options.resources, results.on_end)
        except KeyboardInterrupt:
            results.save()
            raise KeyboardInterrupt(f"stopped; go on with {resume}") from None
        if has_session(directory):
            results.show_and_save(plan.config.log.graphs)
    raise_failures(results.failures, plan.total_sessions, directory, resume)


def _say_plan(directory: Path, plan: SweepPlan, before: SweepPlan | None, jobs: Sequence[Job]) -> None:
    """Prints what is trained, what a resume changes in the plan `before`, and which games have no job left."""
    settings = f", {counted(len(plan.settings), 'setting')}" if plan.vary else ""
    say(f"suite: {directory}, {counted(len(plan.games), 'game')}{settings}")
    if before is not None:
        say_changes("changed", changed_fields(before.config.to_dict(), plan.config.to_dict()))
    waiting = {job.folder.parent for job in jobs}
    for label, run_dir, _ in plan.trials(directory):
        if run_dir.absolute() not in waiting:
            say(f"{label}finished already")


if __name__ == "__main__":
    cli.run(main)
