"""Searches hyperparameters: many trials on few GPUs.

    python -m jaxrl_atari.search --config configs/search_qbert.py [--search.trials 16 --search.resources.gpu 0.25 ...]
    python -m jaxrl_atari.search --resume data/qbert_search_20260101_120000 [--search.trials 32 ...]

Every field of the config and of the search is an option; docs/search.md explains them.
"""

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import tyro

from jaxrl_atari import cli
from jaxrl_atari.config import Config
from jaxrl_atari.errors import ConfigError, UserError
from jaxrl_atari.run_dir.files import write_json
from jaxrl_atari.search.space import SearchConfig, check_space, load_search_file, read_search
from jaxrl_atari.search.worker import read_records
from jaxrl_atari.trial.trial import make_run_dir

CHANGED_BY_RESUME = ("trials", "keep", "address", "resources")
RAY_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",  # nothing is sent anywhere
    "RAY_AIR_NEW_OUTPUT": "0",  # no tables: the search tells what there is to tell
    "TUNE_PRINT_ALL_TRIAL_ERRORS": "0",  # each trial's output.txt has its own
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # `StopFile` has its own
    "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",  # a trial may end before its first game does
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # our own files hold all that theirs would
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # a trial without a GPU keeps off it by itself
}


class TrialsFailed(UserError):
    """Every trial of a search failed."""

    exit_status = 1


@dataclass(frozen=True)
class Options:
    """The options of a new search."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    search: SearchConfig


@dataclass(frozen=True)
class ResumeOptions:
    """The options of a search that goes on: its config stays as it is."""

    search: SearchConfig


def parse(arguments: Sequence[str]) -> tuple[Config, SearchConfig, Path | None]:
    """Command line -> config, search, and the search directory if one is to be resumed.

    Raises:
        UserError: a value that cannot be used.
        SystemExit: after --help.
    """
    first = cli.Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    first.add_argument("--resume")
    known, rest = first.parse_known_args(arguments)
    if (known.config is None) == (known.resume is None):
        raise UserError("--config or --resume: one of the two is needed; for example --config configs/search_qbert.py")
    about: dict[str, Any] = {"prog": "python -m jaxrl_atari.search", "description": __doc__}
    if known.config is not None:
        config, search = load_search_file(known.config)
        options = cli.parse(Options, rest, default=Options(config, search), **about)
        config, search = options.config, options.search
        search_dir = None
    else:
        search_dir = Path(known.resume)
        config, before = read_search(search_dir)
        search = cli.parse(ResumeOptions, rest, default=ResumeOptions(before), **about).search
        for name in (f.name for f in dataclasses.fields(SearchConfig) if f.name not in CHANGED_BY_RESUME):
            if getattr(search, name) != getattr(before, name):
                raise ConfigError(
                    f"search.{name}", getattr(search, name), f"{getattr(before, name)!r}, with which the search began"
                )
    check_space(config, search)
    return config, search, search_dir


def engine(address: str = "") -> ModuleType:
    """`search_tune`, with Ray's settings in the environment: Ray reads them when it is imported.

    Raises:
        UserError: Ray or Optuna is not installed.
    """
    if not address:  # listen on the loopback interface alone: Ray runs what it is sent
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    elif (Path.home() / ".ray" / "auth_token").exists():  # `ray start` asks for it; Ray shows it to `auto` alone
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    for name, value in RAY_SETTINGS.items():
        os.environ.setdefault(name, value)
    try:
        from jaxrl_atari.search import tune as search_tune
    except ImportError as error:
        raise UserError(f"search mode needs {error.name}: pip install 'jaxrl_atari[search]'") from error
    return search_tune


def search(config: Config, search: SearchConfig, search_dir: Path | None = None) -> Path:
    """Runs a search, or goes on with the one in `search_dir`; returns the search directory.

    Raises:
        UserError: it cannot be run.
        TrialsFailed: every trial has failed; the results are written.
        KeyboardInterrupt: told to stop, once all processes have ended.
    """
    from jaxrl_atari.search.results import write_results

    search_tune = engine(search.address)
    if search_dir is None:
        search_dir = make_run_dir(dataclasses.replace(config, name=f"{config.name}_search"))
    search_dir = search_dir.absolute()
    write_json(search_dir / "search.json", {"config": config.to_dict(), "search": search.to_dict()})
    print(f"search directory: {search_dir}", flush=True)
    if search.early_stopping == "asha" and config.sessions > 1:
        print("one session a trial, as search.early_stopping = asha", flush=True)
    try:
        done = search_tune.run(config, search, search_dir)
    finally:
        table = write_results(search_dir)
    print("\n" + table, flush=True)
    if not done:
        print(f"interrupted; --resume {search_dir} goes on", flush=True)
        raise KeyboardInterrupt
    records = read_records(search_dir).values()
    if all(record.status == "failed" for record in records):
        raise TrialsFailed(f"all {len(records)} trials failed, the last one so: {list(records)[-1].reason}")
    return search_dir


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    search(*options)


if __name__ == "__main__":
    cli.run(main)
