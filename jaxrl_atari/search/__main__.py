"""Hyperparameter search: many trials on few GPUs.

python -m jaxrl_atari.search --config configs/search_qbert.py [--search.trials 16 --search.resources.gpu 0.25 ...]
python -m jaxrl_atari.search --resume data/qbert_search_20260101_120000 [--search.trials 32 ...]
python -m jaxrl_atari.search --config configs/search_qbert.py --run-dir data/qbert_search [...]
"""

import argparse
import dataclasses
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from jaxrl_atari import cli
from jaxrl_atari.cli import say
from jaxrl_atari.cli.options import AllOptions, FromDirectory, load_config, parse
from jaxrl_atari.config import Config, changed_fields
from jaxrl_atari.errors import SessionsFailed, UserError, require
from jaxrl_atari.report.page import try_report
from jaxrl_atari.runs.files import only_writer, write_json
from jaxrl_atari.runs.run_dir import SEARCH_FILE, is_search, make_run_dir
from jaxrl_atari.search import SearchConfig
from jaxrl_atari.search.options import check_search, read_search, to_dict
from jaxrl_atari.search.results import text, write_results
from jaxrl_atari.search.study import add_trials, is_open, open_study, open_trial, ranked, reached, run_trial, status
from jaxrl_atari.suite.ray_cluster import cluster, count_gpus

CHANGED_BY_RESUME = tuple(f"search.{name}" for name in ("trials", "retries", "keep", "address", "resources"))


@dataclasses.dataclass(frozen=True)
class Options(FromDirectory):
    """Searches hyperparameters: a new search, or the rest of one that was interrupted."""

    options: AllOptions = dataclasses.field(default_factory=Config)
    search: SearchConfig = dataclasses.field(default_factory=SearchConfig)


def parse_options(arguments: Sequence[str] | None) -> tuple[Config, SearchConfig, Path | None]:
    """Command line -> config, search options, and the directory of the search; None for a new one.

    Raises:
        UserError: a value that cannot be used, or that a search cannot change when it continues.
    """

    def default(start: argparse.Namespace) -> Options:
        search_dir, config, search = start.resume or start.run_dir, Config(), SearchConfig()
        if start.config is not None:
            config, search = load_config(start.config, get_config=Config, get_search=SearchConfig)
        elif search_dir is not None:
            config, search = read_search(search_dir)
        return Options(**vars(start), options=config, search=search)

    options = parse(Options, arguments, default)
    config, search, search_dir = options.options, options.search, options.resume or options.run_dir
    if not search.space:
        raise UserError("--config or --resume: one is needed; for example --config configs/search_qbert.py")
    check_search(config, search)
    if search_dir is not None and is_search(search_dir):
        before, after = to_dict(*read_search(search_dir)), to_dict(config, search)
        for name, (was, wanted) in changed_fields(before, after).items():
            kept = name.startswith(CHANGED_BY_RESUME)
            require(kept, name.removeprefix("config."), wanted, f"{was!r}, its value in this search")
    return config, search, search_dir


def search(config: Config, search: SearchConfig, search_dir: Path | None = None) -> Path:
    """Runs a search and returns the search directory.

    Args:
        search_dir: where to run: a search in it is continued. None: a new search directory.

    Raises:
        UserError: the search cannot be run.
        SessionsFailed: every trial failed; the results are written.
        KeyboardInterrupt: after a stop request, once all processes have ended.
    """
    gpus = count_gpus(search.address, config.devices)  # raises errors before anything is created
    if search_dir is None or not is_search(search_dir):
        search_dir = make_run_dir(dataclasses.replace(config, name=f"{config.name}_search"), search_dir)
    with only_writer(search_dir):
        write_json(search_dir / SEARCH_FILE, to_dict(config, search))
        say(f"search directory: {search_dir}")
        if search.early_stopping == "asha" and config.sessions > 1:
            say("one session per trial, because search.early_stopping = asha")
        study = open_study(search_dir, search)
        add_trials(study, search)
        items = [f"trial_{trial.number}" for trial in study.trials if is_open(trial, search)]
        try:
            if items:
                with cluster(search.address, gpus) as address:
                    from jaxrl_atari.suite.ray_items import run_items  # now that Ray's environment is set

                    run_items(
                        address, search_dir, items, run_trial,
                        devices=config.devices, resources=search.resources, retries=search.retries,
                        status=partial(progress, search_dir), on_end=partial(ended, search_dir, search),
                    )  # fmt: skip
        except KeyboardInterrupt:
            say(f"interrupted; --resume {search_dir} continues")
            raise
        finally:
            if ranked(study):
                say("\n" + write_results(search_dir))
    if config.log.graphs:
        try_report(search_dir)
    failures = [reason for state, reason in map(status, ranked(study)) if state == "failed"]
    if len(failures) == search.trials:
        raise SessionsFailed(f"every trial failed ({search.trials}), the last one: {failures[-1]}")
    return search_dir


def progress(search_dir: Path, item: str) -> str:
    """How far a trial is."""
    score, env_steps = reached(search_dir / item)
    return f"{item} at {env_steps:,} env steps, return_ma {text(score)}"


def ended(search_dir: Path, search: SearchConfig, item: str, failure: str | None) -> None:
    """Records why a trial failed, says how it ended, and removes the checkpoints that are not kept.

    A failed trial keeps its own: its error may be one that the user can correct.
    """
    number = int(item.removeprefix("trial_"))
    if failure is not None:
        trial = open_trial(search_dir, search, number)
        trial.set_user_attr("failure", failure)
        trial.set_user_attr("retries", search.retries)
    study = open_study(search_dir, search)
    say(f"{progress(search_dir, item)}: {', '.join(status(study.trials[number]))}")
    complete = [trial.number for trial in ranked(study) if trial.state.is_finished()]
    for number in complete[search.keep :]:
        for checkpoints in search_dir.glob(f"trial_{number}/session_*/checkpoints"):
            shutil.rmtree(checkpoints, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    search(*parse_options(arguments))


if __name__ == "__main__":
    cli.run(main)
