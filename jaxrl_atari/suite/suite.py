"""Games of a suite: their configs, processes and GPUs.

SUITE_DIR/suite.json             games, config and reporting points
SUITE_DIR/<Game>/                a run directory like any other
SUITE_DIR/results.{md,csv,json}  written when a game ends and when the suite is interrupted (`results.py`)
"""

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jaxrl_atari.cli import counted, say
from jaxrl_atari.config import Config, config_from_dict
from jaxrl_atari.errors import ConfigError, UserError, reason
from jaxrl_atari.hardware.cpu import usable_cores
from jaxrl_atari.hardware.gpus import visible
from jaxrl_atari.runs.description import all_finished, change_budget
from jaxrl_atari.runs.files import read_json, write_json
from jaxrl_atari.runs.run_dir import SUITE_FILE, describe_resumed, is_run, read_config, require_same_run
from jaxrl_atari.suite.processes import Failure, Task, run_processes


def game_configs(config: Config, games: Sequence[str]) -> dict[str, Config]:
    """ALE's name of each game -> config of its trial.

    Raises:
        ConfigError: an unknown game, a game named twice, or no game.
    """
    configs: dict[str, Config] = {}
    for game in games:
        env = dataclasses.replace(config.env, game=game)
        if env.game_name in configs:
            raise ConfigError("games", game, "each game once")
        if dataclasses.replace(env, game=env.game_name).resolved_protocol != env.resolved_protocol:
            raise ConfigError("games", game, env.game_name, "a suite has one protocol: choose it with --env.protocol")
        configs[env.game_name] = dataclasses.replace(config, name=env.game_name, env=env)
    if not configs:
        raise ConfigError("games", "", "at least one game", "leave --games out for all with a reference score")
    return configs


def write_suite_file(suite_dir: Path, config: Config, games: Sequence[str], report_at: Sequence[int] = ()) -> None:
    """Writes suite.json, from which the suite can be run again.

    Args:
        report_at: reporting points: env steps at which the results show scores.
    """
    described = {
        "games": list(games),
        "report_at": list(report_at),
        **describe_resumed(config, suite_dir, SUITE_FILE),
    }
    del described["game"], described["gae_lambda"]  # each game has its own
    write_json(suite_dir / SUITE_FILE, described)


def read_suite_file(suite_dir: Path) -> tuple[Config, list[str], list[int]]:
    """The config, the games and the reporting points of a suite.

    Raises:
        UserError: not the directory of a suite, or its suite.json cannot be used.
    """
    path = suite_dir / SUITE_FILE
    if not path.is_file():
        raise UserError(f"{suite_dir}: not a suite directory (it has no {SUITE_FILE}); expected data/suite_TIMESTAMP")
    try:
        values = read_json(path)
        config, games = config_from_dict(values["config"]), values["games"]
        if not isinstance(games, list) or not all(isinstance(game, str) for game in games):
            raise ValueError("games is not a list of names")
        game_configs(config, games)
        return config, games, [int(point) for point in values.get("report_at", [])]
    except (OSError, ValueError, KeyError, TypeError, OverflowError, UserError) as error:
        raise UserError(f"{path}: damaged ({reason(error)}); expected the games and config of a suite") from error


def share_gpus(config: Config, games: int, gpus: int) -> list[tuple[int, ...]]:
    """GPUs of each game that runs at the same time; `[()]` is one game at a time on all visible GPUs.

    A game gets as many GPUs as one session needs, or more if there are fewer games than GPUs. Many games finish sooner
    on one GPU each, with sessions one after the other, than one game at a time over all GPUs.
    """
    devices = config.devices
    chosen = (devices.gpu, devices.actor, devices.evaluator)
    indexed = any(isinstance(choice, int) and not isinstance(choice, bool) for choice in chosen)
    if gpus == 0 or devices.gpu is False or indexed or devices.data_parallel == "all":
        return [()]
    at_once = max(1, min(gpus // devices.data_parallel, games))
    width = gpus // at_once
    return [()] if at_once == 1 else [tuple(range(i * width, (i + 1) * width)) for i in range(at_once)]


def emulator_threads(config: Config, shares: Sequence[tuple[int, ...]]) -> int:
    """`env.num_threads` of each session: where games train side by side, all their sessions share the cores.

    Args:
        shares: as `share_gpus` returns them.
    """
    width = config.devices.data_parallel
    if config.env.num_threads or len(shares) == 1 or width == "all":
        return config.env.num_threads
    sessions = min(config.trial.parallel or len(shares[0]) // width, config.sessions)
    return max(1, usable_cores() // (len(shares) * sessions))


def run_suite(
    suite_dir: Path,
    config: Config,
    games: Sequence[str],
    report: Callable[[Mapping[str, str]], object] = lambda failures: None,
) -> dict[str, str]:
    """Trains the unfinished games, each in a process of its own; returns failed games with the reasons.

    Args:
        report: called with the games that have failed so far whenever a game ends or the suite is interrupted.

    Raises:
        KeyboardInterrupt: after a stop request, once every session has written its last checkpoint.
    """
    waiting: dict[str, Path] = {}
    failures: dict[str, str] = {}
    for name, game_config in game_configs(config, games).items():
        run_dir = suite_dir / name
        if is_run(run_dir):
            try:
                before = read_config(run_dir)
            except UserError as error:  # damaged; the other games go on
                say(f"game {name}  failed: {error}")
                failures[name] = str(error)
                continue
            require_same_run(game_config, before)
        if all_finished(game_config, run_dir):
            say(f"game {name}  finished already")
            change_budget(game_config, run_dir)
            continue
        run_dir.mkdir(exist_ok=True)
        waiting[name] = run_dir
    if not waiting:
        return failures
    gpus = visible().gpus if config.devices.gpu is not False else ()
    shares = share_gpus(config, len(waiting), len(gpus))
    threads = str(emulator_threads(config, shares))
    tasks = []
    for index, (name, run_dir) in enumerate(waiting.items()):
        share = shares[index % len(shares)]
        environment = dict(os.environ)
        if share:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[i].name for i in share)
        arguments = ("jaxrl_atari.suite.worker", str(run_dir), threads)
        tasks.append(Task(name, arguments, environment, share, kind="game"))
    say(f"{counted(len(waiting), 'game')} to train, {len(shares)} at a time")

    def ended(name: int | str, failure: Failure | None) -> None:
        if failure is not None:
            failures[str(name)] = failure.reason.partition("; --resume")[0]
        report(failures)

    try:
        run_processes(tasks, len(shares), on_end=ended)
    except KeyboardInterrupt:
        report(failures)
        raise
    return failures
