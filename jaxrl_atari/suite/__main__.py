"""Suite of games: a trial for each game, and one table of all scores.

python -m jaxrl_atari.suite [--games Pong Breakout ...] [--sessions 4 --total-env-steps 1000000 ...]
python -m jaxrl_atari.suite --resume data/suite_20260101_120000
python -m jaxrl_atari.suite --run-dir data/suite [--games Pong Breakout ...]
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_atari import cli
from jaxrl_atari.cli import counted, resume_command, say
from jaxrl_atari.cli.options import FromDirectory, load_config, parse, say_changes
from jaxrl_atari.config import Config
from jaxrl_atari.errors import SessionsFailed, reason, require
from jaxrl_atari.report.page import try_report
from jaxrl_atari.report.suites import SuiteResults, save_results, suite_results
from jaxrl_atari.runs.files import only_writer
from jaxrl_atari.runs.run_dir import is_suite, make_run_dir
from jaxrl_atari.suite.launch import Failure, Item, Launcher, Train
from jaxrl_atari.suite.ray_cluster import ResourcesConfig, set_up_ray
from jaxrl_atari.suite.suite import SuitePlan, game_configs, read_suite_file, unfinished_sessions, write_suite_file
from jaxrl_atari.suite.trial import choose_launcher, plan_slots, train_item


@dataclasses.dataclass(frozen=True)
class Options(FromDirectory):
    """Trains many games: a trial for each, and one table of all scores.

    ppo.gae_lambda is that of each game's reference unless it is given: under v5 the tuned one, under classic 0.95.
    """

    games: list[str] | None = None
    """Games to train; None: all with a reference score under the protocol."""
    address: str = ""
    """Ray cluster that trains the sessions: its address, or `auto`. Empty: this machine, without Ray."""
    resources: ResourcesConfig = dataclasses.field(default_factory=ResourcesConfig)
    """With `address`: resources of each session."""


def parse_options(arguments: Sequence[str] | None) -> tuple[Options, SuitePlan, SuitePlan | None]:
    """Command line -> options, the suite, and the one that goes on, if one does.

    Raises:
        UserError: a value that cannot be used.
    """

    def load(path: Path | None) -> list[Any]:
        return [dataclasses.replace(load_config(path, get_config=Config)[0], name="suite"), None]

    options, default = parse(Options, arguments, load, is_suite, read_suite_file, ["games"])
    suite_dir = options.directory
    before = None
    config = options.full_config
    games = list(game_configs(config, options.games))
    game = default.full_config.env.game
    expected = "nothing; each game of a suite has its own trial"
    require(config.env.game == game, "env.game", config.env.game, expected, "choose with --games Pong Breakout")
    require(not config.devices.distributed, "devices.distributed", True, "false in a suite")
    if suite_dir is not None and is_suite(suite_dir):
        before = SuitePlan(default.full_config, default.games or [])
        require(games == before.games, "--games", " ".join(games), f"{' '.join(before.games)}, the games of the suite")
    return options, SuitePlan(config, games), before


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    options, suite, before = parse_options(arguments)
    suite_dir = options.directory
    if options.address:  # raises errors before a directory is made, as the other line does
        set_up_ray(options.address, suite.config.devices)
    else:
        plan_slots(suite.config, suite.config.sessions * len(suite.games))
    if suite_dir is None or before is None:
        suite_dir = make_run_dir(suite.config, suite_dir)
    command = resume_command("suite", suite_dir)
    failures: dict[str, str] = {}  # game -> the last one
    with only_writer(suite_dir):
        items = unfinished_sessions(suite_dir, suite)
        if suite != before or items:
            write_suite_file(suite_dir, suite)
        say(f"suite: {suite_dir}, {counted(len(suite.games), 'game')}")
        if before is not None:
            say_changes("changed", before.config, suite.config)
        for game in suite.games:
            if game not in {item.game for item in items}:
                say(f"game {game}  finished already")

        def on_end(item: Item, failure: Failure | None) -> None:
            if failure is not None:
                item.say(f"failed: {failure.reason}")
                failures[item.game] = f"session {item.session}: {failure.reason}"
            try_to_save(suite_results(suite_dir, failures))

        try:
            if items:
                launch, train = choose_suite_launcher(items, options, suite_dir)
                launch(items, train, on_end)
        except KeyboardInterrupt:
            try_to_save(suite_results(suite_dir, failures))
            raise KeyboardInterrupt(f"stopped; go on with {command}") from None
        found = suite_results(suite_dir, failures)
        say(f"\n{found.text}")
        try_to_save(found)
        if suite.config.log.graphs:
            try_report(suite_dir)
    if failures:
        reasons = "; ".join(f"{game}: {why}" for game, why in failures.items())
        raise SessionsFailed(
            f"{len(failures)} of {counted(len(suite.games), 'game')} failed ({reasons}); {command} runs what is missing"
        )


def choose_suite_launcher(items: Sequence[Item], options: Options, suite_dir: Path) -> tuple[Launcher, Train]:
    """The launcher of sessions, on a Ray cluster or on this machine, and the function that trains each of them."""
    if not options.address:
        return choose_launcher(items)
    from jaxrl_atari.suite.ray_tasks import run_on_ray  # which imports Ray

    devices = items[0].config.devices
    resources = options.resources
    launch = partial(run_on_ray, directory=suite_dir, address=options.address, devices=devices, resources=resources)
    return launch, train_item


def try_to_save(found: SuiteResults) -> None:
    """Saves results, or says why they could not be saved: the next session to end, or a resume, tries again."""
    try:
        save_results(found)
    except OSError as error:
        say(f"results are not saved: {reason(error)}")


if __name__ == "__main__":
    cli.run(main)
