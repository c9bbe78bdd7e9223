"""Trains PPO on an Atari game.

    python -m jaxrl_atari.train --config configs/qbert.py [--total-env-steps 1000000 --ppo.gae-lambda 0.9 ...]
    python -m jaxrl_atari.train --resume data/qbert_20260101_120000 [--total-env-steps 20000000 ...]

Every field of the config is an option; --help after --config shows them with the config's values.
"""

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_atari import cli
from jaxrl_atari.config import Config
from jaxrl_atari.config_files import load_config_file, read_config
from jaxrl_atari.errors import SessionsFailed, UserError
from jaxrl_atari.hardware import runtime


def parse(arguments: Sequence[str]) -> tuple[Config, Path | None]:
    """Command line -> config, and the run directory if one is to be resumed.

    Raises:
        UserError: a value that cannot be used.
        SystemExit: --help, or an option that is not there (status 2).
    """
    first = cli.Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    first.add_argument("--resume")
    known, rest = first.parse_known_args(arguments)
    if known.config and known.resume:
        raise UserError("--config and --resume: a resumed run has its config already; give one of the two")
    if known.resume:
        run_dir = Path(known.resume).expanduser()
        default = read_config(run_dir)
    elif known.config:
        default, run_dir = load_config_file(known.config), None
    elif {"-h", "--help"} & set(rest):
        default, run_dir = Config(), None
    else:
        given = f"; given were {' '.join(rest)}" if rest else ""
        raise UserError(f"--config or --resume: one is needed; for example --config configs/qbert.py{given}")
    config = cli.parse(Config, rest, default=default, prog="python -m jaxrl_atari.train", description=__doc__)
    return config, run_dir


def train(config: Config, run_dir: Path | None = None) -> Path:
    """Runs a trial, or goes on with the one in `run_dir`; returns the run directory.

    With `devices.distributed` every process calls it; process 0 writes.

    Raises:
        UserError: as `run_trial`; `run_dir` holds a run of another game, protocol or seed.
    """
    from jaxrl_atari import devices
    from jaxrl_atari.hardware.gpus import place_session
    from jaxrl_atari.trial.trial import follow_trial, make_run_dir, require_same_run, run_trial

    place_session(config, 0)  # refuses devices that are not there before a run directory is made
    resume = run_dir is not None
    if run_dir is not None:
        require_same_run(config, run_dir)
    if config.devices.distributed:
        devices.join_processes(config.devices)
        run_dir = Path(devices.agree(str(run_dir or (make_run_dir(config) if devices.is_leader() else ""))))
        if not devices.is_leader():
            follow_trial(config, run_dir, resume=resume)
            return run_dir
    run_dir = run_dir or make_run_dir(config)
    print(f"{'resuming' if resume else 'run directory:'} {run_dir}", flush=True)
    try:
        run_trial(config, run_dir, resume=resume)
    except SessionsFailed:
        with contextlib.suppress(UserError):  # no session has figures
            _summarise(config, run_dir)
        raise
    _summarise(config, run_dir)
    return run_dir


def _summarise(config: Config, run_dir: Path) -> None:
    """trial.json, the trial's graphs, and a table for people."""
    from jaxrl_atari.plots import plot_trial
    from jaxrl_atari.run_dir.results import summary_table, write_trial_summary

    summary = write_trial_summary(run_dir)
    graphs = plot_trial(run_dir) if config.log.graphs else []
    print("\n" + summary_table(summary), *graphs, sep="\n", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command."""
    config, run_dir = parse(sys.argv[1:] if arguments is None else arguments)
    for line in runtime.configure():
        print(line, flush=True)
    train(config, run_dir)


if __name__ == "__main__":
    cli.run(main)
