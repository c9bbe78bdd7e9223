"""Hyperparameter search: many trials on few GPUs.

    python -m jaxrl_atari.search --config configs/search_qbert.py [--search.trials 16 --search.resources.gpu 0.25 ...]
    python -m jaxrl_atari.search --resume data/qbert_search_20260101_120000 [--search.trials 32 ...]
    python -m jaxrl_atari.search --config configs/search_qbert.py --run-dir data/qbert_search [...]

--run-dir names the search directory: the command starts a search there, or continues the one that it holds.
Every field of the config and of the search is an option of a new search; docs/search.md explains them, and which ones
can change when a search continues.
"""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import tyro

from jaxrl_atari import cli
from jaxrl_atari.cli import say
from jaxrl_atari.cli.options import load_config
from jaxrl_atari.config import Config, flat
from jaxrl_atari.errors import SessionsFailed, UserError, require
from jaxrl_atari.report.pages import try_report
from jaxrl_atari.report.search_records import read_records
from jaxrl_atari.runs.files import only_writer
from jaxrl_atari.runs.run_dir import is_search, make_run_dir
from jaxrl_atari.search.files import read_search, write_search
from jaxrl_atari.search.results import write_results
from jaxrl_atari.search.space import SearchConfig, check_space

CHANGED_BY_RESUME = ("trials", "retries", "keep", "address", "resources")
RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
    "RAY_AIR_NEW_OUTPUT": "0",  # no tables: the search prints its own progress
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # each trial has its own in output.txt
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # `StopFile` handles it
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial may end before its first game does
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # the run directories hold the same metrics
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a trial without a GPU sets devices.gpu = false instead
}


@dataclass(frozen=True)
class ResumeOptions:
    """The options of a resumed search: its config stays the same."""

    search: SearchConfig


@dataclass(frozen=True)
class Options(ResumeOptions):
    """The options of a new search."""

    config: Annotated[Config, tyro.conf.arg(name="")]


def parse(arguments: Sequence[str] | None) -> tuple[Config, SearchConfig, Path | None]:
    """Command line -> config, search options, and the directory of the search; None for a new one.

    Raises:
        UserError: a value that cannot be used.
        SystemExit: after --help.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", type=Path)
    first.add_argument("--resume", type=Path)
    first.add_argument("--run-dir", type=Path)
    known, rest = first.parse_known_args(arguments)
    about: dict[str, Any] = {"prog": "python -m jaxrl_atari.search", "description": __doc__}
    if known.resume and known.run_dir:
        raise UserError("--resume and --run-dir: both name the search directory; give one of the two")
    if known.resume and known.config:
        raise UserError("--config and --resume: a resumed search has its config already; give one of the two")
    search_dir = known.resume or known.run_dir
    if known.config is None and (search_dir is None or not (known.resume or is_search(search_dir))):
        if {"-h", "--help"} & set(rest):
            tyro.cli(Options, args=rest, default=Options(SearchConfig(), Config()), **about)
        if search_dir is not None:
            raise UserError(f"--run-dir {search_dir}: holds no search; give --config FILE to start one there")
        raise UserError("--config or --resume: one is needed; for example --config configs/search_qbert.py")
    if known.config is not None:
        config, search = load_config(known.config, get_config=Config, get_search=SearchConfig)
        options = tyro.cli(Options, args=rest, default=Options(search, config), **about)
        config, search = options.config, options.search
        saved, before = read_search(search_dir) if search_dir and is_search(search_dir) else (config, search)
        old = flat(saved.to_dict())
        for name, value in flat(config.to_dict()).items():
            require(value == old[name], name, value, f"{old[name]!r}, its value in this search", "keep that value")
    else:
        assert search_dir is not None
        config, before = read_search(search_dir)
        search = tyro.cli(ResumeOptions, args=rest, default=ResumeOptions(before), **about).search
    for name in (f.name for f in dataclasses.fields(SearchConfig) if f.name not in CHANGED_BY_RESUME):
        value, was = getattr(search, name), getattr(before, name)
        require(value == was, f"search.{name}", value, f"{was!r}, its value in this search", "leave it out")
    check_space(config, search)
    return config, search, search_dir


def load_tune(address: str) -> ModuleType:
    """Imports `jaxrl_atari.search.tune`, with Ray's settings in the environment: Ray reads them at import.

    Raises:
        UserError: Ray or Optuna is not installed.
    """
    if not address:  # listen on the loopback interface only: Ray executes what it receives
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    elif (Path.home() / ".ray" / "auth_token").exists():  # `ray start` requires it; Ray uses it only for `auto`
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        from jaxrl_atari.search import tune
    except ImportError as error:
        raise UserError(f"search mode needs {error.name}: pip install 'jaxrl_atari[search]'") from error
    return tune


def search(config: Config, search: SearchConfig, search_dir: Path | None = None) -> Path:
    """Runs a search and returns the search directory.

    Args:
        search_dir: where to run: a search in it is resumed. None: a new search directory.

    Raises:
        UserError: the search cannot be run.
        SessionsFailed: every trial failed; the results are written.
        KeyboardInterrupt: after a stop request, once all processes have ended.
    """
    tune = load_tune(search.address)
    if not search.address:
        from jaxrl_atari.search.worker import usable_gpus  # late: --help need not wait for what it imports

        usable_gpus(config)  # raises an error for missing devices before anything is created
    if search_dir is None or not is_search(search_dir):
        search_dir = make_run_dir(dataclasses.replace(config, name=f"{config.name}_search"), search_dir)
    search_dir = search_dir.absolute()
    with only_writer(search_dir):
        write_search(search_dir, config, search)
        say(f"search directory: {search_dir}")
        if search.early_stopping == "asha" and config.sessions > 1:
            say("one session per trial, because search.early_stopping = asha")
        try:
            complete = tune.run(config, search, search_dir)
        finally:
            table = write_results(search_dir)
    say("\n" + table)
    if config.log.graphs:
        try_report(search_dir)
    if not complete:
        say(f"interrupted; --resume {search_dir} continues")
        raise KeyboardInterrupt
    records = list(read_records(search_dir).values())
    if all(record.status == "failed" for record in records):
        raise SessionsFailed(f"every trial failed ({len(records)}), the last one: {records[-1].reason}")
    return search_dir


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command."""
    search(*parse(arguments))


if __name__ == "__main__":
    cli.run(main)
