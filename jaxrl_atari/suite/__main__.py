"""Suite of games: a trial for each game, and one table of all scores.

python -m jaxrl_atari.suite [--games Pong Breakout ...] [--sessions 4 --total-env-steps 1000000 ...]
python -m jaxrl_atari.suite --resume data/suite_20260101_120000
python -m jaxrl_atari.suite --run-dir data/suite [--games Pong Breakout ...]
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from jaxrl_atari import cli
from jaxrl_atari.cli import counted, resume_command, say
from jaxrl_atari.cli.options import AllOptions, FromDirectory, load_config, parse, say_changes
from jaxrl_atari.config import Config
from jaxrl_atari.envs.games import GAMES
from jaxrl_atari.errors import SessionsFailed, UserError, require
from jaxrl_atari.runs.files import only_writer
from jaxrl_atari.runs.run_dir import is_suite, make_run_dir, require_same_run
from jaxrl_atari.suite.results import write_results
from jaxrl_atari.suite.suite import Suite, game_configs, read_suite_file, unfinished_games, write_suite_file
from jaxrl_atari.suite.trial import plan_slots, settle, summarise, train_items, with_budget

SCORED = [name for name, game in GAMES.items() if game.references]


@dataclasses.dataclass(frozen=True)
class Options(FromDirectory):
    """Trains many games: a trial for each, and one table of all scores.

    ppo.gae_lambda is the value tuned for each game unless it is given.
    """

    games: list[str] = dataclasses.field(default_factory=SCORED.copy)
    """Games to train; by default all with a reference score."""
    address: str = ""
    """Address of a Ray cluster that trains the sessions. By default this machine does."""
    options: AllOptions = dataclasses.field(default_factory=Config)


def parse_options(arguments: Sequence[str] | None) -> tuple[Options, Suite | None]:
    """Command line -> options, and the suite that goes on, if one does.

    Raises:
        UserError: a value that cannot be used.
    """
    default, before = Options(), None

    def make_default(start: argparse.Namespace) -> Options:
        nonlocal default, before
        config = dataclasses.replace(load_config(start.config, get_config=Config)[0], name="suite")
        default, suite_dir = Options(**vars(start), options=config), start.resume or start.run_dir
        if suite_dir is not None and (start.resume or is_suite(suite_dir)):
            before = read_suite_file(suite_dir)
            if start.config is not None:
                say_changes(f"{start.config} differs from the suite, which keeps its own values", config, before.config)
            default = dataclasses.replace(default, options=before.config, games=before.games)
        return default

    options = parse(Options, arguments, make_default)
    config, games = options.options, list(game_configs(options.options, options.games))
    game, expected = default.options.env.game, "nothing; each game of a suite has its own trial"
    require(config.env.game == game, "env.game", config.env.game, expected, "choose with --games Pong Breakout")
    require(not config.devices.distributed, "devices.distributed", True, "false in a suite")
    if before is not None:
        require(games == before.games, "--games", " ".join(games), f"{' '.join(before.games)}, the games of the suite")
        require_same_run(config, before.config, Path())
    return dataclasses.replace(options, games=games), before


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    options, before = parse_options(arguments)
    if options.address:
        raise NotImplementedError("--address: suites on a Ray cluster are not wired yet; leave it out")
    suite = Suite(options.options, options.games)
    suite_dir = options.resume or options.run_dir
    plan_slots(suite.config, suite.config.sessions * len(suite.games))  # raises errors before a directory is made
    if suite_dir is None or before is None:
        suite_dir = make_run_dir(suite.config, suite_dir)
    command = resume_command("suite", suite_dir)
    failures: dict[str, str] = {}
    with only_writer(suite_dir):
        waiting = unfinished_games(suite_dir, suite)
        items = list(chain(*waiting.values()))
        if before is not None and not items:
            suite = suite._replace(config=with_budget(before.config, suite.config))
        if suite != before or items:
            write_suite_file(suite_dir, *suite)
        say(f"suite: {suite_dir}, {counted(len(suite.games), 'game')}")
        if before is not None:
            say_changes("changed", before.config, suite.config)
        for game, config in game_configs(suite.config, suite.games).items():
            if not waiting[game]:
                say(f"game {game}  finished already")
                settle(config, suite_dir / game)
        try:
            for item, failure in train_items(items):
                if failure is not None:
                    reasons = failures.get(item.game), f"session {item.session}: {failure.reason}"
                    failures[item.game] = "; ".join(filter(None, reasons))
                waiting[item.game].remove(item)
                if not waiting[item.game]:
                    with contextlib.suppress(UserError, OSError):  # the end writes them again
                        write_results(suite_dir, failures)
                        summarise(suite.config, item.run_dir)
        except KeyboardInterrupt:
            with contextlib.suppress(UserError, OSError):
                write_results(suite_dir, failures)
            raise KeyboardInterrupt(f"stopped; go on with {command}") from None
        # A full disk may be why games have failed: then it must not hide their reasons.
        with contextlib.suppress(*(UserError, OSError) if failures else ()):
            write_results(suite_dir, failures, final=True)
    if failures:
        reasons = "; ".join(f"{game}: {reason}" for game, reason in failures.items())
        raise SessionsFailed(
            f"{len(failures)} of {counted(len(suite.games), 'game')} failed ({reasons}); {command} runs what is missing"
        )


if __name__ == "__main__":
    cli.run(main)
