"""Suite of games: a trial for each game, and one table of all scores; with --vary, under several settings.

python -m jaxrl_atari.suite [--games Pong Breakout ...] [--sessions 4 --total-env-steps 1000000 ...]
python -m jaxrl_atari.suite --vary ppo.learning_rate=1e-4,2.5e-4,1e-3 [--vary FIELD=VALUE,... --games Pong ...]
python -m jaxrl_atari.suite --resume data/suite_20260101_120000
python -m jaxrl_atari.suite --run-dir data/suite [--games Pong Breakout ...]
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import tyro

from jaxrl_atari import cli
from jaxrl_atari.cli import resume_command
from jaxrl_atari.cli.config_files import load_config
from jaxrl_atari.cli.options import FromDirectory, parse, read_start, say_changes
from jaxrl_atari.errors import SessionsFailed, reason, require
from jaxrl_atari.output import counted, say
from jaxrl_atari.report.page import try_report
from jaxrl_atari.report.suites import SuiteResults, save_results, suite_results
from jaxrl_atari.runs.files import only_writer
from jaxrl_atari.runs.run_dir import is_suite, is_sweep, make_run_dir
from jaxrl_atari.suite.launch import Failure, Item, Launcher, Train
from jaxrl_atari.suite.ray_cluster import ResourcesConfig, set_up_ray
from jaxrl_atari.suite.sessions import train_item
from jaxrl_atari.suite.slots import choose_launcher, plan_slots
from jaxrl_atari.suite.suite import game_configs, read_suite_file
from jaxrl_atari.suite.sweep import (
    Sweep,
    draw_sweep,
    parse_vary,
    read_suites,
    read_sweep_file,
    save_sweep_results,
    sweep_results,
    unfinished_of_sweep,
    write_sweep_files,
)

Failures = dict[str, dict[str, str]]
"""Label of a setting (empty where nothing varies) -> game -> why it failed."""


@dataclasses.dataclass(frozen=True)
class Options(FromDirectory):
    """Trains many games: a trial for each, and one table of all scores.

    ppo.gae_lambda is the value tuned for each game unless it is given.
    """

    games: list[str] | None = None
    """Games to train, between spaces or commas; None: all with a reference score under the protocol."""
    vary: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="FIELD=VALUE,...")] = ()
    """Trains the games once for each of several values of a field: `ppo.learning_rate=1e-4,1e-3`. Several --vary:
    once for each combination."""
    address: str = ""
    """Ray cluster that trains the sessions: its address, or `auto`. Empty: this machine, without Ray."""
    resources: ResourcesConfig = dataclasses.field(default_factory=ResourcesConfig)
    """With `address`: resources of each session."""


def holds_suite(directory: Path) -> bool:
    """Whether a directory is that of a suite or of a sweep."""
    return is_suite(directory) or is_sweep(directory)


def read_plan(directory: Path) -> Sweep:
    """Reads what a directory holds; a suite is a sweep in which nothing varies.

    Raises:
        UserError: as `read_sweep_file` and `read_suite_file`.
    """
    if is_sweep(directory):
        return read_sweep_file(directory)
    config, games = read_suite_file(directory)
    return Sweep(config, games, {})


def parse_options(arguments: Sequence[str] | None) -> tuple[Options, Sweep, Sweep | None]:
    """Parses the command line.

    Returns:
        The options, what is trained, and what the directory held before, if it goes on.

    Raises:
        UserError: a value that cannot be used.
    """
    start = read_start(arguments)
    default = Options(full_config=dataclasses.replace(load_config(start.config), name="suite"))
    before = None
    continued = start.continued(holds_suite)
    if continued is not None:
        before = read_plan(continued)
        start.say_kept(default.full_config, before.config)
        default = Options(full_config=before.config, games=before.games)
    options = parse(Options, arguments, "suite", default, before.config if before else None)
    config = options.full_config
    game = default.full_config.env.game
    expected = "nothing; each game of a suite has its own trial"
    require(config.env.game == game, "env.game", config.env.game, expected, "choose with --games Pong Breakout")
    require(not config.devices.distributed, "devices.distributed", True, "false in a suite")
    named = options.games
    if named is not None:
        named = [name for word in named for name in word.split(",") if name]
    games = list(game_configs(config, named))
    vary = parse_vary(options.vary, config)

    if before is None:
        return options, Sweep(config, games, vary), None
    expected = f"{' '.join(before.games)}, the games of the suite"
    require(games == before.games, "--games", " ".join(games), expected)
    sweep = Sweep(config, games, vary or before.vary)
    labels = {setting.label for setting in sweep.settings}
    kept = all(setting.label in labels for setting in before.settings)
    expected = "the fields and values of the suite, and perhaps more values"
    require(
        kept, "--vary", " ".join(options.vary), expected, f"leave it out, or start a new one; it has {before.vary}"
    )
    return options, sweep, before


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains what a suite or a sweep lacks, and shows, saves and draws its results."""
    options, sweep, before = parse_options(arguments)
    directory = options.directory
    config = sweep.config
    if options.address:  # both branches raise before a directory is made
        set_up_ray(options.address, config.devices)
    else:
        plan_slots(config, config.sessions * len(sweep.games) * len(sweep.settings))
    if directory is None or before is None:
        directory = make_run_dir(config, directory)
    command = resume_command("suite", directory)
    failures: Failures = {}
    suites: dict[str, SuiteResults] = {}
    with only_writer(directory):
        items = unfinished_of_sweep(directory, sweep)
        if sweep != before or items:
            write_sweep_files(directory, sweep)
        settings = f", {counted(len(sweep.settings), 'setting')}" if sweep.vary else ""
        say(f"suite: {directory}, {counted(len(sweep.games), 'game')}{settings}")
        if before is not None:
            say_changes("changed", before.config, config)
        _say_finished(sweep, items)

        def on_end(item: Item, failure: Failure | None) -> None:
            if failure is not None:
                item.say(f"failed: {failure.reason}")
                reasons = failures.setdefault(item.setting, {})
                why = f"session {item.session}: {failure.reason}"
                reasons[item.game] = f"{reasons[item.game]}; {why}" if item.game in reasons else why
            if suites:  # the other settings' results were read when the first session ended
                reasons = failures.get(item.setting, {})
                suites[item.setting] = suite_results(directory / item.setting, reasons)
            else:
                suites.update(read_suites(directory, sweep, failures))
            save(directory, sweep, suites, [item.setting])

        try:
            if items:
                launch, train = choose_suite_launcher(items, options, directory)
                launch(items, train, on_end)
        except KeyboardInterrupt:
            suites = read_suites(directory, sweep, failures)
            save(directory, sweep, suites, suites)
            raise KeyboardInterrupt(f"stopped; go on with {command}") from None
        suites = read_suites(directory, sweep, failures)
        show(directory, sweep, suites)
        save(directory, sweep, suites, suites)
        draw(directory, sweep, suites)
    _raise_failures(failures, sweep, command)


def choose_suite_launcher(items: Sequence[Item], options: Options, directory: Path) -> tuple[Launcher, Train]:
    """The launcher of sessions, on a Ray cluster or on this machine, and the function that trains each of them."""
    if not options.address:
        return choose_launcher(items)
    from jaxrl_atari.suite.ray_tasks import run_on_ray  # which imports Ray

    devices = items[0].config.devices
    resources = options.resources
    launch = partial(
        run_on_ray, directory=directory, address=options.address, devices=devices, resources=resources
    )
    return launch, train_item


def _say_finished(sweep: Sweep, items: Sequence[Item]) -> None:
    """Says which games have nothing left to train."""
    waiting = {(item.setting, item.game) for item in items}
    for setting in sweep.settings:
        for game in sweep.games:
            if (setting.label, game) not in waiting:
                say("  ".join(filter(None, (f"game {game}", setting.label, "finished already"))))


# --- Results -----------------------------------------------------------------------------------------------------


def show(directory: Path, sweep: Sweep, suites: Mapping[str, SuiteResults]) -> None:
    """Prints the table of a suite or a sweep, before anything is saved."""
    text = sweep_results(directory, sweep, suites).text if sweep.vary else suites[""].text
    say(f"\n{text}")


def save(directory: Path, sweep: Sweep, suites: Mapping[str, SuiteResults], labels: Iterable[str]) -> None:
    """Saves the results of some settings, and of the sweep, or says why they could not be saved.

    The next session to end, or a resume, tries again: the results are made from the metrics of the sessions.
    """
    saves = [partial(save_results, suites[label]) for label in labels]
    if sweep.vary:
        saves.append(partial(save_sweep_results, sweep_results(directory, sweep, suites)))
    for save_one in saves:
        try:
            save_one()
        except OSError as error:
            say(f"results are not saved: {reason(error)}; {resume_command('suite', directory)} tries again")


def draw(directory: Path, sweep: Sweep, suites: Mapping[str, SuiteResults]) -> None:
    """Draws the graph of a sweep, and writes the report of each setting, or says why not."""
    if not sweep.config.log.graphs:
        return
    for label in suites:
        try_report(directory / label)
    if not sweep.vary:
        return
    try:
        for path in draw_sweep(sweep_results(directory, sweep, suites)):
            say(str(path))
    except OSError as error:
        say(f"the graph is not saved: {reason(error)}; {resume_command('suite', directory)} tries again")


def _raise_failures(failures: Failures, sweep: Sweep, command: str) -> None:
    """Raises `SessionsFailed` if a game has failed."""
    reasons = [
        f"{'  '.join(filter(None, (game, label)))}: {why}"
        for label, games in failures.items()
        for game, why in games.items()
    ]
    if reasons:
        number = counted(len(sweep.games) * len(sweep.settings), "trial" if sweep.vary else "game")
        raise SessionsFailed(
            f"{len(reasons)} of {number} failed ({'; '.join(reasons)}); {command} runs what is missing"
        )


if __name__ == "__main__":
    cli.run(main)
