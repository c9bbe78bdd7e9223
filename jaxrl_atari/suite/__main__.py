"""Suite of games: a trial for each game, and one table of all scores.

    python -m jaxrl_atari.suite [--games Pong Breakout ...] [--sessions 4 --total-env-steps 1000000 ...]
    python -m jaxrl_atari.suite --resume data/suite_20260101_120000
    python -m jaxrl_atari.suite --run-dir data/suite [--games Pong Breakout ...]

    --games GAME...      games to train; by default all with a reference score
    --config FILE        config file to start from
    --run-dir DIR        start the suite in this directory, or continue the one that it holds
    --resume DIR         continue the suite in this directory
    --report-at N...     add the scores at these env steps to the results
    --compare DIR        compare with the suite in another directory at the end

Every field of the config but env.game, name and devices.distributed is an option too; ppo.gae_lambda is the value tuned
for each game unless it is given.
"""

import argparse
import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import tyro

from jaxrl_atari import cli
from jaxrl_atari.cli import counted, say
from jaxrl_atari.cli.options import load_config, say_changes
from jaxrl_atari.config import Config
from jaxrl_atari.envs.games import GAMES, parse_game
from jaxrl_atari.envs.protocols import comparison_note
from jaxrl_atari.errors import ConfigError, SessionsFailed, UserError, require
from jaxrl_atari.hardware.rotation import place_session
from jaxrl_atari.plots import plot_comparison
from jaxrl_atari.report.pages import try_report
from jaxrl_atari.report.suites import compare_suites, describe_suite, draw_suites, read_suite
from jaxrl_atari.report.summary import read_run
from jaxrl_atari.runs.config_file import with_budget
from jaxrl_atari.runs.description import all_finished, require_budget
from jaxrl_atari.runs.files import only_writer
from jaxrl_atari.runs.run_dir import is_suite, make_run_dir, read_config, require_same_run
from jaxrl_atari.suite.results import write_results
from jaxrl_atari.suite.suite import game_configs, read_suite_file, run_suite, write_suite_file


class Command(NamedTuple):
    """Options of the command line."""

    config: Config
    games: list[str]
    suite_dir: Path | None  # None: a new one
    report_at: list[int]  # env steps
    compare: Path | None  # directory of another suite


def parse(arguments: Sequence[str] | None) -> Command:
    """Parses the command line.

    Raises:
        UserError: a value that cannot be used.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    first.add_argument("--resume", type=Path)
    first.add_argument("--run-dir", type=Path)
    first.add_argument("--compare", type=Path)
    first.add_argument("--games", nargs="*", action="extend")
    first.add_argument("--report-at", nargs="*", type=int, action="extend")
    known, rest = first.parse_known_args(arguments)
    if known.resume and known.run_dir:
        raise UserError("--resume and --run-dir: both name the directory of the suite; give one of the two")
    if known.resume and (known.config or known.games is not None):
        raise UserError("--resume: the suite has its games and config already; leave --games and --config out")
    if any(word.partition("=")[0] in ("--env.game", "--name") for word in rest):
        raise UserError("--env.game and --name: each game of a suite has its own; choose with --games Pong Breakout")
    suite_dir = known.resume or known.run_dir
    wanted = _named_suite(load_config(known.config, get_config=Config)[0] if known.config else Config())
    if suite_dir is not None and (known.resume or is_suite(suite_dir)):
        default, games, report_at = read_suite_file(suite_dir)
        if known.games is not None and list(game_configs(default, known.games)) != games:
            raise ConfigError("--games", " ".join(known.games), f"{' '.join(games)}, the games of {suite_dir}")
    else:
        scored = [name for name, game in GAMES.items() if game.reference_score is not None]
        default, games, report_at = wanted, scored if known.games is None else known.games, []
    report_at = report_at if known.report_at is None else known.report_at
    config = tyro.cli(Config, args=rest, default=default, prog="python -m jaxrl_atari.suite", description=__doc__)
    if suite_dir is not None and default is not wanted:
        require_same_run(config, default)
        for game in games:
            require_budget(config, _config_of(suite_dir / game, default), suite_dir / game)
    require(
        not config.devices.distributed, "devices.distributed", True, "false in a suite", "use --devices.no-distributed"
    )
    if known.report_at is None:  # those of the suite, which a smaller budget may have passed over
        report_at = [point for point in report_at if point <= config.total_env_steps]
    for point in report_at:
        if not 0 < point <= config.total_env_steps:
            raise UserError(f"--report-at {point}: expected env steps from 1 to the budget, {config.total_env_steps}")
    if known.compare is not None:
        if not is_suite(known.compare):
            raise UserError(f"--compare {known.compare}: not a suite directory; expected data/suite_TIMESTAMP")
        suites = {"this suite": config}
        with contextlib.suppress(UserError):  # of another version: it is compared by its games
            suites[str(known.compare)] = read_suite_file(known.compare)[0]
        for name, compared in suites.items():
            if note := comparison_note(compared.env.resolved_protocol):
                raise UserError(f"--compare {known.compare}: {name} is {note}; leave --compare out")
    return Command(config, list(game_configs(config, games)), suite_dir, sorted(set(report_at)), known.compare)


def _config_of(run_dir: Path, default: Config) -> Config:
    """The config of a game's run, or a default where it has not begun or is damaged."""
    with contextlib.suppress(UserError):
        return read_config(run_dir)
    return default


def _named_suite(config: Config) -> Config:
    """The config of a suite: the protocol that the name of its game implies holds for every game."""
    protocol = parse_game(config.env.game)[1] or config.env.protocol
    env = dataclasses.replace(config.env, game=config.env.game_name, protocol=protocol)
    return dataclasses.replace(config, name="suite", env=env)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    config, games, suite_dir, report_at, other = parse(arguments)
    place_session(config, 0)  # raises an error for missing devices before anything is created
    if suite_dir is None or not is_suite(suite_dir):
        suite_dir = make_run_dir(config, suite_dir)
    with only_writer(suite_dir):
        before = read_suite_file(suite_dir) if is_suite(suite_dir) else None
        done = all(all_finished(game, suite_dir / name) for name, game in game_configs(config, games).items())
        if done and before is not None:  # nothing is left to train: the games keep what they were trained with
            config = dataclasses.replace(with_budget(before[0], config), log=config.log)
        if before != (config, games, report_at) or not done:
            write_suite_file(suite_dir, config, games, report_at)
        say(f"suite: {suite_dir}, {counted(len(games), 'game')}")
        if before is not None:
            say_changes("changed", before[0], config)
        try:
            failures = run_suite(suite_dir, config, games, partial(_update_results, suite_dir))
        except KeyboardInterrupt:
            say(f"interrupted; --resume {suite_dir} continues")
            raise
        # A full disk may be why games have failed: then it must not hide their reasons.
        ignored = (UserError, OSError) if failures else ()
        with contextlib.suppress(*ignored):
            say("\n" + write_results(suite_dir, failures))
            if config.log.graphs:
                plot(suite_dir, config, games)
                try_report(suite_dir)
    if other is not None and not failures:
        say("\n" + compare_suites([suite_dir, other], suite_dir / "comparison") + f"\n{suite_dir / 'comparison'}")
    if failures:
        reasons = "; ".join(f"{game}: {reason}" for game, reason in failures.items())
        raise SessionsFailed(
            f"{len(failures)} of {len(games)} games failed ({reasons}); --resume {suite_dir} runs what is missing"
        )


def _update_results(suite_dir: Path, failures: Mapping[str, str]) -> None:
    """Writes the results so far. The games go on if that fails: the end writes them again."""
    with contextlib.suppress(UserError, OSError):
        write_results(suite_dir, failures)


def plot(suite_dir: Path, config: Config, games: Sequence[str]) -> None:
    """Draws the learning curves so far, a panel for each game, and the statistics of the complete games, if any."""
    runs = []
    for game in games:
        with contextlib.suppress(UserError):  # waiting, or failed before its first log point
            runs.append(read_run(suite_dir / game))
    if runs:
        say("\n".join(map(str, plot_comparison(runs, suite_dir / "graphs"))))
        if not comparison_note(config.env.resolved_protocol):
            described = {suite_dir.absolute().name: describe_suite(read_suite(suite_dir))}
            say("\n".join(map(str, draw_suites(described, suite_dir / "graphs"))))


if __name__ == "__main__":
    cli.run(main)
